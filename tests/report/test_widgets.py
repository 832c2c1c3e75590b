"""The editor of one plan: it says what is predicted, or which rule forbids it, and never a number
for the latter.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ipywidgets import Widget

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.forecasting.decision import study_plan
from trilane.planning.explain import use_plan, varied
from trilane.report.widgets import Editor, explore, sentence
from trilane.utils.numbers import with_bounds
from trilane.workspace.study import Study

MACHINE = cluster("jz-a100-80g")
KNOWN = default(MACHINE)
TOPOLOGY = Topology(
    tp=4,
    pp=12,
    dp=8,
    mbs=2,
    gbs=2048,
    zero=1,
    precision="bf16",
    recompute="full",
    fp32_gradients=True,
)
PLAN = Plan(
    label="p", shape=parse_shape("72,14336,64,2048,250880"), cluster=MACHINE, topology=TOPOLOGY
)
BASE = varied(PLAN, KNOWN)


@pytest.fixture
def study(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study whose 02_topology wrote one plan."""
    monkeypatch.setenv("TRILANE_OUTPUTS", str(tmp_path))
    found = Study.open("s")
    found.save("plans.json", {"plans": [BASE.to_json()], "risky": []}, "02_topology")
    return found


@pytest.fixture
def editor(study: Study) -> Iterator[Editor]:
    yield explore(PLAN, KNOWN, study)
    Widget.close_all()  # or they look for their kernel when Python ends


def test_a_plan_that_can_be_is_the_prediction_that_every_command_shows():
    text, p = sentence(BASE, BASE), predict(PLAN)
    seconds = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)
    assert (
        f"<b>{seconds} s</b> an iteration" in text
        and f"<b>{p.memory_bytes / 2**30:.3g} GiB</b>" in text
    )
    assert PLAN.id in text and "on 384 GPUs" in text and p.support.words in text
    assert BASE.prediction == p


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("gbs", 2047, "gbs=2047: must be a multiple of mbs x dp"),
        ("pp", 1, "GiB: must fit the card"),
        ("engine", "deepspeed-zero", "engine deepspeed-zero has no pipeline"),
    ],
)
def test_a_plan_that_cannot_be_names_the_rule_and_has_no_number(editor, name, value, rule):
    editor.boxes[name].value = value
    text = editor.caption.value
    assert text.startswith("<b>refused</b>: ") and rule in text and editor.chosen is None
    assert "an iteration" not in text


def test_a_change_is_predicted_and_a_refused_one_cannot_be_used(editor):
    before = bytes(editor.picture.value)
    editor.boxes["dp"].value = 4
    slower = editor.chosen.prediction.sec_per_it / BASE.prediction.sec_per_it - 1
    assert "on 192 GPUs: <b>" in editor.caption.value and f" {slower:+.1%} " in editor.caption.value
    assert "on 192 GPUs" in editor._repr_mimebundle_()["text/html"], (
        "in a report without a kernel too"
    )
    drawn = bytes(editor.picture.value)
    assert drawn != before and b"Pipeline schedule" in drawn and b"<script" not in drawn
    editor.boxes["pp"].value = 1
    assert "GiB: must fit the card" in editor.caption.value and editor.picture.value == drawn
    editor.button.click()
    assert "not written" in editor.message.value


def test_the_used_plan_is_what_03_and_07_begin_with(editor, study):
    editor.boxes["mbs"].value = 1
    editor.button.click()
    plans, (first, *_) = study.plans(), study_plan(study)
    assert plans == [editor.chosen.plan, PLAN] and first == editor.chosen.plan
    written = json.loads((study.folder / "plans.json").read_text())["plans"][0]["prediction"]
    assert written["sec_per_it"] == editor.chosen.prediction.sec_per_it
    kept = json.loads((study.folder / "earlier/plans.json.1").read_text())
    assert [p["id"] for p in kept["plans"]] == [PLAN.id]
    use_plan(study, BASE, KNOWN)
    assert study.plans()[0] == PLAN and len(study.plans()) == 2, "a plan is listed once"
    foreign = varied(replace(PLAN, shape=parse_shape("24,2048,16,2048,50304")), KNOWN)
    study.save("plans.json", {"plans": [BASE.to_json(), foreign.to_json()]}, "02_topology")
    use_plan(study, BASE, KNOWN)  # the first plan alone is compared
    for plan, known in ((foreign.plan, KNOWN), (PLAN, default(MACHINE, "fsdp"))):
        with pytest.raises(ValueError, match="is of another"):
            use_plan(study, varied(plan, known), known)
