"""A run that leaves its own pace is noticed, and the rank that makes it slow is named; what is
usual is no slowness.
"""

import pytest

from trilane.workspace.pace import note, slowness
from trilane_engine.pace import PaceMeter


def lost(*seconds: float, samples: tuple[int, ...] = ()) -> float:
    """What these iterations lose, in restarts of 30 s."""
    meter = PaceMeter()
    for number, time in enumerate(seconds):
        pace = meter.add((samples or (8,) * len(seconds))[number], time, {"forward-compute": time})
    return pace.lost


USUAL = (1.0, 1.02, 0.98) * 10


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((1.3,) * 10, 0.1), ((1.05,) * 10, 0.0), ((9.0,) * 4, 1.067), ((9.0,) * 99, 2.0)],
    ids=["slow", "a twentieth", "a restart would have been cheaper", "at most two restarts"],
)
def test_what_is_late_above_the_median_and_its_spread_is_lost(
    seconds: tuple[float, ...], expected: float
):
    assert lost(*USUAL, *seconds) == expected


@pytest.mark.parametrize(("usual_s", "burst"), [(0.03, 8.0), (3.0, 1.7)])
def test_a_run_is_slow_once_a_restart_would_have_cost_less_not_by_bursts_of_other_work(
    usual_s: float, burst: float
):
    """By seconds, whatever an iteration takes, and not forgotten for some quick iterations."""
    meter = PaceMeter()

    def trained(seconds: float, factor: float = 1.0) -> float:
        """What is lost after so many seconds of iterations that take so many times as long."""
        lost = 0.0
        for number in range(max(1, round(seconds / usual_s / factor))):
            lost = meter.add(8, usual_s * factor * (1 + 0.01 * (number % 3)), {}).lost
        return lost

    trained(60.0)
    for _ in range(10):
        assert trained(2.0, factor=burst) < 0.1
        assert trained(18.0) < 0.1
    passed = 0
    while trained(10.0, factor=8.0) < 1:
        trained(0.1)
        passed += 10
    assert passed < 60
    assert trained(1.0) > 0.9 and trained(600.0) == 0


def test_a_ramp_of_the_batch_is_no_slowness():
    assert lost(*USUAL, *(1.9,) * 10, samples=(8,) * 30 + (16,) * 10) == 0


def test_the_last_event_counts_and_half_a_line_does_not(tmp_path):
    (tmp_path / "ranks").mkdir()
    note(tmp_path, 40, "SLOW\x1b[2J since", ("n1",))
    with (tmp_path / "ranks/pace.jsonl").open("a") as file:
        file.write('{"nodes": "n", "te')
    text, nodes = slowness(tmp_path)
    assert text.startswith("SLOW") and "\x1b" not in text and nodes == ("n1",)
    note(tmp_path, 60, "")
    assert slowness(tmp_path) == ("", ())
