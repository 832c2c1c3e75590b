"""The index of a study shows what can be read of it, as text."""

import json
from pathlib import Path

import pytest
from markup import Page

from trilane.report.html import write_index
from trilane.workspace.study import Study


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("01_sizing.ipynb", '{"cells": "x"}'),
        (
            "01_sizing.ipynb",
            '{"cells": [], "metadata": {"papermill": 7}, "nbformat": 4, "nbformat_minor": 5}',
        ),
        ("01_sizing.ipynb", "\udc80"),
        ("runs/a/status.json", '{"status": ["x"], "evidence": 7}'),
    ],
)
def test_a_damaged_file_of_a_study_leaves_its_index_readable(outputs: Path, name: str, text: str):
    study = Study.create("s")
    (study.folder / "runs/a").mkdir(parents=True)
    (study.folder / "runs/a/plan.json").write_text("{}")
    (study.folder / name).write_text(text, errors="surrogateescape")
    assert Path(name).name in Page(write_index(study).read_text()).text


def test_an_index_shows_names_as_text_and_links_below_its_folder(outputs: Path):
    study = Study.create("s")
    run = study.folder / "runs" / "a#b?c%20 <u>"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    status = {"status": "crashed", "evidence": "<script>alert(1)</script>", "rank": 0}
    status |= {"exit_code": 1, "seconds": 9.0}
    (run / "status.json").write_text(json.dumps(status))
    (run / ".lock").touch()
    (run / "ranks").mkdir()
    for name in ("javascript:alert(1).csv", "<img src=x>.csv", "\udc80.csv"):
        (study.folder / name).touch()
    text = write_index(study).read_text()
    page = Page(text)
    assert not set(page.tags) & {"script", "u", "img"} and "<img src=x>.csv" in page.text
    assert {
        "runs/a%23b%3Fc%2520%20%3Cu%3E/plan.json",
        "javascript%3Aalert%281%29.csv",
        "%80.csv",
    } <= set(page.values)
