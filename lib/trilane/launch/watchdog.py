"""The watchdog: a run without progress has its stacks dumped and diagnosed, and ends as a `hang`.

For a run on this machine the launcher polls HangMonitor. In a scheduler's job one process on each node does:
`python -m trilane.launch.watchdog RUN_FOLDER PID`, started by the node's first rank (PID), reads the heartbeats of all
nodes on the shared file system. A stall of rank 0's node is detected by the others, a little later.
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
from trilane.workspace.status import RunStatus, Status, known_status, write_status

POLL_S = 0.5
PRECEDENCE_S = 15.0  # how much earlier than the others the node of rank 0 reports a stall
MAX_EVIDENCE = 2000  # characters


class Hang(Exception):
    """The run hangs; `outcome` names the suspected rank."""

    def __init__(self, outcome: RunStatus) -> None:
        super().__init__(outcome.evidence)
        self.outcome = outcome


class HangMonitor:
    """Monitors the run of `plan` in `folder` from its start."""

    def __init__(self, folder: Path, plan: Plan, patience_s: float = 0.0) -> None:
        self._folder, self._plan, self._begin = folder, plan, time.monotonic()
        timeout_s = plan.run.hang_timeout_s
        self._stall = StallDetector(folder, plan.topology.gpus, timeout_s + patience_s if timeout_s else 0.0)
        self._exited: dict[int, str] = {}

    def check(self) -> None:
        """Raise Hang where the run makes no progress, after dumping and diagnosing its stacks; call it often."""
        if self._stall.timeout_s > 0:
            self._record_exits()
        if why := self._stall.stalled():
            raise Hang(self.hang_status(why))

    def hang_status(self, why: str) -> RunStatus:
        """Dump the ranks' stacks and diagnose them; the status with `why` and the verdict as evidence."""
        suspects: tuple[int, ...] = ()
        where = ""
        try:
            stacks = capture(self._folder, self._plan)
            where = f" (stacks in {stacks.relative_to(self._folder)})"
            verdict = diagnose_hang(stacks)
            explanation, suspects = verdict.paragraph, verdict.suspects
        except (ValueError, OSError) as error:  # a full disk
            explanation = f"no verdict: {error}"
        evidence = f"{why}. {explanation}"[:MAX_EVIDENCE] + where
        rank, seconds = next(iter(suspects), None), round(time.monotonic() - self._begin, 3)
        return RunStatus(status=Status.HANG, evidence=evidence, rank=rank, exit_code=1, seconds=seconds)

    def corrected(self, outcome: RunStatus, failed: set[int]) -> RunStatus:
        """The outcome, attributed to a rank that exited without an error before the others failed for lack of it."""
        exited = [rank for rank in self._exited if rank not in failed]
        if outcome.status is not Status.CRASHED or not exited:
            return outcome
        evidence = f"rank {exited[0]} exited without an error, {self._exited[exited[0]]}; then {outcome.evidence}"
        return replace(outcome, evidence=evidence, rank=exited[0])

    def _record_exits(self) -> None:
        for rank, beat in read_beats(self._folder).items():
            here = beat.phase != END and beat.host == platform.node()
            if rank not in self._exited and here and process_state(beat.pid) in ("gone", "Z", "X"):
                if not self._exited:  # where the others are before they fail or wait for ever
                    with contextlib.suppress(OSError):
                        capture(self._folder, self._plan)
                self._exited[rank] = f"in iteration {beat.step}, {beat.phase or 'between phases'}"


def watch_node(folder: Path, parent: int, ahead: bool) -> None:
    """Monitor the run until the process `parent` of this node ends; dump this node's ranks when any node requests it.

    The node that detects a stall writes status.json; each node then ends its own ranks, which ends the job. `ahead` is
    the node of rank 0, to which the others give PRECEDENCE_S.
    """
    monitor = HangMonitor(folder, read_plan(folder / "plan.json"), 0.0 if ahead else PRECEDENCE_S)
    begin, answered = time.time(), {path.name for path in (folder / "stacks").glob("*")}
    while os.getppid() == parent:
        for stacks in sorted((folder / "stacks").glob("*")):
            if stacks.name not in answered:
                answered.add(stacks.name)
                with contextlib.suppress(OSError):
                    capture_here(folder, stacks)
        if _hangs(monitor, folder) or _is_hang(folder, begin):
            _kill_own_ranks(folder, parent)
            return
        time.sleep(POLL_S)


def _hangs(monitor: HangMonitor, folder: Path) -> bool:
    """Whether this process detects a hang, which it records."""
    try:
        monitor.check()
    except Hang as hang:
        print(f"trilane: hang: {hang.outcome.evidence}", flush=True)
        write_status(folder, hang.outcome)
        return True
    return False


def _is_hang(folder: Path, begin: float) -> bool:
    path = folder / "status.json"
    written = known_status(folder) if path.exists() and path.stat().st_mtime >= begin else None
    return written is not None and written.status is Status.HANG


def _kill_own_ranks(folder: Path, last: int) -> None:
    """SIGKILL, as a rank in a collective, or a stopped one, ignores others. `last` comes last: it ends this process."""
    for beat in sorted(read_beats(folder).values(), key=lambda beat: beat.pid == last):
        if beat.host == platform.node():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


if __name__ == "__main__":
    # The parent passes its own id, as it may have ended before we could ask. A capture that waits for other nodes must
    # not outlive it either: SLURM drains a node on which a job's process does not end ("Kill task failed").
    die_with(int(sys.argv[2]))
    watch_node(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["ahead"])
