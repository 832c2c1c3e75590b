"""The notebooks: their parameters, their execution in a study, and copies to work on by hand."""

import ast
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from trilane.report.html import notebook_html, parameters, read_notebook, state, write_index
from trilane.utils.files import replace_text, set_aside
from trilane.utils.folder_lock import FolderLock
from trilane.utils.process import environment, python, replace_by
from trilane.utils.tables import Json
from trilane.utils.validation import require, require_known
from trilane.workspace.installation import outputs_root, shipped, stamp
from trilane.workspace.study import Study, load_cluster

# The notebooks of `all`, in order: of this machine, which trains, and of another cluster
HERE = ["01_sizing", "02_topology", "03_launch", "04_analyze"]
ELSEWHERE = ["02_topology", "03_launch", "07_calendar", "08_decision"]


class NotebookError(Exception):
    """A notebook failed; `is_input` where a cell raised a ValueError, which means bad input."""

    def __init__(self, message: str, is_input: bool):
        super().__init__(message)
        self.is_input = is_input


def notebook_names() -> list[str]:
    """The names of all notebooks, such as `01_sizing`."""
    return sorted(path.stem for path in shipped("notebooks").glob("*.ipynb"))


def path_of(name: str) -> Path:
    """The source notebook of that name; ValueError for an unknown one."""
    require_known("notebook", name, notebook_names())
    return shipped("notebooks") / f"{name}.ipynb"


def typed(field: str, given: object, kind: str) -> Any:
    """`given`, which may be text of a command line, as a value of type `kind`; ValueError where it
    is not one.
    """
    value = given
    if isinstance(given, str) and kind != "str":
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(given.title() if kind == "bool" else given)
    if kind == "float" and type(value) is int:
        value = float(value)
    require(type(value).__name__ == kind, field, given, f"must be of type {kind}")
    return value


def notebooks_of_all(given: Json) -> tuple[list[str], Json]:
    """The notebooks of `all` where the parameters `given` ask for this machine or another cluster,
    for which 03 only writes run folders; and all their parameters. ValueError for an unknown one.
    """
    cluster = given.get("cluster", "local")
    if cluster == "local":
        return HERE, {**given}
    load_cluster(cluster)
    for name in ("shape", "gpus", "gbs"):
        require(name in given, name, "missing", f"needed on {cluster}; 01_sizing proposes shapes")
    return ELSEWHERE, {"train": False, **given}


def distribute(chosen: Sequence[str], given: Mapping[str, object]) -> dict[str, Json]:
    """The typed parameters of each notebook in `chosen`; ValueError for a name that none of them
    has.
    """
    declared = {name: papermill.inspect_notebook(path_of(name)) for name in chosen}
    known = set[str]().union(*declared.values())
    for field in given:
        require_known("parameter", field, known)
    values: dict[str, Json] = {name: {} for name in chosen}
    for name, fields in declared.items():
        for field in fields.keys() & given:
            values[name][field] = typed(field, given[field], fields[field]["inferred_type_name"])
    return values


def run(name: str, study: Study, **given: object) -> Path:
    """Execute one notebook in `study` with the parameters `given`; the path of its HTML.

    The executed copy, HTML and index are written even where a cell fails; then NotebookError names
    the cell. ValueError where another process executes that notebook in the study now.
    """
    values = distribute([name], given)[name]
    with FolderLock([study.folder], f".{name}.lock", f"notebook={name}, study").held(0.0):
        executed = study.folder / f"{name}.ipynb"
        set_aside(executed)
        # papermill would write into the kept copy: the two names are one file
        executed.unlink(missing_ok=True)
        try:
            _execute(name, executed, {**values, "study": study.name})
        finally:
            if executed.exists():
                notebook = nbformat.read(executed, as_version=4)
                notebook.metadata["trilane"] = stamp()
                nbformat.write(notebook, executed)
                replace_text(executed.with_suffix(".html"), notebook_html(executed))
                write_index(study)
    return executed.with_suffix(".html")


def _execute(name: str, executed: Path, values: Json) -> None:
    source = path_of(name)
    inherited = environment({"TRILANE_OUTPUTS": str(outputs_root().absolute())})
    folder = tempfile.TemporaryDirectory(prefix="trilane-", dir=inherited.get("TMPDIR"))
    with folder as sockets, mock.patch.dict(os.environ, inherited, clear=True):  # which restores it
        # a port of TCP could be used by everybody on a shared node; a folder for each kernel, or
        # two share files
        options = {
            "config": Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            # modules of the current folder would go before ours
            "extra_arguments": ["--InteractiveShellApp.ignore_cwd=True"],
            "stdout_file": sys.stderr,
            "stderr_file": sys.stderr,
            "kernel_name": "python3",
            "progress_bar": sys.stderr.isatty(),
        }
        try:
            papermill.execute_notebook(source, executed, parameters=dict(values), **options)
        except PapermillExecutionError as error:
            reason = error.evalue or error.ename
            message = f"{name}, cell [{error.exec_count}]: {reason}"
            raise NotebookError(message, error.ename == "ValueError") from None
        except RuntimeError as error:  # of a kernel that died
            raise NotebookError(f"{name}: {error}", is_input=False) from None


def is_done(name: str, study: Study, values: Json) -> bool:
    """Whether the study holds a completed execution of that notebook with the same parameters."""
    executed = _execution(study, name)
    return state(executed) == "completed" and parameters(executed) == {
        **values,
        "study": study.name,
    }


def _execution(study: Study, name: str) -> Any:
    """The executed copy of a notebook; an empty one where it is missing, damaged, or half
    written.
    """
    with contextlib.suppress(ValueError):
        return read_notebook(study.folder / f"{name}.ipynb")
    return nbformat.v4.new_notebook()


def run_all(study: Study, values: Mapping[str, Json]) -> Path:
    """Run notebooks in order, each with its parameters, as distribute() gives them; the path of the
    study's index.

    A notebook that the study already holds, executed with the same parameters, is not run again
    where none before it is.
    """
    is_kept = True
    for name, given in values.items():
        is_kept = is_kept and is_done(name, study, given)
        print(f"{name}: completed before, kept" if is_kept else name, file=sys.stderr)
        if not is_kept:
            run(name, study, **given)
    return write_index(study)


def open_lab(study: Study, given: Mapping[str, Json]) -> NoReturn:
    """Become JupyterLab on the study's own copies of notebooks, given with their parameters."""
    for name, values in given.items():
        print(copy_into(study, name, values))
    words = python("-m", "jupyterlab", f"--notebook-dir={study.folder / 'lab'}")
    words.append(f"--LabApp.default_url=/lab/tree/{next(iter(given))}.ipynb")
    if os.geteuid() == 0:  # in a container; it listens on this machine alone
        words.append("--allow-root")
    # it asks at the terminal whether Ctrl-C shall end it
    replace_by(words, {"TRILANE_OUTPUTS": str(study.folder.parent.absolute())})


def copy_into(study: Study, name: str, values: Json) -> Path:
    """The study's copy of a notebook to work on by hand, lab/NAME.ipynb; one that exists stays.

    A cell below its parameters sets `values`, and those with which the study ran the notebook.
    """
    path = study.folder / "lab" / f"{name}.ipynb"
    if path.exists():
        return path
    given = {**parameters(_execution(study, name)), **values, "study": study.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    papermill.execute_notebook(path_of(name), path, given, prepare_only=True)
    return path
