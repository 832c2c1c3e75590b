"""The report of a notebook and the index of a study: HTML files that load nothing, in which text
from files is never markup.
"""

import base64
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import mistune
import nbformat
import nh3
import vl_convert
from nbconvert import HTMLExporter

from trilane.report.plots.style import MIME, VERSION
from trilane.utils.files import read_text, replace_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import Columns, Html, Json, Text, short, show
from trilane.utils.validation import DATA, shipped_json
from trilane.workspace.installation import checkout, stamp
from trilane.workspace.status import known_status
from trilane.workspace.study import Study

REPORT = DATA / "report"
# The pages load nothing, and run no script but the one that draws their figures (by its hash); CSP
# Level 3,
# https://www.w3.org/TR/CSP3/
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
POLICY += "base-uri 'none'; form-action 'none'"

KINDS = ("text/html", "text/markdown", "image/png", "text/plain")  # of an output, that a page shows
ALLOWED = shipped_json("report/allowed")
PICTURE = '<img class="small" alt="its first figure" src="data:image/png;base64,{}">'


def notebook_html(executed: Path) -> str:
    """The executed notebook as one HTML text: code folded, figures inline, no external resources.

    It has study, date, revision and parameters; no path of the machine that made it.
    """
    notebook = read_notebook(executed)
    report: dict[str, Any] = {
        "study": executed.parent.name,
        "title": title(notebook),
        "headings": {},
        "about": _about(notebook, executed),
        "css": read_text(REPORT / "report.css"),
        "policy": POLICY,
        "script": "",
        # whose print has to fit a sheet
        "kind": "one-page" if executed.stem == "08_decision" else "report",
    }
    notebook.metadata = {}  # without the state of widgets
    # papermill's own cell on top of a notebook that failed
    own = "papermill-error-cell-tag"
    notebook.cells = [c for c in notebook.cells if own not in c.metadata.get("tags", [])]
    heading = "figure"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in re.findall("^## (.*)", cell.source, re.MULTILINE):
                heading = line.strip()
                report["headings"][anchor(heading)] = heading
        for output in cell.get("outputs", []):
            if "data" in output:
                _keep_what_is_shown(output, heading)
                if "spec" in output["metadata"]:
                    report["script"], digest = script()
                    report["policy"] = f"{POLICY}; script-src {digest}"
    exporter = HTMLExporter(template_file=str(REPORT / "notebook.html.j2"))
    exporter.register_filter("markdown2html", markdown_html)
    text, _ = exporter.from_notebook_node(notebook, resources={"report": report})
    return without_places(text, executed.parent)


def _keep_what_is_shown(output: Any, heading: str) -> None:
    """Of an output what a page shows; its metadata are a picture's words, and a figure's
    specification.
    """
    data = output["data"]
    output["metadata"] = {"alt": f"Figure: {heading}"}
    spec = data.get(MIME)
    if isinstance(spec, dict) and "image/png" in data:
        words = str(spec.get("description") or heading)
        output["metadata"] = {"alt": words, "spec": embedded(spec)}
    output["data"] = {kind: data[kind] for kind in KINDS if kind in data}
    if "text/html" in data:
        output["data"]["text/html"] = plain_html(data["text/html"])


def without_places(text: str, study: Path) -> str:
    """The text of a study's file without the paths of its machine: outputs, checkout and home go
    from the front of others.
    """
    for place in (study, study.parent, checkout(), Path.home()):
        if place and str(place) != "/":
            text = text.replace(f"{place.absolute()}/", "")
    return text


def _about(notebook: Any, executed: Path) -> dict[str, str]:
    """The foot of a report: name and text."""
    papermill = notebook.metadata.get("papermill", {})
    texts = [f"{name} = {value!r}" for name, value in parameters(notebook).items()]
    date = str(papermill.get("end_time") or "not recorded")
    made_by = {**stamp(), **notebook.metadata.get("trilane", {})}
    return {
        "executed": date[:16].replace("T", " "),
        "notebook": executed.stem,
        "parameters": ", ".join(texts),
        "made by": "trilane {trilane}, revision {revision}, Python {python}".format(**made_by),
    }


def embedded(spec: object) -> str:
    """A specification as JSON that stands in a `script` element: nothing in it can end
    the element.
    """
    text = json.dumps(spec, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


@functools.cache
def script() -> tuple[str, str]:
    """Vega's script with ours, which draws the figures of a report, and its source for a
    Content-Security-Policy.
    """
    text = vl_convert.javascript_bundle(read_text(REPORT / "charts.js"), vl_version=VERSION)
    return text, f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def anchor(heading: str) -> str:
    """The id of a heading in a report: "Does it fit?" -> "does-it-fit"."""
    return re.sub(r"\W+", "-", re.sub(r"<[^>]*>|&#?\w+;", "", heading).lower()).strip("-")


class _Renderer(mistune.HTMLRenderer):
    """HTML within Markdown is shown as its source; entities are characters (with `escape=True` they
    would not be).
    """

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        return f'<h{level} id="{anchor(text)}">{text}</h{level}>\n'

    def inline_html(self, html: str) -> str:
        return str(Html.of("{}", html))

    def block_html(self, html: str) -> str:
        return str(Html.of("<p>{}</p>\n", html))


def markdown_html(text: str) -> str:
    """Markdown with tables as HTML."""
    read = mistune.create_markdown(renderer=_Renderer(escape=False), plugins=["table"])
    return str(read(text))


def plain_html(text: str) -> str:
    """HTML of an output, with tables, text and pictures alone: nothing in it runs, loads, or covers
    the page.
    """
    return nh3.clean(
        text,
        tags={*ALLOWED["tags"]},
        clean_content_tags={"style"},  # of a DataFrame
        attributes={tag: {*names} for tag, names in ALLOWED["attributes"].items()},
        attribute_filter=_attribute,
        filter_style_properties={*ALLOWED["styles"]},
        url_schemes={"data"},
        link_rel=None,
    )


def _attribute(tag: str, name: str, value: str) -> str | None:
    """The value of an attribute; None where it leads out of the study's folder."""
    pattern = ALLOWED["addresses"].get(name)
    if pattern is None or re.fullmatch(pattern, value):
        return value
    return None


def title(notebook: Any) -> str:
    """The notebook's first heading."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for heading in re.findall("^# (.*)", cell.source, re.MULTILINE):
                return str(heading).strip()
    return "untitled"


def parameters(notebook: Any) -> Json:
    """Those with which it was executed, by name."""
    return notebook.metadata.get("papermill", {}).get("parameters", {})


def state(notebook: Any) -> str:
    """Whether an execution is completed, failed (also where its kernel died), or unfinished."""
    papermill = notebook.metadata.get("papermill", {})
    if not papermill.get("end_time"):
        return "unfinished"
    if papermill.get("exception"):
        return "failed"
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if all("iopub.status.idle" in cell.metadata.get("execution", {}) for cell in code):
        return "completed"
    return "failed"


def read_notebook(path: Path) -> Any:
    """The notebook in a file; ValueError where it is damaged."""
    try:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            assert isinstance(cell.source, str)
            assert cell.cell_type
            assert cell.metadata is not None
        for name in ("papermill", "trilane"):
            assert isinstance(notebook.metadata.get(name, {}), dict)
        assert isinstance(parameters(notebook), dict)
    # of a damaged file nbformat raises anything, also AssertionError and UnboundLocalError
    except Exception as error:
        raise ValueError(f"notebook={path}: is damaged ({short(str(error), 80)})") from None
    return notebook


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
