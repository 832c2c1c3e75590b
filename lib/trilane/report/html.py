"""Reports: an executed notebook as one HTML file; text from files is never markup in it."""

import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import bleach
import mistune
import nbformat
from bleach.css_sanitizer import CSSSanitizer
from nbconvert import HTMLExporter

from trilane.report.plots.interactive import MIME, embedded, script
from trilane.utils.tables import Html, short
from trilane.workspace.installation import checkout, stamp
from trilane.workspace.run_folder import write_text

DATA = Path(str(resources.files("trilane"))) / "data/report"
# The pages load nothing, and run no script but the one that draws their figures (by its hash); CSP Level 3,
# https://www.w3.org/TR/CSP3/
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SCRIPT = "<!-- script -->"  # stands for the script in the template
ONE_PAGE = "08_decision"  # its print has to fit a sheet
SHOWN = ("text/html", "text/markdown", "image/png", "text/plain")  # outputs that a report holds
TAGS = {"a", "b", "br", "code", "details", "div", "em", "i", "img", "mark", "p", "pre", "span", "strong", "summary"}
TAGS |= {"table", "tbody", "td", "th", "thead", "tr"}
STYLES = ("background-color", "line-height", "min-width", "text-align", "white-space")


def notebook_html(executed: Path, file: Path | None = None, about: Mapping[str, str] | None = None) -> str:
    """The executed notebook as one HTML text: code folded, figures inline, no external resources.

    It says what it is: study, date, revision, parameters and what it read; no path of the machine that made it. Where
    the notebook is in another `file`, `executed` is its place in the study; `about` replaces lines of its foot.
    """
    exporter = HTMLExporter(template_file=str(DATA / "notebook.html.j2"))
    exporter.register_filter("markdown2html", markdown_html)
    css = (DATA / "report.css").read_text(encoding="utf-8")
    notebook, headings, last, drawn = read_notebook(file or executed), dict[str, str](), "figure", False
    facts = {**_about(notebook, executed), **(about or {})}
    notebook.metadata = {}  # without the state of widgets
    notebook.cells = [
        cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    for cell in notebook.cells:
        found = [line[3:].strip() for line in cell.source.splitlines() if line.startswith("## ")]
        headings |= {anchor(heading): heading for heading in found if cell.cell_type == "markdown"}
        last = found[-1] if found and cell.cell_type == "markdown" else last
        for output in (o for o in cell.get("outputs", []) if "data" in o):
            output["metadata"] = _figure(output["data"], last)
            drawn = drawn or "spec" in output["metadata"]
            output["data"] = {kind: value for kind, value in output["data"].items() if kind in SHOWN}
            if "text/html" in output["data"]:
                output["data"]["text/html"] = plain_html(output["data"]["text/html"])
    report = {"title": title(notebook), "study": executed.parent.name, "pages": _neighbours(executed)}
    made = f"Study {executed.parent.name}, executed {facts['executed']}, made by {facts['made by']}"
    report |= {"kind": "one-page" if executed.stem == ONE_PAGE else "report"}
    report |= {"headings": list(headings.items()), "about": list(facts.items()), "made": made}
    code, digest = script() if drawn else ("", "")
    policy = f"{POLICY}; script-src {digest}" if drawn else POLICY
    given = {"trilane_css": css, "policy": policy, "report": report}
    text = _without_paths(exporter.from_notebook_node(notebook, resources=given)[0], executed.parent)
    return text.replace(SCRIPT, f'<script type="module">{code}</script>' if drawn else "", 1)


def _figure(data: Mapping[str, Any], heading: str) -> dict[str, str]:
    """What the template needs of an output's figure: its text, and the specification of one that can be drawn."""
    spec = data.get(MIME)
    if not isinstance(spec, dict) or "image/png" not in data:
        return {"alt": f"Figure: {heading}"}
    return {"alt": str(spec.get("description") or f"Figure: {heading}"), "spec": embedded(spec)}


def _about(notebook: Any, executed: Path) -> dict[str, str]:
    """What the foot of a report says: name and text."""
    made = notebook.metadata.get("papermill", {})
    made = made if isinstance(made, dict) else {}
    of = {**stamp(), **(dict(by) if isinstance(by := notebook.metadata.get("trilane"), dict) else {})}
    values = found if isinstance(found := made.get("parameters"), dict) else {}
    files = {path.name: read_field(path, lambda v: v["made_by"]) for path in sorted(executed.parent.glob("*.json"))}
    mine = [by for by in files.values() if isinstance(by, dict) and by.get("notebook") == executed.stem]
    read = {name: str(key) for by in mine if isinstance(by.get("read"), dict) for name, key in by["read"].items()}
    given = ", ".join(f"{name} = {value!r}" for name, value in values.items())
    return {
        "executed": str(made.get("end_time") or made.get("start_time") or "not recorded")[:16].replace("T", " "),
        "notebook": executed.stem,
        "parameters": given or "as the notebook has them",
        "read": ", ".join(f"{name} {key}" for name, key in read.items()) or "no result file of the study",
        "made by": f"trilane {of['trilane']}, revision {of['revision']}, Python {of['python']}",
    }


def _notebooks(executed: Path) -> list[Path]:
    """The executed notebooks of the study, in their order."""
    return sorted({*executed.parent.glob("[0-9]*.ipynb"), executed})


def with_predecessor(executed: Path) -> list[Path]:
    """The executed notebook, and the one before it, whose report links to it."""
    found = _notebooks(executed)
    at = found.index(executed)
    return found[max(0, at - 1) : at + 1]


def _neighbours(executed: Path) -> list[tuple[str, str]]:
    """The notebooks of the study before and after this one: word and name."""
    names = [path.stem for path in _notebooks(executed)]
    at = names.index(executed.stem)
    near = (("←", names[at - 1] if at else ""), ("→", names[at + 1] if at + 1 < len(names) else ""))
    return [(word, name) for word, name in near if re.fullmatch(r"[\w.-]+", name)]


def _without_paths(text: str, folder: Path) -> str:
    """The HTML without the folder of the study, of all studies and of the checkout, which say nothing elsewhere."""
    for place in (folder, folder.parent, checkout()):
        if place and len(place.parts) > 1:
            text = text.replace(f"{place.absolute()}/", "")
    return text


def anchor(heading: str) -> str:
    """The id of a heading in a report: "Does it fit?" -> "does-it-fit"."""
    return re.sub(r"\W+", "-", re.sub(r"<[^>]*>|&#?\w+;", "", heading).lower()).strip("-")


class _Renderer(mistune.HTMLRenderer):
    """HTML within Markdown is shown as its source; entities are characters (with `escape=True` they would not be)."""

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        return f'<h{level} id="{anchor(text)}">{text}</h{level}>\n'

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


def read_field(path: Path, field: Callable[[Any], Any]) -> Any:
    """What `field` takes of the JSON in the file; None where the file is damaged: an index shows what can be read."""
    try:
        return field(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return None
