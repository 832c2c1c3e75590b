"""`trilane plan`: sizes, topologies, one plan in full, dates and risks, the cost model against
measurements.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from trilane.analysis.plan_report import plan_report
from trilane.cli.app import GROUPS, Answer, Group, command, note
from trilane.config.engines import ENGINES
from trilane.config.options import option
from trilane.config.parallelism import Topology
from trilane.config.plan import plan_of, read_plan
from trilane.config.shapes import read_shape
from trilane.costmodel import backtest as measured
from trilane.costmodel.shipped import calibration_for, constants_of
from trilane.forecasting.forecast import forecast
from trilane.forecasting.request import ForecastRequest
from trilane.interop.deepspeed_config import read_deepspeed
from trilane.planning import deadline
from trilane.planning.alternatives import asked_case
from trilane.planning.decision import Decision, decision_text
from trilane.planning.search import search as search_plans
from trilane.planning.size_request import ANY, SizeRequest
from trilane.planning.sizing import survey
from trilane.utils.process import install_command
from trilane.utils.validation import parse_count, require
from trilane.workspace.study import Study, load_cluster

plan = Group("plan", help=GROUPS["plan"])
SHAPE = "layers,hidden,heads,seq,vocab, or a JSON file: a shape, or Hugging Face's config.json"
CLUSTER = "a cluster's name or JSON file; local: this machine, measured"
SEQUENCE = option(
    0, "tokens of a sequence; default: the shape's, in a config.json its longest", minimum=1
)
# of a command that takes a plan's file or what makes one
PLAN = option(None, argument="[PLAN]")
OR_SHAPE = option("", f"without PLAN: {SHAPE}")
OR_ENGINE = option("", f"what trains it; default: {ENGINES[0]}", choices=ENGINES)
CALIBRATION = ForecastRequest.__dataclass_fields__["calibration"]
Choices = Annotated[dict[str, Any], Topology]


@command(plan)
def size(
    *,
    params: float = option(help="parameters of the model: 200B, 1.3e9, 350M", above=0),
    cluster: str = option(help=CLUSTER),
    top: int = option(10, "shapes to list", minimum=1),
    choices: Choices,
    **asked: Annotated[Any, SizeRequest],
) -> Answer:
    """List shapes of a target size, layers x hidden, each with its best topology, days and
    GPU-hours.

    Exit code 1 where none can run. `plan best` lists the largest that end within some days.
    """
    machine = load_cluster(cluster)
    found = survey(SizeRequest(parameters=params, cluster=machine, choices=choices, **asked))
    return Answer(found.to_json(top), found.as_text(top), not found.rows)


@command(plan)
def search(
    *,
    shape: str = option(help=SHAPE),
    cluster: str = option(help=CLUSTER),
    gpus: int = option(help="GPUs of the run", minimum=1),
    seq: int = SEQUENCE,
    gbs: int = option(help="sequences of an iteration", minimum=1, maximum=1 << 20),
    calibration: str = CALIBRATION,
    engine: str = option(ENGINES[0], "what trains it", choices=ENGINES),
    top: int = option(10, "plans to list, each of another tp x pp x dp", minimum=1),
    choices: Choices,
) -> Answer:
    """Predict every topology of a cluster for a model, and list the best; exit code 1 where none
    can run.

    An option that names a choice of the topology pins it. Where --tp and --pp leave one tp x pp x
    dp, its variants are listed.
    """
    machine = load_cluster(cluster)
    model = read_shape(shape, seq_length=seq)
    known = calibration_for(machine, calibration)
    asked = {"gpus": gpus, "gbs": gbs, "engine": engine, "top": top, **choices}
    found = search_plans(model, machine, calibration=known, distinct=True, **asked)
    return Answer(found.to_json(), found.as_text(), not found.rows)


@command(plan)
def best(
    *,
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
    engine: str = option(ANY, "what trains it; any: the fastest", choices=(*ENGINES, ANY)),
    **asked: Annotated[Any, SizeRequest],
) -> Answer:
    """Answer what to train: the largest model that each cluster ends in time, on three topologies,
    and what it costs.

    Days with 90 % probability, failures and checkpoints counted as by `plan calendar`, which takes
    the file that --json prints. Exit code 1 where nothing ends in time.
    """
    clusters = [name.strip() for name in cluster.split(",")]
    prices = [parse_count("price", one) for one in price.split(",") if price]
    asked |= {"gpus": gpus, "gbs": gbs, "engine": engine}
    found = deadline.best_within(days, clusters, prices=prices, **asked)
    return Answer(found.to_json(), found.as_text(), not found.rows)


@command(plan)
def show(
    plan: Path | None = PLAN,
    shape: str = OR_SHAPE,
    cluster: str = option("", f"{CLUSTER}; of a PLAN: predict it there"),
    seq: int = SEQUENCE,
    engine: str = OR_ENGINE,
    deepspeed: Path | None = option(
        None, "DeepSpeed's JSON, for --dp, --mbs, --zero, ...", metavar="FILE"
    ),
    gpus: int = option(0, "with --deepspeed: GPUs of the run", minimum=1),
    calibration: str = CALIBRATION,
    *,
    choices: Choices,
) -> Answer:
    """Predict one plan in full: seconds by cause, memory by pipeline stage, TFLOPs and MFU.

    The plan is a file, or the options --shape, --cluster, --gbs, --mbs, --tp, --pp, --dp and what
    else differs from the defaults of cluster and engine.
    """
    given = {"shape": shape, "cluster": cluster, "seq": seq, "engine": engine}
    needed = ("shape", "cluster", "gbs")
    if deepspeed:
        given["deepspeed"] = str(deepspeed)
        engine = engine or ENGINES[1]
        choices, _, notes = read_deepspeed(deepspeed, gpus, choices)
        note(notes)
    require_either(plan, {**given, **choices, "cluster": "" if plan else cluster}, needed)
    if plan:
        read = read_plan(plan)
        if cluster:
            read = read.replace(cluster=load_cluster(cluster), calibration=None)
    else:
        model = read_shape(shape, seq_length=seq)
        read = plan_of(model, load_cluster(cluster), engine or ENGINES[0], choices)
    return Answer(*plan_report(read, constants_of(read, calibration)))


def require_either(plan: Path | None, given: dict[str, Any], needed: Iterable[str]) -> None:
    """ValueError where a plan is named and something else is given, or something needed is not."""
    for name, value in given.items():
        require(not (plan and value), name, value, f"contradicts the plan {plan}")
    for name in needed:
        require(plan or given.get(name), name, "missing", "needed where no plan is named")


@command(plan)
def calendar(
    plan: Path,
    tokens: float = option(help="tokens of the whole run: 341B, 3.41e11", above=0),
    **given: Annotated[Any, ForecastRequest],
) -> Answer:
    """Forecast PLAN: the finish date, GPU-hours and days, and the risk of missing a deadline or an
    allocation.
    """
    found = forecast(plan, tokens=tokens, **given)
    lines = [f"{name:21} {text}" for name, text in found.rows().items()]
    return Answer(found.to_json(), "\n".join(lines))


@command(None)
def decide(
    plan: Path | None = PLAN,
    shape: str = OR_SHAPE,
    cluster: str = option("", f"without PLAN: {CLUSTER}"),
    gpus: int = option(0, "without PLAN: GPUs of the run", minimum=1),
    gbs: int = option(0, "without PLAN: sequences of an iteration", minimum=1, maximum=1 << 20),
    seq: int = SEQUENCE,
    engine: str = OR_ENGINE,
    cases: tuple[str, ...] = option(
        (), "what if: gpus=256, tokens=+30%, attention=scores; repeatable", name="if", metavar="IF"
    ),
    title: str = option("", "what the run is called"),
    study: str = option("decision", "the new folder below outputs/ of the pages"),
    **given: Annotated[Any, ForecastRequest],
) -> Answer:
    """Answer whether to start PLAN, or the best plan of a shape, and write the page that says why.

    02, 07 and 08 are executed in a new study. Without the notebooks' packages the verdict is
    printed alone. Exit code 1 where it is not to start.
    """
    model = {"shape": shape, "cluster": cluster, "gpus": gpus, "gbs": gbs}
    require_either(plan, {**model, "seq": seq, "engine": engine}, model)
    engine = engine or ENGINES[0]
    # before a notebook runs, all that is wrong is known
    if plan:
        chosen = read_plan(plan)
    else:
        known = given.get("calibration", "")
        sizes = {"gpus": gpus, "gbs": gbs, "engine": engine, "calibration": known, "top": 1}
        found = search_plans(read_shape(shape, seq_length=seq), cluster, distinct=True, **sizes)
        chosen = found.best().plan
    asked = forecast(chosen, **given)
    for case in cases:
        asked_case(asked, case)
    if find_spec("papermill") is None:
        values = Decision(asked=asked, title=title, ifs=cases).to_json()
        page = f"no page: {install_command('notebooks')} installs what it needs"
    else:
        from trilane.report.notebook import distribute, run_all

        names = ["07_calendar", "08_decision"]
        if plan:
            parameters = {**given, "plan": str(plan)}
        else:
            names.insert(0, "02_topology")
            parameters = {**given, **model, "seq_length": seq, "engine": engine}
            parameters["gpus"] = str(gpus)
        parameters |= {"title": title, "ifs": " ".join(cases)}
        run_all(Study.create(study), distribute(names, parameters))
        values = Study(study).load("decision.json", "08_decision")
        page = str(Study(study).folder / "08_decision.html")
    values["page"] = page
    text = f"{decision_text(values)}\n{page}"
    return Answer(values, text, not values["recommendation"]["figures"])


@command(plan)
def backtest(
    rows: str,
    cluster: str | None = option(None, f"{CLUSTER}, instead of the column"),
    cv: str | None = option(None, "refit without each", choices=("table", "hidden", "date")),
    calibration: str = CALIBRATION,
) -> Answer:
    """Compare measured rows (columns of lib/trilane/data/scored.csv) with their predictions.

    ROWS may be a set that ships: all, scored, measured, dlperf_v100, dgxc_nemotron_h100 or
    lucie_jz_a100_2024.
    """
    result = measured.backtest(rows, cluster, cv, calibration)
    note([f"skipped {row.row_id}: {row.reason}" for row in result.skipped])
    note([f"ignored {text}" for text in result.ignored])
    return Answer(result.to_json(), result.as_text())
