"""The means of many simulated runs, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from trilane.forecasting.failures import NODE_YEAR_S, FailureModel, Interruption
from trilane.forecasting.simulation import Outcomes, Uncertainty, Work, simulate

CALM = FailureModel(stops=(), startup_s=0, queue_s=0)
SURE = Uncertainty(common=0, independent=0)


def simulated(risks: FailureModel, seconds: float, interval_s: float) -> Outcomes:
    """20,000 runs of so much work on eight GPUs."""
    work = Work(same=np.array([0]), seconds=np.array([seconds]), gpus=8, nodes=1)
    return simulate(work, SURE, risks, {}, interval_s, 20_000, np.random.default_rng(5))


def test_idle_hours_that_are_not_charged_cost_days_and_no_gpu_hours():
    """Nine stops in 900 s, 3.6 s idle each (no work is undone to speak of)."""
    for charged in (True, False):
        every_100_s = {"name": "stop", "per_year": NODE_YEAR_S / 100}
        stop = Interruption(**every_100_s, idle_hours=0.001, charged=charged)
        found = simulated(replace(CALM, stops=(stop,)), 900.0, 1e-6)
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
    lost = simulated(risks, 1e8, 60.0).lost_s["stop"]
    assert lost.mean() == pytest.approx(100 * 130, rel=0.01)
    assert lost.var() == pytest.approx(100 * (130**2 + 300 + 100**2), rel=0.05)
