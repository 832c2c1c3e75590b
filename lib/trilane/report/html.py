"""Reports: an executed notebook as one HTML file, and the index of a study."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from nbconvert import HTMLExporter

from trilane.utils.tables import short
from trilane.workspace.run_folder import write_text
from trilane.workspace.status import known_status, status_problem
from trilane.workspace.study import Study, stamp

WIDGET = "application/vnd.jupyter.widget-view+json"
DATA = Path(str(resources.files("trilane"))) / "data/report"


def notebook_html(executed: Path) -> str:
    """The executed notebook as one HTML text: code folded, figures inline, no external resources."""
    exporter = HTMLExporter(template_file=str(DATA / "notebook.html.j2"))
    exporter.exclude_anchor_links = True
    css = (DATA / "report.css").read_text(encoding="utf-8")
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata["title"] = f"{title(notebook)} · trilane"
    notebook.cells = [
        cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    for output in (o for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o):
        output["data"].pop(WIDGET, None)  # its text/html output stays
    return exporter.from_notebook_node(notebook, resources={"trilane_css": css})[0]


def title(notebook: Any) -> str:
    """The notebook's first heading."""
    lines = (line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "untitled")


def write_notebook_report(executed: Path) -> Path:
    """Write the executed notebook's HTML next to it; its path."""
    return write_text(executed.with_suffix(".html"), notebook_html(executed), derived=True)


def write_index(study: Study) -> Path:
    """Write the study's index.html: its notebooks, its runs with their status, its result files."""
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True).from_string(
        (DATA / "index.html.j2").read_text(encoding="utf-8")
    )
    text = template.render(
        study=study.name,
        css=jinja2.utils.markupsafe.Markup((DATA / "report.css").read_text(encoding="utf-8")),
        headline=headline(study),
        notebooks=[_notebook_row(path) for path in sorted(study.folder.glob("*.ipynb"))],
        runs=[_run_row(folder) for folder in study.run_folders()],
        files=sorted(p.name for p in study.folder.iterdir() if p.suffix in (".json", ".csv")),
        stamp=stamp(),
    )
    return write_text(study.folder / "index.html", text, derived=True)


def headline(study: Study) -> list[dict[str, str]]:
    """The figures on top of the index, from headline.json; empty where there is none."""
    path = study.folder / "headline.json"
    return json.loads(path.read_text(encoding="utf-8"))["cards"] if path.exists() else []


def _notebook_row(path: Path) -> dict[str, Any]:
    notebook = nbformat.read(path, as_version=4)
    made = notebook.metadata.get("papermill", {})
    html = path.with_suffix(".html")
    return {
        "title": title(notebook),
        "file": path.name,
        "html": html.name if html.exists() else None,
        "status": "failed" if made.get("exception") else "completed" if made.get("end_time") else "unfinished",
        "seconds": f"{made['duration']:.0f}" if made.get("duration") else "",
    }


def _run_row(folder: Path) -> dict[str, Any]:
    written, problem = known_status(folder), status_problem(folder)
    return {
        "name": folder.name,
        "status": str(written.status) if written else "unknown" if problem else "not started",
        "evidence": short(written.evidence if written else problem),
        "files": sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")),
    }
