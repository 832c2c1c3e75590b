"""The editor of one plan shows what is predicted, or which rule forbids it, and never a number for
the latter.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from ipywidgets import Widget
from support import REPOSITORY

from trilane.config.plan import read_plan
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.report.plots.style import MIME
from trilane.report.widgets import PAGE, Editor, explore
from trilane.utils.numbers import with_bounds

PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
KNOWN = default(PLAN.cluster)


@pytest.fixture
def editor() -> Iterator[Editor]:
    yield explore(PLAN, KNOWN)
    Widget.close_all()  # or they look for their kernel when Python ends


def test_a_plan_that_can_be_is_the_prediction_that_every_command_shows(editor):
    text, p = editor.caption.value, predict(PLAN)
    assert f"take {with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)} s" in text
    assert p.support.words in text and PLAN.id in text
    bundle = editor._repr_mimebundle_()
    assert bundle[MIME] == editor.figure.spec, "in a report without a kernel the figure"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("gbs", 2047, "gbs=2047: must be a multiple of mbs x dp"),
        ("recompute", "none", "GiB: must fit the card"),
        ("gpus", 385, "must divide the 385 GPUs"),
        ("cp", 0, "must divide the 384 GPUs"),
        ("engine", "deepspeed-zero", "engine deepspeed-zero has no pipeline"),
    ],
)
def test_a_plan_that_cannot_be_names_the_rule_is_not_drawn_and_cannot_be_used(
    editor, name, value, rule
):
    editor.boxes[name].value = value
    text = editor.caption.value
    assert text.startswith("<b>refused</b>: ") and rule in text and editor.chosen is None
    assert editor.picks["plan"].value is None, "nothing stays picked"
    picked = drawn(editor)["params"][0]
    assert picked["name"] == "plan" and "value" not in picked


def drawn(editor: Editor) -> dict[str, Any]:
    """The specification of the figure that a browser shows."""
    (output,) = editor.picture.outputs
    return output["data"][MIME]


def test_the_gpus_are_held_and_dp_follows(editor):
    for name, value in (("pp", 6), ("tp", 8)):
        editor.boxes[name].value = value
    assert (editor.chosen.tp, editor.chosen.pp, editor.chosen.dp) == (8, 6, 8)
    editor.boxes["gpus"].value = 192
    assert (editor.chosen.gpus, editor.chosen.dp) == (192, 4)


def test_a_refused_choice_has_its_reason(editor):
    texts = dict((value, text) for text, value in editor.boxes["tp"].options)
    assert texts[4] == "4" and texts[16].startswith("16 refused: tp=16: a tensor-parallel group")
    assert "refused: " in PAGE["style"], "which is grey"
    editor.boxes["engine"].value = "megatron"
    stages = [text for text, _ in editor.boxes["zero"].options]
    assert stages[2].startswith("2 refused: zero=2: engine megatron has ZeRO stage 0 and 1")


def test_the_figure_follows_the_controls_and_the_controls_a_pick(editor):
    first = editor.picks["plan"].value
    editor.boxes["mbs"].value = 1
    assert PLAN.id in first and editor.chosen.plan.id in editor.picks["plan"].value
    rows = drawn(editor)["datasets"]["plans"]
    assert [row["key"] for row in rows] == [first, editor.picks["plan"].value]
    editor.picks["plan"].value = first  # as a click in the figure does
    assert editor.chosen.plan.id == PLAN.id and editor.boxes["mbs"].value == PLAN.mbs
