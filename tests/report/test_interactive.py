"""Interactive figures: what JupyterLab and a report get of them."""

import base64
import hashlib
import json
import re
from pathlib import Path

import altair as alt
import nbformat
import pytest
from markup import HOSTILE, Page

from trilane.report.html import POLICY, notebook_html
from trilane.report.plots.interactive import MIME, Interactive, embedded


@pytest.fixture(scope="module")
def figure() -> Interactive:
    """Three dots; the name of one is hostile, the height of another is not a number."""
    values = [{"x": 1, "y": 2.5, "name": HOSTILE[0]}, {"x": 2, "y": float("nan"), "name": "</script><b>"}]
    dots = alt.Chart(alt.Data(values=[*values, {"x": 3, "y": 1.0, "name": "c"}])).mark_point()
    return Interactive(dots.encode(x="x:Q", y="y:Q", tooltip="name:N"), "Three dots, of which one has no height.")


def report(folder: Path, data: dict[str, object]) -> str:
    cell = nbformat.v4.new_code_cell("figure", outputs=[nbformat.v4.new_output("display_data", data=data)])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "x.ipynb")
    return notebook_html(folder / "x.ipynb")


def test_a_notebook_gets_the_specification_its_picture_and_its_text(figure: Interactive, tmp_path: Path) -> None:
    shown = figure._repr_mimebundle_()
    assert json.loads(json.dumps(shown[MIME], allow_nan=False)) == shown[MIME], "JSON that a browser reads"
    assert shown[MIME]["description"] == shown["text/plain"] == figure.text
    figure.savefig(tmp_path / "x.png", dpi=150)
    assert (tmp_path / "x.png").read_bytes() == base64.b64decode(shown["image/png"])


def test_a_report_runs_the_one_script_that_its_policy_names_by_hash(figure: Interactive, tmp_path: Path) -> None:
    text = report(tmp_path, figure._repr_mimebundle_())
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, flags=re.DOTALL)
    assert [kind.strip() for kind, _ in scripts] == ['type="module"', 'type="application/json"']
    digest = base64.b64encode(hashlib.sha256(scripts[0][1].encode()).digest()).decode()
    assert f"{POLICY}; script-src 'sha256-{digest}'" in Page(text).values and "eval" not in POLICY
    assert json.loads(scripts[1][1]) == figure.spec, "hostile names are data in it"
    assert figure.text in Page(text).values, "the picture says what it shows"
    assert len(text) < 1_500_000


@pytest.mark.parametrize("spec", ["</script>", ["x"], None, 5])
def test_what_is_no_specification_is_shown_as_its_picture(spec: object, tmp_path: Path) -> None:
    text = report(tmp_path, {MIME: spec, "image/png": "aGk="})
    assert "<script" not in text and POLICY in Page(text).values and "data:image/png;base64,aGk=" in text


@pytest.mark.parametrize("value", HOSTILE)
def test_no_text_in_a_specification_ends_its_element(value: str) -> None:
    text = embedded({"name": value})
    assert json.loads(text) == {"name": value} and not set(text) & set("<>&\u2028")
