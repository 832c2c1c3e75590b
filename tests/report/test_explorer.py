"""The explorer shows what the search predicts, and stays small whatever the search found."""

import json
import re
from dataclasses import replace

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.costmodel.pipeline import pipeline_schedule
from trilane.planning.proposals import training_days
from trilane.planning.search import search
from trilane.planning.search_result import SearchResult
from trilane.report.plots.explorer import explorer, is_covered
from trilane.report.plots.explorer_rows import Drawn, lines, plan_rows, ranks_by_id, shown_plans

MACHINE, SHAPE = cluster("jz-a100-80g"), parse_shape("24,2048,16,2048,50304")


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(SHAPE, MACHINE, gpus=(16, 32), gbs=128, mbs=(1, 2, 4), recompute="none")


def test_the_first_plan_is_the_best_of_the_table_and_every_plan_is_shown_once(found):
    shown = shown_plans(found)
    assert shown[0] == found.best(1).rows[0]
    assert len({c.plan.id for c in shown}) == len(shown) <= 40
    fastest, smallest = found.pareto[0], found.pareto[-1]
    assert {fastest.plan.id, smallest.plan.id} <= {c.plan.id for c in shown}


def test_numbers_and_ties_are_those_of_the_table(found):
    table = found.best(12).to_frame()
    rows = {row["id"]: row for row in plan_rows(shown_plans(found), ranks_by_id(found))}
    for id, rank, seconds in zip(table["id"], table["rank"], table["s/it"], strict=True):
        assert rows[id]["rank"].rstrip("=") == rank.rstrip("=") and rows[id]["s"] == pytest.approx(seconds, abs=2e-3)
        assert rows[id]["tie"] in ("", rows[id]["rank"])
        assert rows[id]["lo"] < rows[id]["s"] < rows[id]["hi"]


def test_a_plan_that_may_run_out_of_memory_has_its_own_colour_and_no_rank():
    narrow = replace(MACHINE, gpu=replace(MACHINE.gpu, memory_bytes=int(9e9)))
    found = search(SHAPE, narrow, gpus=16, gbs=128, mbs=(1, 2))
    rows = plan_rows(shown_plans(found), ranks_by_id(found))
    risky = [row for row in rows if row["risk"] == "above 10 %"]
    assert risky and all(row["oom"] > 0.1 and not row["rank"] for row in risky)


def test_the_drawn_schedule_is_that_of_the_plan_and_names_what_is_left_out(found):
    c = max(found.candidates, key=lambda c: c.topology.microbatches * c.topology.pp)
    drawn, whole = Drawn(c, 40), Drawn(c, 10**9)
    made = pipeline_schedule(c.topology, c.prediction, drawn.microbatches)
    first = [p.start for p in made.passes if p.stage == 0 and p.is_forward and p.chunk == 0]
    assert drawn.passes[0]["start"] == pytest.approx(first, rel=1e-3, abs=1e-6)
    assert sum(len(row["start"]) for row in drawn.passes) < sum(len(row["start"]) for row in whole.passes)
    text = " ".join(row["line"] for row in lines(c, 1e9, drawn))
    assert f"{drawn.microbatches} of {c.topology.microbatches} microbatches" in text
    assert drawn.after[-1]["end"] == pytest.approx(made.end, rel=1e-3)


def test_the_words_have_the_days_of_the_tokens_and_the_evidence(found):
    c = found.best(1).rows[0]
    text = " ".join(row["line"].strip() for row in lines(c, 3e11, Drawn(c, 300)))
    days = training_days(SHAPE, c.topology, c.prediction.sec_per_it, 3e11)
    assert days == pytest.approx(3e11 / 2048 / 128 * c.prediction.sec_per_it / 86400)
    assert float(re.findall(r"tokens: ([\d.]+) \(", text)[0]) == pytest.approx(days, rel=0.01)
    assert c.plan.id in text and c.prediction.support.words in text


def test_ten_thousand_plans_make_no_larger_figure(found):
    many = replace(found, candidates=found.candidates * 20, front=lambda: list(found.candidates) * 20)
    assert len(many.candidates) >= 10_000
    made = explorer(many)
    assert len(json.dumps(made.spec)) < 400_000
    assert f" of the {len(many.candidates) + len(many.risky)} best" in made.text


def test_one_plan_is_a_figure_and_none_is_one_line(found):
    alone = found.candidates[:1]
    one = replace(found, candidates=alone, risky=(), front=lambda: list(alone))
    assert explorer(one).text.count(alone[0].label) == 1
    with pytest.raises(ValueError, match="gpus=16,32: no topology can run"):
        explorer(replace(found, candidates=(), risky=(), front=list))


def test_what_a_reader_picks_is_data_and_never_a_field_or_an_expression(found):
    """The pick and the filter are constants of ours: a label of a file reaches a specification as a value alone."""
    one = replace(found, candidates=found.candidates[:1], risky=(), front=list)
    text = json.dumps({k: v for k, v in explorer(one).spec.items() if k != "description"})
    assert '"filter": {"param": "plan"' in text and '"filter": {"param": "cell"}' in text
    assert set(_calculated(json.loads(text))) == {"datum.start + datum.length"}


def _calculated(part):
    if isinstance(part, dict):
        yield from [part["calculate"]] if "calculate" in part else []
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _calculated(each)


def test_the_label_of_a_tie_never_lies_on_the_dot_of_another_plan():
    """Text on a dot has a contrast of 2; the tooltip and the table have the tie, too."""
    row = {"gib": 10.0, "s": 5.0, "tie": "7="}
    for at, covered in (((10.6, 5.3), True), ((10.0, 5.0), False), ((9.0, 5.3), False), ((10.6, 6.5), False)):
        assert is_covered(row, [row, {**row, "gib": at[0], "s": at[1]}], [0.0, 20.0], [0.0, 10.0]) is covered
