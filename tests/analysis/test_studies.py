"""Studies side by side: what differs is a row, and what a study lacks is reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import small_plan
from test_collect import LINE

from trilane.analysis.studies import compare_studies
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.workspace.study import Study


def study(name: str, hidden_size: int = 64) -> Study:
    """A study with a plan, and a run of it whose iterations take 1.25 s."""
    made, plan = Study.create(name), small_plan()
    plan = replace(plan, shape=replace(plan.shape, hidden_size=hidden_size))
    predicted = predict(plan, default(plan.cluster)).to_json()
    entry = {"id": plan.id, **plan.to_json(), "prediction": predicted}
    made.save("plans.json", {"plans": [entry]}, "02_topology")
    folder = made.folder / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    lines = [LINE.format(i, 20, 1250.0, 4, 5 - i / hidden_size) for i in range(1, 21)]
    (folder / "run.log").write_text("".join(lines))
    (made.folder / "index.html").touch()
    return made


def test_what_differs_is_a_row_and_what_is_equal_is_none(outputs: Path):
    here = study("a")
    study("b", hidden_size=128)
    found = compare_studies(here, "a, b")
    rows = found.to_frame().to_numpy().tolist()
    assert ["model: hidden_size", "64", "128"] in rows
    names = {row[0] for row in rows}
    assert {"prediction: sec_per_it", "run one: loss"} <= names
    assert not names & {"model: num_layers", "run one: sec_per_it"}
    assert set(here.read) == {"a/plans.json", "b/plans.json"}
    assert set(found.curves()) == {"a: one", "b: one"}
    assert found.to_json()["studies"] == ["a", "b"]


@pytest.mark.parametrize("text", ["{", '{"plans": [{"id": 1}]}', '{"plans": []}'])
def test_a_damaged_result_is_refused_and_a_missing_one_is_empty(outputs: Path, text: str):
    here = study("a")
    plans = study("b").folder / "plans.json"
    plans.unlink()
    table = compare_studies(here, "a,b").to_frame()
    assert not table["choice"].str.startswith(("model", "prediction")).any()
    plans.write_text(text)
    with pytest.raises(ValueError, match=r"^stud[^\n]*$"):
        compare_studies(here, "a,b")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("a", "studies=a: must be two or more, separated by commas"),
        ("a,b", "studies=b: known: a"),
        ("a,../b", "study='../b': must be a plain folder name (letters, digits, . _ -)"),
    ],
)
def test_a_study_that_does_not_exist_is_refused(outputs: Path, names: str, message: str):
    with pytest.raises(ValueError) as caught:
        compare_studies(study("a"), names)
    assert str(caught.value) == message
