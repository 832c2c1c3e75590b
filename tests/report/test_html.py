"""What a report keeps of the Markdown and HTML in a notebook's outputs, and what it
says of itself.
"""

import base64
import hashlib
import json
import re
from pathlib import Path

import nbformat
import pytest
from markup import HOSTILE, Page, words

from trilane.report.html import POLICY, anchor, markdown_html, notebook_html, plain_html
from trilane.report.plots.explorer import MIME, Interactive
from trilane.utils.tables import Html, Text, show
from trilane.workspace.study import Study


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_in_a_report_is_its_text(value: str):
    page = Page(markdown_html(Text.of("- {}\n\nand {:code}", value, value)))
    assert set(page.tags) <= {"ul", "li", "p", "code"} and words(page.text) == words(
        f"{value} and {value}"
    )
    table = show({"a": [value, Html.link("x", "y.html")]})
    assert words(Page(plain_html(table)).text) == words(Page(table).text)


@pytest.mark.parametrize("value", HOSTILE)
def test_markup_that_nobody_escaped_loads_and_runs_nothing(value: str):
    """A notebook of a user's own may show any text as Markdown or HTML."""
    for page in (Page(markdown_html(value)), Page(plain_html(value))):
        assert not set(page.tags) & {"script", "svg", "style", "iframe", "form", "input", "comment"}
        assert set(page.attributes) <= {"href", "src", "alt", "class", "start", "id"}, (
            "no handlers, no styles"
        )
        assert re.fullmatch(r"[\w-]*", anchor(value)), "an id is a plain word"
        assert not [
            v for v in page.values if v.strip().lower().startswith(("javascript", "data:text"))
        ]


def test_a_report_has_a_policy_no_script_and_only_outputs_that_are_shown(tmp_path):
    data = {
        "application/javascript": "alert(1)",
        "text/latex": "$x$",
        "image/svg+xml": "<svg onload='alert(1)'/>",
    }
    data |= {
        "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
        "text/plain": "<b>plain</b>",
    }
    output = nbformat.v4.new_output(
        "display_data", data=data, metadata={"image/png": {"width": "1 onerror=alert(1)"}}
    )
    error = nbformat.v4.new_output(
        "error", ename="E", evalue="<b>", traceback=["\x1b[31m<script>alert(1)</script>\x1b[0m"]
    )
    stream = nbformat.v4.new_output(
        "stream", text="\x1b[1m<script>alert(1)</script>\x1b]8;;https://127.0.0.1:9\x07x"
    )
    cells = [
        nbformat.v4.new_markdown_cell("# </title><script>alert(1)</script>\n\n$x$ <b>bold</b>")
    ]
    cells.append(
        nbformat.v4.new_code_cell(
            "'</pre><script>alert(1)</script>'", outputs=[output, error, stream]
        )
    )
    state = {
        "application/vnd.jupyter.widget-state+json": {
            "state": {},
            "version_major": 2,
            "version_minor": 0,
        }
    }
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"widgets": state}), tmp_path / "x.ipynb"
    )
    page = Page(notebook_html(tmp_path / "x.ipynb"))
    assert POLICY in page.values
    assert not set(page.tags) & {"script", "svg", "b", "link", "iframe"}
    assert page.text.count("<script>alert(1)</script>") == 5, (
        "title, heading, code, error and stream show it"
    )
    assert "<b>plain</b>" in page.text and "<b>bold</b>" in page.text


def test_a_report_runs_the_one_script_that_its_policy_names_by_hash(tmp_path):
    look = {"x": {"field": "x", "type": "quantitative"}, "tooltip": {"field": "name"}}
    dots = {"data": {"name": "dots"}, "mark": "point", "encoding": look, "config": {}}
    figure = Interactive(dots, "One dot.", dots=[{"x": 1, "name": HOSTILE[1]}])
    text = report(tmp_path, figure._repr_mimebundle_())
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, flags=re.DOTALL)
    assert [kind.strip() for kind, _ in scripts] == ['type="module"', 'type="application/json"']
    digest = base64.b64encode(hashlib.sha256(scripts[0][1].encode()).digest()).decode()
    assert f"{POLICY}; script-src 'sha256-{digest}'" in Page(text).values and "eval" not in POLICY
    assert json.loads(scripts[1][1]) == figure.spec, "hostile names are data in it"
    assert figure.spec["description"] in Page(text).values and len(text) < 1_500_000
    for spec in ("</script>", ["x"], None, 5):
        text = report(tmp_path, {MIME: spec, "image/png": "aGk="})
        assert (
            "<script" not in text
            and POLICY in Page(text).values
            and "data:image/png;base64,aGk=" in text
        )


def report(folder: Path, data: dict[str, object]) -> str:
    cell = nbformat.v4.new_code_cell(
        "figure", outputs=[nbformat.v4.new_output("display_data", data=data)]
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "x.ipynb")
    return notebook_html(folder / "x.ipynb")


def test_a_report_has_its_parameters_and_nothing_of_the_machine_that_made_it(outputs: Path):
    study = Study.create("s")
    cells = [
        nbformat.v4.new_markdown_cell("# When?\n\n## What does it *cost*?"),
        nbformat.v4.new_code_cell("1"),
    ]
    figure = nbformat.v4.new_output("display_data", data={"image/png": "aGk="})
    cells[1].outputs = [
        figure,
        nbformat.v4.new_output("stream", text=f"{study.folder}/calendar.json\n"),
    ]
    made = {
        "papermill": {
            "parameters": {"study": "s", "tokens": 3e11},
            "end_time": "2027-01-04T10:30:00.1",
        }
    }
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata=made), study.folder / "07_calendar.ipynb"
    )
    text = notebook_html(study.folder / "07_calendar.ipynb")
    page = Page(text)
    for fact in ("Study s", "2027-01-04 10:30", "tokens = 300000000000.0", "revision"):
        assert fact in page.text
    assert {"index.html", "#what-does-it-cost"} <= set(page.values)
    assert 'id="what-does-it-cost"' in text and 'alt="Figure: What does it *cost*?"' in text
    assert str(outputs) not in text and "calendar.json" in page.text
