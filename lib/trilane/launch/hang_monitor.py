"""HangMonitor: what watches the ranks of one node: reports them in the run folder, and detects that the run hangs."""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.config.plan import Plan
from trilane.diagnose.capture import capture
from trilane.diagnose.hang import diagnose_hang
from trilane.workspace import node_folder
from trilane.workspace.heartbeat import NodeReport, forget_reports
from trilane.workspace.stall_detector import StallDetector, report_every_s
from trilane.workspace.status import RunStatus, Status

MAX_EVIDENCE = 2000  # characters
STALLED_S = 1.0  # between two reports of a node with a stall: whose is the longest is decided within seconds


class Hang(Exception):
    """The run hangs; `outcome` names the suspected rank."""

    def __init__(self, outcome: RunStatus) -> None:
        super().__init__(outcome.evidence)
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True)
class Node:
    """The node that a process watches: its first rank, the start of the run, where its ranks write."""

    first: int
    start: str
    places: Callable[[], list[Path]]


class HangMonitor:
    """Monitors the run of `plan` in `folder` from its start, on the node where it runs."""

    def __init__(self, folder: Path, plan: Plan, node: Node, patience_s: float = 0.0) -> None:
        self._folder, self._plan, self._node, self._begin = folder, plan, node, time.monotonic()
        timeout_s, ranks = plan.run.hang_timeout_s, plan.topology.gpus
        if node.first == 0:
            forget_reports(folder, node.start)
        self._stall = StallDetector(
            folder,
            ranks,
            timeout_s,
            places=node.places,
            start=node.start,
            leads=node.first == 0,
            patience_s=patience_s,
        )
        self._exited: dict[int, str] = {}
        self._at_exit: Path | None = None  # the stacks that were dumped when the first rank exited
        self._number, self._next_report, self._silent = 0, 0.0, set[int]()

    @property
    def is_stalled_here(self) -> bool:
        """Whether a rank of this node makes no progress."""
        return self._stall.is_stalled_here

    def check(self, is_asked: Callable[[], bool] = lambda: False, *, waits: bool = False) -> None:
        """Raise Hang where the run makes no progress, after dumping and diagnosing its stacks; call it often.

        A rank that exits has all stacks dumped, unless they are asked for already. Nothing is decided where this node
        `waits` for another's decision.
        """
        was_stalled, exits = self._stall.is_stalled_here, len(self._exited)
        if not self._stall.look():
            return
        self._record_exits()
        if self.is_stalled_here != was_stalled or time.monotonic() >= self._next_report or len(self._exited) > exits:
            self.report()
        if len(self._exited) > exits == 0 and not is_asked():
            with contextlib.suppress(OSError):  # where the others are before they fail or wait for ever
                self._at_exit = capture(self._folder, self._plan)
        if not waits and (why := self._stall.decide()) and (self._node.first == 0 or not is_asked()):
            raise Hang(self.hang_status(why))
        self._note_silent_nodes()

    def report(self) -> None:
        """Write this node's report; not where the disk is full."""
        self._number += 1
        every_s = report_every_s(self._stall.timeout_s)
        self._next_report = time.monotonic() + (min(STALLED_S, every_s) if self.is_stalled_here else every_s)
        ranks = tuple(progress for _, progress in sorted(self._stall.own.items()))
        report = NodeReport(
            first=self._node.first, host=platform.node(), start=self._node.start, number=self._number, ranks=ranks
        )
        with contextlib.suppress(OSError):
            report.write(self._folder)

    def close(self) -> None:
        """Write the last report, and remove what the ranks wrote on this node."""
        self._stall.look()
        if self._stall.timeout_s > 0:
            self.report()
        places = [place for place in self._node.places() if place != self._folder / "ranks"]
        for place in places:
            node_folder.remove(place)

    def hang_status(self, why: str) -> RunStatus:
        """Dump the ranks' stacks and diagnose them; the status with `why` and the verdict as evidence."""
        rank, where = None, ""
        try:
            stacks = capture(self._folder, self._plan, self._stall.hosts())
            if self._at_exit and not any(stacks.glob("rank_*")):  # the launcher has ended all ranks since one exited
                stacks = self._at_exit
            where = f" (stacks in {stacks.relative_to(self._folder)})"
            verdict = diagnose_hang(stacks)
            explanation, rank = verdict.paragraph, verdict.first
        except (ValueError, OSError) as error:  # a full disk
            explanation = f"no verdict: {error}"
        evidence = f"{why}. {explanation}"[:MAX_EVIDENCE] + where
        seconds = round(time.monotonic() - self._begin, 3)
        return RunStatus(status=Status.HANG, evidence=evidence, rank=rank, exit_code=1, seconds=seconds)

    def corrected(self, outcome: RunStatus, failed: set[int]) -> RunStatus:
        """The outcome, attributed to a rank that exited without an error before the others failed for lack of it."""
        exited = [rank for rank in self._exited if rank not in failed]
        if outcome.status is not Status.CRASHED or not exited:
            return outcome
        evidence = f"rank {exited[0]} exited without an error, {self._exited[exited[0]]}; then {outcome.evidence}"
        return replace(outcome, evidence=evidence, rank=exited[0])

    def _record_exits(self) -> None:
        for rank, progress in self._stall.own.items():
            if progress.has_exited and rank not in self._exited:
                beat = progress.beat
                self._exited[rank] = f"in iteration {beat.step}, {beat.phase or 'between phases'}"

    def kill_ranks(self, last: int) -> None:
        """SIGKILL this node's, as a rank in a collective, or a stopped one, ignores others. `last` comes last: it ends
        this process."""
        beats = [progress.beat for progress in self._stall.own.values() if progress.beat.host == platform.node()]
        for beat in sorted(beats, key=lambda beat: beat.pid == last):
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)

    def _note_silent_nodes(self) -> None:
        """Print which nodes no longer report, and which do again."""
        silent = self._stall.silent()
        for first, report in silent.items():
            if first not in self._silent:
                last = max((progress.beat.rank for progress in report.ranks), default=first)
                print(f"trilane: {report.host} (ranks {first} to {last}) no longer reports", flush=True)
        if back := self._silent - set(silent):
            print(f"trilane: the nodes of ranks {sorted(back)} report again", flush=True)
        self._silent = set(silent)
