"""The watchdog: a run without progress has its stacks dumped and diagnosed, and ends as a `hang`.

For a run on this machine the launcher polls HangMonitor. In a scheduler's job one process on each
node does, by the heartbeats of that node: `python -m trilane_diagnose.watchdog RUN_FOLDER PID RANK`,
started by its first rank (PID). When they stall, the one of rank 0's node asks all others for
stacks, and decides, or another's, a little later.
"""

import contextlib
import functools
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.launch.outcome import Hang
from trilane.utils.files import json_lines, read_text, replace_text
from trilane.utils.process import die_with
from trilane.workspace import pace, rank_grid
from trilane.workspace.heartbeat import (
    Heartbeat,
    NodeReport,
    Stall,
    read_reports,
    remove_records,
    start_id,
)
from trilane.workspace.pace import LATE, RESTART
from trilane.workspace.status import RunStatus, Status, known_status, write_status
from trilane_diagnose.capture import OTHERS_S, capture, capture_here, hosts_in
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.stragglers import slowest


class HangMonitor:
    """Monitors the run of `plan` in `folder`, on the node whose first rank is `first`, from this
    start on (`env`).
    """

    def __init__(self, folder: Path, plan: Plan, env: Mapping[str, str], first: int = 0) -> None:
        self._folder, self._plan, self._env, self._first = folder, plan, env, first
        self._begin, self._timeout_s = time.monotonic(), plan.run.hang_timeout_s
        for report in read_reports(folder) if first == 0 else []:
            if report.start != start_id(env):  # of a node that the run may no longer have
                (folder / "ranks/nodes" / f"{report.first}.json").unlink(missing_ok=True)
        self.stall = Stall(folder, env, self._timeout_s)
        self._exited: dict[int, Heartbeat] = {}
        self._slowness, self._is_late = Slowness(folder, plan, env) if first == 0 else None, False
        self._at_exit: Path | None = None  # the stacks that were dumped when the first rank exited

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
        known, exits = len(self.stall.own), len(self._exited)
        self.stall.look()
        self._exited |= {
            r: b for r, b in self.stall.own.items() if b.has_exited and r not in self._exited
        }
        if len(self.stall.own) > known or len(self._exited) > exits:
            self.report()
        if len(self._exited) > exits == 0 and not is_asked:
            with contextlib.suppress(
                OSError
            ):  # where the others are before they fail or wait for ever
                self._at_exit = capture(self._folder, self._plan)
        # where stacks are asked for another node is deciding: this one waits, unless it has rank 0
        if (self._first == 0 or not is_asked) and self.stall.is_stalled(
            patience_s(self._first, self._plan)
        ):
            raise Hang(self.hang_status())

    def news(self) -> str:
        """A line where the run has become slow since the last call, or fast again, by what check()
        saw; "" else.
        """
        is_late = any(2 * beat.pace.late >= LATE for beat in self.stall.own.values())
        if is_late and not self._is_late:
            self.report()  # the node of rank 0 compares the ranks of all
        self._is_late = is_late
        try:
            return (
                self._slowness.news(self.stall.own, start_id(self._env)) if self._slowness else ""
            )
        except (OSError, ValueError):  # a full disk
            return ""

    def report(self) -> None:
        """Write this node's report; not where the disk is full."""
        ranks, start = (
            tuple(beat for _, beat in sorted(self.stall.own.items())),
            start_id(self._env),
        )
        with contextlib.suppress(OSError):
            NodeReport(first=self._first, host=platform.node(), start=start, ranks=ranks).write(
                self._folder
            )

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
        rank, where, others, answered = None, "", list[NodeReport](), set[str]()
        try:
            stacks = capture(self._folder, self._plan)
            answered = hosts_in(stacks)
            others = [
                r
                for r in read_reports(self._folder)
                if r.start == start_id(self._env) and r.first != self._first
            ]
            if self._at_exit and not any(
                stacks.glob("rank_*")
            ):  # the launcher has ended all ranks since one exited
                stacks = self._at_exit
            where = f" (stacks in {stacks.relative_to(self._folder)})"
            verdict = diagnose_hang(stacks)
            explanation, rank = verdict.paragraph, verdict.first
        except (ValueError, OSError) as error:  # a full disk
            explanation = f"no verdict: {error}"
        why = self.stall.cause(self._plan.topology.gpus, others, answered)
        evidence = f"{why}. {explanation}"[:2000] + where
        seconds = round(time.monotonic() - self._begin, 3)
        return RunStatus(
            status=Status.HANG, evidence=evidence, rank=rank, exit_code=1, seconds=seconds
        )

    def corrected(self, outcome: RunStatus, failed: set[int]) -> RunStatus:
        """The outcome, attributed to a rank that exited without an error before the others failed
        for lack of it.
        """
        exited = [beat for rank, beat in self._exited.items() if rank not in failed]
        if outcome.status is not Status.CRASHED or not exited:
            return outcome
        evidence = f"{exited[0]}, exited without an error; then {outcome.evidence}"
        return replace(outcome, evidence=evidence, rank=exited[0].rank)

    def kill_ranks(self, last: int) -> None:
        """SIGKILL this node's; `last` comes last, which ends this process."""
        # a rank in a collective, or a stopped one, ignores other signals
        beats = [beat for beat in self.stall.own.values() if beat.host == platform.node()]
        for beat in sorted(beats, key=lambda beat: beat.pid == last):
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


class Slowness:
    """Notices, once each, that the run of `plan` in `folder` has become slow, and that it is no
    longer.

    It has left its own pace and the plan's interval for ten iterations.
    """

    def __init__(self, folder: Path, plan: Plan, env: Mapping[str, str]) -> None:
        self._folder, self._plan, self._env = folder, plan, env
        self._is_slow, self._seen = False, 0
        self._cancel()  # of an attempt that ended before it saw it

    def news(self, own: Mapping[int, Heartbeat], start: str) -> str:
        """A line about the run in whose start the ranks of this node, with rank 0, are as in `own`;
        "" without news.
        """
        # all ranks are late in the same iterations; the count of one may begin again, where other
        # work disturbs it
        first = (
            sorted(own.values(), key=lambda beat: beat.pace.late)[len(own) // 2]
            if 0 in own
            else None
        )
        late = first.pace.late if first else 0
        if not first or (late == self._seen):
            return ""
        self._seen = late
        if self._is_slow and not late:
            self._is_slow = False
            self._cancel()
            pace.note(self._folder, first.step, "")
            return f"as fast as usual again, since iteration {first.step}"
        if (
            late < LATE
            or self._is_slow
            or first.pace.now_s <= self._expected_s * first.pace.samples
        ):
            return ""
        return self._found(first, own, start)

    def _cancel(self) -> None:
        """Take back the request to start again on other nodes."""
        if read_text(self._folder / "save", 100) == RESTART:
            (self._folder / "save").unlink(missing_ok=True)

    def _found(self, first: Heartbeat, own: Mapping[int, Heartbeat], start: str) -> str:
        """The line that names the place, recorded; "" while it is not known."""
        reports = [report for report in read_reports(self._folder) if report.start == start]
        beats = {beat.rank: beat for report in reports for beat in report.ranks} | dict(own)
        late = {
            rank: b.pace
            for rank, b in beats.items()
            if b.pace.late and rank < self._plan.topology.gpus
        }
        hosts = {rank: beat.host for rank, beat in beats.items()}
        t = self._plan.topology
        # every node reports when it is half as late; one that did not, two iterations later, is
        # left out
        if len(late) < t.gpus and first.pace.late < LATE + 2:
            return ""
        width = min(self._plan.cluster.gpus_per_node, t.gpus)
        grid = rank_grid.regular(t.tp, t.pp, t.dp * t.cp, width)
        grid = replace(
            grid, places=tuple(replace(p, node=hosts.get(p.rank, p.node)) for p in grid.places)
        )
        words, ranks = slowest(grid, late)
        if len({*hosts.values()}) == 1 and not ranks and not words.startswith("the shared disk"):
            return ""  # a machine's other work slows all ranks; the nodes of a job do no other
        self._is_slow, usual = True, first.pace
        text = f"SLOW since iteration {max(1, first.step - usual.late)}: {words}; "
        text += (
            f"{usual.now_s / usual.usual_s:.1f} times its usual {usual.usual_s:.3g} s an iteration"
        )
        nodes = tuple(sorted({hosts[rank] for rank in ranks} if len({*hosts.values()}) > 1 else ()))
        if nodes and len(nodes) <= self._spares():
            replace_text(self._folder / "save", RESTART)
            text += "; at its next save its nodes are tested, and it starts again on a spare"
        elif nodes:
            text += f"; no spare is left: submit it again with --exclude={','.join(nodes)}"
        pace.note(self._folder, first.step, text, nodes)
        return text

    @functools.cached_property
    def _expected_s(self) -> float:
        """The upper end of the plan's interval for an iteration, by the sample; 0 where nothing is
        predicted.
        """
        from trilane.costmodel.predict import (
            predict,
        )  # numpy and all shipped rows: only where a run is late

        try:
            return predict(self._plan).sec_hi / self._plan.topology.gbs
        except ValueError:
            return 0.0

    def _spares(self) -> int:
        """Nodes of the job that neither train nor are left out, by its environment and the ledger's
        last choice.
        """
        chosen = [
            e
            for e in json_lines(read_text(self._folder / "jobs.jsonl"))
            if e.get("event") == "nodes"
        ]
        job_nodes = self._env.get("SLURM_JOB_NUM_NODES", "0")
        if not chosen or not job_nodes.isdigit():
            return 0
        return int(job_nodes) - sum(
            len(chosen[-1].get(name) or ()) for name in ("chosen", "left_out")
        )


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
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM}
    )  # which ranks block, and their children with them
    before, known = known_status(folder), _names(folder)
    asked_at = look_at = -1e9
    while os.getppid() == parent:
        if monitor.stall.is_stalled() or time.monotonic() >= look_at:
            look_at = time.monotonic() + 5.0
            for name in sorted(_names(folder) - known):  # each is a request to every node
                known, asked_at = known | {name}, time.monotonic()
                _answer(monitor, folder, name)
        is_asked = time.monotonic() - asked_at < 2 * OTHERS_S
        written = known_status(folder) if is_asked else None
        if _hangs(monitor, folder, is_asked) or (
            written and written != before and written.status is Status.HANG
        ):
            monitor.kill_ranks(parent)
            break
        if news := monitor.news():
            print(f"trilane: {news}", flush=True)
        time.sleep(0.5)
    monitor.close()


def patience_s(first: int, plan: Plan) -> float:
    """How much later than the node of rank 0 the one of rank `first` decides: 45 s, and not all at
    once.
    """
    further = first // min(plan.cluster.gpus_per_node, plan.topology.gpus)
    unit = min(15.0, max(0.5, plan.run.hang_timeout_s / 10))  # less for the short timeout of a test
    return unit * min(3 + (further - 1) / 3, 4) if further else 0.0


def _names(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir(folder / "stacks"))
    return set()


def _answer(monitor: HangMonitor, folder: Path, name: str) -> None:
    """Write this node's report and stacks, unless it has asked itself."""
    with contextlib.suppress(OSError):
        if platform.node() not in hosts_in(folder / "stacks" / name):
            monitor.report()
            capture_here(folder, folder / "stacks" / name)


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
    """Watch the node of the process argv[1], its first rank argv[2] (default 0), of the run in
    argv[0].
    """
    folder, parent, first = Path(argv[0]), int(argv[1]), int(argv[2]) if len(argv) > 2 else 0
    # The parent passes its own id, as it may have ended before we could ask. A capture that waits
    # for other nodes must not outlive it either: SLURM drains a node on which a job's process does
    # not end ("Kill task failed").
    die_with(parent, signal.SIGTERM)
    watch_node(folder, parent, first)


if __name__ == "__main__":
    main(sys.argv[1:])
