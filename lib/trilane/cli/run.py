"""`trilane run`: one notebook of a study, or all in order; `trilane train`: a plan trained on this machine; `trilane
measure`: this machine, the speed of a plan, the equality of the engines.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trilane.cli.options import JSON, PLAN, Command, Group, command, emit, option, together, whole
from trilane.config.engines import ENGINES
from trilane.utils.process import python
from trilane.utils.tables import printable
from trilane.utils.validation import require, require_known

if TYPE_CHECKING:
    from trilane.workspace.study import Study

PORT = option("--port", type=whole(0, 65535), default=0, help="torchrun's port (0: one that is free)")
RESUME = option("--resume", is_flag=True, help="go on from the newest checkpoint of the run folder")


class RunCommand(Command):
    """`run NOTEBOOK --help` also lists the notebook's parameters."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from trilane.report.notebook import described_parameters, notebook_names

        names = notebook_names()
        with formatter.section("Notebooks"):
            formatter.write_text(", ".join(names))
        for name in (word for word in sys.argv[1:] if word in names):
            with formatter.section(f"Parameters of {name}, set by -p NAME VALUE"):
                formatter.write_dl(
                    [
                        (f"{p.name} {p.inferred_type_name}", f"{p.help} [{p.default}]")
                        for p in described_parameters(name)
                    ]
                )


@click.command(cls=RunCommand)
@click.argument("notebook", metavar="NOTEBOOK|all")
@option("--study", default="demo", help="the folder below outputs/")
@option("-p", "--parameter", nargs=2, multiple=True, metavar="NAME VALUE", help="set a parameter; may be repeated")
@option("--resume", is_flag=True, help="go on in a study that exists")
@option("--fresh", is_flag=True, help="take the next free name if the study exists")
@option("--lab", is_flag=True, help="open JupyterLab on copies in the study instead, with its parameters set")
@option("--pdf", is_flag=True, hidden=True)  # gone: it names its successor until 0.1.0 is released
@JSON
def run(
    notebook: str,
    study: str,
    parameter: tuple[tuple[str, str], ...],
    resume: bool,
    fresh: bool,
    lab: bool,
    pdf: bool,
    as_json: bool,
) -> int:
    """Execute NOTEBOOK, such as 02_topology, or all of the demo in order, and print the path of its report.

    With --lab `all` means every notebook; copies that exist in the study's folder lab/ are kept as they are.
    Exit code 1 where a notebook fails, 2 where its parameters are the reason.
    """
    from trilane.report import notebook as notebooks
    from trilane.workspace.study import Study

    require(not (resume and fresh), "resume", True, "contradicts --fresh")
    require(not pdf, "option", "--pdf", "is now `chromium --headless --no-sandbox --print-to-pdf=OUT.pdf REPORT.html`")
    given = dict(parameter)
    if lab:
        return _lab(notebook, Study(study), given)
    chosen = notebooks.DEMO if notebook == "all" else (notebook,)
    notebooks.distribute(chosen, given)  # every parameter is checked before a folder is made
    # one notebook may join a study that does not hold it yet: 02 after 01
    joins = notebook != "all" and not (Study(study).folder / f"{notebook}.ipynb").exists()
    where = Study.create(study, resume=resume or joins, fresh=fresh)
    try:
        is_all = notebook == "all"
        report = notebooks.run_all(where, given) if is_all else notebooks.run(notebook, where, **given)
    except notebooks.NotebookError as error:
        print("trilane:", printable(str(error)), file=sys.stderr)
        print(f"the executed copy with the traceback: {where.folder / error.notebook}.ipynb", file=sys.stderr)
        return 2 if error.is_input else 1
    return emit(as_json, {"study": str(report.parent), "report": str(report)}, str(report))


def _lab(notebook: str, study: "Study", given: dict[str, str]) -> int:
    """JupyterLab on the study's own copies of the notebooks; its exit code."""
    from trilane.report.notebook import copy_into, distribute, notebook_names

    values = distribute(notebook_names() if notebook == "all" else [notebook], given)
    study.folder.mkdir(parents=True, exist_ok=True)
    copies = [copy_into(study, name, values[name]) for name in values]
    for path, is_new in copies:
        print(f"{path}: {'new' if is_new else 'kept as it is, whatever -p gives' if given else 'kept as it is'}")
    command = python("-m", "jupyterlab", f"--notebook-dir={copies[0][0].parent}")
    command += [f"--LabApp.default_url=/lab/tree/{copies[0][0].name}"]
    return subprocess.call(command, env={**os.environ, "TRILANE_OUTPUTS": str(study.folder.parent.absolute())})


@click.command(cls=Command)
@together(PLAN, PORT, RESUME, JSON)
def train(plan: str, port: int, resume: bool, as_json: bool) -> int:
    """Train PLAN here: a plan.json in its own folder, a plan of another file in a new folder of its name.

    Exit code 0 when the run completed, 3 when it was stopped on request, else 1.
    """
    from trilane.config.plan import read_plan
    from trilane.launch.local import run_folder, train_local
    from trilane.utils.folder_lock import FolderLock

    folder = run_folder(plan, resume)
    read_plan(folder / "plan.json")  # a folder that is not there cannot be locked
    with FolderLock([folder]).held(0.0):
        outcome = train_local(folder, port=port, resume=resume)
    text = f"{outcome.status} after {outcome.seconds:.1f} s: {outcome.evidence}"
    print(json.dumps(asdict(outcome)) if as_json else printable(text))
    return outcome.status.exit_code


NAME = option("--name", default="", help="of the cluster; default: the host's without digits, or local on one machine")
ITERATIONS = option("--iterations", type=whole(0), default=0, help="train so many at the full batch (0: as planned)")
LEAVE_OUT = option("--leave-out", type=whole(0), default=5, help="first iterations left out")
PROFILE = option("--profile", is_flag=True, help="also the profiler's table (run.profile, or the last 3 iterations)")
measure = Group("measure", help="Measure this machine or cluster, the speed of a plan, the equality of the engines.")


@command(measure, click.argument("out", metavar="[OUT.json]", default=""), NAME)
def machine(out: str, name: str) -> None:
    """Measure this machine, or under torchrun or srun this cluster, into OUT.json, which describes it as a cluster."""
    # In place of this process: torchrun and srun count on the rank that they started. Only the engine imports torch.
    os.execvp("env", python("-m", "trilane.engine.bench", out, name))


@command(measure, PLAN, ITERATIONS, LEAVE_OUT, PROFILE, JSON)
def plan(plan: Path, iterations: int, leave_out: int, profile: bool, as_json: bool) -> int:
    """Train PLAN and print how fast it was; the folder of a finished run, also of another machine, is only measured."""
    from trilane.analysis import benchmark

    found = benchmark.benchmark(plan, iterations, leave_out, profile)
    return emit(as_json, found, benchmark.text(found), failed=found["status"] != "completed")


@command(measure, option("--engines", default="all", help=f"all, or some of {','.join(ENGINES)}"), JSON)
def engines(engines: str, as_json: bool) -> None:
    """Train the equality table of the engines here: each row's losses against one reference. Progress is on stderr.

    Exit code 1 where a row exceeds its bound or did not train.
    """
    names = ENGINES if engines == "all" else tuple(name.strip() for name in engines.split(","))
    for name in names:
        require_known("engines", name, ("all", *ENGINES))
    os.execvp("env", python("-m", "trilane.engine.parity", *names, *["--json"] * as_json))
