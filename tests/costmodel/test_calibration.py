"""Calibration: what rows teach, what they cannot spoil, and what a file must hold."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import calibration, shipped
from trilane.costmodel.calibration import Calibration, Configuration, Regime
from trilane.costmodel.columns import Setting, columns_of, linear_flops_per_s
from trilane.costmodel.constants import BOUNDS
from trilane.costmodel.fit import fit_time, refit
from trilane.costmodel.iteration import iteration_time

A100 = cluster("jz-a100-80g")
SHAPE = parse_shape("72,14336,64,2048,250880")
SPREAD = [
    (8, 12, 4, 1),
    (8, 6, 8, 2),
    (4, 12, 8, 1),
    (1, 12, 32, 1),
    (8, 12, 4, 8),
    (2, 12, 16, 2),
    (4, 6, 16, 4),
]
CASES = [
    Configuration(
        shape=SHAPE,
        topology=Topology(
            tp=t, pp=p, dp=d, mbs=m, gbs=2048, precision="bf16", recompute="full", zero=1
        ),
        cluster=A100,
    )
    for t, p, d, m in SPREAD
]


def seconds(case, constants):
    return iteration_time(columns_of(case.shape, case.topology), case.cluster, constants).total


def errors(constants, measured):
    return [abs(math.log(seconds(c, constants) / s)) for c, s in zip(CASES, measured, strict=True)]


def test_calibration_recovers_what_made_the_rows():
    truth = dataclasses.replace(Calibration(), matmul=0.66, network=0.15, launch_s=4e-3)
    measured = [seconds(c, truth) for c in CASES]
    fitted = fit_time(CASES, measured, Calibration())
    assert max(errors(fitted, measured)) < 0.02 < max(errors(Calibration(), measured))
    assert fitted.rows == len(CASES) and fitted.half_width < 0.2


def test_a_cards_own_shares_come_before_those_of_its_name_and_of_its_clusters_fit():
    machine = cluster("dgx-h100")
    gpu = dataclasses.replace(machine.gpu, shares={"matmul": [0.36, 0.01], "fp8": 0.457})
    own = dataclasses.replace(machine, gpu=gpu)
    fitted = shipped.default(own)
    assert fitted.matmul == pytest.approx(0.36, rel=0.02) and fitted.memory > 0.7
    eight_bits = columns_of(SHAPE, Topology(precision="fp8"))
    rates = [linear_flops_per_s(Setting(eight_bits, c, fitted)) for c in (own, machine)]
    assert rates[0] == pytest.approx(rates[1] / 2)


def test_rows_that_do_not_predict_each_other_leave_the_prior_and_few_that_do_pull_a_little():
    """Seconds at random around the prediction say nothing; all 20 % above it say that the machine
    is slower.
    """
    known = [seconds(c, Calibration()) for c in CASES]
    noise = np.random.default_rng(1).lognormal(0, 0.15, len(CASES))
    lost = refit(
        CASES, [s * n / np.median(noise) for s, n in zip(known, noise, strict=True)], Calibration()
    )
    assert lost.weight == 0 and all(
        getattr(lost.calibration, n) == getattr(Calibration(), n) for n in BOUNDS
    )
    slow = refit(CASES, [1.2 * s for s in known], Calibration())
    assert slow.weight > 0 and np.abs(slow.after).max() < 0.1 < np.abs(slow.before).max()


def test_a_regime_takes_the_blame_for_its_days_only():
    slow = Regime(
        name="slow", constants=("p2p", "network"), first_day="2026-01-02", last_day="2026-01-03"
    )
    prior = dataclasses.replace(Calibration(), regimes=(slow,))
    truth = dataclasses.replace(prior, regimes=(dataclasses.replace(slow, factor=0.1),))
    days = ["2026-01-01", "2026-01-02"]
    cases = [dataclasses.replace(c, day=d) for c in CASES for d in days]
    measured = [seconds(c, truth.on(c.day, c.topology.gpus)) for c in cases]
    fitted = fit_time(cases, measured, prior)
    assert fitted.regimes[0].factor == pytest.approx(0.1, rel=0.25)
    assert fitted.network == pytest.approx(prior.network, rel=0.1)
    assert fitted.on("", 8) == fitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul": 1.2}, "calibration.matmul=1.2: must lie between 0.1 and 0.98"),
        ({"stack": "a\x1b[2J"}, "must be one line"),
        ({"own": [[8.0] * 7 + [0.0]]}, "calibration.own=1: must be 8 positive numbers a run"),
        (
            {"matmull": 0.7},
            "calibration field=matmull: known: ",
        ),
        ({"network": "fast"}, "calibration.network='fast': must be a number"),
    ],
)
def test_a_wrong_calibration_file_is_named(tmp_path, change, message):
    path = tmp_path / "calibration.json"
    values = {**calibration.to_json(Calibration()), **change}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(message)):
        shipped.calibration_for(A100, str(path))
