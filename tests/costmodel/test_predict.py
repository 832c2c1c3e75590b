"""Sizing and one prediction: published numbers, and laws that any planner must obey."""

import dataclasses
import math

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Configuration
from trilane.costmodel.measured_rows import every_row
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.costmodel.support import FAR, NEAR

A100 = cluster("jz-a100-80g")
SHAPE = parse_shape("72,14336,64,2048,250880")
BF16 = {"precision": "bf16", "recompute": "full", "zero": 1}


def measured(**change):
    """The winner of the chronicles: 72 x 14336 on 384 A100s, TP 8, PP 12, DP 4, MBS 2."""
    sizes = dict(tp=8, pp=12, dp=4, mbs=2, gbs=2048, attention="scores", **BF16)
    return Configuration(shape=SHAPE, topology=Topology(**{**sizes, **change}), cluster=A100)


def test_a_measured_run_supports_itself():
    row = every_row()[30]
    found = predict(row.case, default(row.case.cluster, row.stack)).support
    assert found.distance == 0
    assert found.words.startswith("rests on measured runs such as") and found.widening == 0


@pytest.mark.parametrize(
    ("case", "differs"),
    [
        (dataclasses.replace(measured(), cluster=cluster("h200")), "card"),
        (measured(attention="fused", recompute="none"), "attention kernel"),
        (
            dataclasses.replace(measured(), shape=parse_shape("72,512,8,65536,50304")),
            "sequence length",
        ),
    ],
)
def test_a_plan_like_no_measured_run_is_named_and_its_interval_widens(case, differs):
    near, far = (predict(c).support for c in (measured(), case))
    assert near.distance < NEAR < FAR < far.distance and far.widening > 0
    assert far.words.startswith("no measured run like this") and differs == far.differs[0]
    assert math.log(predict(case).sec_hi / predict(case).sec_lo) > math.log(
        predict(measured()).sec_hi / predict(measured()).sec_lo
    )


@pytest.mark.parametrize(
    ("sizes", "topology", "tokens_per_s"),
    [
        ("32,4096,32,2048,50432", dict(dp=8, mbs=6, gbs=48), 85144),
        ("32,4096,32,2048,50432", dict(dp=128, mbs=6, gbs=768), 1340830),
        ("80,8192,64,2048,50432", dict(dp=64, mbs=8, gbs=2048, recompute="full"), 66523),
    ],
)
def test_an_h100_of_a_stack_that_nobody_fitted_takes_what_its_interval_allows(
    sizes, topology, tokens_per_s
):
    """MosaicML's llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0): MPT on FSDP, H100
    80GB, bf16.
    """
    shape, machine = dataclasses.replace(parse_shape(sizes), biases="none"), cluster("dgx-h100")
    case = Configuration(
        shape=shape, topology=Topology(precision="bf16", zero=3, **topology), cluster=machine
    )
    found, measured_s = (
        predict(case, default(machine, "fsdp")),
        case.topology.gbs * 2048 / tokens_per_s,
    )
    assert found.sec_per_it < measured_s < found.sec_hi


def test_a_prediction_faster_than_any_measured_run_says_so_and_is_less_sure():
    """No run of an A100 that ships has more than 59 % of its peak."""
    shape = parse_shape("32,4096,32,4096,32000")
    topology = Topology(dp=64, mbs=2, gbs=1024, zero=1, precision="bf16", attention="fused")
    case = Configuration(shape=shape, topology=topology, cluster=cluster("dgx-a100-80g"))
    usual = default(case.cluster)
    bold = dataclasses.replace(usual, pace=0.9, rows=100, stack="fsdp", half_width=0.1)
    plain, claimed = predict(case, dataclasses.replace(bold, pace=1.3)), predict(case, bold)
    assert (
        "of the card's peak" in claimed.support.words
        and "of the card's peak" not in plain.support.words
    )
    assert claimed.support.mfu > claimed.support.record > plain.support.mfu
    assert claimed.sec_hi / claimed.sec_per_it > 1.2 * plain.sec_hi / plain.sec_per_it
