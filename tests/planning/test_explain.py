"""Why a plan takes what it takes: parts that sum to the whole, the best neighbour, and what nothing supports."""

import dataclasses
import json

import pytest
from support import REPOSITORY

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.engines import default_topology
from trilane.config.model import parse_shape
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.costmodel.predict import predict
from trilane.planning.explain import explain, neighbours
from trilane.planning.search import search
from trilane.utils.tables import Text

A100, DGX = cluster("jz-a100-80g"), cluster("dgx-a100-80g")
SMALL = parse_shape("24,2048,16,2048,50304")
LLAMA = dataclasses.replace(SMALL, activation="swiglu", normalization="rmsnorm", positions="rotary", biases="none")
BLOOM = str(REPOSITORY / "docs/plan-176b.json")
LARGE = parse_shape("36,8192,64,2048,50304")


def plan_of(shape=SMALL, machine=A100, **chosen):
    topology = default_topology(shape, machine, **{"gbs": 64, "tp": 2, "pp": 2, "dp": 4, "mbs": 2, **chosen})
    return Plan(label="one", shape=shape, cluster=machine, topology=topology)


def test_shares_sum_to_the_whole_and_the_fullest_stage_is_the_memory():
    why = explain(plan_of())
    number, part, share = why.fullest
    stage = why.prediction.stages[number]
    shares = list(why.shares.values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert stage.total == why.prediction.memory_bytes and getattr(stage, part) == pytest.approx(share * stage.total)


def test_a_neighbour_differs_in_one_choice_and_takes_as_many_gpus():
    plan = plan_of()
    found = list(neighbours(plan))
    assert len(found) > 15
    for fields in found:
        sizes = set(fields) & {"tp", "pp", "dp"}
        assert len(fields) == (2 if sizes else 1) and any(getattr(plan.topology, n) != v for n, v in fields.items())
        t = vars(plan.topology) | fields
        assert t["tp"] * t["pp"] * t["dp"] == plan.topology.gpus


def test_the_best_change_is_the_fastest_safe_neighbour_and_is_predicted_as_a_plan_of_its_own():
    plan = plan_of(recompute="full", mbs=1)
    why = explain(plan)
    assert why.change.prediction == predict(why.change.plan) and not why.change.prediction.is_risky
    for fields in neighbours(plan):
        try:
            other = predict(dataclasses.replace(plan, topology=dataclasses.replace(plan.topology, **fields)))
        except ValueError:
            continue
        assert other.is_risky or other.sec_per_it >= why.change.prediction.sec_per_it
    saved = why.to_json()["best_change"]["seconds_saved"]
    assert saved == pytest.approx(why.prediction.sec_per_it - why.change.prediction.sec_per_it) and saved > 0


def test_the_best_plan_of_a_full_search_has_no_faster_neighbour():
    best = search(SMALL, A100, gpus=16, gbs=64, top=1).candidates[0].plan
    why = explain(best)
    assert why.change.prediction.sec_per_it >= why.prediction.sec_per_it * 0.9999
    assert any("none makes it faster" in line for line in why.as_lines())


def test_of_a_plan_that_runs_out_of_memory_the_best_change_fits_or_none_is_named():
    fits = explain(plan_of(LARGE, DGX, gbs=1024, tp=4, pp=1, dp=8, mbs=4))
    assert fits.prediction.is_risky and not fits.change.prediction.is_risky
    never = explain(plan_of(LARGE, DGX, gbs=1024, tp=1, pp=1, dp=1, mbs=4))
    assert never.change is None and never.to_json()["best_change"] is None


def test_the_explanation_is_json_and_its_plan_is_read_back(capsys):
    """Of the 176B plan, which was measured, and of one that is like no measured run."""
    assert main(["plan", "show", BLOOM, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["why"]["best_change"]["change"] == "attention fused instead of scores"
    assert plan_from_json(values).id == read_plan(BLOOM).id
    assert any("rests on measured runs" in line for line in values["why"]["sentences"])
    words = "plan show --shape 4,256,4,128,384 --cluster h200 --gbs 16 --gpus 8 --mbs 2"
    assert main(words.split(" ")) == 0
    assert "no measured run like this" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("only", [True, False])
def test_what_no_engine_trains_is_said_before_the_launch(only):
    precision, machine = "fp8" if only else "bf16", cluster("dgx-h100")
    why = explain(plan_of(LLAMA, machine, precision=precision))
    found = search(LLAMA, machine, gpus=8, gbs=64, top=2, precision=precision)
    texts = [*why.as_lines(), found.as_text(), found.summary()]
    assert [("redicted only: precision=fp8: needs" in text) for text in texts].count(True) == 3 * only
    assert bool(why.to_json()["predicted_only"]) is bool(found.listing()["predicted_only"]) is only


def test_in_a_notebook_text_of_rows_is_escaped():
    why = explain(plan_of())
    named = dataclasses.replace(why.prediction.support, nearest=(("<b>x</b> [a](b)", 0.1),))
    shown = dataclasses.replace(why, prediction=dataclasses.replace(why.prediction, support=named))._repr_markdown_()
    assert "<b>" not in shown and Text.escape("<b>x</b> [a](b)") in shown
