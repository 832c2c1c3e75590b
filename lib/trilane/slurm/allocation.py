"""Allocation: which nodes of a job train, and which stay out; recorded in the ledger, the reasons in the log."""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.slurm import attempt, client, ledger
from trilane.slurm.node_failure import lost_nodes
from trilane.utils.files import append_line
from trilane.utils.validation import require


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The nodes that train, in the allocation's order, and of the others those that are not simply spare: why."""

    chosen: tuple[str, ...]
    left_out: dict[str, str]


def choose(nodes: Sequence[str], count: int, lost: Collection[str] = ()) -> Choice:
    """The first `count` nodes that are not lost; ValueError where there are fewer."""
    left = [node for node in nodes if node not in lost]
    rule = f"the plan needs {count} nodes, and of {len(nodes)} in the job {len(left)} are left"
    require(len(left) >= count, "nodes", ",".join(left) or "none", rule)
    return Choice(chosen=tuple(left[:count]), left_out=dict.fromkeys(lost, "has failed"))


def start_nodes(folder: Path, count: int, env: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """The nodes of the next start as a SLURM node list, and a line about each that is left out, also in run.log."""
    job = attempt.job_id(env)
    nodes = client.hostnames(env["SLURM_JOB_NODELIST"])
    choice = choose(nodes, count, lost_nodes(folder, job))
    ledger.note(folder, "nodes", job, chosen=list(choice.chosen), left_out=choice.left_out)
    lines = [f"NODE {node} is left out: {reason}" for node, reason in choice.left_out.items()]
    with contextlib.suppress(OSError):  # a full disk
        for line in lines:
            append_line(folder / "run.log", line)
    return client.call(["scontrol", "show", "hostlist", ",".join(choice.chosen)]).strip(), lines
