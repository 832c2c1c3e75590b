"""Node loss: an attempt that ended because a node went away: noted, kept off later, and begun again."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trilane import ledger, probe, slurm
from trilane.outcome import Outcome, write_status

# How a log ends where a node went away under it, and otherwise too.
BY_NODES = ("crashed", "NCCL error", "hang", "node failure")


def judged(folder: Path, job: str, nodelist: str, outcome: Outcome) -> Outcome:
    """The outcome of an attempt of this very job; "node failure" where a node is gone, once its consequences are drawn.

    Later jobs are kept off the node; the job goes back into the queue where it may: SLURM itself does that only while
    the job still runs, and it learns of a dead node minutes after srun has failed.
    """
    if outcome.status not in BY_NODES:
        return outcome
    with contextlib.suppress(ValueError):  # a SLURM that cannot be asked changes nothing in how the attempt ended
        nodes = slurm.hostnames(nodelist)
        dead = probe.gone(nodes) if len(nodes) > 1 else []
        if not dead:
            return outcome
        reason = f"{', '.join(dead)} cannot be reached any more; the log: {outcome.evidence}"
        outcome = replace(outcome, status="node failure", evidence=reason)
        write_status(folder, outcome)
        _avoid(folder, job, dead)
        if " Requeue=1 " in slurm.call(["scontrol", "show", "job", "-o", job]):
            slurm.call(["scontrol", "requeue", job])
    return outcome


def blame(folder: Path) -> None:
    """Where the attempt before lost a node that SLURM knows of by now, note it, and keep what still waits off it."""
    events = ledger.events(folder)
    begun = [place for place, e in enumerate(events) if e["event"] == "started"]
    if not begun:
        return
    noted = {node for e in events[begun[-1] :] if e["event"] == "node failure" for node in e["nodes"]}
    with contextlib.suppress(ValueError):  # a note that cannot be had must not keep the training from starting
        dead = set(slurm.hostnames(events[begun[-1]]["nodes"])) & set(slurm.down_nodes()) - noted
        if dead:
            _avoid(folder, events[begun[-1]]["id"], sorted(dead))


def waiting(folder: Path, job: str) -> list[str]:
    """The folder's other jobs that have not started."""
    states = slurm.states([i for i in ledger.job_ids(folder) if i != job and slurm.JOB_ID.fullmatch(i)])
    return [i for i, state in states.items() if state.state == "PENDING"]


def _avoid(folder: Path, job: str, dead: Sequence[str]) -> None:
    ledger.note(folder, "node failure", job, nodes=list(dead))
    for later in waiting(folder, job):
        slurm.exclude(later, dead)
