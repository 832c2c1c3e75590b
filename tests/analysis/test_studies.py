"""Studies side by side: what differs comes first, and what a study lacks is said."""

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


def study(name: str, hidden_size: int = 64, plans: int = 1, **runs: float) -> Study:
    """A study with that many plans, and a run for each name, whose iterations take so many seconds."""
    made, plan = Study.create(name), small_plan()
    plan = replace(plan, shape=replace(plan.shape, hidden_size=hidden_size))
    entries = [
        {"id": p.id, **p.to_json(), "prediction": predict(p, default(p.cluster)).to_json()}
        for p in (
            replace(plan, label=f"p{n}", topology=replace(plan.topology, mbs=1 + n))
            for n in range(plans)
        )
    ]
    if plans:
        made.save(
            "plans.json",
            {"shape": vars(plan.shape), "cluster": "local", "plans": entries},
            "02_topology",
        )
    for run, seconds in runs.items():
        folder = made.folder / "runs" / run
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan.to_json()))
        (folder / "run.log").write_text(
            "".join(LINE.format(i, 20, 1000 * seconds, 4, 5 - i / 20) for i in range(1, 21))
        )
    (made.folder / "index.html").touch()
    return made


def test_what_differs_is_a_row_and_what_is_equal_is_none(outputs: Path) -> None:
    here = study("a")
    study("b", hidden_size=128)
    found = compare_studies(here, "a, b")
    rows = found.differences().to_frame().values.tolist()
    assert ["model", "hidden_size", "64", "128"] in rows and not [
        row for row in rows if row[1] == "num_layers"
    ]
    assert set(here.read) == {"a/plans.json", "b/plans.json"}
    assert "seconds an iteration" in {row[1] for row in rows if row[0] == "prediction"}
    (row,) = [row for row in found.to_json()["differences"] if row["choice"] == "hidden_size"]
    assert row == {"part": "model", "choice": "hidden_size", "values": {"a": "64", "b": "128"}}


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        (None, "plans.json (02_topology)"),
        ("{", "property name"),
        ('{"plans": [{"id": 1}]}', "plans.json: is damaged"),
        ('{"plans": [], "shape": 7}', "runs (03_launch)"),
    ],
)
def test_what_a_study_lacks_or_what_is_damaged_in_it_is_a_line(
    outputs: Path, text: str | None, lack: str
) -> None:
    here = study("a", one=1.25)
    other = study("b", plans=0)
    if text is not None:
        (other.folder / "plans.json").write_text(text)
        (other.folder / "calendar.json").write_text('{"days": [], "finish": 7}')
    found = compare_studies(here, "a,b")
    assert any(lack in line for line in found.studies[1].lacks), found.studies[1].lacks
    assert ">1.25<" in found.runs()._repr_html_(), (
        "the seconds of a run, next to a study without runs"
    )
    assert found.to_json()["lacks"]["a"] and found.summary() and found.differences()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("a", "studies=a: must be two or more, separated by commas"),
        ("a,a", "studies=a,a: must be two or more, separated by commas"),
        ("a,b", "studies=b: known: a"),
        ("a,../b", "study='../b': must be a plain folder name (letters, digits, . _ -)"),
    ],
)
def test_a_study_that_does_not_exist_is_refused(outputs: Path, names: str, message: str) -> None:
    here = study("a")
    with pytest.raises(ValueError, match="stud") as caught:
        compare_studies(here, names)
    assert str(caught.value) == message
