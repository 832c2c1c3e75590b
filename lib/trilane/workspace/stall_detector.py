"""StallDetector: whether a rank of a run makes no progress, by the heartbeats of this node and the others' reports."""

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.workspace.heartbeat import (
    END,
    Heartbeat,
    NodeReport,
    Progress,
    beats_in,
    process_state,
    read_report,
    read_reports,
    report_paths,
)

# Until its second iteration a rank imports, builds samples and compiles: its timeout is longer by this factor, and at
# least this many seconds: a minute more than the ranks wait for one another (engine/torchrun.py), which
# ends with the names of those that did not come.
START_FACTOR, START_S = 5.0, 660.0

REPORT_S = 15.0  # between two reports of a node
READS_PER_S = 0.7  # of other nodes' reports, by the node that decides, while its own ranks make progress
PASS_SHARE = 0.25  # of the timeout: no slower than this are all of them read once
SILENT = 4  # a node is silent after so many reports that did not come
SILENT_S = 10.0  # and not before
LOOK_S = 0.1  # between two looks at the heartbeats of this node
SHARED_LOOK_S = 5.0  # the same where they lie in the run folder
RESOLUTION_S = 2.0  # of the ages of ranks of different nodes
SETTLE_S = 2.0  # from the first stall to the decision: the reports of other nodes' stalls come in


def report_every_s(timeout_s: float) -> float:
    """Seconds between two reports of a node: REPORT_S, less for a timeout of a test."""
    return min(REPORT_S, max(0.5, timeout_s / 10))


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A node's report; when this process first found it, and when it last looked, by its own clock."""

    report: NodeReport
    since: float
    looked: float


class StallDetector:
    """Detects when a rank of the run in `folder` has made no progress for `timeout_s`; 0 disables it.

    The heartbeats of this node's ranks are read from `places` (default: ranks/ of the run folder). Where one of them
    stalls, the reports of all nodes are read, and it is decided which rank has stalled longest: by the node that
    `leads`, or by one that has waited `patience_s` for it in vain. Ranks train in step: a rank that hangs soon stalls
    all. So while its own ranks make progress, the leading node reads one report after the other, slowly.

    Clocks of hosts differ: what counts is for how long a heartbeat did not change, as its own node saw it, and for how
    long a report did not, as this process sees it. A rank on a node that no longer reports stalls with the others:
    alone it does not, since that node's watchdog may have died and its ranks live.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        timeout_s: float,
        *,
        places: Callable[[], Iterable[Path]] | None = None,
        start: str = "",
        leads: bool = True,
        patience_s: float = 0.0,
    ) -> None:
        self._folder, self._ranks, self.timeout_s, self._start_id = folder, ranks, timeout_s, start
        self._places = places or (lambda: [folder / "ranks"])
        self._leads, self._patience_s = leads, patience_s
        self._factor = max(START_FACTOR, START_S / timeout_s) if timeout_s else START_FACTOR
        self._begin = self._next = self._next_reading = time.monotonic()
        self._changed: dict[int, tuple[Heartbeat, float]] = {}
        self._seen: dict[int, _Seen] = {}
        self._queue, self._pause_s = list[Path](), 0.0
        self._stalled_since = 0.0
        self._exits = set[int]()
        self.own: dict[int, Progress] = {}

    def look(self) -> bool:
        """Read this node's heartbeats; False, without a look, where the last is too recent. Cheap to call."""
        now = time.monotonic()
        if self.timeout_s <= 0 or now < self._next:
            return False
        beats: dict[int, Heartbeat] = {}
        is_shared = False
        for place in self._places():
            beats |= beats_in(place)
            is_shared |= place.is_relative_to(self._folder)
        self._next = now + (min(SHARED_LOOK_S, max(0.2, self.timeout_s / 20)) if is_shared else LOOK_S)
        for rank, beat in beats.items():
            if rank not in self._changed or self._changed[rank][0] != beat:
                self._changed[rank] = (beat, now)
        self._exits = {r for r, beat in beats.items() if beat.phase != END and (r in self._exits or _has_exited(beat))}
        self.own = {
            rank: Progress(beat=beat, idle_s=now - since, has_exited=rank in self._exits)
            for rank, (beat, since) in self._changed.items()
        }
        return True

    @property
    def is_stalled_here(self) -> bool:
        """Whether a rank of this node made no progress for too long when last looked at."""
        return any(self._is_late(progress) for progress in self.own.values())

    def stalled(self) -> str:
        """Why the run counts as stalled: the rank longest without progress; "" where all progress. Cheap to call."""
        return self.decide() if self.look() else ""

    def decide(self) -> str:
        """The same by what the last look() found, and by the other nodes' reports as far as they are due to be read."""
        now, others = time.monotonic(), len(self.own) < self._ranks
        is_late = any(self._is_late(progress, self._patience_s) for progress in self.own.values())
        if others and is_late and not self._stalled_since:
            self._read_all(now)
        elif others and self._leads:
            self._read_next(now)
        elif others and not is_late:
            return ""
        why = self._longest(now)
        if not why or not self._seen:
            self._stalled_since = 0.0
            return why
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < min(SETTLE_S, self.timeout_s / 20):
            return ""
        self._read_all(now)
        self._stalled_since = 0.0
        return self._longest(now)

    def hosts(self) -> set[str]:
        """The hosts that can answer: of this node's ranks, and of the nodes that still report.

        Nor is waited for the node of rank 0 where another decides in its place, and it has not reported since the stall
        was found: a node with a stall reports every second.
        """
        gone = set(self.silent())
        gone |= {first for first, seen in self._seen.items() if first == 0 and seen.looked > seen.since}
        own = {progress.beat.host for progress in self.own.values()}
        return own | {seen.report.host for first, seen in self._seen.items() if first not in gone}

    def silent(self) -> dict[int, NodeReport]:
        """The last reports of nodes that no longer report, by first rank."""
        return {first: seen.report for first, seen in self._seen.items() if self._is_silent(seen)}

    def _read_all(self, now: float) -> None:
        for report in read_reports(self._folder):
            self._note(report, now)

    def _read_next(self, now: float) -> None:
        """Read the next report where it is due; at the end of a pass begin another."""
        if now < self._next_reading:
            return
        every_s = report_every_s(self.timeout_s)
        if not self._queue:
            self._queue = report_paths(self._folder)
            most_s = max(every_s, PASS_SHARE * self.timeout_s)
            self._pause_s = min(max(every_s, len(self._queue) / READS_PER_S), most_s) / max(1, len(self._queue))
        if self._queue and (report := read_report(self._queue.pop())):
            self._note(report, now)
        self._next_reading = now + self._pause_s

    def _note(self, report: NodeReport, now: float) -> None:
        old = self._seen.get(report.first)
        is_ours = all(progress.beat.rank in self.own for progress in report.ranks)
        if report.start == self._start_id and not is_ours:
            is_same = old is not None and old.report.number == report.number
            since = old.since if old is not None and is_same else now
            self._seen[report.first] = _Seen(report=report, since=since, looked=now)

    def _longest(self, now: float) -> str:
        """The rank longest without progress, where its time is up; first those that exited, or whose node is silent."""
        alive, silent = dict(self.own), dict[int, Progress]()
        ages = {rank: progress.idle_s for rank, progress in self.own.items()}
        for seen in self._seen.values():
            of_node = {progress.beat.rank: progress for progress in seen.report.ranks}
            (silent if self._is_silent(seen) else alive).update(of_node)
            ages |= {rank: progress.idle_s + now - seen.since for rank, progress in of_node.items()}
        running = [p for p in alive.values() if p.beat.phase != END]
        late = [p for p in alive.values() if self._is_late(p)]
        lost = [p for p in silent.values() if self._is_late(p, age_s=ages[p.beat.rank])]
        found = [(p.has_exited, ages[p.beat.rank] / self._times(p.beat), p.beat.step, _text(p)) for p in late]
        if late or not running:
            ages_of_lost = ((ages[p.beat.rank], p) for p in lost)
            found += [
                (True, age, p.beat.step, f"{p.beat} on {p.beat.host}, which no longer reports")
                for age, p in ages_of_lost
            ]
        absent = [r for r in range(self._ranks) if r not in ages]
        if absent and now - self._begin > self.timeout_s * self._factor:
            found.append((False, (now - self._begin) / self._factor, 0, f"rank {absent[0]} before its first heartbeat"))
        return f"no progress for {self.timeout_s:.0f} s: {_first(found, self._seen)}" if found else ""

    def _times(self, beat: Heartbeat) -> float:
        return self._factor if beat.step < 2 else 1.0

    def _is_late(self, progress: Progress, more_s: float = 0.0, *, age_s: float | None = None) -> bool:
        """Whether a rank made no progress for too long, and `more_s` beyond; a rank that has finished may be silent."""
        idle_s = progress.idle_s if age_s is None else age_s
        return progress.beat.phase != END and idle_s > self.timeout_s * self._times(progress.beat) + more_s

    def _is_silent(self, seen: _Seen) -> bool:
        return seen.looked - seen.since > max(SILENT_S, SILENT * report_every_s(self.timeout_s))


def _first(found: Sequence[tuple[bool, float, int, str]], others: object) -> str:
    """Of (is the likely cause, age in s, iteration, text) the text that is first: of the likely causes the oldest.

    Where nodes have reported ages, those that differ by less than the reports do count as equal, and the earliest
    iteration decides.
    """
    is_cause, longest, *_ = max(found)
    least = longest - (RESOLUTION_S if others else 0.0)
    near = [(step, -age, text) for cause, age, step, text in found if cause == is_cause and age >= least]
    return min(near)[2]


def _text(progress: Progress) -> str:
    return f"{progress.beat}{', which has exited' if progress.has_exited else ''}"


def _has_exited(beat: Heartbeat) -> bool:
    """Whether a rank's process has ended before the rank did."""
    return beat.host == platform.node() and process_state(beat.pid) in ("gone", "Z", "X")
