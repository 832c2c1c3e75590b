"""Allocation: which nodes of a job train, and which stay out; recorded in the ledger, the reasons in the log."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.slurm import attempt, client, ledger
from trilane.slurm.nodes import node_test
from trilane.slurm.nodes.node_failure import avoid, lost_nodes, requeue
from trilane.utils.files import append_line
from trilane.utils.validation import require
from trilane.workspace.status import RunStatus, Status, write_status

Tester = Callable[[Sequence[str]], node_test.Findings]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The nodes that train, in the allocation's order; of the others why they do not, where not simply spare; and which
    train though they are slow.
    """

    chosen: tuple[str, ...]
    left_out: dict[str, str]
    slow: dict[str, str]


def choose(
    nodes: Sequence[str], count: int, broken: Mapping[str, str], slow: Mapping[str, tuple[float, str]]
) -> Choice:
    """The first `count` nodes that are neither broken nor slow; for lack of them the least slow.

    The first, because neighbours in the list are neighbours in the network. ValueError where too few are not broken.
    """
    left = [node for node in nodes if node not in broken]
    reasons = "; ".join(f"{node}: {reason}" for node, reason in broken.items())
    rule = f"the plan needs {count} nodes, and {len(left)} of the job's {len(nodes)} are left: {reasons}"
    require(len(left) >= count, "nodes", ",".join(left) or "none", rule)
    best = sorted(left, key=lambda node: -slow[node][0] if node in slow else -1.0)[:count]
    chosen = tuple(node for node in nodes if node in best)
    left_out = {**broken, **{node: reason for node, (_, reason) in slow.items() if node not in chosen}}
    return Choice(chosen=chosen, left_out=left_out, slow={n: slow[n][1] for n in chosen if n in slow})


def tester(gpus: int, srun: Sequence[str], env: Mapping[str, str] = os.environ) -> Tester:
    """The test of nodes of this job, on so many GPUs of each (0: a core), by steps with these arguments of srun."""

    def tested(nodes: Sequence[str]) -> node_test.Findings:
        return node_test.findings(nodes, node_test.Steps(nodes, gpus, srun, env), is_cpu=gpus == 0)

    return tested


def broken_by(gpus: int, srun: Sequence[str]) -> Callable[[Sequence[str]], Mapping[str, str]]:
    """The broken ones of nodes, and why, by that test."""
    return lambda nodes: tester(gpus, srun)(nodes).broken


def start_nodes(
    folder: Path, count: int, test: Tester | None, env: Mapping[str, str] = os.environ
) -> tuple[str, list[str]]:
    """The nodes of the next start as a SLURM node list, and a line about each that is left out, also in run.log.

    Where too few work, the attempt has ended as a node failure, the job goes back into the queue, and ValueError names
    the broken nodes.
    """
    job, nodes = attempt.job_id(env), client.hostnames(attempt.job_nodes(env))
    lost = dict.fromkeys(lost_nodes(folder, job), "has failed")
    left = [node for node in nodes if node not in lost]
    found = test(left) if test and len(left) > 1 else node_test.Findings()
    if found.broken:
        with contextlib.suppress(ValueError):  # a SLURM that does not answer must not prevent the training
            avoid(folder, job, list(found.broken))
    try:
        choice = choose(nodes, count, {**lost, **found.broken}, found.slow)
    except ValueError as error:
        _give_up(folder, job, str(error), len(nodes), list(found.broken))
        raise
    ledger.note(folder, "nodes", job, chosen=list(choice.chosen), left_out=choice.left_out, slow=choice.slow)
    lines = [f"NODES {note}" for note in found.notes]
    lines += [f"NODE {node} is left out: {reason}" for node, reason in choice.left_out.items()]
    lines += [f"NODE {node} is slow, and no spare is better: {reason}" for node, reason in choice.slow.items()]
    with contextlib.suppress(OSError):  # a full disk
        for line in lines:
            append_line(folder / "run.log", line)
    return client.call(["scontrol", "show", "hostlist", ",".join(choice.chosen)]).strip(), lines


def _give_up(folder: Path, job: str, reason: str, nodes: int, broken: Sequence[str]) -> None:
    """The attempt ends before it has trained, and the job waits for other nodes."""
    outcome = RunStatus(status=Status.NODE_FAILURE, evidence=reason, rank=None, exit_code=1, seconds=0.0)
    write_status(folder, outcome)
    ledger.note(folder, "ended", job, status=outcome.status, evidence=reason)
    with contextlib.suppress(ValueError):
        requeue(job, nodes=nodes, without=broken)
