"""Pace: how long a rank's iterations take relative to its own median, in which of its own work the
difference lies, and the events of a slow run (ranks/pace.jsonl).

All ranks train in step, so that the ranks of a slow run are late in the same iterations: each node
sees that by itself.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trilane.utils.files import append_line, json_lines, read_text
from trilane.utils.tables import one_line
from trilane.utils.validation import require

# The phases of a rank's own work, and how many iterations in a row must be late before a run counts
# as slow.
OWN, LATE = ("batch-generator", "forward-compute", "backward-compute", "optimizer"), 10
# the content of the file `save` that also ends a run; what such a run is stopped by
RESTART = "a slow node"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of an iteration of `samples`, by their median (`usual_s`) and in the last `late` ones
    (`now_s`, their mean); what each phase of OWN takes longer. `usual_s` is 0 until there is a
    median.
    """

    late: int = 0
    samples: int = 0
    usual_s: float = 0.0
    now_s: float = 0.0
    excess_s: tuple[float, ...] = (0.0,) * len(OWN)

    def __post_init__(self) -> None:
        numbers = (self.late, self.samples, self.usual_s, self.now_s, *map(abs, self.excess_s))
        sound = len(self.excess_s) == len(OWN) and all(0 <= n < 1e9 for n in numbers)
        require(sound, "pace", numbers, "is damaged")

    def encode(self) -> bytes:
        """Its part of a heartbeat's record."""
        numbers = " ".join(f"{n:.4g}" for n in (self.usual_s, self.now_s, *self.excess_s))
        return f"{self.late} {self.samples} {numbers}".encode()


def decode(words: list[str]) -> Pace:
    """The pace in the words of a record; ValueError for what no rank writes."""
    if not words:
        return Pace()
    usual_s, now_s, *excess_s = map(float, words[2:])
    return Pace(
        late=int(words[0]),
        samples=int(words[1]),
        usual_s=usual_s,
        now_s=now_s,
        excess_s=tuple(excess_s),
    )


class PaceMeter:
    """The pace of one rank. Seconds count by the sample, so that a ramp of the batch size is no
    slowness.
    """

    def __init__(self) -> None:
        self._usual = deque[tuple[float, ...]](maxlen=100)  # late iterations do not become usual
        self._late, self._count, self._in_time = deque[tuple[float, ...]](maxlen=LATE), 0, 0

    def add(self, samples: int, seconds: float, phases: Mapping[str, float]) -> Pace:
        """Add an iteration with this rank's seconds by phase; the pace with it."""
        times = tuple(s / samples for s in (seconds, *(phases.get(name, 0.0) for name in OWN)))
        usual = (
            tuple(map(median, zip(*self._usual, strict=True))) if len(self._usual) >= LATE else ()
        )
        if usual and times[0] > self._limit(usual[0]):
            self._late.append(times)
            self._count, self._in_time = self._count + 1, 0
        else:
            self._in_time += 1
            self._usual.append(times)
        if self._in_time > 2:  # fewer are luck: what holds a rank up may miss an iteration
            self._late.clear()
            self._count = 0
        if not usual:
            return Pace(samples=samples)
        now = tuple(map(fmean, zip(*self._late, strict=True))) if self._late else usual
        excess = tuple(
            samples * (after - before) for after, before in zip(now[1:], usual[1:], strict=True)
        )
        usual_s, now_s = samples * usual[0], samples * now[0]
        return Pace(
            late=min(self._count, 1 << 29),
            samples=samples,
            usual_s=usual_s,
            now_s=now_s,
            excess_s=excess,
        )

    def _limit(self, middle: float) -> float:
        """What an iteration may take: five robust standard deviations more than the median; at
        least a tenth: less costs in an hour only the minutes of a restart.
        """
        spread = 1.4826 * median(abs(times[0] - middle) for times in self._usual)
        return middle + max(5.0 * spread, 0.1 * middle)


def note(folder: Path, iteration: int, text: str, nodes: tuple[str, ...] = ()) -> None:
    """Append an event of the run's pace; `text` is "" where it is as usual again. OSError where the
    disk is full.
    """
    values = {"iteration": iteration, "text": text, "nodes": nodes}
    append_line(folder / "ranks/pace.jsonl", json.dumps(values))


def slowness(folder: Path) -> tuple[str, tuple[str, ...]]:
    """What makes the run slow now, in one line, and the nodes at fault; "" where it is as fast as
    usual.
    """
    events = [e for e in json_lines(read_text(folder / "ranks/pace.jsonl")) if _is_event(e)]
    return (one_line(events[-1]["text"]), tuple(events[-1]["nodes"])) if events else ("", ())


def _is_event(values: Mapping[str, Any]) -> bool:
    nodes = values.get("nodes")
    return (
        isinstance(values.get("text"), str)
        and isinstance(nodes, list)
        and all(isinstance(n, str) for n in nodes)
    )
