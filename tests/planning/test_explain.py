"""Why a plan takes what it takes: parts that sum to the whole, and what nothing supports."""

import pytest

from trilane.config.cluster import cluster
from trilane.config.engines import default_topology
from trilane.config.model import parse_shape
from trilane.config.plan import Plan
from trilane.planning.explain import explain

A100 = cluster("jz-a100-80g")
SMALL = parse_shape("24,2048,16,2048,50304")


def test_shares_sum_to_the_whole_and_the_fullest_stage_is_the_memory():
    topology = default_topology(SMALL, A100, gbs=64, tp=2, pp=2, dp=4, mbs=2)
    why = explain(Plan(label="one", shape=SMALL, cluster=A100, topology=topology))
    number, part, share = why.fullest
    stage = why.prediction.stages[number]
    shares = list(why.shares.values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert stage.total == why.prediction.memory_bytes and getattr(stage, part) == pytest.approx(
        share * stage.total
    )
