"""The means of many simulated runs, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from trilane.forecasting.failures import NODE_YEAR_S, FailureModel, Interruption
from trilane.forecasting.simulation import Outcomes, Uncertainty, Work, simulate

CALM = FailureModel(stops=(), startup_s=0, queue_s=0)
EVERY_100_S = Interruption(name="stop", per_year=NODE_YEAR_S / 100)


def work(seconds: list[float], gpus: float = 8) -> Work:
    return Work(same=np.zeros(len(seconds), int), seconds=np.array(seconds), gpus=gpus, nodes=1)


def run(
    risks: FailureModel, seconds: list[float], interval_s: float = 1.0, shares=None
) -> Outcomes:
    return simulate(
        work(seconds),
        Uncertainty(common=0, independent=0),
        risks,
        shares or {},
        interval_s,
        20_000,
        np.random.default_rng(5),
    )


def test_idle_hours_that_are_not_charged_cost_days_and_no_gpu_hours():
    """Nine stops in 900 s, 3.6 s idle each (no work is undone to speak of)."""
    for charged in (True, False):
        stop = replace(EVERY_100_S, idle_hours=0.001, charged=charged)
        found = run(replace(CALM, stops=(stop,)), [900.0], interval_s=1e-6)
        idle = found.wall_s - 900
        assert idle.mean() == pytest.approx(9 * 3.6, rel=0.02)
        assert found.gpu_s == pytest.approx(8 * (900 + idle * charged), rel=1e-6)


def test_thousands_of_runs_scatter_as_their_causes_do():
    """Stops with a queue of 100 s: a Poisson number n of them, mean 100, each uniform in 60 s plus
    exponential waits.

    Variance of the sum (Wald): E n (mean^2 + variance) = 100 (130^2 + 60^2 / 12 + 100^2).
    """
    risks = replace(
        CALM, stops=(Interruption(name="stop", per_year=NODE_YEAR_S / 1e6),), queue_s=100
    )
    rng, sure = np.random.default_rng(5), Uncertainty(common=0, independent=0)
    many = simulate(work([1e8]), sure, risks, {}, 60.0, 20_000, rng)
    lost = many.lost_s["stop"]
    assert lost.mean() == pytest.approx(100 * 130, rel=0.01)
    assert lost.var() == pytest.approx(100 * (130**2 + 300 + 100**2), rel=0.05)
