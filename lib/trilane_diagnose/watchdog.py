"""The watchdog: a run without progress has its stacks dumped and diagnosed, and ends as a `hang`.

For a run on this machine the launcher polls HangMonitor. In a scheduler's job one process on each
node does, by the heartbeats of that node, started by its first rank:
`python -m trilane_diagnose.watchdog RUN_FOLDER PID RANK`. When they stall, the one of rank 0's node
asks all others for stacks, and decides, or another's, a little later.
"""

import contextlib
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.launch.outcome import Hang
from trilane.utils.files import read_text, replace_text
from trilane.utils.process import die_with
from trilane.workspace import ledger, pace
from trilane.workspace.heartbeat import (
    Heartbeat,
    NodeReport,
    read_reports,
    remove_records,
    start_id,
)
from trilane.workspace.status import RunStatus, Status, known_status, write_status
from trilane_diagnose.capture import OTHERS_S, capture, capture_here, hosts_in
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.response import decide
from trilane_diagnose.stall import Stall
from trilane_diagnose.stragglers import slowest

LOOK_S = 5.0  # between two looks at the shared disk for requests
LOOK_AGAIN_S = 60.0  # between two looks for the place of a slowness that lasts


class HangMonitor:
    """Monitors the run of `plan` in `folder`, on the node whose first rank is `first`, from this
    start on (`env`).
    """

    def __init__(self, folder: Path, plan: Plan, env: Mapping[str, str], first: int = 0) -> None:
        self._folder = folder
        self._plan = plan
        self._first = first
        self._start = start_id(env)
        self._env = env
        self._timeout_s = plan.run.hang_timeout_s
        self.stall = Stall(folder, env, self._timeout_s)
        self._exited: dict[int, Heartbeat] = {}
        self._stacks_at_exit: Path | None = None  # dumped when the first rank exited
        self._report_at = -math.inf
        self._slowness: Slowness | None = None
        if first == 0:
            self._slowness = Slowness(folder, plan)
            for report in read_reports(folder):
                if report.start != self._start:  # of a node that the run may no longer have
                    path = folder / "ranks/nodes" / f"{report.first}.json"
                    path.unlink(missing_ok=True)

    @property
    def iteration(self) -> int:
        """The last iteration that a rank of this node entered."""
        self.stall.look()
        return max((beat.step for beat in self.stall.own.values()), default=0)

    def check(self, is_asked: bool = False) -> None:
        """Raise Hang where the run makes no progress, after dumping and diagnosing its stacks; call
        it often.
        """
        if self._timeout_s <= 0:
            return
        ranks = len(self.stall.own)
        exits = len(self._exited)
        self.stall.look()
        for rank, beat in self.stall.own.items():
            if beat.has_exited:
                self._exited.setdefault(rank, beat)
        if len(self.stall.own) > ranks or len(self._exited) > exits:
            self.report()
        if self._exited and not exits and not is_asked:
            # where the others are before they fail or wait for ever
            with contextlib.suppress(OSError):
                self._stacks_at_exit = capture(self._folder, self._plan)
        if self._first != 0 and is_asked:
            return  # another node is deciding
        if self.stall.is_stalled(patience_s(self._first, self._plan)):
            raise Hang(self.hang_status())

    def news(self) -> str:
        """A line where the run has become slow since the last call, or fast again, by what check()
        saw; "" else.
        """
        is_late = any(beat.pace.lost >= 0.5 for beat in self.stall.own.values())
        if is_late and time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + LOOK_AGAIN_S / 2
            self.report()  # the node of rank 0 compares the ranks of all
        if self._slowness:
            with contextlib.suppress(OSError, ValueError):  # a full disk
                return self._slowness.news(self.stall.own, self._start)
        return ""

    def report(self) -> None:
        """Write this node's report; not where the disk is full."""
        ranks = tuple(self.stall.own[rank] for rank in sorted(self.stall.own))
        report = NodeReport(first=self._first, host=platform.node(), start=self._start, ranks=ranks)
        with contextlib.suppress(OSError):
            report.write(self._folder)

    def close(self) -> None:
        """Write the last report, and remove what the ranks wrote on this node."""
        if self._timeout_s > 0:
            self.stall.look()
            self.report()
        remove_records(self._folder, self._env)

    def hang_status(self) -> RunStatus:
        """Dump the ranks' stacks and diagnose them; the status with the rank that stands still and
        the verdict.
        """
        rank = None
        where = ""
        exclude = ""
        others = []
        answered = set()
        try:
            stacks = capture(self._folder, self._plan)
            answered = hosts_in(stacks)
            for report in read_reports(self._folder):
                if report.start == self._start and report.first != self._first:
                    others.append(report)
            # the launcher has ended all ranks since one exited
            if self._stacks_at_exit and not any(stacks.glob("rank_*")):
                stacks = self._stacks_at_exit
            where = f" (stacks in {stacks.relative_to(self._folder)})"
            verdict = diagnose_hang(stacks)
            explanation = verdict.paragraph
            rank = verdict.first
            exclude = verdict.exclude.partition("=")[2]
        except (ValueError, OSError) as error:  # a full disk
            explanation = f"no verdict: {error}"
        cause = self.stall.cause(self._plan.topology.gpus, others, answered)
        evidence = f"{cause}. {explanation}"[:2000] + where
        return RunStatus(status=Status.HANG, evidence=evidence, rank=rank, exclude=exclude)

    def corrected(self, outcome: RunStatus, failed: set[int]) -> RunStatus:
        """The outcome, attributed to a rank that exited without an error before the others failed
        for lack of it.
        """
        if outcome.status is Status.CRASHED:
            for rank, beat in self._exited.items():
                if rank not in failed:
                    evidence = f"{beat}, exited without an error; then {outcome.evidence}"
                    return replace(outcome, evidence=evidence, rank=rank)
        return outcome

    def kill_ranks(self, last: int) -> None:
        """SIGKILL this node's; `last` comes last, which ends this process."""
        # a rank in a collective, or a stopped one, ignores other signals
        beats = [beat for beat in self.stall.own.values() if beat.host == platform.node()]
        for beat in sorted(beats, key=lambda beat: beat.pid == last):
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


@dataclass
class Slowness:
    """Notices that the run of `plan` in `folder` has become slow: it has lost what a restart costs.
    It looks again while that lasts, and notices that it is over.
    """

    _folder: Path
    _plan: Plan
    _said: str = ""  # the place that the last line named
    _look_at: float = -math.inf

    def __post_init__(self) -> None:
        self._cancel()  # of an attempt that ended before it saw it

    def news(self, own: Mapping[int, Heartbeat], start: str) -> str:
        """A line about the run in whose start the ranks of this node, with rank 0, are as in `own`;
        "" without news.
        """
        if 0 not in own:
            return ""
        # all ranks are late in the same iterations; one may be out of step
        usual = sorted(own.values(), key=lambda beat: beat.pace.lost)[len(own) // 2]
        if self._said and not usual.pace.lost:
            self._said = ""
            self._cancel()
            pace.note(self._folder, usual.step, "")
            return f"as fast as usual again, since iteration {usual.step}"
        if usual.pace.lost < 1 or time.monotonic() < self._look_at:
            return ""
        return self._place(usual, own, start)

    def _cancel(self) -> None:
        """Take back the request to start again on other nodes."""
        if read_text(self._folder / "save", 100) == pace.RESTART:
            (self._folder / "save").unlink(missing_ok=True)

    def _place(self, usual: Heartbeat, own: Mapping[int, Heartbeat], start: str) -> str:
        """The line that names the place, recorded; "" while it is not known, or the last one."""
        beats: dict[int, Heartbeat] = {}
        for report in read_reports(self._folder):
            if report.start == start:
                beats |= {beat.rank: beat for beat in report.ranks}
        beats |= own
        world = self._plan.topology.gpus
        paces = {r: beat.pace for r, beat in beats.items() if beat.pace.late and r < world}
        # every node reports at half of it; one that did not, a tenth later, is left out
        if len(paces) < world and usual.pace.lost < 1.1:
            return ""
        self._look_at = time.monotonic() + LOOK_AGAIN_S
        hosts = {rank: beat.host for rank, beat in beats.items()}
        words, ranks = slowest(hosts, paces)
        every = {*hosts.values()}
        is_one_machine = len(every) == 1
        if is_one_machine and not ranks and not words.startswith("the shared disk"):
            return ""  # a machine's other work slows all ranks; the nodes of a job do no other
        nodes = {hosts[rank] for rank in ranks}
        if is_one_machine or nodes == every:
            nodes = set()
        place = ",".join(sorted(nodes)) or words.partition(",")[0]
        if place == self._said:
            return ""
        self._said = place
        since = max(1, usual.step - usual.pace.late)
        takes = f"{usual.pace.now_s:.3g} s an iteration, usually {usual.pace.usual_s:.3g} s"
        line = f"SLOW since iteration {since}: {words}; {takes}"
        if nodes:
            line += self._response(nodes, every)
        pace.note(self._folder, usual.step, line, tuple(sorted(nodes)))
        return line

    def _response(self, nodes: Collection[str], every: Collection[str]) -> str:
        """What is done about slow nodes, which is begun."""
        spares = [f"spare {number}" for number in range(self._spares())]
        response = decide("slow node", trained=every, left=[*every, *spares], blamed=nodes)
        if response.action in ("spare", "requeue"):
            replace_text(self._folder / "save", pace.RESTART)
            return f"; it saves now; {response}"
        return f"; no spare is left: submit it again with --exclude={','.join(sorted(nodes))}"

    def _spares(self) -> int:
        """Nodes of the job that neither train nor are left out, by its environment and the ledger's
        last choice.
        """
        with contextlib.suppress(ValueError):  # a damaged ledger
            choices = ledger.events(self._folder, "nodes")
            if choices:
                taken = len(choices[-1]["chosen"]) + len(choices[-1]["left_out"])
                return int(os.environ.get("SLURM_JOB_NUM_NODES", taken)) - taken
        return 0


def watch_node(folder: Path, parent: int, first: int) -> None:
    """Monitor the run until the process `parent` of this node ends; dump this node's ranks when any
    node requests it.

    The node that detects a stall writes status.json; each node then ends its own ranks, which ends
    the job.
    """
    monitor = HangMonitor(folder, read_plan(folder / "plan.json"), os.environ, first)

    def end(number: int, frame: object) -> None:
        if os.getppid() != parent:  # else the ranks take their time to save
            monitor.close()
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    # which ranks block, and their children with them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    before = known_status(folder)
    answered = _requests(folder)
    asked_at = -math.inf
    look_at = -math.inf
    while os.getppid() == parent:
        if monitor.stall.is_stalled() or time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_S
            for name in sorted(_requests(folder) - answered):
                answered.add(name)
                asked_at = time.monotonic()
                _answer(monitor, folder / "stacks" / name)
        is_asked = time.monotonic() - asked_at < 2 * OTHERS_S
        has_ended = _hangs(monitor, folder, is_asked)
        if is_asked and not has_ended:
            written = known_status(folder)
            has_ended = written != before and bool(written and written.status is Status.HANG)
        if has_ended:
            monitor.kill_ranks(parent)
            break
        news = monitor.news()
        if news:
            print(f"trilane: {news}", flush=True)
        time.sleep(0.5)
    monitor.close()


def patience_s(first: int, plan: Plan) -> float:
    """How much later than the node of rank 0 the one of rank `first` decides: 45 s, and not all at
    once.
    """
    node = first // min(plan.cluster.gpus_per_node, plan.topology.gpus)
    if node == 0:
        return 0.0
    unit = min(15.0, max(0.5, plan.run.hang_timeout_s / 10))  # less for the short timeout of a test
    return unit * min(3 + (node - 1) / 3, 4)


def _requests(folder: Path) -> set[str]:
    """The folders of stacks, each of which is a request to every node."""
    with contextlib.suppress(OSError):
        return set(os.listdir(folder / "stacks"))
    return set()


def _answer(monitor: HangMonitor, stacks: Path) -> None:
    """Write this node's report and stacks, unless it has asked itself."""
    with contextlib.suppress(OSError):
        if platform.node() not in hosts_in(stacks):
            monitor.report()
            capture_here(stacks.parents[1], stacks)


def _hangs(monitor: HangMonitor, folder: Path, is_asked: bool) -> bool:
    """Whether this process detects a hang, which it records."""
    try:
        monitor.check(is_asked)
    except Hang as hang:
        (outcome,) = hang.args
        print(f"trilane: hang: {outcome.evidence}", flush=True)
        write_status(folder, outcome)
        return True
    return False


def main(argv: list[str]) -> None:
    """Watch the node of the process argv[1], its first rank argv[2], of the run in argv[0]."""
    folder = Path(argv[0])
    parent = int(argv[1])
    # The parent passes its own id, as it may have ended before we could ask. A capture that waits
    # for other nodes must not outlive it either: SLURM drains a node on which a job's process does
    # not end ("Kill task failed").
    die_with(parent, signal.SIGTERM)
    watch_node(folder, parent, int(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
