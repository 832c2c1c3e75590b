"""Sizing and one prediction: published numbers, and laws that any planner must obey."""

import dataclasses
import math

import pandas
import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel.backtest import backtest
from trilane.costmodel.calibration import Configuration
from trilane.costmodel.measured_rows import every_row
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.costmodel.support import FAR, KINDS, NEAR, SPANS, features, sizes_of
from trilane.costmodel.support import measured as measured_rows
from trilane.utils.validation import DATA

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


def test_what_supports_predictions_is_what_ships():
    """benchmarks/fit_calibrations.py writes it anew after a change of rows."""
    rows = measured_rows()[0]
    assert [row["row_id"] for row in rows] == [row.row_id for row in every_row()]
    for row, shipped in zip(rows[::7], every_row()[::7], strict=True):
        assert [float(row[name]) for name in SPANS] == pytest.approx([*sizes_of(shipped.case)])
        own = features(shipped.case, shipped.stack, shipped.seconds)
        assert {name: row[name] for name in KINDS} == {name: own[name] for name in KINDS}


def test_rows_of_a_stack_are_predicted_by_it_wherever_they_are_read():
    path = DATA / "llmfoundry_h100.csv"
    asked = predict(pandas.read_csv(path), "dgx-h100")
    told = backtest(path).runs
    assert [*asked["predicted_sec_per_it"]] == pytest.approx([*told["sec_pred"]])
