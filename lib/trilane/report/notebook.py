"""Execute the notebooks of a study with checked parameters; write their HTML and the study's index."""

import ast
import contextlib
import glob
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import nbformat
import papermill
from jupyter_client import AsyncKernelManager
from papermill.exceptions import PapermillExecutionError
from traitlets import Unicode

from trilane.report.html import read_notebook, with_predecessor, write_notebook_report
from trilane.report.index import write_index
from trilane.report.parameters import described_parameters, edited_parameters, path_of
from trilane.utils.folder_lock import FolderLock
from trilane.utils.process import SAFE_PATH, environment_set
from trilane.utils.progress import BATCH
from trilane.utils.validation import require_known
from trilane.workspace.installation import outputs_root, shipped, stamp
from trilane.workspace.run_folder import keep_earlier
from trilane.workspace.study import Study

DEMO = ("01_sizing", "02_topology", "03_launch", "04_analyze")  # the notebooks of `all`, in order


def kernel_manager(stderr: IO[bytes], sockets: str) -> type[AsyncKernelManager]:
    """A manager of kernels that listen on socket files: any user of a shared node can connect to a TCP port.

    The files are in the folder `sockets`, by default in the working directory, where two kernels started at once would
    share them. The kernel process writes its own stderr to the file `stderr`; the notebook's stderr is an output of its
    cell.
    """

    class SocketFileKernelManager(AsyncKernelManager):
        transport = Unicode("ipc")

        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            self.ip = f"{sockets}/kernel"
            await super().start_kernel(**{**options, "stderr": stderr})

    return SocketFileKernelManager


def socket_folder() -> str:
    """The folder for temporary files, or /tmp where its path is too long for a socket: 107 bytes, man 7 unix."""
    return folder if len(os.fsencode(folder := tempfile.gettempdir())) < 70 else "/tmp"


class NotebookError(Exception):
    """A cell of a notebook failed; `is_input` where it raised a ValueError, which means bad input."""

    def __init__(self, notebook: str, cell: str, reason: str, is_input: bool):
        super().__init__(f"{notebook}, {cell}: {reason}")
        self.notebook = notebook
        self.is_input = is_input


def typed(field: str, text: object, kind: str) -> Any:
    """`text` as a value of type `kind`; ValueError where it is not one. An int is also a float."""
    if not isinstance(text, str):
        ok = type(text).__name__ == kind or (kind == "float" and isinstance(text, int) and not isinstance(text, bool))
        value: Any = text
    elif kind == "str":
        return text if field == "study" else located(text)
    else:
        try:
            value = {"true": True, "false": False}.get(text.lower()) if kind == "bool" else ast.literal_eval(text)
            ok = type(value).__name__ == kind or (kind == "float" and type(value) is int)
        except (ValueError, SyntaxError):
            ok = False
    if not ok:
        raise ValueError(f"{field}={text}: must be of type {kind}")
    return float(value) if kind == "float" else value


def located(text: str) -> str:
    """An existing relative path or glob as an absolute one, since a kernel's working directory is notebooks/.

    A path that exists in notebooks/ too, and a bare word (which may be a name), stay as they are.
    """

    def exists(folder: Path) -> bool:
        return os.path.exists(folder / text) or any(glob.iglob(text, root_dir=folder, recursive=True))

    like_a_path = glob.has_magic(text) or os.sep in text or Path(text).suffix
    if not like_a_path or os.path.isabs(text) or exists(shipped("notebooks")) or not exists(here := Path.cwd()):
        return text
    return os.path.normpath(here / text if os.path.exists(here / text) else Path(glob.escape(str(here))) / text)


def distribute(chosen: Sequence[str], given: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The typed parameters of each notebook in `chosen`; ValueError for a name that none of them has."""
    known = {name: described_parameters(name) for name in chosen}
    for field in given:
        require_known("parameter", field, sorted({p.name for found in known.values() for p in found}))
    return {
        name: {p.name: typed(p.name, given[p.name], p.kind) for p in found if p.name in given}
        for name, found in known.items()
    }


def run(name: str, study: Study, **given: object) -> Path:
    """Execute one notebook in `study` with the parameters `given`; the path of its HTML.

    The executed copy, HTML and index are written even where a cell fails; then NotebookError names the cell. ValueError
    where another process executes that notebook in the study now.
    """
    values = {**_as_committed(name), **distribute([name], given)[name]}
    with FolderLock([study.folder], f".{name}.lock", f"notebook={name}, study").held(0.0):
        return _run(name, study, values)


def _run(name: str, study: Study, values: Mapping[str, Any]) -> Path:
    """As run(), while no other process executes that notebook in the study."""
    source, executed = path_of(name), study.folder / f"{name}.ipynb"
    keep_earlier(executed)
    executed.unlink(missing_ok=True)  # papermill would write into the kept copy: the two names are one file
    # the kernel runs in another folder
    inherited = {BATCH: "1", "TRILANE_OUTPUTS": str(outputs_root().absolute()), **SAFE_PATH}
    kernel_stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed below
    sockets = tempfile.TemporaryDirectory(prefix="trilane-", dir=socket_folder())  # removed below
    options = {"stdout_file": sys.stderr, "request_save_on_cell_execute": True, "cwd": str(source.parent)}
    try:
        with environment_set(inherited):
            papermill.execute_notebook(
                source,
                executed,
                parameters={**values, "study": study.name},
                kernel_name="python3",
                kernel_manager_class=kernel_manager(kernel_stderr, sockets.name),
                progress_bar={"desc": name, "unit": "cell"},
                **options,
            )
    except PapermillExecutionError as error:
        cell = cell_name(source, error.source)
        raise NotebookError(name, cell, error.evalue or error.ename, error.ename == "ValueError") from None
    except BaseException as error:  # a dead kernel, Ctrl-C: papermill keeps the copy as if it were complete
        unfinished = mark_failed(executed)
        if not isinstance(error, RuntimeError):
            raise
        cell = cell_name(source, unfinished) if unfinished is not None else "before its first cell"
        kernel_stderr.seek(0)
        last = kernel_stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise NotebookError(name, cell, "; ".join([str(error), *last]), is_input=False) from None
    finally:
        kernel_stderr.close()
        sockets.cleanup()
        _write_reports(study, executed)
    return executed.with_suffix(".html")


def _write_reports(study: Study, executed: Path) -> None:
    """The executed copy with the software that made it, its page, and the study's index, where there is a copy."""
    if executed.exists():
        made = nbformat.read(executed, as_version=4)
        made.metadata["trilane"] = stamp()
        nbformat.write(made, executed)
        *before, own = with_predecessor(executed)
        for report in before:
            with contextlib.suppress(
                ValueError
            ):  # another process may be executing it: half written, and its own to report
                write_notebook_report(report)
        write_notebook_report(own)
        write_index(study)


def _as_committed(name: str) -> dict[str, Any]:
    """The committed defaults of parameters that were edited in the notebook itself, which is said on stderr."""
    edited = edited_parameters(name)
    if edited:
        which = ", ".join(f"{field} is {value!r}" for field, value in edited.items())
        print(
            f"trilane: notebooks/{name}.ipynb was edited; this run takes its parameters as committed ({which}). Set "
            f"them with -p, or work on a copy: trilane run {name} --lab",
            file=sys.stderr,
        )
    return edited


def cell_name(notebook: Path, source: str) -> str:
    """Number and heading of the code cell with that source: "cell 7 (How long does it take?)"."""
    heading = ""
    for number, cell in enumerate(nbformat.read(notebook, as_version=4).cells, start=1):
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.splitlines()[0].lstrip("# ")
        elif cell.cell_type == "code" and cell.source == source:
            return f"cell {number} ({heading})"
    return "a cell"


def mark_failed(executed: Path) -> str | None:
    """Record in the executed copy that it is incomplete; the source of its first unfinished code cell."""
    if not executed.exists():
        return None
    made = nbformat.read(executed, as_version=4)
    made.metadata.setdefault("papermill", {})["exception"] = True
    nbformat.write(made, executed)
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    return next((cell.source for cell in code if "iopub.status.idle" not in cell.metadata.get("execution", {})), None)


def is_done(name: str, study: Study, values: Mapping[str, Any]) -> bool:
    """Whether the study holds a completed execution of that notebook with the same parameters."""
    executed = study.folder / f"{name}.ipynb"
    try:
        made = read_notebook(executed).metadata.get("papermill", {})
    except ValueError:  # missing, damaged, or half written by another process
        return False
    same = made.get("parameters") == {**values, "study": study.name}
    return bool(same and made.get("end_time") and not made.get("exception"))


def run_all(study: Study, given: Mapping[str, object], chosen: Sequence[str] = DEMO) -> Path:
    """Run the notebooks in order, each with those of the parameters that it has; the path of the study's index.

    A notebook that the study already holds, executed with the same parameters, is not run again.
    """
    plan = distribute(chosen, given)
    for number, name in enumerate(chosen, start=1):
        if is_done(name, study, plan[name]):
            print(f"[{number}/{len(chosen)}] {name}: completed before, kept", file=sys.stderr)
            continue
        print(f"[{number}/{len(chosen)}] {name}", file=sys.stderr)
        run(name, study, **plan[name])
    return write_index(study)
