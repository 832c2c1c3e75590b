"""From a deadline to a size: what ends in time, what is larger and does not, and why
nothing can.
"""

import json

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.forecasting.deadline import best_within, sizes_within
from trilane.forecasting.forecast import forecast
from trilane.planning.search_result import sizes_of
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import survey

A100 = cluster("jz-a100-80g")
FEW = {
    "zero": 1,
    "interleaving": 1,
    "sequence_parallel": False,
    "recompute": "none",
}  # a search in milliseconds
ASKED = {"cluster": A100, "vocabulary": 50_257, "gpus": 8, "gbs": 64, "tokens": 2e9, "choices": FEW}


@pytest.fixture(scope="module")
def found():
    return sizes_within(2.0, **ASKED)


@pytest.mark.slow
def test_the_largest_shapes_end_in_time_and_larger_ones_do_not(found):
    sizes = [row.costs["parameters"] for row in found.rows]
    assert [row.costs["tokens_per_parameter"] for row in found.rows] == pytest.approx(
        [2e9 / size for size in sizes]
    )
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0.89 * sizes[0]
    assert all(row.costs["days_p50"] < row.costs["days_p90"] <= 2.0 for row in found.rows)
    assert not any(row.proposal.prediction.is_risky for row in found.rows)
    for p in survey(SizeRequest(parameters=1.08 * sizes[0], **ASKED)).rows:
        assert forecast(p.plan, tokens=2e9).days(0.9) > 2.0, p.plan.label


@pytest.mark.slow
def test_twice_the_days_allow_about_twice_the_parameters_and_root_2_times_with_the_tokens_of_each(
    found,
):
    """6 FLOPs a parameter and token, at about the same rate."""
    largest, twice = (
        each.rows[0].costs["parameters"] for each in (found, sizes_within(4.0, **ASKED))
    )
    assert twice == pytest.approx(2 * largest, rel=0.2)
    some, more = (
        sizes_within(days, **ASKED | {"tokens": "20x"}).rows[0].costs for days in (1.0, 2.0)
    )
    assert more["parameters"] == pytest.approx(2**0.5 * some["parameters"], rel=0.15)
    assert some["tokens"] == 20 * some["parameters"]


def test_a_deadline_that_nothing_meets_is_refused_with_the_days_of_the_smallest():
    with pytest.raises(ValueError, match=r"days=0\.1: the smallest shape"):
        sizes_within(0.1, **ASKED | {"tokens": 3e11}).proposals()


@pytest.fixture(scope="module")
def best():
    cards = [A100, cluster("jz-v100-32g")]
    return best_within(1.0, cards, gpus=8, gbs=64, prices=[2.0, 1.0], choices=FEW)


@pytest.mark.slow
def test_the_best_of_each_cluster_is_compute_optimal_in_time_and_on_three_topologies_by_any_engine(
    best,
):
    """Hoffmann et al. 2022: 20 tokens a parameter. No engine alone ends a larger one."""
    for name in ("jz-a100-80g", "jz-v100-32g"):
        rows = [row for row in best.rows if row.request.cluster.name == name]
        costs = [row.costs for row in rows]
        assert costs[0]["tokens_per_parameter"] == pytest.approx(20) and costs[0]["days_p90"] <= 1.0
        assert (
            len({sizes_of(row.proposal) for row in rows}) == 3
            and len({row.proposal.shape for row in rows}) == 1
        )
        assert costs[0]["gpu_hours_p50"] <= min(each["gpu_hours_p50"] for each in costs)
    alone = sizes_within(1.0, **ASKED | {"tokens": "20x"})
    assert best.rows[0].costs["parameters"] >= 0.96 * alone.rows[0].costs["parameters"]


@pytest.mark.slow
def test_clusters_are_compared_by_one_model_and_a_card_is_worth_the_gpu_hours_that_it_saves(best):
    a100, v100 = (row.costs for row in best.same)
    assert a100["parameters"] == v100["parameters"] and a100["tokens"] == v100["tokens"]
    ratio = a100["gpu_hours_p50"] / v100["gpu_hours_p50"]
    assert v100["money"] == v100["gpu_hours_p50"] and 0.15 < ratio < 0.7
    assert f"does the work of {ratio:.2f} of jz-a100-80g" in best.worth()[0]
    assert f"{0.5 / ratio - 1:+.0%} of money" in best.worth()[0]


@pytest.mark.slow
def test_the_calendar_of_the_best_plan_has_its_gpu_hours(capsys, tmp_path):
    command = (
        "plan best --days 0.5 --cluster jz-a100-80g --gpus 8 --gbs 64 --engine megatron --json"
    )
    assert main(command.split()) == 0
    (tmp_path / "best.json").write_text(capsys.readouterr().out)
    first = json.loads((tmp_path / "best.json").read_text())["plans"][0]
    assert (
        main(
            [
                "plan",
                "calendar",
                str(tmp_path / "best.json"),
                "--tokens",
                str(first["costs"]["tokens"]),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["gpu_hours"] == pytest.approx(
        first["costs"]["gpu_hours_p50"], rel=1e-6
    )
