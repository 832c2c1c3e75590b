"""`trilane run`: notebooks of a study; `calibrate`: constants; `train`: a plan; `measure`: machine,
plan, engines.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trilane.cli.app import GROUPS, Answer, Group, command, note
from trilane.config.engines import ENGINES
from trilane.config.options import option
from trilane.utils.files import write_new
from trilane.utils.process import python, replace_by
from trilane.utils.validation import require, require_known, require_new

measure = Group("measure", help=GROUPS["measure"])


@command(None)
def run(
    notebook: str = option(argument="NOTEBOOK|all"),
    study: str = option("demo", "the folder below outputs/"),
    parameter: tuple[Any, ...] = option(
        (), "set a parameter; repeatable", short="-p", nargs=2, metavar="NAME VALUE"
    ),
    resume: bool = option(False, "with all: go on in a study that exists"),
    lab: bool = option(
        False, "open JupyterLab on copies in the study instead, with its parameters set"
    ),
) -> Answer:
    """Execute NOTEBOOK, such as 02_topology, or all in order, and print the path of its report.

    `all` sizes, plans, trains and measures on this machine; with `-p cluster NAME` it plans, writes
    run folders, forecasts and decides instead. With --lab it means every notebook; copies that
    exist in the study's folder lab/ are kept as they are. Exit code 1 where a notebook fails, 2
    where its parameters are the reason.
    """
    from trilane.report import notebook as notebooks
    from trilane.workspace.study import Study

    given = dict(parameter)
    chosen = [notebook]
    if notebook == "all" and lab:
        chosen = notebooks.notebook_names()
    elif notebook == "all":
        chosen, given = notebooks.notebooks_of_all(given)
    # every parameter is checked before a folder is made
    values = notebooks.distribute(chosen, given)
    if lab:
        notebooks.open_lab(Study(study), values)
    where = Study.create(study, resume=resume or notebook != "all")
    try:
        if notebook == "all":
            others = sorted({*notebooks.notebook_names()} - {*chosen})
            note([f"left out: {', '.join(others)} (each runs by its name)"])
            report = notebooks.run_all(where, values)
        else:
            report = notebooks.run(notebook, where, **given)
    except notebooks.NotebookError as error:
        note([f"{error}; the traceback is in the executed copy in {where.folder}"])
        return Answer(code=2 if error.is_input else 1)
    return Answer({"study": str(report.parent), "report": str(report)}, str(report))


@command(None)
def calibrate(
    rows: str = option(argument="ROWS|LOGS|STUDY"),
    cluster: str = option(help="where the runs ran: a cluster's name or JSON file"),
    output: Path = option(
        help="the JSON file of constants to write, for --calibration", short="-o", metavar="FILE"
    ),
) -> Answer:
    """Fit the constants of predictions to measured runs, as far as that predicts each of them
    better from the others.

    The runs are a table (CSV or Markdown; columns of lib/trilane/data/scored.csv, of which those of
    shape and parallelism, gbs, mbs and sec_per_it are needed), logs or run folders, or those of a
    study.
    """
    from trilane.analysis.recalibrate import fit
    from trilane.workspace.installation import stamp

    require_new("output", output)
    found = fit(rows, cluster)
    # the name by which other commands know the constants of this file
    kept = {**found.fitted.kept(), "name": str(output)}
    made_by = {"command": "trilane calibrate", "rows": rows, **stamp()}
    write_new(output, json.dumps({**kept["constants"], "made_by": made_by}, indent=1) + "\n")
    return Answer(found.to_json(), f"{found.summary()}\nwritten: {output} ({kept['hash']})")


@command(None)
def train(
    plan: str,
    resume: bool = option(False, "go on from the newest checkpoint of the run folder"),
) -> Answer:
    """Train PLAN here: a plan.json in its own folder, a plan of another file in a new folder of its
    name.

    Exit code 0 when the run completed, 3 when it was stopped on request, else 1.
    """
    from trilane.launch.local import require_startable, run_folder, train_local
    from trilane.utils.folder_lock import FolderLock

    require_startable(plan)  # before there is a folder
    folder = run_folder(plan, resume)
    with FolderLock([folder]).held(0.0):
        outcome = train_local(folder, resume=resume)
    text = f"{outcome.status} after {outcome.seconds:.1f} s: {outcome.evidence}"
    return Answer(asdict(outcome), text, outcome.status.exit_code)


@command(measure)
def machine(
    out: str = option("", argument="[OUT.json]"),
) -> None:
    """Measure this machine, or under torchrun or srun this cluster, into OUT.json, which describes
    it as a cluster.
    """
    # In place of this process: torchrun and srun count on the rank that they started. Only the
    # engine imports torch.
    replace_by(python("-m", "trilane_engine.bench", out))


@command(measure)
def plan(
    plan: Path,
    iterations: int = option(0, "train so many at the full batch (0: as planned)"),
    trace: bool = option(
        False, "run its real engine without a GPU, at any size: memory, collectives, FLOPs, kernels"
    ),
) -> Answer:
    """Train PLAN and print how fast it was; the folder of a finished run, also of another machine,
    is only measured.

    With --trace nothing is trained: see docs/engine.md.
    """
    if trace:
        require(not iterations, "iterations", iterations, "nothing is trained with --trace")
        options = ["--json"] if click.get_current_context().params["as_json"] else []
        replace_by(python("-m", "trilane_engine.trace", str(plan), *options))
    from trilane.analysis.benchmark import benchmark
    from trilane.analysis.collect import parse_text

    found = benchmark(plan, iterations)
    return Answer(found.to_json(), parse_text([found]), not found.status.is_clean)


@command(measure)
def engines(names: tuple[str, ...] = option((), argument="[ENGINES...]")) -> None:
    """Train the equality table of these engines (default: all) here: each row's losses against
    one reference, a line a row. From a checkout alone.

    Exit code 1 where a row exceeds its bound or did not train.
    """
    for name in names:
        require_known("engines", name, ENGINES)
    script = Path(__file__).parents[3] / "tests/engine/parity.py"
    require(script.is_file(), "engines", script, "is not here; a checkout of trilane has it")
    replace_by(python(str(script), *names))
