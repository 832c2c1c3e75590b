"""Stall: whether a rank of this node makes no progress, by its heartbeats."""

import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from trilane.workspace.heartbeat import END, SAVE, Heartbeat, NodeReport, own_beats, process_state
from trilane.workspace.pace import LATE

# Seconds in which a rank may always stand still: a client of Lustre waits 100 s for a server (its
# manual, obd_timeout) before it connects again, and a restart costs more than the wait.
LEAST_S = 180.0


class Stall:
    """Whether a rank of this node has made no progress for `timeout_s`, in the start `env` of the
    run in `folder`.

    Ranks train in step: one that hangs soon stalls all, so that each node looks at its own alone.
    Clocks of hosts are never compared: what counts is for how long a heartbeat did not change, as
    its own node saw it.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], timeout_s: float) -> None:
        self._folder = folder
        self._env = env
        self._timeout_s = timeout_s
        self._begin = time.monotonic()
        self._changed: dict[int, tuple[Heartbeat, float]] = {}
        self.own: dict[int, Heartbeat] = {}

    def look(self) -> None:
        """Read this node's heartbeats into `own`."""
        now = time.monotonic()
        for rank, beat in own_beats(self._folder, self._env).items():
            if rank not in self._changed or self._changed[rank][0] != beat:
                self._changed[rank] = (beat, now)
        self.own = {
            rank: replace(beat, idle_s=now - changed, has_exited=_has_exited(beat))
            for rank, (beat, changed) in self._changed.items()
        }

    def is_stalled(self, more_s: float = 0.0) -> bool:
        """Whether a rank of this node stood still for too long when last looked at, and `more_s`
        more.
        """
        beats = self.own.values()
        if not beats:
            return self._is_late_to_begin()
        if all(beat.has_exited for beat in beats):
            return False  # whoever started them is about to report it
        # one that has ended may be silent
        running = [beat for beat in beats if beat.phase != END]
        return any(beat.idle_s > self._patience_s(beat) + more_s for beat in running)

    def cause(
        self, ranks: int, others: Iterable[NodeReport] = (), answered: Iterable[str] = ()
    ) -> str:
        """Why the run of so many `ranks` counts as stalled: the rank that stands still. `others`
        are the reports of the other nodes, `answered` the hosts of those that were written now.
        """
        beats = list(self.own.values())
        for report in others:
            is_lost = report.host not in answered
            for beat in report.ranks:
                beats.append(replace(beat, has_exited=beat.has_exited or is_lost))
        waits_s = [beat.idle_s for beat in self.own.values() if beat.phase != END]
        head = f"no progress for {max(waits_s, default=self._timeout_s):.0f} s"
        absent = set(range(ranks)) - {beat.rank for beat in beats}
        if absent and self._is_late_to_begin() and all(beat.step < 2 for beat in beats):
            return f"{head}: rank {min(absent)} before its first heartbeat"
        # one that is gone, else the one in the earliest iteration, as no rank waits there for one
        # in a later
        running = [beat for beat in beats if beat.phase != END]
        beat = min(running, key=lambda b: (not b.has_exited, b.step, -b.idle_s, b.rank))
        if beat.has_exited:
            return f"{head}: {beat} on {beat.host}, which has exited or does not answer"
        return f"{head}: {beat}"

    def _is_late_to_begin(self) -> bool:
        return time.monotonic() - self._begin > self._first_s

    @property
    def _first_s(self) -> float:
        # Until its second iteration a rank imports, builds samples and compiles; and it is given a
        # minute more than the ranks wait for one another (engine/torchrun.py), which ends with the
        # names of those that did not come.
        return max(5 * self._timeout_s, 660.0)

    def _patience_s(self, beat: Heartbeat) -> float:
        """How long a rank may stand still there, s: ten iterations at its pace, where that is
        known.
        """
        if beat.step < 2:
            return self._first_s
        # a save lasts as long as the disk takes
        if not beat.pace.usual_s or beat.phase == SAVE:
            return self._timeout_s
        return min(self._timeout_s, max(LEAST_S, LATE * max(beat.pace.usual_s, beat.pace.now_s)))


def _has_exited(beat: Heartbeat) -> bool:
    """Whether a rank's process has ended before the rank did."""
    if beat.phase == END or beat.host != platform.node():
        return False
    return process_state(beat.pid) in ("gone", "Z", "X")
