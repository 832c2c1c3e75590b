"""`trilane plan`: sizes, topologies, one plan in full, dates and risks, the cost model against measurements."""

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trilane.cli.options import COUNT, FILE, JSON, PLAN, Choice, Group, command, emit, number, option, whole
from trilane.cli.plan_options import (
    CALIBRATION,
    CHOICES,
    ENGINE,
    MOST_SEQUENCES,
    PRECISION,
    SCORES,
    SPACE,
    WORDS,
    choices_of,
    constants_of,
    plan_of,
    shape_of,
    sizing_fields,
)
from trilane.config.plan import read_plan
from trilane.utils.tables import one_line
from trilane.utils.validation import require
from trilane.workspace.study import load_cluster

MOST_GBS = 1 << 14  # every size up to it is evaluated: 9 s on two cores
SHAPE = "layers,hidden,heads,seq,vocab, or a JSON file: a shape, or Hugging Face's config.json"
CLUSTER = "a cluster's name or JSON file; local: this machine, measured"
plan = Group("plan", help="Plan a training: its size, its topology, its dates.")


@command(
    plan,
    option("--params", type=COUNT, help="parameters of the model: 200B, 1.3e9, 350M"),
    option("--days", type=number(), help="instead of --params: the largest that end within so many days"),
    option("--vocab", required=True, type=whole(), help="tokens of the vocabulary; padded to a multiple of 128"),
    option("--gpus", required=True, type=whole(), help="GPUs of the run"),
    option("--cluster", required=True, help=CLUSTER),
    option("--tokens", type=COUNT, default="300B", help="tokens to train on"),
    option("--gbs", type=whole(1, MOST_SEQUENCES), default=2048, help="sequences an iteration"),
    option("--seq", type=whole(), default=2048, help="tokens of a sequence"),
    option(
        "--like", default="gpt2", metavar="KIND", help="gpt2, bloom, llama, or a JSON file with a model: config.json"
    ),
    option("--tolerance", type=number(), default=0.03, help="allowed distance from the target, as a share of it"),
    option("--recompute", type=WORDS["recompute"], help="default: whatever is fastest"),
    option("--partition", type=WORDS["partition"]),
    option("--attention", type=WORDS["attention"], help=f"{SCORES}, as in 2022"),
    *(ENGINE, PRECISION, option("--fp32-gradients", is_flag=True, help="accumulate 16-bit gradients in fp32")),
    *(CALIBRATION, option("--top", type=whole(), default=10, help="shapes to list"), JSON),
)
def size(top: int, as_json: bool, params: float | None, days: float | None, **options: Any) -> int:
    """List shapes of a target size, layers x hidden, each with its best topology, days and GPU-hours.

    With --days instead of --params: the largest shapes that end in time with 90 % probability, failures and
    checkpoints counted as by `plan calendar`. Exit code 1 where none can run, or none ends in time.
    """
    from trilane.planning.size_request import SizeRequest
    from trilane.planning.sizing import proposals_json, proposals_text, survey, why_none

    given = f"{params:g}" if params else "missing"
    require((params is None) != (days is None), "params", given, "give either --params or --days")
    if days is not None:
        from trilane.forecasting.deadline import sizes_within

        in_time = sizes_within(days, **sizing_fields(options))
        return emit(as_json, in_time.to_json(top), in_time.as_text(top), failed=not in_time.rows)
    request = SizeRequest(parameters=params or 0.0, **sizing_fields(options))
    found, refused = survey(request)
    values = {**proposals_json(request, found[:top], len(found)), "refused": dict(refused)}
    why = [] if found else [why_none(request, refused)]
    return emit(as_json, values, "\n".join([proposals_text(request, found[:top]), *why]), failed=not found)


@command(
    plan,
    option("--shape", required=True, help=SHAPE),
    option("--cluster", required=True, help=CLUSTER),
    option("--gpus", type=whole(), required=True, help="GPUs of the run"),
    SPACE,
    option("--gbs-max", type=whole(1, MOST_GBS), help="instead of --gbs: every global batch size up to this one"),
    option("--objective", type=Choice(("seconds", "days", "gpu_hours", "headroom")), default="seconds"),
    option("--top", type=whole(), default=10, help="plans to list"),
    JSON,
)
def search(shape: str, gpus: int, gbs: int | None, gbs_max: int | None, as_json: bool, **options: Any) -> int:
    """Predict every topology of a cluster for a model, and list the best; exit code 1 where none can run.

    An option that names a choice of the topology pins it.
    """
    from trilane.costmodel.shipped import calibration_for
    from trilane.planning.search import search as search_plans

    require((gbs is None) != (gbs_max is None), "gbs", gbs or "missing", "give either --gbs or --gbs-max")
    cluster, what = load_cluster(options["cluster"]), shape_of(shape, options)
    require(gpus <= cluster.max_gpus, "gpus", gpus, f"{cluster.name} has {cluster.max_gpus}")
    given = {"calibration": calibration_for(cluster, options["calibration"]), **choices_of(options)}
    given |= {name: options[name] for name in ("engine", "objective", "top")}
    found = search_plans(what, cluster, gpus=gpus, gbs=gbs or range(1, (gbs_max or 0) + 1), **given)
    return emit(as_json, found.listing(), found.as_text(), failed=not found.candidates)


@command(
    plan,
    click.argument("plan", metavar="[PLAN]", type=FILE, required=False),
    option("--shape", help=f"without PLAN: {SHAPE}"),
    option("--cluster", help=f"without PLAN: {CLUSTER}"),
    option("--gpus", type=whole(), help="GPUs of the run, where --dp is left open"),
    SPACE,
    option("--tokens", type=COUNT, help="also the days that so many tokens take: 300B"),
    option("--seconds", type=number(), help="also the TFLOPs of an iteration measured to take so long"),
    JSON,
)
def show(plan: Path | None, tokens: float | None, seconds: float | None, as_json: bool, **options: Any) -> None:
    """Predict one plan in full: seconds by cause, memory by pipeline stage, TFLOPs, MFU and HFU, days.

    The plan is a file, or the options --shape, --cluster, --gbs, --mbs, --tp, --pp, --dp and what else differs from
    the defaults of cluster and engine.
    """
    from trilane.analysis.plan_report import plan_report
    from trilane.costmodel.shipped import calibration_for

    if plan is not None:
        pinned = {name: options[name] for name in ("shape", "cluster", "gpus", "gbs", "seq", *CHOICES)}
        given = click.get_current_context().get_parameter_source("engine")
        pinned["engine"] = options["engine"] if given is ParameterSource.COMMANDLINE else None
        name = next((name for name, value in pinned.items() if value is not None), "")
        require(not name, name, pinned.get(name), f"contradicts the plan {plan}")
    read = read_plan(plan) if plan else plan_of(options)
    source = options["calibration"]
    known = constants_of(plan, read.cluster, source) if plan else calibration_for(read.cluster, source)
    emit(as_json, *plan_report(read, known, tokens, seconds))


@command(
    plan,
    PLAN,
    option("--tokens", required=True, type=COUNT, help="tokens of the whole run: 341B, 3.41e11"),
    option("--ramp", metavar="START,INCREMENT,SAMPLES", help="the batch size's ramp; default: the plan's"),
    option("--capacity", metavar="JSON", help="GPUs from day to day; default: the plan's GPUs, not shared"),
    option("--failures-per-node-year", type=number(False), help="default: 1.8, uncertain by a factor of 2.2"),
    option("--allocation", type=number(False), metavar="GPU_HOURS", help="GPU-hours that are granted"),
    option("--deadline", metavar="DATE", help="the last day, such as 2026-07-11"),
    option("--start", metavar="DATE", help="default: today (UTC)"),
    option(
        "--adapt", type=Choice(("no", "days", "gpu_hours")), default="no", help="let DP, MBS, nodes follow the batch"
    ),
    option("--day-worth", type=number(False), metavar="GPU_HOURS", help="instead of --adapt: the price of a day"),
    option("--reshape", is_flag=True, help="with these, let TP and PP change too"),
    option("--checkpoint-minutes", type=number(), help="between checkpoints; default: Daly's optimum"),
    option("--spare-nodes", type=whole(0), help="nodes in reserve (default: 4, or what the jobs leave free)"),
    option("--job-hours", type=number(), help="the longest job that the queue takes (default: 20)"),
    option("--evaluation-iters", type=whole(0), help="per 1000 iterations (default: 100, as Megatron-LM)"),
    option("--risks", metavar="JSON", help="fields of FailureModel that you know better"),
    option("--price", type=number(False), metavar="PER_GPU_HOUR", help="price of one GPU-hour, in your currency"),
    option("--watts", type=number(False), metavar="PER_GPU", help="of one GPU with its share of the node"),
    CALIBRATION,
    option("--runs", type=whole(), default=10_000, help="simulated runs"),
    *(option("--seed", type=whole(0), default=0, help="of the simulation"), JSON),
)
def calendar(plan: Path, as_json: bool, **options: Any) -> None:
    """Forecast PLAN: the finish date, GPU-hours and days, and the risk of missing a deadline or an allocation."""
    from trilane.forecasting.forecast import forecast

    read = read_plan(plan)
    options["calibration"] = constants_of(plan, read.cluster, options["calibration"])
    found = forecast(read, **options)
    emit(as_json, found.to_json(), found.as_text())


@command(
    plan,
    click.argument("rows", metavar="ROWS.csv"),
    option("--cluster", help=f"{CLUSTER}, instead of the column"),
    option(
        "--cv",
        type=Choice(("date", "file", "file-ten", "hidden", "table")),
        help="refit without each table, hidden size, date or file",
    ),
    option("--calibrate-on", metavar="CSV", help="refit to these rows first"),
    JSON,
)
def backtest(rows: str, cluster: str | None, cv: str | None, calibrate_on: str | None, as_json: bool) -> int:
    """Compare measured rows (columns of lib/trilane/data/measured.csv) with their predictions.

    ROWS.csv may be a set that ships: all, scored, measured, dlperf_v100, dgxc_nemotron_h100 or lucie_jz_a100_2024.

    Exit code 1 where no row can be predicted.
    """
    from trilane.costmodel.backtest import backtest as run_backtest

    require(not (cv and calibrate_on), "cv", cv, "contradicts --calibrate-on")
    result = run_backtest(rows, cluster, cv, calibrate_on)
    if not as_json:
        for skipped in result.skipped:
            print(one_line(f"skipped {skipped.row_id}: {skipped.reason}"), file=sys.stderr)
        for line in result.ignored:
            print(one_line(f"ignored {line}"), file=sys.stderr)
    return emit(as_json, result.to_json(), repr(result), failed=not result.predictions)
