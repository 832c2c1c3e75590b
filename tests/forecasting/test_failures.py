"""Interruptions: what one costs, how long a node is waited for, how often to save;
counted by hand.
"""

from dataclasses import replace

import pytest
from scipy.stats import poisson

from trilane.forecasting.failures import (
    FailureModel,
    Interruption,
    daly_interval_s,
    wait_for_node_s,
)
from trilane.utils.validation import shipped_json

HOUR, DAY = 3600.0, 86400.0
NOTHING = FailureModel(stops=(), startup_s=0, queue_s=0)
STOP = Interruption(name="stop")


def cost(risks: FailureModel, stop: Interruption = STOP):
    return risks.stop_cost(stop, 1, 12.0, 0)


def test_means_add_and_so_do_variances_of_what_is_independent():
    """Lost work is uniform over 12 s: variance 144 / 12; start-up, idle time and queue are
    exponential.
    """
    assert cost(NOTHING) == (6, 12, 1)
    starting = replace(NOTHING, startup_s=10)
    assert cost(starting) == (16, 112, 1)
    queued = replace(starting, queue_s=4)
    assert cost(queued) == (20, 12 + 100 + 16, 16 / 20)
    idle = Interruption(name="stop", idle_hours=0.01)  # 36 s
    assert cost(starting, idle) == (52, 112 + 36**2, 1)
    assert cost(starting, replace(idle, charged=False)) == (52, 112 + 36**2, 16 / 52)


@pytest.mark.parametrize("spares", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("nodes", [1, 48, 1000])
def test_a_node_is_waited_for_where_all_spares_are_under_repair(nodes: int, spares: int):
    """M/M/inf: as many are under repair as a Poisson says; k + 1 of them: the first is back after 1
    / (k + 1).
    """
    under_repair = poisson(
        nodes * 10 / 365.25 * 1.0
    )  # 10 failures a node and year, repaired within a day
    expected = under_repair.sf(spares - 1) * DAY / (spares + 1)
    assert wait_for_node_s(nodes, 10, 24, spares) == pytest.approx(expected, rel=1e-9)


def test_checkpoints_are_as_often_as_daly_says_for_all_interruptions_together():
    """Equation 37: d = 60 s, M = 20 h: Young's 2939.4 s, times 1.00685, less the save."""
    assert daly_interval_s(60, 20 * HOUR) == pytest.approx(2899.53, rel=1e-5)
    risks = replace(
        NOTHING,
        stops=(Interruption(name="a", per_node_year=1.0), Interruption(name="b", per_year=2.0)),
    )
    year = 365.25 * DAY
    assert risks.stops_per_s(100) * year == pytest.approx(102), (
        "rates by node grow with the nodes, others do not"
    )
    assert risks.checkpoint_interval_s(60, 100) == pytest.approx(daly_interval_s(60, year / 102))
    assert replace(risks, checkpoint_s=1800).checkpoint_interval_s(60, 100) == 1800
    assert NOTHING.checkpoint_interval_s(60, 100) == NOTHING.job_hours * HOUR, (
        "nothing to save for but the job's end"
    )


def test_every_assumption_has_a_source():
    assert set(shipped_json("risks")["sources"]) == set(vars(FailureModel())) - {"stops"}
    assert all(stop.source for stop in FailureModel().stops)
