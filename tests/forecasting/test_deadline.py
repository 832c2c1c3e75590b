"""From a deadline to a size: what ends in time, what is larger and does not, and why nothing can."""

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.forecasting.deadline import sizes_within
from trilane.forecasting.forecast import forecast
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import survey

A100 = cluster("jz-a100-80g")
FEW = {"zero": 1, "interleaving": 1, "sequence_parallel": False, "recompute": "none"}  # a search in milliseconds
ASKED = {"cluster": A100, "vocabulary": 50_257, "gpus": 8, "gbs": 64, "tokens": 2e9, "choices": FEW}
COMMAND = ["plan", "size", "--vocab", "50257", "--gpus", "8", "--gbs", "64", "--cluster", "jz-a100-80g"]


@pytest.fixture(scope="module")
def found():
    return sizes_within(2.0, **ASKED)


@pytest.mark.slow
def test_the_largest_shapes_end_in_time_and_larger_ones_do_not(found):
    sizes = [p.shape.parameters for p, _ in found.rows]
    assert [d["tokens_per_parameter"] for _, d in found.rows] == pytest.approx([2e9 / size for size in sizes])
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0.89 * sizes[0]
    assert all(d["days_50"] < d["days_90"] <= 2.0 and not p.prediction.is_risky for p, d in found.rows)
    for p in survey(SizeRequest(parameters=1.08 * sizes[0], **ASKED)).rows:
        assert forecast(p.plan, tokens=2e9).days(0.9) > 2.0, p.plan.label


@pytest.mark.slow
def test_twice_the_days_allow_about_twice_the_parameters(found):
    """6 FLOPs a parameter and token, at about the same rate."""
    largest, twice = (each.rows[0][0].shape.parameters for each in (found, sizes_within(4.0, **ASKED)))
    assert twice == pytest.approx(2 * largest, rel=0.2)


@pytest.mark.slow
def test_where_memory_is_the_limit_it_is_the_reason():
    long = sizes_within(2000.0, **ASKED | {"gpus": 1, "gbs": 8})
    proposal, dated = long.rows[0]
    assert dated["days_90"] < 1800 and "memory" in long.reason and not proposal.prediction.is_risky


def test_a_deadline_that_nothing_meets_is_exit_code_1_with_the_days_of_the_smallest(capsys):
    assert main([*COMMAND, "--tokens", "300B", "--days", "0.1"]) == 1
    assert "the smallest shape (" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"days=0\.1: the smallest shape"):
        sizes_within(0.1, **ASKED | {"tokens": 3e11}).proposals()
