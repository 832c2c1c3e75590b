"""The watchdog: a run without progress has its stacks dumped and diagnosed, and ends as a `hang`.

For a run on this machine the launcher polls HangMonitor. In a scheduler's job one process on each node does:
`python -m trilane.launch.watchdog RUN_FOLDER PID RANK`, started by the node's first rank (PID). It reads the heartbeats
of its own node, on that node, and reports them in the run folder. When they stall, the watchdog of rank 0's node reads
all reports and decides; where no decision comes, another node's does, a little later.
"""

import contextlib
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.diagnose.capture import OTHERS_S, capture, capture_here
from trilane.diagnose.hang import diagnose_hang
from trilane.utils.process import die_with
from trilane.workspace.heartbeat import Heartbeat, NodeReport, node_folders, read_reports, start_id
from trilane.workspace.stall_detector import StallDetector, report_every_s
from trilane.workspace.status import RunStatus, Status, known_status, write_status


class Hang(Exception):
    """The run hangs; `outcome` names the suspected rank."""

    def __init__(self, outcome: RunStatus) -> None:
        super().__init__(outcome.evidence)
        self.outcome = outcome


class HangMonitor:
    """Monitors the run of `plan` in `folder`, on the node whose first rank is `first`, from this start on (`env`)."""

    def __init__(self, folder: Path, plan: Plan, env: Mapping[str, str], first: int = 0) -> None:
        self._folder, self._plan, self._env, self._first = folder, plan, env, first
        self._begin, self._timeout_s = time.monotonic(), plan.run.hang_timeout_s
        self._every_s = report_every_s(self._timeout_s)
        for report in read_reports(folder) if first == 0 else []:
            if report.start != start_id(env):  # of a node that the run may no longer have
                (folder / "ranks/nodes" / f"{report.first}.json").unlink(missing_ok=True)
        self._stall = StallDetector(
            folder,
            plan.topology.gpus,
            self._timeout_s,
            places=lambda: node_folders(folder, env),
            start=start_id(env),
            patience_s=patience_s(first, plan),
        )
        self._exited: dict[int, Heartbeat] = {}
        self._at_exit: Path | None = None  # the stacks that were dumped when the first rank exited
        self._number, self._next_report = 0, 0.0

    @property
    def is_stalled_here(self) -> bool:
        """Whether a rank of this node makes no progress."""
        return self._stall.is_stalled_here

    @property
    def iteration(self) -> int:
        """The last iteration that a rank of this node entered."""
        self._stall.look()
        return max((beat.step for beat in self._stall.own.values()), default=0)

    def check(self, is_asked: bool = False) -> None:
        """Raise Hang where the run makes no progress, after dumping and diagnosing its stacks; call it often."""
        if self._timeout_s <= 0:
            return
        was_stalled, exits = self.is_stalled_here, len(self._exited)
        self._stall.look()
        for rank, beat in self._stall.own.items():
            if beat.has_exited:
                self._exited.setdefault(rank, beat)
        is_news = self.is_stalled_here != was_stalled or len(self._exited) > exits
        if is_news or time.monotonic() >= self._next_report:
            self.report()
        if len(self._exited) > exits == 0 and not is_asked:
            with contextlib.suppress(OSError):  # where the others are before they fail or wait for ever
                self._at_exit = capture(self._folder, self._plan)
        # where stacks are asked for another node is deciding: this one waits, unless it has rank 0
        if (self._first == 0 or not is_asked) and (why := self._stall.decide()):
            raise Hang(self.hang_status(why))

    def report(self) -> None:
        """Write this node's report; not where the disk is full."""
        self._number += 1
        # during a stall every second: which rank is the first is decided within seconds
        self._next_report = time.monotonic() + (min(1.0, self._every_s) if self.is_stalled_here else self._every_s)
        ranks = tuple(beat for _, beat in sorted(self._stall.own.items()))
        host, start = platform.node(), start_id(self._env)
        with contextlib.suppress(OSError):
            NodeReport(first=self._first, host=host, start=start, number=self._number, ranks=ranks).write(self._folder)

    def close(self) -> None:
        """Write the last report, and remove what the ranks wrote on this node."""
        if self._timeout_s > 0:
            self._stall.look()
            self.report()
        for place in node_folders(self._folder, self._env):
            shutil.rmtree(place, ignore_errors=True)

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
        evidence = f"{why}. {explanation}"[:2000] + where
        seconds = round(time.monotonic() - self._begin, 3)
        return RunStatus(status=Status.HANG, evidence=evidence, rank=rank, exit_code=1, seconds=seconds)

    def corrected(self, outcome: RunStatus, failed: set[int]) -> RunStatus:
        """The outcome, attributed to a rank that exited without an error before the others failed for lack of it."""
        exited = [beat for rank, beat in self._exited.items() if rank not in failed]
        if outcome.status is not Status.CRASHED or not exited:
            return outcome
        evidence = f"{exited[0]}, exited without an error; then {outcome.evidence}"
        return replace(outcome, evidence=evidence, rank=exited[0].rank)

    def kill_ranks(self, last: int) -> None:
        """SIGKILL this node's; `last` comes last, which ends this process."""
        # a rank in a collective, or a stopped one, ignores other signals
        beats = [beat for beat in self._stall.own.values() if beat.host == platform.node()]
        for beat in sorted(beats, key=lambda beat: beat.pid == last):
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


def watch_node(folder: Path, parent: int, first: int) -> None:
    """Monitor the run until the process `parent` of this node ends; dump this node's ranks when any node requests it.

    The node that detects a stall writes status.json; each node then ends its own ranks, which ends the job.
    """
    monitor = HangMonitor(folder, read_plan(folder / "plan.json"), os.environ, first)

    def end(number: int, frame: object) -> None:
        if os.getppid() != parent:  # else the ranks take their time to save
            monitor.close()
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which ranks block, and their children with them
    requests, before = _Requests(folder), known_status(folder)
    while os.getppid() == parent:
        for stacks in requests.new(is_due=monitor.is_stalled_here):
            monitor.report()
            with contextlib.suppress(OSError):
                capture_here(folder, stacks)
        is_asked = requests.age_s < 2 * OTHERS_S
        written = known_status(folder) if is_asked else None
        if _hangs(monitor, folder, is_asked) or (written and written != before and written.status is Status.HANG):
            monitor.kill_ranks(parent)
            break
        time.sleep(0.5)
    monitor.close()


def patience_s(first: int, plan: Plan) -> float:
    """How much later than the node of rank 0 the one of rank `first` decides: not all at once."""
    every_s = report_every_s(plan.run.hang_timeout_s)
    further = first // min(plan.cluster.gpus_per_node, plan.topology.gpus)
    return every_s * min(3 + (further - 1) / 3, 4) if further else 0.0


class _Requests:
    """Folders in stacks/ of the run folder: each is a request to every node."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked_at, self._next = folder / "stacks", -1e9, 0.0
        self._known = self._names()

    @property
    def age_s(self) -> float:
        """Seconds since the last."""
        return time.monotonic() - self._asked_at

    def new(self, is_due: bool) -> list[Path]:
        """Those that were not there before, and that this host has not answered; each is returned once.

        Without `is_due` they are looked for every 5 s.
        """
        if not is_due and time.monotonic() < self._next:
            return []
        new = sorted(self._names() - self._known)
        self._known |= set(new)
        self._next = time.monotonic() + 5.0
        self._asked_at = time.monotonic() if new else self._asked_at
        answer = f"states-{platform.node()}.json"
        return [self._folder / name for name in new if not (self._folder / name / answer).exists()]

    def _names(self) -> set[str]:
        with contextlib.suppress(OSError):
            return set(os.listdir(self._folder))
        return set()


def _hangs(monitor: HangMonitor, folder: Path, is_asked: bool) -> bool:
    """Whether this process detects a hang, which it records."""
    try:
        monitor.check(is_asked)
    except Hang as hang:
        print(f"trilane: hang: {hang.outcome.evidence}", flush=True)
        write_status(folder, hang.outcome)
        return True
    return False


def main(argv: list[str]) -> None:
    """Watch the node of the process argv[1], its first rank argv[2] (default 0), of the run in argv[0]."""
    folder, parent, first = Path(argv[0]), int(argv[1]), int(argv[2]) if len(argv) > 2 else 0
    # The parent passes its own id, as it may have ended before we could ask. A capture that waits for other nodes must
    # not outlive it either: SLURM drains a node on which a job's process does not end ("Kill task failed").
    die_with(parent, signal.SIGTERM)
    watch_node(folder, parent, first)


if __name__ == "__main__":
    main(sys.argv[1:])
