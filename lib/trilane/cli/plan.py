"""`trilane plan`: sizes, topologies, one plan in full, dates and risks, the cost model against
measurements.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from trilane.analysis.plan_report import plan_report
from trilane.cli.app import Answer, Group, command, note
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, default_topology, label_of
from trilane.config.options import option
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan
from trilane.config.shapes import read_shape
from trilane.costmodel import backtest as measured
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.shipped import calibration_for, constants_of, foreign, replaced
from trilane.costmodel.trace import trace_of
from trilane.forecasting.deadline import best_within, sizes_within
from trilane.forecasting.forecast import forecast
from trilane.forecasting.request import ForecastRequest
from trilane.planning.search import search as search_plans
from trilane.planning.size_request import ANY, SizeRequest
from trilane.planning.sizing import survey
from trilane.utils.validation import parse_count, require
from trilane.workspace.study import load_cluster

GROUP = Group("plan", help="Plan a training: its size, its topology, its dates.")
SHAPE = "layers,hidden,heads,seq,vocab, or a JSON file: a shape, or Hugging Face's config.json"
CLUSTER = "a cluster's name or JSON file; local: this machine, measured"
SEQUENCE = option(
    0, "tokens of a sequence; default: the shape's, in a config.json its longest", minimum=1
)
CALIBRATION: Any = ForecastRequest.__dataclass_fields__["calibration"]


@command(GROUP)
def size(
    params: float = option(0.0, "parameters of the model: 200B, 1.3e9, 350M", above=0),
    days: float = option(
        0.0, "instead of --params: the largest that end within so many days", above=0
    ),
    cluster: str = option(help=CLUSTER),
    calibration: str = CALIBRATION,
    top: int = option(10, "shapes to list", minimum=1),
    **given: Annotated[Any, SizeRequest, Topology | None],
) -> Answer:
    """List shapes of a target size, layers x hidden, each with its best topology, days and
    GPU-hours.

    With --days instead of --params: the largest shapes that end in time with 90 % probability,
    failures and checkpoints counted as by `plan calendar`. Exit code 1 where none can run, or none
    ends in time.
    """
    named = f"{params:g}" if params else "missing"
    require(bool(params) != bool(days), "params", named, "give either --params or --days")
    machine = load_cluster(cluster)
    asked: dict[str, Any] = {"cluster": machine, "calibration": constants(machine, calibration)}
    asked |= {f.name: given.pop(f.name) for f in fields(SizeRequest) if f.name in given} | {
        "choices": given
    }
    if days:
        in_time = sizes_within(days, **asked)
        return Answer(in_time.to_json(top), in_time.as_text(top), not in_time.rows)
    found = survey(SizeRequest(parameters=params, **asked))
    return Answer(found.to_json(top), found.to_text(top), not found.rows)


@command(GROUP)
def search(
    shape: str = option(help=SHAPE),
    cluster: str = option(help=CLUSTER),
    gpus: int = option(help="GPUs of the run", minimum=1),
    seq: int = SEQUENCE,
    gbs: int = option(help="sequences of an iteration", minimum=1, maximum=1 << 20),
    calibration: str = CALIBRATION,
    engine: str = option(ENGINES[0], "what trains it", choices=ENGINES),
    top: int = option(10, "plans to list, each of another tp x pp x dp", minimum=1),
    **choices: Annotated[Any, Topology | None],
) -> Answer:
    """Predict every topology of a cluster for a model, and list the best; exit code 1 where none
    can run.

    An option that names a choice of the topology pins it. Where --tp and --pp leave one tp x pp x
    dp, its variants are listed.
    """
    machine, what = load_cluster(cluster), shape_of(shape, seq, choices)
    require(gpus <= machine.max_gpus, "gpus", gpus, f"{machine.name} has {machine.max_gpus}")
    choices |= {"calibration": constants(machine, calibration), "engine": engine, "distinct": True}
    found = search_plans(what, machine, gpus=gpus, gbs=gbs, top=top, **choices)
    return Answer(found.listing(), found.as_text(), not found.candidates)


@command(GROUP)
def best(
    days: float = option(help="within which the training ends", above=0),
    cluster: str = option(
        help="names or JSON files of one or several clusters", metavar="C[,C2,...]"
    ),
    gpus: int = option(0, "GPUs of each; default: all of the smallest", minimum=1),
    gbs: int = option(
        0,
        "sequences of an iteration; default: some 4 million tokens, divided by all GPUs",
        minimum=1,
    ),
    price: str = option("", "of a GPU-hour, of all clusters or of each", metavar="P[,P2,...]"),
    calibration: str = CALIBRATION,
    engine: str = option(ANY, "what trains it; any: the fastest", choices=(*ENGINES, ANY)),
    **given: Annotated[Any, SizeRequest],
) -> Answer:
    """Answer what to train: the largest model that each cluster ends in time, on three topologies,
    and what it costs.

    Days with 90 % probability, failures and checkpoints counted as by `plan calendar`, which takes
    the file that --json prints. Exit code 1 where nothing ends in time.
    """
    machines = [load_cluster(name.strip()) for name in cluster.split(",")]
    for machine in machines:
        constants(machine, calibration)
    prices = [parse_count("price", one) for one in price.split(",") if price]
    asked = {
        "gpus": gpus,
        "gbs": gbs,
        "prices": prices,
        "calibration": calibration,
        "engine": engine,
        **given,
    }
    found = best_within(days, machines, **asked)
    return Answer(found.to_json(), found.as_text(), not found.rows)


@command(GROUP)
def show(
    plan: Path | None = option(None, argument="[PLAN]"),
    shape: str = option("", f"without PLAN: {SHAPE}"),
    cluster: str = option("", f"without PLAN: {CLUSTER}"),
    gpus: int = option(0, "GPUs of the run, where --dp is left open", minimum=1),
    seq: int = SEQUENCE,
    engine: str = option("", f"what trains it; default: {ENGINES[0]}", choices=ENGINES),
    calibration: str = CALIBRATION,
    tokens: float | None = option(None, "also the days that so many tokens take: 300B", above=0),
    seconds: float | None = option(
        None, "also the TFLOPs of an iteration measured to take so long", above=0
    ),
    **choices: Annotated[Any, Topology | None],
) -> Answer:
    """Predict one plan in full: seconds by cause, memory by pipeline stage, TFLOPs, MFU and HFU,
    days.

    The plan is a file, or the options --shape, --cluster, --gbs, --mbs, --tp, --pp, --dp and what
    else differs from the defaults of cluster and engine.
    """
    given = {"shape": shape, "cluster": cluster, "gpus": gpus, "seq": seq, "engine": engine}
    given = {name: value for name, value in given.items() if value} | choices
    if plan:
        for name, value in given.items():
            require(False, name, value, f"contradicts the plan {plan}")
        read = read_plan(plan)
        known = constants_of(read, calibration)
    else:
        require(
            "shape" in given, "shape", "missing", "name a plan, or its --shape, --cluster and --gbs"
        )
        for name in ("cluster", "gbs"):
            require(name in given, name, "missing", "needed where no plan is named")
        read = plan_of(shape_of(shape, seq, choices), cluster, engine or ENGINES[0], gpus, choices)
        known = calibration_for(read.cluster, calibration)
    note(replaced(read, known))
    return Answer(
        *plan_report(read, known, tokens, seconds, trace_of(read, plan) if plan else None)
    )


def constants(cluster: Cluster, source: str) -> Calibration:
    """The constants that are named; that they are of another cluster goes to stderr."""
    known = calibration_for(cluster, source)
    note(foreign(known, cluster))
    return known


def shape_of(text: str, seq: int, choices: dict[str, Any]) -> Any:
    """The shape that is named, with the vocabulary padded; what was decided for it goes to stderr."""
    given = read_shape(text, seq_length=seq, tp=choices.get("tp", 1))
    note(given.notes)
    return given.shape


def plan_of(shape: Any, cluster: str, engine: str, gpus: int, choices: dict[str, Any]) -> Plan:
    """The plan of these choices, with the defaults of cluster and engine for what they leave open."""
    machine = load_cluster(cluster)
    if gpus:
        replica = choices.get("tp", 1) * choices.get("cp", 1) * choices.get("pp", 1)
        choices.setdefault("dp", max(1, gpus // replica))
        what, made = (
            "tp x cp x pp x dp" if "cp" in choices else "tp x pp x dp",
            choices["dp"] * replica,
        )
        require(
            made == gpus, what, made, f"contradicts gpus={gpus}; multiples of {replica} would do"
        )
    topology = default_topology(shape, machine, engine, **choices)
    label = label_of(shape, machine, topology, engine)
    return Plan(label=label, shape=shape, cluster=machine, topology=topology, engine=engine)


@command(GROUP)
def calendar(
    plan: Path,
    tokens: float = option(help="tokens of the whole run: 341B, 3.41e11", above=0),
    **given: Annotated[Any, ForecastRequest],
) -> Answer:
    """Forecast PLAN: the finish date, GPU-hours and days, and the risk of missing a deadline or an
    allocation.
    """
    read = read_plan(plan)
    given["calibration"] = constants_of(read, given["calibration"])
    note(replaced(read, given["calibration"]))
    found = forecast(read, tokens=tokens, **given)
    return Answer(found.to_json(), found.as_text())


@command(GROUP)
def backtest(
    rows: str,
    cluster: str | None = option(None, f"{CLUSTER}, instead of the column"),
    cv: str | None = option(None, "refit without each", choices=("table", "hidden", "date")),
    calibration: str = CALIBRATION,
) -> Answer:
    """Compare measured rows (columns of lib/trilane/data/scored.csv) with their predictions.

    ROWS may be a set that ships: all, scored, measured, dlperf_v100, dgxc_nemotron_h100 or
    lucie_jz_a100_2024. Exit code 1 where no row can be predicted.
    """
    result = measured.backtest(rows, cluster, cv, calibration)
    note([f"skipped {row.row_id}: {row.reason}" for row in result.skipped], label="")
    note(result.ignored, label="ignored ")
    return Answer(result.to_json(), result.as_text(), not result.predictions)
