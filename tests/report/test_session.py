"""A report of a JupyterLab session: of which notebook, and as of when."""

import os
from pathlib import Path

import nbformat
import pytest
from markup import Page

from trilane.report.notebook import export_report
from trilane.workspace.study import Study


def session(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved notebook of a session."""
    path = study.folder / "lab/04_analyze.ipynb"
    path.parent.mkdir()
    cell = nbformat.v4.new_code_cell("1", execution_count=7)
    cell.outputs = [nbformat.v4.new_output("stream", text="five runs")]
    parameters = nbformat.v4.new_code_cell("tp: int = 2  # size", metadata={"tags": ["parameters"]})
    cells = [nbformat.v4.new_markdown_cell("# What happened?"), parameters, cell]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    os.utime(path, (1_800_000_000, 1_800_000_000))
    monkeypatch.delenv("TRILANE_BATCH", raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))


def test_the_report_of_a_session_has_the_time_when_its_notebook_was_saved(outputs: Path, monkeypatch) -> None:
    here = Study.create("s")
    session(here, monkeypatch)
    export_report(here)
    page = Page((here.folder / "04_analyze-session.html").read_text())
    assert "Study s, executed in a session, as saved at 2027-01-15 08:00:00 (UTC), made by" in page.text
    assert "five runs" in page.text and "tp = 2" in page.text and "index.html" in page.values
    assert "04_analyze-session.html" in Page((here.folder / "index.html").read_text()).values


@pytest.mark.parametrize("name", ["", "gone.ipynb", "lab"])
def test_a_session_whose_notebook_cannot_be_found_is_refused(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here = Study.create("s")
    session(here, monkeypatch)
    monkeypatch.setenv("JPY_SESSION_NAME", name)
    with pytest.raises(ValueError, match=f"^notebook={name}: is not this kernel's notebook; save it, or pass"):
        export_report(here)
    export_report(here, str(here.folder / "lab/04_analyze.ipynb"))
