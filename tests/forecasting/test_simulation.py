"""One simulated run with every random number at its mean, counted by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from trilane.forecasting.failures import NODE_YEAR_S, Cause, FailureModel, Interruption
from trilane.forecasting.simulation import CapacityWindow, Outcomes, Simulation, Stretch, Uncertainty

CALM = FailureModel(stops=(), startup_s=0, queue_s=0)
EVERY_100_S = Interruption(name="stop", per_year=NODE_YEAR_S / 100)


def stretch(seconds: list[float], start: float = 0, end: float = math.inf, shared: bool = False, gpus: float = 8):
    window = CapacityWindow(start_s=start, end_s=end, gpus=int(gpus), shared=shared)
    return Stretch(
        window=window, seconds=np.array(seconds), gpus=np.full(len(seconds), gpus), nodes=np.ones(len(seconds))
    )


def run(risks: FailureModel, *stretches: Stretch, interval_s: float = 1.0, shares=None) -> Outcomes:
    same = np.zeros(max(s.seconds.size for s in stretches), int)
    sure = Uncertainty(common=0, independent=0)
    return Simulation(same, sure, risks, shares or {}, interval_s, 1, None).run(stretches)


def test_what_an_interruption_undoes_is_done_again_and_may_be_interrupted_again() -> None:
    """900 s of work, a stop every 100 s, each undoes 10 s of a 20 s interval: T = 900 + T / 100 x 10 = 1000 s."""
    found = run(replace(CALM, stops=(EVERY_100_S,)), stretch([900.0]), interval_s=20.0)
    assert found.wall_s[0] == pytest.approx(1000) and found.lost_s["stop"][0] == pytest.approx(100)
    assert found.gpu_s[0] == pytest.approx(8 * 1000), "lost work is charged"


def test_idle_hours_that_are_not_charged_cost_days_and_no_gpu_hours() -> None:
    """Nine stops in 900 s, 3.6 s idle each (no work is undone to speak of)."""
    for charged in (True, False):
        stop = replace(EVERY_100_S, idle_hours=0.001, charged=charged)
        found = run(replace(CALM, stops=(stop,)), stretch([900.0]), interval_s=1e-6)
        assert found.wall_s[0] == pytest.approx(900 + 9 * 3.6)
        assert found.gpu_s[0] == pytest.approx(8 * (900 + 9 * 3.6 * charged))


@pytest.mark.parametrize(("shared", "queued"), [(False, 0), (True, 50)])
def test_a_change_of_capacity_costs_a_start_up_and_the_queue_only_where_others_share_it(shared: bool, queued: float):
    """Half of the work on 8 GPUs until second 500, the other half on 16; the first start waits for nobody."""
    risks = replace(CALM, startup_s=20, queue_s=50)
    found = run(risks, stretch([1000.0], end=500), stretch([1000.0], start=500, shared=shared, gpus=16))
    assert found.lost_s[Cause.CHANGE][0] == pytest.approx(20) and found.lost_s[Cause.QUEUE][0] == pytest.approx(queued)
    assert found.wall_s[0] == pytest.approx(1000 + 20 + queued)
    assert found.gpu_s[0] == pytest.approx(8 * 500 + 16 * 520), "a start-up is charged, a queue is not"


def test_work_is_done_phase_after_phase_across_windows() -> None:
    """Three phases of 100 s; a window ends in the second one, and 40 s pass without GPUs."""
    empty = CapacityWindow(start_s=150, end_s=190, gpus=0, shared=False)
    phases = [100.0, 100.0, 100.0]
    found = run(CALM, stretch(phases, end=150), Stretch(window=empty), stretch(phases, start=190))
    assert found.reached_s[0] == pytest.approx([100, 240, 340]) and found.wall_s[0] == pytest.approx(340)
    assert found.gpu_s[0] == pytest.approx(8 * 300)


def test_thousands_of_runs_scatter_as_their_causes_do() -> None:
    """Stops with a queue of 100 s: a Poisson number n of them, mean 100, each uniform in 60 s plus exponential waits.

    Variance of the sum (Wald): E n (mean^2 + variance) = 100 (130^2 + 60^2 / 12 + 100^2).
    """
    risks = replace(CALM, stops=(Interruption(name="stop", per_year=NODE_YEAR_S / 1e6),), queue_s=100)
    rng, sure = np.random.default_rng(5), Uncertainty(common=0, independent=0)
    many = Simulation(np.zeros(1, int), sure, risks, {}, 60.0, 20_000, rng).run([stretch([1e8], shared=True)])
    lost = many.lost_s["stop"]
    assert lost.mean() == pytest.approx(100 * 130, rel=0.01)
    assert lost.var() == pytest.approx(100 * (130**2 + 300 + 100**2), rel=0.05)
