"""Run a notebook of a study: papermill behind one checked door, then its HTML and the study's index."""

import ast
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

from trilane.report.html import write_index, write_notebook_report
from trilane.utils.progress import BATCH
from trilane.utils.validation import require_known
from trilane.workspace.run_folder import keep_earlier
from trilane.workspace.study import REPOSITORY, Study

NOTEBOOKS = REPOSITORY / "notebooks"


DEMO = ("01_sizing", "02_topology", "03_launch", "04_analyze")  # what `all` runs, in this order


def kernel_manager(stderr: IO[bytes]) -> type[AsyncKernelManager]:
    """Kernels behind socket files (over TCP every other user of a shared node could listen in), their own stderr in a
    file: what ends up there is about the kernel, not the notebook."""

    class SocketFileKernelManager(AsyncKernelManager):
        transport = Unicode("ipc")

        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            await super().start_kernel(**{**options, "stderr": stderr})

    return SocketFileKernelManager


class NotebookError(Exception):
    """A cell of a notebook failed; `is_input` where the reason is bad input (a ValueError)."""

    def __init__(self, notebook: str, cell: str, reason: str, is_input: bool):
        super().__init__(f"{notebook}, {cell}: {reason}")
        self.notebook = notebook
        self.is_input = is_input


def names() -> list[str]:
    """The notebooks that there are, such as `01_sizing`."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def parameters(name: str) -> dict[str, str]:
    """The notebook's parameters and their types ("int", "float", "str", "bool")."""
    require_known("notebook", name, names())
    found = papermill.inspect_notebook(NOTEBOOKS / f"{name}.ipynb")
    return {p["name"]: p["inferred_type_name"] for p in found.values()}


def typed(field: str, text: object, kind: str) -> Any:
    """`text` as the `kind` that a parameter declares; ValueError where it is none."""
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
    """A relative path or glob that names something here as an absolute one, since kernels stand in notebooks/.

    What notebooks/ holds too, and a bare word (which may be a name), stay as they are.
    """

    def names(folder: Path) -> bool:
        return os.path.exists(folder / text) or any(glob.iglob(text, root_dir=folder, recursive=True))

    like_a_path = glob.has_magic(text) or os.sep in text or Path(text).suffix
    if not like_a_path or os.path.isabs(text) or names(NOTEBOOKS) or not names(here := Path.cwd()):
        return text
    return os.path.normpath(here / text if os.path.exists(here / text) else Path(glob.escape(str(here))) / text)


def distribute(chosen: Sequence[str], given: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The typed parameters of each notebook in `chosen`; ValueError for a name that none of them has."""
    known = {name: parameters(name) for name in chosen}
    for field in given:
        require_known("parameter", field, sorted({field for fields in known.values() for field in fields}))
    return {
        name: {field: typed(field, given[field], kind) for field, kind in fields.items() if field in given}
        for name, fields in known.items()
    }


def run(name: str, study: Study, **given: object) -> Path:
    """Execute one notebook in `study` with `given` parameters; the path of its HTML.

    The executed copy, HTML and index are written even where a cell fails; then NotebookError names the cell.
    """
    values = distribute([name], given)[name]
    executed = study.folder / f"{name}.ipynb"
    keep_earlier(executed)
    executed.unlink(missing_ok=True)  # papermill would write into the kept copy: the two names are one file
    outer = os.environ.get(BATCH)
    os.environ[BATCH] = "1"  # kernels inherit it
    kernel_says = tempfile.TemporaryFile()  # noqa: SIM115  closed below
    try:
        papermill.execute_notebook(
            NOTEBOOKS / f"{name}.ipynb",
            executed,
            parameters={**values, "study": study.name},
            kernel_name="python3",
            kernel_manager_class=kernel_manager(kernel_says),
            cwd=str(NOTEBOOKS),
            progress_bar={"desc": name, "unit": "cell"},
            stdout_file=sys.stderr,
            request_save_on_cell_execute=True,
        )
    except PapermillExecutionError as error:
        cell = cell_name(NOTEBOOKS / f"{name}.ipynb", error.source)
        raise NotebookError(name, cell, error.evalue or error.ename, error.ename == "ValueError") from None
    except BaseException as error:  # a dead kernel, Ctrl-C: papermill keeps the copy as if it were complete
        source = mark_failed(executed)
        if not isinstance(error, RuntimeError):
            raise
        cell = cell_name(NOTEBOOKS / f"{name}.ipynb", source) if source is not None else "before its first cell"
        kernel_says.seek(0)
        last = kernel_says.read().decode(errors="replace").strip().splitlines()[-1:]
        raise NotebookError(name, cell, "; ".join([str(error), *last]), is_input=False) from None
    finally:
        kernel_says.close()
        os.environ.pop(BATCH)
        if outer is not None:
            os.environ[BATCH] = outer
        if executed.exists():
            write_notebook_report(executed)
            write_index(study)
    return executed.with_suffix(".html")


def cell_name(notebook: Path, source: str) -> str:
    """ "cell 7 (How long does it take?)": the code cell with that source, and the heading above it."""
    heading = ""
    for number, cell in enumerate(nbformat.read(notebook, as_version=4).cells, start=1):
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.splitlines()[0].lstrip("# ")
        elif cell.cell_type == "code" and cell.source == source:
            return f"cell {number} ({heading})"
    return "a cell"


def mark_failed(executed: Path) -> str | None:
    """Write into the executed copy that it is not complete; the source of its first code cell that did not end."""
    if not executed.exists():
        return None
    made = nbformat.read(executed, as_version=4)
    made.metadata.setdefault("papermill", {})["exception"] = True
    nbformat.write(made, executed)
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    return next((cell.source for cell in code if "iopub.status.idle" not in cell.metadata.get("execution", {})), None)


def is_done(name: str, study: Study, values: Mapping[str, Any]) -> bool:
    """Whether the study holds a completed execution of that notebook with those very parameters."""
    executed = study.folder / f"{name}.ipynb"
    if not executed.exists():
        return False
    made = nbformat.read(executed, as_version=4).metadata.get("papermill", {})
    same = made.get("parameters") == {**values, "study": study.name}
    return bool(same and made.get("end_time") and not made.get("exception"))


def run_all(study: Study, given: Mapping[str, object], chosen: Sequence[str] = DEMO) -> Path:
    """Run the notebooks in order, each with the parameters it has; the path of the study's index.

    What a resumed study already holds, executed with the same parameters, is not run again.
    """
    plan = distribute(chosen, given)
    for number, name in enumerate(chosen, start=1):
        if is_done(name, study, plan[name]):
            print(f"[{number}/{len(chosen)}] {name}: done before, kept", file=sys.stderr)
            continue
        print(f"[{number}/{len(chosen)}] {name}", file=sys.stderr)
        run(name, study, **plan[name])
    return write_index(study)
