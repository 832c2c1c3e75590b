"""Slowness: a run that has left its own pace and the plan's interval for ten iterations, and where it loses the time.

The watchdog of rank 0's node decides, by its own ranks and what late nodes have reported.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trilane.config.plan import Plan
from trilane.diagnose.stragglers import slowest
from trilane.utils.files import json_lines, read_text, replace_text
from trilane.workspace import pace, rank_grid
from trilane.workspace.heartbeat import Heartbeat, read_reports
from trilane.workspace.pace import LATE, RESTART


class Slowness:
    """Notices, once each, that the run of `plan` in `folder` has become slow, and that it is no longer."""

    def __init__(self, folder: Path, plan: Plan, env: Mapping[str, str]) -> None:
        self._folder, self._plan, self._env = folder, plan, env
        self._is_slow, self._seen = False, 0
        self._cancel()  # of an attempt that ended before it saw it

    def news(self, own: Mapping[int, Heartbeat], start: str) -> str:
        """A line about the run in whose start the ranks of this node, with rank 0, are as in `own`; "" without news."""
        # all ranks are late in the same iterations; the count of one may begin again, where other work disturbs it
        first = sorted(own.values(), key=lambda beat: beat.pace.late)[len(own) // 2] if 0 in own else None
        late = first.pace.late if first else 0
        if not first or (late == self._seen):
            return ""
        self._seen = late
        if self._is_slow and not late:
            self._is_slow = False
            self._cancel()
            pace.note(self._folder, first.step, "")
            return f"as fast as usual again, since iteration {first.step}"
        if late < LATE or self._is_slow or first.pace.now_s <= self._expected_s * first.pace.samples:
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
        late = {rank: b.pace for rank, b in beats.items() if b.pace.late and rank < self._plan.topology.gpus}
        hosts = {rank: beat.host for rank, beat in beats.items()}
        t = self._plan.topology
        # every node reports when it is half as late; one that did not, two iterations later, is left out
        if len(late) < t.gpus and first.pace.late < LATE + 2:
            return ""
        width = min(self._plan.cluster.gpus_per_node, t.gpus)
        grid = rank_grid.regular(t.tp, t.pp, t.dp * t.cp, width)
        grid = replace(grid, places=tuple(replace(p, node=hosts.get(p.rank, p.node)) for p in grid.places))
        words, ranks = slowest(grid, late)
        if len({*hosts.values()}) == 1 and not ranks and not words.startswith("the shared disk"):
            return ""  # a machine's other work slows all ranks; the nodes of a job do no other
        self._is_slow, usual = True, first.pace
        text = f"SLOW since iteration {max(1, first.step - usual.late)}: {words}; "
        text += f"{usual.now_s / usual.usual_s:.1f} times its usual {usual.usual_s:.3g} s an iteration"
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
        """The upper end of the plan's interval for an iteration, by the sample; 0 where nothing is predicted."""
        from trilane.costmodel.predict import predict  # numpy and all shipped rows: only where a run is late

        try:
            return predict(self._plan).sec_hi / self._plan.topology.gbs
        except ValueError:
            return 0.0

    def _spares(self) -> int:
        """Nodes of the job that neither train nor are left out, by its environment and the ledger's last choice."""
        chosen = [e for e in json_lines(read_text(self._folder / "jobs.jsonl")) if e.get("event") == "nodes"]
        job_nodes = self._env.get("SLURM_JOB_NUM_NODES", "0")
        if not chosen or not job_nodes.isdigit():
            return 0
        return int(job_nodes) - sum(len(chosen[-1].get(name) or ()) for name in ("chosen", "left_out"))
