"""The index of a study."""

from pathlib import Path
from typing import Any

import jinja2

from trilane.report.html import POLICY, REPORT, read_notebook, state, title
from trilane.utils.files import read_text, replace_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import Columns, Html, Text, short, show
from trilane.workspace.installation import stamp
from trilane.workspace.status import known_status
from trilane.workspace.study import Study

PICTURE = '<img class="small" alt="its first figure" src="data:image/png;base64,{}">'


def write_index(study: Study) -> Path:
    """Write the study's index.html: its notebooks, its runs with their status, its results.

    One process at a time does it, so that the last one lists what all have made.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True)
    template = environment.from_string(read_text(REPORT / "page.html.j2"))
    css = Html(read_text(REPORT / "report.css"))
    heading = Html.of("Study “{}”", study.name)
    with FolderLock([study.folder], ".index.lock", "study").held(20.0):
        files = sorted(study.folder.iterdir())
        notebooks = [_notebook_row(path) for path in files if path.suffix == ".ipynb"]
        runs = [_run_row(folder) for folder in study.run_folders()]
        names = [path.name for path in files if path.suffix in (".json", ".csv")]
        parts = [
            Html.of("<h1>{}</h1>\n<h2>Notebooks</h2>", heading),
            _table("Question Answer Picture Status Executed Copy", notebooks),
            Html("<h2>Runs</h2>"),
            _table("Run Status Evidence Files", runs),
            Html("<h2>Results</h2>"),
            Html.of("<p>{}</p>", Html.joined(" · ", [Html.link(name, name) for name in names])),
        ]
        body = Html.joined("\n", parts)
        page = {"css": css, "body": body, "policy": Html(POLICY), "title": heading}
        return replace_text(study.folder / "index.html", template.render(page, stamp=stamp()))


def _notebook_row(path: Path) -> list[object]:
    """Question, answer (its first sentence), first figure, status, day and executed copy of a
    notebook.
    """
    heading = path.stem
    status = "damaged"
    answer = ""
    day = ""
    picture = ""
    try:
        notebook = read_notebook(path)
        status = state(notebook)
        heading = title(notebook)
        day = str(notebook.metadata.get("papermill", {}).get("end_time") or "")[:10]
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        answer = Text(_first(outputs, "text/markdown")).plain
        if png := _first(outputs, "image/png"):
            picture = Html.of(PICTURE, png)
    except (ValueError, TypeError, AttributeError, LookupError):
        pass
    report = path.with_suffix(".html")
    question = Html.link(heading, report.name) if report.exists() else heading
    copy = Html.link(path.name, path.name)
    date = Html.of('<span style="white-space:nowrap">{}</span>', day)
    return [question, short(answer, 400), picture, _status(status), date, copy]


def _table(heads: str, rows: list[list[object]]) -> Html:
    return show(Columns.of_rows(heads.split(), rows).columns)


def _first(outputs: list[Any], kind: str) -> str:
    """The first output of that type that is no HTML; empty where there is none."""
    found = [output["data"][kind] for output in outputs if kind in output.get("data", {})]
    return next((text for text in found if not text.startswith("<")), "")


def _run_row(folder: Path) -> list[object]:
    """Name, status, its evidence, and the files of a run."""
    written = known_status(folder)
    status = "not started"
    evidence = ""
    if written:
        status = str(written.status)
        evidence = written.evidence
    names = sorted(path.name for path in folder.glob("[!.]*") if path.is_file())
    links = Html.joined(" ", [Html.link(name, "runs", folder.name, name) for name in names])
    return [folder.name, _status(status), short(evidence), links]


def _status(status: str) -> Html:
    return Html.of('<span class="status-{}">{}</span>', status, status)
