"""The watchdog: a run whose ranks stand still is dumped, judged and ended as a `hang` instead of burning its hours.

For a run on this machine the launcher's watcher asks Guard. Inside a job that a scheduler started, one process on each
node does: `python -m trilane.launch.watchdog RUN_FOLDER PID`, started by the node's first rank (PID),
sees the beats of all
nodes on the shared file system. Who stalls the node of rank 0 is seen by the others, a little later.
"""

import contextlib
import os
import platform
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.diagnose.hang.capture import capture, capture_here
from trilane.diagnose.hang.verdict import diagnose_hang
from trilane.utils.process import die_with
from trilane.workspace.heartbeat import END, StallDetector, process_state, read_beats
from trilane.workspace.status import RunStatus, Status, read_status, write_status

LOOK_S = 0.5


PRECEDENCE_S = 15.0  # what the node of rank 0 is ahead of the others in noticing


LONGEST = 2000  # characters of evidence


class Hang(Exception):
    """The run hangs; `outcome` says who is to blame."""

    def __init__(self, outcome: RunStatus) -> None:
        super().__init__(outcome.evidence)
        self.outcome = outcome


class HangMonitor:
    """Looks after the run of `plan` in `folder` from its beginning."""

    def __init__(self, folder: Path, plan: Plan, patience_s: float = 0.0) -> None:
        self._folder, self._plan, self._begin = folder, plan, time.monotonic()
        timeout_s = plan.run.hang_timeout_s
        self._pulse = StallDetector(folder, plan.topology.gpus, timeout_s + patience_s if timeout_s else 0.0)
        self._left: dict[int, str] = {}

    def look(self) -> None:
        """Raise Hang where the run stands still, once its stacks are dumped and judged; call it often."""
        if self._pulse.timeout_s > 0:
            self._see_who_left()
        why = self._pulse.stalled()
        if why:
            raise Hang(self.judged(why))

    def judged(self, why: str) -> RunStatus:
        """Dump the ranks, judge the dumps, and say both."""
        stacks = capture(self._folder, self._plan)
        suspects: tuple[int, ...] = ()
        try:
            verdict = diagnose_hang(stacks)
            said, suspects = verdict.paragraph, verdict.suspects
        except ValueError as error:
            said = f"no verdict: {error}"
        where = stacks.relative_to(self._folder)
        evidence = f"{why}. {said}"[:LONGEST] + f" (stacks in {where})"
        seconds = round(time.monotonic() - self._begin, 3)
        return RunStatus(
            status=Status.HANG, evidence=evidence, rank=next(iter(suspects), None), exit_code=1, seconds=seconds
        )

    def corrected(self, outcome: RunStatus, failed: set[int]) -> RunStatus:
        """The outcome, but blamed on a rank that left without an error before the others broke for want of it."""
        left = [rank for rank in self._left if rank not in failed]
        if outcome.status is not Status.CRASHED or not left:
            return outcome
        rank = left[0]
        evidence = f"rank {rank} left without an error, {self._left[rank]}; then {outcome.evidence}"
        return replace(outcome, evidence=evidence, rank=rank)

    def _see_who_left(self) -> None:
        for rank, beat in read_beats(self._folder).items():
            here = beat.phase != END and beat.host == platform.node()
            if rank not in self._left and here and process_state(beat.pid) in ("gone", "Z", "X"):
                if not self._left:
                    capture(self._folder, self._plan)  # where the others are before they break or wait for ever
                self._left[rank] = f"in iteration {beat.step}, {beat.phase or 'between phases'}"


def watch_node(folder: Path, parent: int, ahead: bool) -> None:
    """Look after the run until the process `parent` of this node ends; dump this node's ranks when any node asks.

    Who notices a stall writes status.json; each node then ends its own ranks, which ends the job. `ahead` is the node
    of rank 0: the others give it PRECEDENCE_S.
    """
    guard = HangMonitor(folder, read_plan(folder / "plan.json"), 0.0 if ahead else PRECEDENCE_S)
    begin, answered = time.time(), {path.name for path in (folder / "stacks").glob("*")}
    while os.getppid() == parent:
        for stacks in sorted((folder / "stacks").glob("*")):
            if stacks.name not in answered:
                answered.add(stacks.name)
                capture_here(folder, stacks)
        with contextlib.suppress(Hang):
            _look(guard, folder)
        if _is_hang(folder, begin):
            _end_own(folder, parent)
            return
        time.sleep(LOOK_S)


def _look(guard: HangMonitor, folder: Path) -> None:
    try:
        guard.look()
    except Hang as hang:
        write_status(folder, hang.outcome)
        print(f"trilane: hang: {hang.outcome.evidence}", flush=True)
        raise


def _is_hang(folder: Path, begin: float) -> bool:
    path = folder / "status.json"
    return path.exists() and path.stat().st_mtime >= begin and read_status(folder).status is Status.HANG


def _end_own(folder: Path, last: int) -> None:
    """SIGKILL: what hangs in a collective, or is stopped, does not listen to less. `last` takes this process along."""
    for beat in sorted(read_beats(folder).values(), key=lambda beat: beat.pid == last):
        if beat.host == platform.node():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


if __name__ == "__main__":
    # The parent says who it is: it may be gone before we can ask. A capture that waits for other nodes must not outlive
    # it either: SLURM drains a node on which a job's process does not end ("Kill task failed").
    die_with(int(sys.argv[2]))
    watch_node(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["ahead"])
