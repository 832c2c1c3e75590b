"""The watchdog: a run without progress has its stacks dumped and diagnosed, and ends as a `hang`.

For a run on this machine the launcher polls HangMonitor. In a scheduler's job one process on each node does:
`python -m trilane.launch.watchdog RUN_FOLDER PID RANK`, started by the node's first rank (PID). It reads the heartbeats
of its own node, on that node, and reports them in the run folder every REPORT_S. The watchdog of rank 0's node reads
all reports and decides; where its own node stalls and no decision comes, another node's does, a little later.
"""

import contextlib
import os
import platform
import signal
import sys
import time
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.diagnose.capture import OTHERS_S, capture_here
from trilane.launch.hang_monitor import Hang, HangMonitor, Node
from trilane.utils.process import die_with
from trilane.workspace import node_folder
from trilane.workspace.stall_detector import report_every_s
from trilane.workspace.status import Status, known_status, write_status

POLL_S = 0.5
ASK_S = 5.0  # between two looks at stacks/ of the run folder, on a node without a stall
PRECEDENCE_S = 15.0  # how much earlier than the next node that of rank 0 decides
STAGGER_S, LATEST_S = 5.0, 15.0  # from one further node to the next: it sees the other's request; and of the last
DECISION_S = OTHERS_S + 30.0  # after a request for stacks, which another node may have made to decide
ANSWER_S = 120.0  # after a request for stacks a decision may follow
END_S = 10.0  # to write the last report


def watch_node(folder: Path, parent: int, first: int) -> None:
    """Monitor the run until the process `parent` of this node ends; dump this node's ranks when any node requests it.

    The node that detects a stall writes status.json; each node then ends its own ranks, which ends the job.
    """
    plan, start = read_plan(folder / "plan.json"), node_folder.start_id(os.environ)
    places = node_folder.Places(folder, os.environ)
    node = Node(first=first, start=start, places=lambda: places() or [folder / "ranks"])
    monitor = HangMonitor(folder, plan, node, patience_s(first, plan))
    signal.signal(signal.SIGTERM, lambda number, frame: _end(monitor, parent))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which ranks block, and their children with them
    requests, every_s = _Requests(folder), min(ASK_S, report_every_s(plan.run.hang_timeout_s))
    status, next_look = _HangStatus(folder), 0.0
    while os.getppid() == parent:
        if time.monotonic() >= next_look or monitor.is_stalled_here:
            next_look = time.monotonic() + every_s
            for stacks in requests.new():
                monitor.report()
                with contextlib.suppress(OSError):
                    capture_here(folder, stacks)
        is_awaited = monitor.is_stalled_here or requests.age_s() < ANSWER_S
        if _hangs(monitor, folder, requests, waits=first > 0 and requests.age_s() < DECISION_S) or status.is_written(
            is_awaited
        ):
            monitor.kill_ranks(parent)
            break
        time.sleep(POLL_S)
    monitor.close()


def patience_s(first: int, plan: Plan) -> float:
    """How much later than the node of rank 0 the one of rank `first` decides: not all at once."""
    further = first // min(plan.cluster.gpus_per_node, plan.topology.gpus)
    return PRECEDENCE_S + min(STAGGER_S * (further - 1), LATEST_S) if further else 0.0


class _Requests:
    """Folders in stacks/ of the run folder: each is a request to every node."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked_at = folder / "stacks", float("-inf")
        self._known = set(self._names())

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError):
            return os.listdir(self._folder)
        return []

    def new(self) -> list[Path]:
        """Those that were not there before, and that this host has not answered; each is returned once."""
        new = sorted(set(self._names()) - self._known)
        self._known |= set(new)
        self._asked_at = time.monotonic() if new else self._asked_at
        answer = f"states-{platform.node()}.json"
        return [self._folder / name for name in new if not (self._folder / name / answer).exists()]

    def are_open(self) -> bool:
        """Whether there is one that new() has not returned yet."""
        return not self._known.issuperset(self._names())

    def age_s(self) -> float:
        """Seconds since the last."""
        return time.monotonic() - self._asked_at


class _HangStatus:
    """Whether status.json becomes that of a hang, of which no clock is needed: it is another file than at the start."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next = folder, 0.0
        self._before = self._identity()

    def _identity(self) -> tuple[int, int]:
        with contextlib.suppress(OSError):
            facts = (self._folder / "status.json").stat()
            return facts.st_ino, facts.st_mtime_ns
        return 0, 0

    def is_written(self, is_awaited: bool) -> bool:
        """Whether it is; looked at seldom where no decision is awaited."""
        if time.monotonic() < self._next and not is_awaited:
            return False
        self._next = time.monotonic() + report_every_s(float("inf"))
        written = known_status(self._folder) if self._identity() not in (self._before, (0, 0)) else None
        return written is not None and written.status is Status.HANG


def _hangs(monitor: HangMonitor, folder: Path, requests: _Requests, waits: bool) -> bool:
    """Whether this process detects a hang, which it records."""
    try:
        monitor.check(requests.are_open, waits=waits)
    except Hang as hang:
        print(f"trilane: hang: {hang.outcome.evidence}", flush=True)
        write_status(folder, hang.outcome)
        return True
    return False


def _end(monitor: HangMonitor, parent: int) -> None:
    """On SIGTERM: nothing while the ranks take their time to save; else the last report, within END_S, and the end."""
    if os.getppid() == parent:
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, END_S)
    monitor.close()
    os._exit(0)


def main(argv: list[str]) -> None:
    """Watch the node of the process argv[1], its first rank argv[2] (default 0), of the run in argv[0]."""
    folder, parent, first = Path(argv[0]), int(argv[1]), int(argv[2]) if len(argv) > 2 else 0
    if os.getppid() != parent:
        for place in node_folder.Places(folder, os.environ)():
            node_folder.remove(place)
    # The parent passes its own id, as it may have ended before we could ask. A capture that waits for other nodes must
    # not outlive it either: SLURM drains a node on which a job's process does not end ("Kill task failed").
    die_with(parent, signal.SIGTERM)
    watch_node(folder, parent, first)


if __name__ == "__main__":
    main(sys.argv[1:])
