"""The report of a notebook: one HTML file that loads nothing, in which text from files is never
markup.
"""

import base64
import contextlib
import functools
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import mistune
import nbformat
import nh3
import vl_convert
from nbconvert import HTMLExporter
from PIL import Image

from trilane.report.plots.style import MIME, VERSION
from trilane.utils.tables import Html, short
from trilane.workspace.installation import checkout, stamp

DATA = Path(str(resources.files("trilane"))) / "data/report"
# The pages load nothing, and run no script but the one that draws their figures (by its hash); CSP
# Level 3,
# https://www.w3.org/TR/CSP3/
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def notebook_html(executed: Path) -> str:
    """The executed notebook as one HTML text: code folded, figures inline, no external resources.

    It has study, date, revision and parameters; no path of the machine that made it.
    """
    notebook = read_notebook(executed)
    report: dict[str, Any] = {
        "study": executed.parent.name,
        "title": title(notebook),
        "headings": {},
    }
    report["about"] = _about(notebook, executed)
    report |= {
        "css": (DATA / "report.css").read_text(encoding="utf-8"),
        "policy": POLICY,
        "script": "",
    }
    report["kind"] = (
        "one-page" if executed.stem == "08_decision" else "report"
    )  # whose print has to fit a sheet
    notebook.metadata, heading = {}, "figure"  # without the state of widgets
    # papermill's own cell on top of a notebook that failed
    cells = [
        c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])
    ]
    # what only the last cells know is the first thing that a reader asks for
    findings = [c for c in cells if "finding" in c.metadata.get("tags", [])]
    rest = [c for c in cells if c not in findings]
    notebook.cells = list(_results_first([*rest[:1], *findings, *rest[1:]]))
    for cell in notebook.cells:
        lines = cell.source.splitlines() if cell.cell_type == "markdown" else []
        for heading in (line[3:].strip() for line in lines if line.startswith("## ")):
            report["headings"][anchor(heading)] = heading
        for output in (o for o in cell.get("outputs", []) if "data" in o):
            output["metadata"] = {
                "alt": f"Figure: {heading}",
                "width": _width(output["data"].get("image/png")),
            }
            if isinstance(spec := output["data"].get(MIME), dict) and "image/png" in output["data"]:
                output["metadata"] = {
                    "alt": str(spec.get("description") or heading),
                    "spec": embedded(spec),
                }
                report["script"], digest = script()
                report["policy"] = f"{POLICY}; script-src {digest}"
            shown = ("text/html", "text/markdown", "image/png", "text/plain")
            output["data"] = {
                kind: output["data"][kind] for kind in shown if kind in output["data"]
            }
            if "text/html" in output["data"]:
                output["data"]["text/html"] = plain_html(output["data"]["text/html"])
    exporter = HTMLExporter(template_file=str(DATA / "notebook.html.j2"))
    exporter.register_filter("markdown2html", markdown_html)
    return without_places(
        exporter.from_notebook_node(notebook, resources={"report": report})[0], executed.parent
    )


def without_places(text: str, study: Path) -> str:
    """The text of a study's file without the paths of its machine: outputs, checkout and home go
    from their front.
    """
    places = [
        str(place.absolute()) for place in (study, study.parent, checkout(), Path.home()) if place
    ]
    for place in (place for place in places if place != "/"):
        # at the beginning of a word, also after an escaped line end in JSON
        pattern = rf"(?:(?<![\w.-])|(?<=\\[nrt])){re.escape(place)}(/(?=\S)|(?![\w.-]))"
        text = re.sub(pattern, lambda at: "" if at[1] else ".", text)
    return text


def _results_first(cells: Iterable[Any]) -> Iterator[Any]:
    """The cells; the code between two texts is one cell below its outputs, that of a cell `formula`
    above its own.
    """
    sources = list[str]()
    for cell in cells:
        if cell.cell_type != "code" or "formula" in cell.metadata.get("tags", []):
            yield from [nbformat.v4.new_code_cell("\n\n".join(sources))] * bool(sources)
            sources.clear()
            yield cell
            continue
        sources += [cell.source] * bool(cell.source)
        if cell.outputs:
            cell.source = ""
            yield cell
    yield from [nbformat.v4.new_code_cell("\n\n".join(sources))] * bool(sources)


def _width(png: Any) -> int | None:
    """How wide a picture is shown, in CSS pixels: 110 an inch, so that letters of 8 points are 12
    pixels high.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        picture = Image.open(io.BytesIO(base64.b64decode(png)))
        return round(picture.width / picture.info["dpi"][0] * 110)
    return None


def _about(notebook: Any, executed: Path) -> dict[str, str]:
    """The foot of a report: name and text."""
    of = {
        **stamp(),
        **(dict(by) if isinstance(by := notebook.metadata.get("trilane"), dict) else {}),
    }
    made = by if isinstance(by := notebook.metadata.get("papermill"), dict) else {}
    values = by if isinstance(by := made.get("parameters"), dict) else {}
    return {
        "executed": str(made.get("end_time") or made.get("start_time") or "not recorded")[
            :16
        ].replace("T", " "),
        "notebook": executed.stem,
        "parameters": ", ".join(f"{n} = {v!r}" for n, v in values.items())
        or "as the notebook has them",
        "made by": f"trilane {of['trilane']}, revision {of['revision']}, Python {of['python']}",
    }


def embedded(spec: object) -> str:
    """A specification as JSON that stands in a `script` element: nothing in it can end the element."""
    text = json.dumps(spec, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


@functools.cache
def script() -> tuple[str, str]:
    """Vega's script with ours, which draws the figures of a report, and its source for a
    Content-Security-Policy.
    """
    ours = (DATA / "charts.js").read_text(encoding="utf-8")
    text = vl_convert.javascript_bundle(ours, vl_version=VERSION)
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

    def inline_math(self, latex: str) -> str:
        return formula(latex)

    def block_math(self, latex: str) -> str:
        return f"<p>{formula(latex)}</p>\n"


def markdown_html(text: str) -> str:
    """Markdown with tables and formulas ($...$, $$...$$) as HTML."""
    return str(
        mistune.create_markdown(renderer=_Renderer(escape=False), plugins=["table", "math"])(text)
    )


@functools.lru_cache(256)
def formula(latex: str) -> str:
    """A formula as a picture that JupyterLab's looks like; its source is read aloud, and shown
    where it is no LaTeX.

    What matplotlib's mathtext draws: one line, \\frac, \\sqrt, \\sum, \\mathrm; no environments.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    line, drawn, size = " ".join(latex.split()), io.BytesIO(), 12  # points
    try:
        depth = math_to_image(f"${line}$", drawn, FontProperties(size=size), dpi=72, format="svg")
    except ValueError:
        return str(Html.of("<code>{}</code>", line))
    svg = re.sub(rb"(?s)<metadata>.*?</metadata>", b"", drawn.getvalue())  # has the time
    height = re.search(rb'height="([\d.]+)pt"', svg)
    style = (
        f"height: {float(height[1]) / size:.3f}em; vertical-align: {-depth / size:.3f}em"
        if height
        else ""
    )
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return str(Html.of('<img class="math" alt="{}" style="{}" src="{}">', line, style, source))


def plain_html(text: str) -> str:
    """HTML of an output, with tables, text and pictures alone: nothing in it runs, loads, or covers
    the page.
    """
    tags = {
        "a",
        "b",
        "br",
        "code",
        "details",
        "div",
        "em",
        "i",
        "img",
        "mark",
        "p",
        "pre",
        "span",
        "strong",
        "summary",
    }
    tags |= {"table", "tbody", "td", "th", "thead", "tr"}
    attributes = {
        "*": {"class", "style", "width", "colspan", "rowspan", "border"},
        "a": {"href"},
        "img": {"src"},
    }
    return nh3.clean(
        text,
        tags=tags,
        clean_content_tags={"style"},  # of a DataFrame
        attributes=attributes,
        attribute_filter=_attribute,
        filter_style_properties={
            "background-color",
            "line-height",
            "min-width",
            "text-align",
            "white-space",
        },
        url_schemes={"data"},
        link_rel=None,
    )


def _attribute(tag: str, name: str, value: str) -> str | None:
    """The value of an attribute; None where it leads out of the study's folder."""
    patterns = {"href": r"[\w.%~-]+", "src": r"data:image/png;base64,[\w+/=\s]+"}
    return value if name not in patterns or re.fullmatch(patterns[name], value) else None


def title(notebook: Any) -> str:
    """The notebook's first heading."""
    lines = (
        line
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
    )
    return next(
        (line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "untitled"
    )


def state(notebook: Any) -> str:
    """Whether an execution is completed, failed (also where its kernel died), or unfinished."""
    made = notebook.metadata.get("papermill", {})
    if not made.get("end_time"):
        return "unfinished"
    return "failed" if made.get("exception") or unfinished(notebook) else "completed"


def unfinished(notebook: Any) -> list[str]:
    """The sources of the code cells that were not executed to their end."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    return [
        cell.source
        for cell in code
        if "iopub.status.idle" not in cell.metadata.get("execution", {})
    ]


def read_notebook(path: Path) -> Any:
    """The notebook in a file; ValueError where it is damaged."""
    try:
        notebook = nbformat.read(path, as_version=4)
        assert all(
            isinstance(c.source, str) and c.cell_type and c.metadata is not None
            for c in notebook.cells
        )
    except Exception as error:  # of a damaged file nbformat raises anything, also AssertionError and UnboundLocalError
        raise ValueError(f"notebook={path}: is damaged ({short(str(error), 80)})") from None
    return notebook
