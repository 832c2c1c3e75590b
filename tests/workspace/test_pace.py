"""A run that leaves its own pace is noticed, and the rank that makes it slow is named; what is
usual is no slowness.
"""

from pathlib import Path

import pytest

from trilane.workspace.pace import LATE, PaceMeter, note, slowness


def late(*seconds: float, samples: tuple[int, ...] = ()) -> int:
    """How many of the last iterations were late."""
    meter = PaceMeter()
    for number, time in enumerate(seconds):
        pace = meter.add((samples or (8,) * len(seconds))[number], time, {"forward-compute": time})
    return pace.late


USUAL = (1.0, 1.02, 0.98) * 10


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.3,) * LATE, LATE),
        ((1.05,) * LATE, 0),
        ((9.0,) * 9 + (1.0,) * 3, 0),
        ((9.0,) * 9 + (1.0, 9.0), LATE),
    ],
    ids=["slow", "a twentieth", "back in time", "but for one"],
)
def test_ten_iterations_above_the_median_and_its_spread_are_slow(
    seconds: tuple[float, ...], expected: int
) -> None:
    assert late(*USUAL, *seconds) == expected


def test_a_ramp_of_the_batch_is_no_slowness() -> None:
    assert late(*USUAL, *(1.9,) * LATE, samples=(8,) * 30 + (16,) * LATE) == 0


def test_the_last_event_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    note(tmp_path, 40, "SLOW\x1b[2J since", ("n1",))
    with (tmp_path / "ranks/pace.jsonl").open("a") as file:
        file.write('{"nodes": "n", "te')
    text, nodes = slowness(tmp_path)
    assert text.startswith("SLOW") and "\x1b" not in text and nodes == ("n1",)
    note(tmp_path, 60, "")
    assert slowness(tmp_path) == ("", ())
