"""`trilane plan`: sizes, topologies, one plan in full, dates and risks, the cost model against measurements."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from trilane.cli.options import (
    FILE,
    Choice,
    Count,
    Group,
    Number,
    Whole,
    calibration_option,
    emit,
    json_option,
    option,
    plan_argument,
)
from trilane.config.cluster import PRECISIONS, Cluster
from trilane.config.engines import ENGINES
from trilane.config.parallelism import ATTENTIONS, OFFLOADS, PARTITIONS, RECOMPUTE
from trilane.utils.validation import require

F = TypeVar("F", bound=Callable[..., Any])
CHOICES = (
    *("tp", "pp", "dp", "mbs", "zero", "interleaving", "recompute", "partition", "sequence_parallel", "offload"),
    *("precision", "attention", "fp32_gradients"),
)
SHAPE = "layers,hidden,heads,seq,vocab, or a JSON file with a shape"
ATTENTION = "scores: no flash kernel"
MOST_GBS = 1 << 14  # every size up to it is evaluated: 9 s on two cores
MOST_SEQUENCES = 1 << 20  # of one iteration; published runs have at most 16,384


@click.group(cls=Group)
def plan() -> None:
    """Plan a training: its size, its topology, its dates."""


def calibration_of(path: str | None, cluster: Cluster) -> Any:
    """The calibration in the file, or the cluster's own."""
    from trilane.costmodel.calibration import default, load

    return load(path) if path else default(cluster)


@plan.command()
@option("--params", required=True, type=Count(), help="parameters of the model: 200B, 1.3e9, 350M")
@option("--vocab", required=True, type=Whole(), help="tokens of the vocabulary; padded to a multiple of 128")
@option("--gpus", required=True, type=Whole(), help="GPUs of the run")
@option("--cluster", required=True, help="a cluster's name or JSON file")
@option("--tokens", type=Count(), default="300B", help="tokens to train on")
@option("--gbs", type=Whole(1, MOST_SEQUENCES), default=2048, help="sequences an iteration")
@option("--seq", type=Whole(), default=2048, help="tokens of a sequence")
@option("--tolerance", type=Number(), default=0.03, help="allowed distance from the target, as a share of it")
@option("--recompute", type=Choice(RECOMPUTE), help="default: whatever is fastest")
@option("--partition", type=Choice(PARTITIONS))
@option("--attention", type=Choice(ATTENTIONS), help=f"{ATTENTION}, as in 2022")
@option("--engine", type=Choice(ENGINES), default=ENGINES[0], help="what trains it")
@option("--precision", type=Choice(PRECISIONS), help="default: bf16 where the card has it")
@option("--fp32-gradients", is_flag=True, help="accumulate 16-bit gradients in fp32")
@calibration_option
@option("--top", type=Whole(), default=10, help="shapes to list")
@json_option
def size(top: int, as_json: bool, **options: Any) -> int:
    """List shapes of a target size, layers x hidden, each with its best topology, days and GPU-hours.

    Exit code 1 where none can run.
    """
    from trilane.planning.sizing import survey, survey_json, why_none

    request = size_request(options)
    found, refused = survey(request)
    values = lambda: {**survey_json(request, found[:top], len(found)), "refused": dict(refused)}  # noqa: E731
    emit(
        as_json, values, lambda: size_text(request, found[:top]) + ("" if found else "\n" + why_none(request, refused))
    )
    return 0 if found else 1


def size_request(options: dict[str, Any]) -> Any:
    """What the options of `size` ask for."""
    from trilane.config import cluster as hardware
    from trilane.planning.sizing import SizeRequest

    cluster = hardware.cluster(options["cluster"])
    names = ("attention", "precision", "recompute", "partition")
    choices: dict[str, Any] = {name: options[name] for name in names if options[name]}
    return SizeRequest(
        parameters=options["params"],
        vocabulary=options["vocab"],
        gpus=options["gpus"],
        cluster=cluster,
        calibration=calibration_of(options["calibration"], cluster),
        tokens=options["tokens"],
        gbs=options["gbs"],
        seq_length=options["seq"],
        tolerance=options["tolerance"],
        choices=choices | ({"fp32_gradients": True} if options["fp32_gradients"] else {}),
        engine=options["engine"],
    )


def size_words(parameters: float) -> str:
    """ "176.2B", or "20.3M" where that is below a billion."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def size_text(request: Any, proposals: list[Any]) -> str:
    """The proposals, a line each and one for each note."""
    lines = [
        f"{size_words(request.parameters)} parameters, {request.vocab_size} rows of embedding, {request.gpus} GPUs of",
        f"{request.cluster.name}, {request.tokens / 1e9:g} B tokens; days with nothing going wrong:",
    ]
    for p in proposals:
        s, (middle, low, high) = p.shape, p.tflops
        relative = p.days_at_target / proposals[0].days_at_target - 1
        lines.append(
            f"{s.num_layers:4} x {s.hidden_size:5} a{s.num_attention_heads:<4}{size_words(s.parameters):>8} "
            f"ratio {p.ratio:4.0f} {p.prediction.sec_per_it:8.2f} s {middle:4.0f} TFLOP/s ({low:.0f}-{high:.0f}) "
            f"{p.days:7.1f} d {p.gpu_hours:10,.0f} GPU-h {p.prediction.memory_bytes / 2**30:5.1f} GiB "
            f"{relative:+6.1%}  {p.topology.label}"
        )
        lines += [f"{'':10}{note}" for note in p.notes]
    return "\n".join(lines)


def space_options(function: F) -> F:
    """The options that describe a model, a cluster and the topologies of one number of GPUs."""
    for decorate in (
        calibration_option,
        option("--fp32-gradients", type=Choice(("yes", "no")), help="sum 16-bit gradients in fp32; default: for bf16"),
        option("--attention", type=Choice(ATTENTIONS), help=f"{ATTENTION}; default: what card and heads allow"),
        option("--precision", type=Choice(PRECISIONS), help="default: bf16 where the card has it"),
        option("--offload", type=Choice(OFFLOADS), help="what stays in host memory"),
        option("--sequence-parallel", type=Choice(("yes", "no")), help="cut norms and dropouts by tp, too"),
        option("--partition", type=Choice(PARTITIONS), help="how layers are cut into pipeline stages"),
        option("--recompute", type=Choice(RECOMPUTE), help="activations computed again in the backward pass"),
        option("--interleaving", type=Whole(), help="model chunks of a pipeline stage"),
        option("--zero", type=Choice(("0", "1", "2", "3")), help="ZeRO stage"),
        option("--mbs", type=Whole(), help="sequences of a microbatch, per replica"),
        option("--dp", type=Whole(), help="data-parallel size: replicas"),
        option("--pp", type=Whole(), help="pipeline stages"),
        option("--tp", type=Whole(), help="tensor-parallel size"),
        option("--engine", type=Choice(ENGINES), default=ENGINES[0], help="what trains it"),
        option("--gbs", type=Whole(1, MOST_SEQUENCES), help="sequences an iteration"),
    ):
        function = decorate(function)
    return function


def choices_of(options: dict[str, Any]) -> dict[str, Any]:
    """What the options pin, by Topology's names and as search() takes it."""
    given = {name: options[name] for name in CHOICES if options[name] is not None}
    given |= {name: given[name] == "yes" for name in ("sequence_parallel", "fp32_gradients") if name in given}
    return given | ({"zero": int(given["zero"])} if "zero" in given else {})


def gpus_of(gpus: int, cluster: Cluster) -> int:
    """The number of GPUs, which the cluster must have."""
    require(gpus <= cluster.max_gpus, "gpus", gpus, f"{cluster.name} has {cluster.max_gpus}")
    return gpus


@plan.command()
@option("--shape", required=True, help=SHAPE)
@option("--cluster", required=True, help="a cluster's name or JSON file")
@option("--gpus", type=Whole(), required=True, help="GPUs of the run")
@space_options
@option("--gbs-max", type=Whole(1, MOST_GBS), help="instead of --gbs: every global batch size up to this one")
@option("--objective", type=Choice(("seconds", "days", "gpu_hours", "headroom")), default="seconds")
@option("--top", type=Whole(), default=10, help="plans to list")
@json_option
def search(
    shape: str,
    cluster: str,
    gpus: int,
    gbs: int | None,
    gbs_max: int | None,
    objective: str,
    top: int,
    as_json: bool,
    **options: Any,
) -> int:
    """Predict every topology of a cluster for a model, and list the best; exit code 1 where none can run.

    An option that names a choice of the topology pins it.
    """
    from trilane.config import cluster as hardware
    from trilane.config.model import read_shape
    from trilane.planning.search import search as search_plans

    require((gbs is None) != (gbs_max is None), "gbs", gbs or "missing", "give either --gbs or --gbs-max")
    where, what = hardware.cluster(cluster), read_shape(shape)
    sizes = gbs or range(1, (gbs_max or 0) + 1)
    given = {"calibration": calibration_of(options["calibration"], where), **choices_of(options)}
    count = gpus_of(gpus, where)
    found = search_plans(
        what, where, gpus=count, gbs=sizes, engine=options["engine"], objective=objective, top=top, **given
    )
    emit(as_json, lambda: search_json(found), lambda: search_text(found))
    return 0 if found.candidates else 1


def search_json(found: Any) -> dict[str, Any]:
    """A search as JSON: the plans, those that may run out of memory apart."""
    plans, risky = ([c.to_json() for c in rows] for rows in (found.candidates, found.risky))
    counts = {"evaluated": found.evaluated, "refused": found.refused_by_rule, "held_fixed": found.space.held_fixed}
    return {**counts, "plans": plans, "risky": risky}


def search_text(found: Any) -> str:
    """How many topologies can run, why the others cannot, what was not varied, and a line for each candidate."""
    lines = [f"{found.evaluated} topologies, {found.runnable} can run"]
    lines += [f"{count:>12} refused: {rule}" for rule, count in found.refused_by_rule.items()]
    lines += [f"held fixed: {found.space.held_fixed}", *map(candidate_line, found.candidates)]
    if found.risky:
        lines += ["apart, because these may run out of memory (P above 10 %):", *map(candidate_line, found.risky)]
    return "\n".join(lines)


def candidate_line(candidate: Any) -> str:
    """A candidate in one line."""
    p, t = candidate.prediction, candidate.topology
    seconds = f"{p.sec_per_it:9.3f} s ({p.sec_lo:.3f}-{p.sec_hi:.3f})"
    memory = f"{p.memory_bytes / 2**30:6.1f} GiB  P(OOM) {p.oom_probability:.2f}"
    return f"{seconds} {memory}  gbs {t.gbs:5} {candidate.plan.id} {candidate.label}"


@plan.command()
@click.argument("plan", metavar="[PLAN]", type=FILE, required=False)
@option("--shape", help=f"without PLAN: {SHAPE}")
@option("--cluster", help="without PLAN: a cluster's name or JSON file")
@option("--gpus", type=Whole(), help="GPUs of the run, where --dp is left open")
@space_options
@option("--tokens", type=Count(), help="also the days that so many tokens take: 300B")
@option("--seconds", type=Number(), help="also the TFLOPs of an iteration measured to take so long")
@json_option
def show(
    plan: Path | None,
    shape: str | None,
    cluster: str | None,
    gpus: int | None,
    gbs: int | None,
    tokens: float | None,
    seconds: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict one plan in full: seconds by cause, memory by pipeline stage, TFLOPs, MFU and HFU, days.

    The plan is a file, or the options --shape, --cluster, --gbs, --mbs, --tp, --pp, --dp and what else differs from
    the defaults of cluster and engine.
    """
    from trilane.analysis.plan_report import plan_report
    from trilane.config.plan import read_plan

    if plan is not None:
        pinned = {"shape": shape, "cluster": cluster, "gpus": gpus, "gbs": gbs, **{n: options[n] for n in CHOICES}}
        name = next((name for name, value in pinned.items() if value is not None), "")
        require(not name, name, pinned.get(name), f"contradicts the plan {plan}")
        read = read_plan(plan)
    else:
        read = plan_of(shape, cluster, gpus, gbs, options)
    report = plan_report(read, calibration_of(options["calibration"], read.cluster), tokens, seconds)
    emit(as_json, report.to_json, report.as_text)


def plan_of(shape: str | None, cluster: str | None, gpus: int | None, gbs: int | None, options: dict[str, Any]) -> Any:
    """The plan that the options describe, with defaults for what they leave open."""
    from trilane.config import cluster as hardware
    from trilane.config.engines import default_topology, label_of
    from trilane.config.model import read_shape
    from trilane.config.plan import Plan

    require(shape is not None, "shape", "missing", "name a plan, or its --shape, --cluster and --gbs")
    require(cluster is not None, "cluster", "missing", "needed where no plan is named")
    require(gbs is not None, "gbs", "missing", "needed where no plan is named")
    where, what, engine = hardware.cluster(str(cluster)), read_shape(str(shape)), options["engine"]
    given = choices_of(options)
    if gpus is not None:
        replica = given.get("tp", 1) * given.get("pp", 1)
        given.setdefault("dp", max(1, gpus // replica))
        require(given["dp"] * replica == gpus, "tp x pp x dp", given["dp"] * replica, f"contradicts gpus={gpus}")
    topology = default_topology(what, where, engine, gbs=gbs, **given)
    label = label_of(what, where, topology, engine)
    return Plan(label=label, shape=what, cluster=where, topology=topology, engine=engine)


@plan.command()
@plan_argument
@option("--tokens", required=True, type=Count(), help="tokens of the whole run: 341B, 3.41e11")
@option("--ramp", metavar="START,INCREMENT,SAMPLES", help="the batch size's ramp; default: the plan's")
@option("--capacity", metavar="JSON", help="GPUs from day to day; default: the plan's GPUs, not shared")
@option(
    "--failures-per-node-year", type=Number(False), help="node failures; default: 1.8, uncertain by a factor of 2.2"
)
@option("--allocation", type=Number(False), metavar="GPU_HOURS", help="GPU-hours that are granted")
@option("--deadline", metavar="DATE", help="the last day, such as 2026-07-11")
@option("--start", metavar="DATE", help="default: today (UTC)")
@option("--adapt", type=Choice(("no", "days", "gpu_hours")), default="no", help="let DP, MBS, nodes follow the batch")
@option("--day-worth", type=Number(False), metavar="GPU_HOURS", help="instead of --adapt: the price of a day")
@option("--reshape", is_flag=True, help="with these, let TP and PP change too")
@option("--checkpoint-minutes", type=Number(), help="between checkpoints; default: Daly's optimum")
@option("--spare-nodes", type=Whole(0), help="nodes in reserve (default: 4, or what the jobs leave free)")
@option("--job-hours", type=Number(), help="the longest job that the queue takes (default: 20)")
@option("--evaluation-iters", type=Whole(0), help="per 1000 iterations (default: 100, as Megatron-LM)")
@option("--risks", metavar="JSON", help="fields of FailureModel that you know better")
@option("--price", type=Number(False), metavar="PER_GPU_HOUR", help="price of one GPU-hour, in your currency")
@option("--watts", type=Number(False), metavar="PER_GPU", help="of one GPU with its share of the node")
@calibration_option
@option("--runs", type=Whole(), default=10_000, help="simulated runs")
@option("--seed", type=Whole(0), default=0, help="of the simulation")
@json_option
def calendar(plan: Path, as_json: bool, **options: Any) -> None:
    """Forecast PLAN: the finish date, GPU-hours and days, and the risk of missing a deadline or an allocation."""
    from trilane.config.plan import read_plan
    from trilane.forecasting.forecast import forecast
    from trilane.forecasting.request import forecast_request

    found = forecast(forecast_request(read_plan(plan), **options))
    emit(as_json, found.to_json, found.as_text)


@plan.command()
@click.argument("rows", metavar="ROWS.csv")
@option("--cluster", help="a cluster's name or JSON file, instead of the column")
@option("--cv", type=Choice(("date", "hidden", "table")), help="refit without each table, hidden size or date")
@option("--calibrate-on", metavar="CSV", help="refit to these rows first")
@json_option
def backtest(rows: str, cluster: str | None, cv: str | None, calibrate_on: str | None, as_json: bool) -> int:
    """Compare measured rows (columns of lib/trilane/data/measured.csv) with their predictions.

    Exit code 1 where no row can be predicted.
    """
    from trilane.costmodel.backtest import backtest as run_backtest

    require(not (cv and calibrate_on), "cv", cv, "contradicts --calibrate-on")
    result = run_backtest(rows, cluster, cv, calibrate_on)
    if not as_json:
        for skipped in result.skipped:
            print(f"skipped {skipped.row_id}: {skipped.reason}", file=sys.stderr)
    emit(as_json, result.to_json, result.as_text)
    return 0 if result.predictions else 1
