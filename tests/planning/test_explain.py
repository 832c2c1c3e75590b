"""Why a plan takes what it takes: parts that sum to the whole, and what nothing supports."""

import json

import pytest
from support import REPOSITORY

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.engines import default_topology
from trilane.config.model import parse_shape
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.planning.explain import explain

A100, DGX = cluster("jz-a100-80g"), cluster("dgx-a100-80g")
SMALL = parse_shape("24,2048,16,2048,50304")
BLOOM = str(REPOSITORY / "docs/plan-176b.json")


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


def test_the_explanation_is_json_and_its_plan_is_read_back(capsys):
    """Of the 176B plan, which was measured, and of one that is like no measured run."""
    assert main(["plan", "show", BLOOM, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert plan_from_json(values).id == read_plan(BLOOM).id
    assert any("rests on measured runs" in line for line in values["why"]["sentences"])
    words = "plan show --shape 4,256,4,128,384 --cluster h200 --gbs 16 --gpus 8 --mbs 2"
    assert main(words.split(" ")) == 0
    assert "no measured run like this" in " ".join(capsys.readouterr().out.split())
