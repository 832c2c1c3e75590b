"""A report of a JupyterLab session as it stands: the notebook as last saved, with its outputs."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.report.html import notebook_html, read_notebook
from trilane.report.index import SESSION, write_index
from trilane.report.parameters import read_parameters
from trilane.utils.progress import BATCH
from trilane.utils.tables import Text
from trilane.utils.validation import require
from trilane.workspace.run_folder import write_text
from trilane.workspace.study import Study

# The notebook's path in the environment of its kernel; jupyter_server, services/sessions/sessionmanager.py
NAME = "JPY_SESSION_NAME"


def export_report(study: Study, notebook: str = "") -> Text:
    """Write the report of the notebook in which this is called, as it was last saved, into the study.

    `notebook` is its path, where it is not that of the session (an editor that tells the kernel nothing, a renamed
    file). A later report replaces an earlier one. Raises ValueError where the file cannot be found or read.
    """
    if os.environ.get(BATCH):
        return Text("A batch run writes its report itself.")
    path = Path(notebook or os.environ.get(NAME, "")).absolute()
    rule = "is not this kernel's notebook; save it, or pass its path: export_report(here, 'mine.ipynb')"
    require(path.suffix == ".ipynb" and path.is_file(), "notebook", notebook or os.environ.get(NAME, ""), rule)
    saved = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M:%S")
    behind = _cells_executed() - _last_number(read_notebook(path))
    late = f"; cells executed later are missing: {behind}" if behind > 0 else ""
    parameters = ", ".join(f"{p.name} = {p.default}" for p in read_parameters(path))
    about = {"executed": f"in a session, as saved at {saved} (UTC){late}", "parameters": parameters or "none"}
    place = study.folder / path.name
    page = notebook_html(place, path, about)
    written = write_text(place.with_name(path.stem + SESSION), page, derived=True)
    write_index(study)
    result = Text.of("{}, as saved at {} (UTC){}.", str(written), saved, late)
    return Text.of("{} Save the notebook, and export it again.", result) if late else result


def _cells_executed() -> int:
    """How many cells this kernel executed before the one that runs now; 0 outside of IPython."""
    from IPython import get_ipython

    shell: Any = get_ipython()
    # In holds "", the earlier cells, and this one; execution_count is already the next one's in IPython 9
    return len(shell.user_ns["In"]) - 2 if shell else 0


def _last_number(notebook: Any) -> int:
    """The highest number of an executed cell in the notebook; 0 where none was executed."""
    return max((cell.get("execution_count") or 0 for cell in notebook.cells), default=0)
