"""Reports: an executed notebook as one HTML file, and the index of a study; text from files is never markup in them."""

import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import bleach
import jinja2
import mistune
import nbformat
from bleach.css_sanitizer import CSSSanitizer
from nbconvert import HTMLExporter

from trilane.utils.tables import Html, printable, short
from trilane.workspace.run_folder import write_text
from trilane.workspace.status import known_status, status_problem
from trilane.workspace.study import Study, stamp

DATA = Path(str(resources.files("trilane"))) / "data/report"
# The pages have no script and load nothing; CSP Level 3, https://www.w3.org/TR/CSP3/
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SHOWN = ("text/html", "text/markdown", "image/png", "text/plain")  # outputs that a report holds
TAGS = {"a", "b", "br", "code", "details", "div", "em", "i", "img", "mark", "p", "pre", "span", "strong", "summary"}
TAGS |= {"table", "tbody", "td", "th", "thead", "tr"}
STYLES = ("background-color", "line-height", "min-width", "text-align", "white-space")


def notebook_html(executed: Path) -> str:
    """The executed notebook as one HTML text: code folded, figures inline, no script, no external resources."""
    exporter = HTMLExporter(template_file=str(DATA / "notebook.html.j2"))
    exporter.register_filter("markdown2html", markdown_html)
    css = (DATA / "report.css").read_text(encoding="utf-8")
    notebook = read_notebook(executed)
    notebook.metadata = {"title": f"{title(notebook)} · trilane"}  # without the state of widgets
    notebook.cells = [
        cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    for output in (o for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o):
        output["metadata"] = {}
        output["data"] = {kind: value for kind, value in output["data"].items() if kind in SHOWN}
        if "text/html" in output["data"]:
            output["data"]["text/html"] = plain_html(output["data"]["text/html"])
    return exporter.from_notebook_node(notebook, resources={"trilane_css": css, "policy": POLICY})[0]


class _Renderer(mistune.HTMLRenderer):
    """HTML within Markdown is shown as its source; entities are characters (with `escape=True` they would not be)."""

    def inline_html(self, html: str) -> str:
        return str(Html.of("{}", html))

    def block_html(self, html: str) -> str:
        return str(Html.of("<p>{}</p>\n", html))


def markdown_html(text: str) -> str:
    """Markdown with tables as HTML."""
    return str(mistune.create_markdown(renderer=_Renderer(escape=False), plugins=["table"])(text))


def plain_html(text: str) -> str:
    """HTML of an output with tables, text and pictures alone; any other element is shown as its source."""
    text = re.sub(r"<style\b.*?</style>", "", text, flags=re.DOTALL)  # of a DataFrame
    allowed = CSSSanitizer(allowed_css_properties=STYLES)
    return bleach.clean(text, TAGS, _is_plain_attribute, protocols=["https", "data"], css_sanitizer=allowed)


def _is_plain_attribute(tag: str, name: str, value: str) -> bool:
    if name in ("href", "src"):
        pattern = {"a": r"[\w.%~-]+", "img": r"data:image/png;base64,[\w+/=\s]+"}.get(tag, "")
        return re.fullmatch(pattern, value) is not None
    return name in ("class", "style", "width", "colspan", "rowspan", "border")


def title(notebook: Any) -> str:
    """The notebook's first heading."""
    lines = (line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "untitled")


def write_notebook_report(executed: Path) -> Path:
    """Write the executed notebook's HTML next to it; its path."""
    return write_text(executed.with_suffix(".html"), notebook_html(executed), derived=True)


def write_index(study: Study) -> Path:
    """Write the study's index.html: its notebooks, its runs with their status, its result files."""
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True, finalize=_shown).from_string(
        (DATA / "index.html.j2").read_text(encoding="utf-8")
    )
    text = template.render(
        study=study.name,
        policy=POLICY,
        css=Html((DATA / "report.css").read_text(encoding="utf-8")),
        headline=headline(study),
        notebooks=[_notebook_row(path) for path in sorted(study.folder.glob("*.ipynb"))],
        runs=[_run_row(folder) for folder in study.run_folders()],
        files=[Html.link(p.name, p.name) for p in sorted(study.folder.iterdir()) if p.suffix in (".json", ".csv")],
        stamp=stamp(),
    )
    return write_text(study.folder / "index.html", text, derived=True)


def _shown(value: object) -> object:
    """A value of the template: Html as it is, any other one as text, which the template escapes."""
    return value if isinstance(value, Html) else printable(str(value))


def headline(study: Study) -> list[dict[str, Any]]:
    """The figures on top of the index, from headline.json; empty where there is none, or none that can be read."""
    path = study.folder / "headline.json"
    cards = _read(path, lambda values: list(values["cards"])) if path.exists() else []
    return [card for card in cards if isinstance(card, dict) and {"value", "label"} <= set(card)] if cards else []


def _read(path: Path, field: Callable[[Any], Any]) -> Any:
    """What `field` takes of the JSON in the file; None where the file is damaged: an index shows what can be read."""
    try:
        return field(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return None


def read_notebook(path: Path) -> Any:
    """The notebook in a file; ValueError where it is damaged."""
    try:
        notebook = nbformat.read(path, as_version=4)
        assert all(
            isinstance(cell.source, str) and cell.cell_type and cell.metadata is not None for cell in notebook.cells
        )
    except Exception as error:  # of a damaged file nbformat raises anything, also AssertionError and UnboundLocalError
        raise ValueError(f"notebook={path}: is damaged ({short(str(error), 80)})") from None
    return notebook


def _notebook_row(path: Path) -> dict[str, Any]:
    try:
        notebook = read_notebook(path)
        heading, made = title(notebook), notebook.metadata.get("papermill", {})
        seconds = f"{made['duration']:.0f}" if made.get("duration") else ""
        status = "failed" if made.get("exception") else "completed" if made.get("end_time") else "unfinished"
    except (ValueError, KeyError, TypeError, AttributeError):
        heading, seconds, status = path.stem, "", "damaged"
    page = path.with_suffix(".html")
    return {
        "title": Html.link(heading, page.name) if page.exists() else heading,
        "file": Html.link(path.name, path.name),
        "status": status,
        "seconds": seconds,
    }


def _run_row(folder: Path) -> dict[str, Any]:
    written, problem = known_status(folder), status_problem(folder)
    files = sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {
        "name": folder.name,
        "status": str(written.status) if written else "unknown" if problem else "not started",
        "evidence": short(written.evidence if written else problem),
        "files": [Html.link(name, "runs", folder.name, name) for name in files],
    }
