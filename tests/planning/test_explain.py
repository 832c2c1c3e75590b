"""Why a plan takes what it takes: parts that sum to the whole, and what nothing supports."""

import dataclasses
import json

import pytest
from support import REPOSITORY

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.engines import default_topology
from trilane.config.model import parse_shape
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.planning.explain import Explanation, explain
from trilane.planning.search import search
from trilane.utils.tables import Text

A100, DGX = cluster("jz-a100-80g"), cluster("dgx-a100-80g")
SMALL = parse_shape("24,2048,16,2048,50304")
LLAMA = dataclasses.replace(
    SMALL, activation="swiglu", normalization="rmsnorm", positions="rotary", biases="none"
)
BLOOM = str(REPOSITORY / "docs/plan-176b.json")
LARGE = parse_shape("36,8192,64,2048,50304")


def plan_of(shape=SMALL, machine=A100, **chosen):
    topology = default_topology(
        shape, machine, **{"gbs": 64, "tp": 2, "pp": 2, "dp": 4, "mbs": 2, **chosen}
    )
    return Plan(label="one", shape=shape, cluster=machine, topology=topology)


def test_shares_sum_to_the_whole_and_the_fullest_stage_is_the_memory():
    why = explain(plan_of())
    number, part, share = why.fullest
    stage = why.prediction.stages[number]
    shares = list(why.shares.values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert stage.total == why.prediction.memory_bytes and getattr(stage, part) == pytest.approx(
        share * stage.total
    )


def test_whether_memory_fits_has_four_degrees_and_a_plan_is_risky_above_one_in_ten():
    """1 in 100 may be recommended, 1 in 10 is ranked, 1 in 2 is listed."""
    p, words = explain(plan_of()).prediction, []
    for degree, risky in (
        ((0.0, 0.01), False),
        ((0.0101, 0.1), False),
        ((0.101, 0.5), True),
        ((0.501, 1.0), True),
    ):
        found = [dataclasses.replace(p, oom_probability=probability) for probability in degree]
        assert [one.is_risky for one in found] == [risky, risky]
        words += [
            Explanation(plan=plan_of(), prediction=one).as_lines()[-2].partition("(P(")[0]
            for one in found
        ]
    assert [words.index(text) for text in words] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_the_explanation_is_json_and_its_plan_is_read_back(capsys):
    """Of the 176B plan, which was measured, and of one that is like no measured run."""
    assert main(["plan", "show", BLOOM, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
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
    assert [("redicted only: precision=fp8: needs" in text) for text in texts].count(
        True
    ) == 3 * only
    assert bool(why.to_json()["predicted_only"]) is bool(found.listing()["predicted_only"]) is only


def test_in_a_notebook_text_of_rows_is_escaped():
    why = explain(plan_of())
    named = dataclasses.replace(why.prediction.support, nearest=(("<b>x</b> [a](b)", 0.1),))
    shown = dataclasses.replace(
        why, prediction=dataclasses.replace(why.prediction, support=named)
    )._repr_markdown_()
    assert "<b>" not in shown and Text.escape("<b>x</b> [a](b)") in shown
