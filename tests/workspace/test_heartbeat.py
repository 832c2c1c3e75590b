"""When a run counts as stalled, by a clock that the test turns."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trilane.workspace import heartbeat, stall_detector
from trilane.workspace.heartbeat import encode, place, read_beats, read_calls
from trilane.workspace.stall_detector import StallDetector


class Clock:
    """time.monotonic() of the detector."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stall_detector, "time", made)
    return made


@pytest.fixture
def beat(tmp_path: Path) -> Callable[..., None]:
    (tmp_path / "ranks").mkdir()

    def write(rank: int, step: int, phase: str = "forward") -> None:
        (tmp_path / f"ranks/{rank}.beat").write_bytes(encode(step, phase, 12.5, place()))

    return write


def stalls_after(detector: StallDetector, clock: Clock, most: int = 20_000) -> int:
    """The first whole second of silence after which it reports a stall."""
    begin = clock.now
    for second in range(0, most, 5):
        clock.now = begin + second
        if detector.stalled():
            return second
    return most


@pytest.mark.parametrize(
    ("timeout_s", "step", "seconds"), [(200, 2, 205), (200, 1, 1005), (200, 0, 1005), (20, 1, 665)]
)
def test_a_rank_is_given_five_times_as_long_until_its_second_iteration(
    timeout_s: float, step: int, seconds: int, tmp_path: Path, clock: Clock, beat: Callable[..., None]
) -> None:
    """It compiles and builds samples in the first: five times the limit, and 660 s at least. Asked every 5 s."""
    detector = StallDetector(tmp_path, 1, timeout_s)
    beat(0, step)
    assert stalls_after(detector, clock) == seconds


def test_a_change_of_phase_is_progress_and_the_rank_without_is_named(
    tmp_path: Path, clock: Clock, beat: Callable[..., None]
) -> None:
    detector = StallDetector(tmp_path, 2, 100)
    beat(0, 5), beat(1, 5)
    assert detector.stalled() == ""
    clock.now += 90
    beat(0, 5, "backward")
    assert detector.stalled() == ""
    clock.now += 90
    assert detector.stalled() == "no progress for 100 s: rank 1 in iteration 5, forward"


def test_a_rank_that_has_finished_may_be_silent(tmp_path: Path, clock: Clock, beat: Callable[..., None]) -> None:
    """Rank 0 writes the last checkpoint's manifest while the others have ended."""
    detector = StallDetector(tmp_path, 2, 100)
    beat(1, 9, "end")
    for second in range(0, 2000, 50):
        clock.now = 1000 + second
        beat(0, 9, f"saving-{second}")
        assert detector.stalled() == ""


def test_a_rank_that_never_began_is_named_and_no_timeout_means_never(
    tmp_path: Path, clock: Clock, beat: Callable[..., None]
) -> None:
    detector, off = StallDetector(tmp_path, 3, 200), StallDetector(tmp_path, 3, 0)
    for second in range(0, 1010, 5):
        clock.now = 1000 + second
        for rank in (0, 2):
            beat(rank, second)
        said = detector.stalled()
        assert bool(said) is (second > 1000) and not off.stalled()
    assert said == "no progress for 200 s: rank 1 before its first heartbeat"


def test_a_heartbeat_survives_its_file(tmp_path: Path, beat: Callable[..., None]) -> None:
    beat(3, 7, "")
    (found,) = read_beats(tmp_path).values()
    assert (found.rank, found.step, found.phase, found.time) == (3, 7, "", 12.5)
    assert (tmp_path / "ranks/3.beat").stat().st_size == heartbeat.RECORD


def test_the_calls_of_a_ring_that_has_gone_round_are_in_order(tmp_path: Path) -> None:
    """Numbers 3 and 4 have replaced 0 and 1; the slot of 2 is half-written."""
    slots = [f"{n:012d} 5.000000 > f{n}".ljust(127) + "\n" for n in (3, 4, 1, 2)]
    slots[2] = slots[2][:20].ljust(128, "\0")
    (tmp_path / "0.calls").write_text("".join(slots))
    assert read_calls(tmp_path / "0.calls") == ["5.000000 > f2", "5.000000 > f3", "5.000000 > f4"]
