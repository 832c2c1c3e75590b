"""Rehearsals on 52 nodes of a real SLURM: the training is a sleep or a stand-in, everything else is
real.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slurm_cluster import PATIENCE_S, REQUEST, SITE, Cluster, ended, one, says, send, submit_chain
from support import REPOSITORY, wait_until

from trilane.cli.app import main
from trilane.config.cluster import cluster as nodes_of
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Run
from trilane.slurm import chain, client, jobs
from trilane.utils.files import json_lines
from trilane.workspace import ledger, run
from trilane.workspace.checkpoints import FOLDER, latest, name_of
from trilane.workspace.heartbeat import read_beats

GOAL, SAVES, TRAIN, SPARES = 40, 10, 42, 6


class Rehearsal:
    """A run of 42 nodes and 6 spares; the test lets its iterations begin, and kills
    what they need.
    """

    def __init__(self, cluster: Cluster, chained: Path) -> None:
        t = Topology(dp=TRAIN, mbs=1, gbs=TRAIN, precision="bf16")
        shape, nodes = (
            parse_shape("24,2048,16,2048,50304"),
            replace(nodes_of("jz-a100-80g"), gpus_per_node=1),
        )
        p = Plan(
            label="big",
            shape=shape,
            cluster=nodes,
            topology=t,
            run=Run(train_iters=GOAL, save_interval=SAVES),
        )
        request = replace(REQUEST, spares=SPARES, preflight=True)
        (self.folder,) = chain.create(chained, p, [], SITE, request)
        self.cluster = cluster
        self._put_stand_ins(chained / "bin")

    def _put_stand_ins(self, programs: Path) -> None:
        """tests/planted/node.py in place of each node's ranks and of its test, and short intervals
        for long ones.

        The nodes are tested before the first start alone: a test of 48 takes 10 s here.
        """
        node = f"{sys.executable} -IS {REPOSITORY}/tests/planted/node.py"
        programs.mkdir()
        (programs / "python").write_text(
            f'#!/bin/sh\n[ "$3" != trilane_engine.bench.node_test ] || exec {node} test\nexec {sys.executable} "$@"\n'
        )
        (programs / "python").chmod(0o755)
        script = (self.folder / "job.sbatch").read_text()
        ranks = r"exec python -m trilane_engine.torchrun .*?plan.json'"
        script = re.sub(ranks, lambda _: f"exec {node} {GOAL} {SAVES}'", script, flags=re.S)
        for old, new in (
            ("# Nothing left to do", f'export PATH="{programs}:$PATH"\n# Nothing left to do'),
            ("python -m trilane_engine.data.corpus --in-job plan.json\n", ""),
            ("slurm job guard . &", "slurm job guard . --every 1 &"),
            ("--wait=15", "--wait=2"),
            (" --test ", " $([ -e tested ] || { touch tested; echo --test; }) "),
        ):
            assert old in script, old
            script = script.replace(old, new)
        (self.folder / "job.sbatch").write_text(script)

    def lead_to(self, iteration: int) -> None:
        """Let the training begin all iterations up to this one, and wait until it has."""
        (self.folder / "allowed").write_text(str(iteration))
        self.wait(lambda: run.iteration(self.folder) >= iteration, f"iteration {iteration}")

    def wait(self, true: Callable[[], bool], what: str) -> None:
        """Wait; where it takes too long, show what the job has printed."""
        try:
            wait_until(true, PATIENCE_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {one(self.folder)} {says(self.folder)}") from None

    def kill(self, *places: int) -> list[str]:
        """Kill the nodes at these places of those that train; their names."""
        chosen = ledger.events(self.folder, "nodes")[-1]["chosen"]
        for place in places:
            self.cluster.do("kill-node", chosen[place])
        return [chosen[place] for place in places]

    def count(self, event: str) -> int:
        return len(ledger.events(self.folder, event))

    def executed(self) -> list[int]:
        """Every iteration that was trained, again or not, in order."""
        return [
            line["iteration"] for line in json_lines((self.folder / "executed.jsonl").read_text())
        ]


def test_52_nodes_lose_four_and_the_controller_and_no_iteration(cluster, tmp_path):
    """A broken and a slow node stay out; two nodes die, then a third, whose places spares take; the
    controller; the first node, which costs a requeue; the signal before the time limit, after which
    the next job of the chain goes on. Who watches is told of the end.

    The nodes that die are heads of the tree by which SLURM collects the end of a step (every 8th):
    of others the heads wait a minute for them, and hold their nodes.
    """
    r = Rehearsal(cluster, tmp_path / "chain")
    lines: list[str] = []
    watching = threading.Thread(
        target=lambda: lines.extend(jobs.watch([r.folder], 0.5, PATIENCE_S))
    )
    for name, node in (("broken", "jz-a100-4"), ("slow", "jz-a100-30")):
        (r.folder / name).write_text(node)
    first, second = submit_chain(tmp_path / "chain", times=2)
    watching.start()
    r.wait(lambda: r.count("nodes") == 1, "nodes tested")
    assert set(ledger.events(r.folder, "nodes")[0]["left_out"]) == {"jz-a100-4", "jz-a100-30"}
    r.lead_to(13)
    assert len(read_beats(r.folder)) == 8 * TRAIN
    dead = [r.kill(17, 33)]
    r.wait(lambda: r.count("response") == 1, "spares for two nodes")
    r.lead_to(14)
    dead += [r.kill(9)]
    r.wait(lambda: r.count("response") == 2, "a spare for a third")
    r.lead_to(15)
    assert one(r.folder).id == first and {
        e["restarts"] for e in ledger.events(r.folder, "started")
    } == {0}
    assert main(["slurm", "status", str(r.folder)]) == 0
    os.kill(cluster.controller(), signal.SIGKILL)
    assert main(["slurm", "status", str(r.folder)]) == 75
    r.lead_to(17)
    cluster.start()  # the dead nodes come back, too
    dead += [r.kill(0)]
    client.call(["scontrol", "update", f"NodeName={dead[-1][0]}", "State=DOWN", "Reason=killed"])
    r.wait(lambda: ledger.events(r.folder, "started")[-1]["restarts"] == 1, "requeued")
    r.lead_to(25)
    send(first, "USR1")
    r.wait(lambda: latest(r.folder / FOLDER).name == name_of(25), "saved before the limit")
    client.cancel([first])
    r.wait(lambda: one(r.folder).id == second, "the next job of the chain")
    r.lead_to(GOAL)
    found = ended(r.folder)
    assert (found.id, found.status, found.iteration) == (second, "completed", GOAL), says(r.folder)
    watching.join(30.0)
    assert [line["iteration"] for line in json_lines((r.folder / "steps.jsonl").read_text())] == [
        *range(1, GOAL + 1)
    ]
    # from the checkpoint of 10
    again = [*range(11, 14), *range(11, 15), *range(11, 18)]
    assert sorted(r.executed()) == sorted([*range(1, GOAL + 1), *again])
    starts = [(e["id"], e["restarts"], e["iteration"]) for e in ledger.events(r.folder, "started")]
    assert starts == [
        (first, 0, 0),
        (first, 0, 13),
        (first, 0, 14),
        (first, 1, 17),
        (second, 0, 25),
    ]
    lost = [["jz-a100-4"], *dead]
    assert [sorted(e["nodes"]) for e in ledger.events(r.folder, "node failure")] == [
        sorted(nodes) for nodes in lost
    ]
    assert "completed" in lines[-1], lines
