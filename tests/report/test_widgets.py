"""The editor of one plan shows what is predicted, or which rule forbids it, and never a number for
the latter.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ipywidgets import Widget
from support import REPOSITORY

from trilane.config.plan import read_plan
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.planning.decision import study_plan
from trilane.planning.explain import varied
from trilane.report.widgets import Editor, explore
from trilane.utils.numbers import with_bounds
from trilane.workspace.study import Study

PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
KNOWN = default(PLAN.cluster)
BASE = varied(PLAN, KNOWN)


@pytest.fixture
def study(outputs: Path) -> Study:
    """A study whose 02_topology wrote one plan."""
    found = Study.open("s")
    found.save("plans.json", {"plans": [BASE.to_json()], "risky": []}, "02_topology")
    return found


@pytest.fixture
def editor(study: Study) -> Iterator[Editor]:
    yield explore(PLAN, KNOWN, study)
    Widget.close_all()  # or they look for their kernel when Python ends


def test_a_plan_that_can_be_is_the_prediction_that_every_command_shows(editor):
    text, p = editor.caption.value, predict(PLAN)
    seconds = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)
    assert f"<b>{seconds} s</b> an iteration" in text and p.support.words in text
    assert f"<b>{p.memory_bytes / 2**30:.3g} GiB</b>" in text and PLAN.id in text
    assert text in editor._repr_mimebundle_()["text/html"], "in a report without a kernel too"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("gbs", 2047, "gbs=2047: must be a multiple of mbs x dp"),
        ("pp", 1, "GiB: must fit the card"),
        ("engine", "deepspeed-zero", "engine deepspeed-zero has no pipeline"),
    ],
)
def test_a_plan_that_cannot_be_names_the_rule_and_cannot_be_used(editor, name, value, rule):
    editor.boxes[name].value = value
    text = editor.caption.value
    assert text.startswith("<b>refused</b>: ") and rule in text and editor.chosen is None
    assert "an iteration" not in text
    editor.button.click()
    assert "not written" in editor.message.value


def test_the_used_plan_is_what_03_and_07_begin_with(editor, study):
    editor.boxes["mbs"].value = 1
    slower = editor.chosen.prediction.sec_per_it / BASE.prediction.sec_per_it - 1
    assert f" {slower:+.1%} " in editor.caption.value
    editor.button.click()
    plans, (first, *_) = study.plans(), study_plan(study)
    assert plans == [editor.chosen.plan, PLAN] and first == editor.chosen.plan
    written = json.loads((study.folder / "plans.json").read_text())["plans"][0]["prediction"]
    assert written["sec_per_it"] == editor.chosen.prediction.sec_per_it
