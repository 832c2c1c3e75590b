"""From a deadline to a size: what ends in time, what is larger and does not, and why
nothing can.
"""

import json

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.forecasting.forecast import forecast
from trilane.planning.deadline import best_within
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import survey

A100, V100 = cluster("jz-a100-80g"), cluster("jz-v100-32g")
FEW = {
    "zero": 1,
    "interleaving": 1,
    "sequence_parallel": False,
    "recompute": "none",
}  # a search in milliseconds
ASKED = {"gpus": 8, "gbs": 64, "choices": FEW}


def largest(days, **asked):
    """The largest model on the A100s."""
    return best_within(days, [A100], engine="megatron", **ASKED, **asked).best


@pytest.mark.slow
def test_the_largest_ends_in_time_and_larger_ones_do_not():
    found = largest(2.0, tokens=2e9)
    assert found.costs["days_p50"] < found.costs["days_p90"] <= 2.0
    more = {"parameters": 1.08 * found.shape.parameters, "vocabulary": 50_257, "tokens": 2e9}
    for p in survey(SizeRequest(cluster=A100, **more, **ASKED)).rows:
        assert forecast(p.plan, tokens=2e9).days(0.9) > 2.0, p.plan.label


@pytest.mark.slow
def test_twice_the_days_allow_twice_the_parameters_of_as_many_tokens():
    """6 FLOPs a parameter and token, at about the same rate."""
    some, more = (largest(days, tokens=2e9).shape.parameters for days in (2.0, 4.0))
    assert more == pytest.approx(2 * some, rel=0.2)


def test_a_deadline_that_nothing_meets_is_exit_code_1_with_the_days_of_the_smallest(capsys):
    words = "plan best --vocab 50257 --gpus 8 --gbs 64 --cluster jz-a100-80g --tokens 300B"
    assert main([*words.split(), "--days", "0.1"]) == 1
    assert "the smallest shape (" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^params=.*the smallest shape"):
        assert best_within(0.1, [A100], tokens=3e11, **ASKED).best


@pytest.fixture(scope="module")
def best():
    return best_within(1.0, [A100, V100], prices=[2.0, 1.0], **ASKED)


@pytest.mark.slow
def test_the_best_of_each_cluster_is_compute_optimal_in_time_and_on_three_topologies_by_any_engine(
    best,
):
    """Hoffmann et al. 2022: 20 tokens a parameter. No engine alone ends a larger one."""
    for name in ("jz-a100-80g", "jz-v100-32g"):
        rows = [row for row in best.rows if row.plan.cluster.name == name]
        costs = [row.costs for row in rows]
        assert rows[0].tokens == pytest.approx(20 * rows[0].shape.parameters)
        assert all(each["days_p90"] <= 1.0 for each in costs)
        assert len({row.lane for row in rows}) == len(rows)
        assert len({row.shape for row in rows}) == 1
        assert costs[0]["gpu_hours_p50"] <= min(each["gpu_hours_p50"] for each in costs)
    assert best.best.shape.parameters >= 0.96 * largest(1.0).shape.parameters


@pytest.mark.slow
def test_a_card_is_worth_the_gpu_hours_that_it_saves(best):
    first = {}
    for p in best.rows:
        first.setdefault(p.plan.cluster.name, p)
    a100, v100 = first.values()
    assert v100.costs["money_p50"] == v100.costs["gpu_hours_p50"]
    ratio = a100.cost / v100.cost
    assert 0.15 < ratio < 0.7
    over = best.to_frame().groupby("cluster").cost_over_best.first()
    assert over["jz-v100-32g"] == pytest.approx(1 / ratio - 1)


@pytest.mark.slow
def test_the_calendar_of_the_best_plan_has_its_gpu_hours(capsys, tmp_path):
    words = "plan best --days 0.5 --cluster jz-a100-80g --gpus 8 --gbs 64 --engine megatron --json"
    assert main(words.split()) == 0
    path = tmp_path / "best.json"
    path.write_text(capsys.readouterr().out)
    first = json.loads(path.read_text())["plans"][0]["costs"]
    assert main(f"plan calendar {path} --tokens {first['tokens']} --json".split()) == 0
    hours = json.loads(capsys.readouterr().out)["gpu_hours_p50"]
    assert hours == pytest.approx(first["gpu_hours_p50"], rel=1e-6)
