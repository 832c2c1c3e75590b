"""StallDetector: whether a rank of a run makes no progress, by the heartbeats of this node and the others' reports."""

import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from trilane.workspace.heartbeat import END, Heartbeat, NodeReport, beats_in, process_state, read_reports


def report_every_s(timeout_s: float) -> float:
    """Seconds between two reports of a node: 15, less for the short timeout of a test."""
    return min(15.0, max(0.5, timeout_s / 10))


class StallDetector:
    """Finds which rank of the run in `folder` has made no progress for `timeout_s` (0: never), on one of its nodes.

    Ranks train in step: one that hangs soon stalls all. So a node looks at its own ranks in `places()` alone; once one
    of them stalls, and `patience_s` later, it reads the reports of all nodes. Clocks of hosts are never compared: what
    counts is for how long a heartbeat did not change, as its own node saw it, and whether a report's number rises.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        timeout_s: float,
        *,
        places: Callable[[], Iterable[Path]],
        start: str = "",
        patience_s: float = 0.0,
    ) -> None:
        self._folder, self._ranks, self.timeout_s, self._start = folder, ranks, timeout_s, start
        self._places, self._patience_s = places, patience_s
        self._begin = self._next = time.monotonic()
        self._changed: dict[int, tuple[Heartbeat, float]] = {}
        self._stalled_at: float | None = None
        self._before: dict[int, int] = {}  # the numbers of the reports when the stall was found
        self._others: list[NodeReport] = []
        self.silent: list[NodeReport] = []  # the last reports of nodes that no longer report
        self.own: dict[int, Heartbeat] = {}

    def look(self) -> None:
        """Read this node's heartbeats."""
        now = time.monotonic()
        for beat in (beat for where in self._places() for beat in beats_in(where).values()):
            if beat.rank not in self._changed or self._changed[beat.rank][0] != beat:
                self._changed[beat.rank] = (beat, now)
        self.own = {
            rank: replace(beat, idle_s=now - since, has_exited=_has_exited(beat))
            for rank, (beat, since) in self._changed.items()
        }

    @property
    def is_stalled_here(self) -> bool:
        """Whether a rank of this node made no progress for too long when last looked at."""
        return any(self._is_late(beat) for beat in self.own.values())

    def decide(self) -> str:
        """Why the run counts as stalled, by the last look(): the rank that stands still; "" where all progress.

        With other nodes it takes a second or two until those have reported their stalls, and two intervals where one
        is silent.
        """
        now = time.monotonic()
        is_late = any(self._is_late(beat, self._patience_s) for beat in self.own.values())
        if self.timeout_s <= 0 or not (is_late or (not self.own and now - self._begin > self._patience_of(0))):
            self._stalled_at = None
            return ""
        if len(self.own) < self._ranks and not self._others_known(now):
            return ""
        return f"no progress for {self.timeout_s:.0f} s: {self._first(now)}"

    def hosts(self) -> set[str]:
        """The hosts that can answer: of this node's ranks, and of the nodes that still report."""
        return {beat.host for beat in self.own.values()} | {r.host for r in self._others if r not in self.silent}

    def _others_known(self, now: float) -> bool:
        """Whether all nodes have reported their stalls; read once a second, as they then report."""
        if self._stalled_at is None:
            self._stalled_at, self._before = now, {}
        if now < self._next:
            return False
        every_s = report_every_s(self.timeout_s)
        self._next = now + min(1.0, every_s)
        reports = (report for report in read_reports(self._folder) if report.start == self._start)
        self._others = [report for report in reports if not {beat.rank for beat in report.ranks} <= {*self.own}]
        self._before = self._before or {report.first: report.number for report in self._others}
        known = len(self.own) + sum(len(report.ranks) for report in self._others)
        stopped = all(self._is_late(b) or b.phase == END for report in self._others for b in report.ranks)
        waited = now - self._stalled_at > 2 * every_s
        self.silent = [r for r in self._others if waited and self._before.get(r.first) == r.number]
        return waited or (stopped and known == self._ranks)

    def _first(self, now: float) -> str:
        """The rank that stands still: one that is gone, else in the earliest iteration, of those the longest."""
        # no rank waits in an earlier iteration for one in a later one
        alive = [*self.own.values(), *(b for r in self._others if r not in self.silent for b in r.ranks)]
        late = [b for b in alive if self._is_late(b)]
        found = [((not b.has_exited, b.step, -b.idle_s), f"{b}{', which has exited' * b.has_exited}") for b in late]
        lost = [b for report in self.silent for b in report.ranks if b.phase != END]
        found += [((False, b.step, -b.idle_s), f"{b} on {b.host}, which no longer reports") for b in lost]
        absent = sorted({*range(self._ranks)} - {b.rank for b in (*alive, *lost)})
        if absent and now - self._begin > self._patience_of(0) and all(b.step < 2 for b in alive):
            found.append(((False, -1, 0.0), f"rank {absent[0]} before its first heartbeat"))
        return min(found)[1]

    def _patience_of(self, step: int) -> float:
        """The timeout of a rank in that iteration, s."""
        # Until its second iteration a rank imports, builds samples and compiles; and it is given a minute more than the
        # ranks wait for one another (engine/torchrun.py), which ends with the names of those that did not come.
        return self.timeout_s if step >= 2 else max(5 * self.timeout_s, 660.0)

    def _is_late(self, beat: Heartbeat, more_s: float = 0.0) -> bool:
        return beat.phase != END and beat.idle_s > self._patience_of(beat.step) + more_s  # one that ended may be silent


def _has_exited(beat: Heartbeat) -> bool:
    """Whether a rank's process has ended before the rank did."""
    return beat.phase != END and beat.host == platform.node() and process_state(beat.pid) in ("gone", "Z", "X")
