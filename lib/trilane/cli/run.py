"""`trilane run`: notebooks of a study; `calibrate`: constants; `train`: a plan; `measure`: machine,
plan, engines.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trilane.cli.app import GROUPS, Answer, Group, command, note
from trilane.config.engines import ENGINES
from trilane.config.options import option
from trilane.utils.process import python, replace_by
from trilane.utils.validation import require, require_known

measure = Group("measure", help=GROUPS["measure"])


class RunCommand(click.Command):
    """`run NOTEBOOK --help` also lists the notebook's parameters."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from trilane.report.notebook import notebook_names, path_of, read_parameters

        names = notebook_names()
        with formatter.section("Notebooks"):
            formatter.write_text(", ".join(names))
        for name in names:
            if name in sys.argv:
                parameters = read_parameters(path_of(name))
                with formatter.section(f"Parameters of {name}, set by -p NAME VALUE"):
                    formatter.write_dl(
                        [
                            (p.name, f"{p.inferred_type_name}: {p.help} [{p.default}]")
                            for p in parameters
                        ]
                    )


@command(None, cls=RunCommand)
def run(
    notebook: str = option(argument="NOTEBOOK|all"),
    study: str = option("demo", "the folder below outputs/"),
    parameter: tuple[Any, ...] = option(
        (), "set a parameter; repeatable", short="-p", nargs=2, metavar="NAME VALUE"
    ),
    resume: bool = option(False, "go on in a study that exists"),
    fresh: bool = option(False, "take the next free name if the study exists"),
    zip: bool = option(
        False, "also write outputs/STUDY.zip: the pages and what they link, to hand on"
    ),
    lab: bool = option(
        False, "open JupyterLab on copies in the study instead, with its parameters set"
    ),
) -> Answer:
    """Execute NOTEBOOK, such as 02_topology, or all of the demo in order, and print the path of its
    report.

    With --lab `all` means every notebook; copies that exist in the study's folder lab/ are kept as
    they are. Exit code 1 where a notebook fails, 2 where its parameters are the reason.
    """
    from trilane.report import index
    from trilane.report import notebook as notebooks
    from trilane.workspace.study import Study

    require(not (resume and fresh), "resume", True, "contradicts --fresh")
    require(not (zip and lab), "zip", True, "contradicts --lab")
    given = dict(parameter)
    chosen = [notebook]
    if notebook == "all":
        if lab:
            chosen = notebooks.notebook_names()
        else:
            chosen = list(notebooks.DEMO)
    # every parameter is checked before a folder is made
    values = notebooks.distribute(chosen, given)
    if lab:
        notebooks.open_lab(Study(study), values)
    is_free = notebooks.is_free(Study(study), "" if notebook == "all" else notebook)
    where = Study.create(study, resume=resume or is_free, fresh=fresh)
    if zip:
        index.zip_path(where)  # refused before anything runs
    try:
        if notebook == "all":
            report = notebooks.run_all(where, given)
        else:
            report = notebooks.run(notebook, where, **given)
    except notebooks.NotebookError as error:
        copy = where.folder / f"{error.notebook}.ipynb"
        note([f"{error}; the executed copy with the traceback: {copy}"])
        return Answer(code=2 if error.is_input else 1)
    paths = {"study": str(report.parent), "report": str(report)}
    lines = [str(report)]
    if zip:
        paths["zip"] = str(index.write_zip(where))
        lines.append(paths["zip"])
    return Answer(paths, "\n".join(lines))


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
    from trilane.analysis.recalibrate import fit_source
    from trilane.workspace.installation import stamp
    from trilane.workspace.study import load_cluster

    require(not output.exists(), "output", output, "exists; name another file")
    require(output.parent.is_dir(), "output", output, "its folder does not exist")
    found = fit_source(rows, load_cluster(cluster))
    # the name by which other commands know the constants of this file
    kept = {**found.fitted.kept(), "name": str(output)}
    made_by = {"command": "trilane calibrate", "rows": rows, **stamp()}
    with output.open("x", encoding="utf-8") as file:  # also where another process has just made it
        file.write(json.dumps({**kept["constants"], "made_by": made_by}, indent=1) + "\n")
    text = f"{found.summary()}\nwritten: {output} ({kept['hash']})"
    return Answer({**found.to_json(), "calibration": kept, "file": str(output)}, text)


@command(None)
def train(
    plan: str,
    resume: bool = option(False, "go on from the newest checkpoint of the run folder"),
) -> Answer:
    """Train PLAN here: a plan.json in its own folder, a plan of another file in a new folder of its
    name.

    Exit code 0 when the run completed, 3 when it was stopped on request, else 1.
    """
    from trilane.config.plan import read_plan
    from trilane.launch.local import run_folder, train_local
    from trilane.utils.folder_lock import FolderLock

    folder = run_folder(plan, resume)
    read_plan(folder / "plan.json")  # a folder that is not there cannot be locked
    with FolderLock([folder]).held(0.0):
        outcome = train_local(folder, resume=resume)
    text = f"{outcome.status} after {outcome.seconds:.1f} s: {outcome.evidence}"
    return Answer(asdict(outcome), text, outcome.status.exit_code)


@command(measure)
def machine(
    out: str = option("", argument="[OUT.json]"),
    name: str = option("", "of the cluster; default: local"),
    storage: str = option(
        "", "folder where what a checkpoint takes is measured; default: the current one"
    ),
) -> None:
    """Measure this machine, or under torchrun or srun this cluster, into OUT.json, which describes
    it as a cluster.
    """
    # In place of this process: torchrun and srun count on the rank that they started. Only the
    # engine imports torch.
    replace_by(python("-m", "trilane_engine.bench", out, name, storage))


@command(measure)
def plan(
    plan: Path,
    iterations: int = option(0, "train so many at the full batch (0: as planned)", minimum=0),
    leave_out: int = option(5, "first iterations left out", minimum=0),
    trace: bool = option(
        False, "run its real engine without a GPU, at any size: memory, collectives, FLOPs, kernels"
    ),
    timeline: Path | None = option(
        None, "with --trace: write what ran as a Chrome trace, for Perfetto", metavar="FILE.json"
    ),
) -> Answer:
    """Train PLAN and print how fast it was; the folder of a finished run, also of another machine,
    is only measured.

    With --trace nothing is trained: see docs/engine.md.
    """
    require(trace or not timeline, "timeline", timeline, "needs --trace")
    if trace:
        require(not iterations, "iterations", iterations, "nothing is trained with --trace")
        if timeline:
            require(not timeline.exists(), "timeline", timeline, "exists; name another file")
            require(timeline.parent.is_dir(), "timeline", timeline, "its folder does not exist")
        replace_by(
            python("-m", "trilane_engine.trace", str(plan), str(timeline or ""), *json_option())
        )
    from trilane.analysis.benchmark import benchmark, result
    from trilane.analysis.tables import parse_text

    found = benchmark(plan, iterations, leave_out)
    return Answer(result(found), parse_text([found]), int(not found.status.is_clean))


@command(measure)
def engines(
    engines: str = option("all", f"all, or some of {','.join(ENGINES)}"),
) -> Answer:
    """Train the equality table of the engines here: each row's losses against one reference.
    Progress is on stderr.

    Exit code 1 where a row exceeds its bound or did not train.
    """
    names = ENGINES if engines == "all" else engines.split(",")
    for name in names:
        require_known("engines", name, ("all", *ENGINES))
    script = Path(__file__).parents[3] / "tests/engine/parity.py"
    require(script.is_file(), "engines", engines, "are compared from a checkout of trilane alone")
    replace_by([sys.executable, str(script), *names, *json_option()])


def json_option() -> list[str]:
    """--json, where it was given, for the process that takes the place of this one."""
    if click.get_current_context().params["as_json"]:
        return ["--json"]
    return []
