"""Node loss: an attempt that ended because a node went away: noted, kept off later, and begun again.

Probe: which nodes of the job that runs this are gone. SLURM itself knows only minutes later (SlurmdTimeout).
"""

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trilane.slurm import client, ledger
from trilane.workspace.status import RunStatus, Status, write_status


def handle_node_failure(folder: Path, job: str, nodelist: str, outcome: RunStatus) -> RunStatus:
    """The outcome of an attempt of this very job; "node failure" where a node is gone, once its consequences are drawn.

    Later jobs are kept off the node; the job goes back into the queue where it may: SLURM itself does that only while
    the job still runs, and it learns of a dead node minutes after srun has failed.
    """
    if not outcome.status.may_be_node_failure:
        return outcome
    with contextlib.suppress(ValueError):  # a SLURM that cannot be asked changes nothing in how the attempt ended
        nodes = client.hostnames(nodelist)
        dead = gone(nodes) if len(nodes) > 1 else []
        if not dead:
            return outcome
        reason = f"{', '.join(dead)} cannot be reached any more; the log: {outcome.evidence}"
        outcome = replace(outcome, status=Status.NODE_FAILURE, evidence=reason)
        write_status(folder, outcome)
        _avoid(folder, job, dead)
        if " Requeue=1 " in client.call(["scontrol", "show", "job", "-o", job]):
            client.call(["scontrol", "requeue", job])
    return outcome


def blame(folder: Path) -> None:
    """Where the attempt before lost a node that SLURM knows of by now, note it, and keep what still waits off it."""
    events = ledger.events(folder)
    begun = [place for place, e in enumerate(events) if e["event"] == "started"]
    if not begun:
        return
    noted = {node for e in events[begun[-1] :] if e["event"] == "node failure" for node in e["nodes"]}
    with contextlib.suppress(ValueError):  # a note that cannot be had must not keep the training from starting
        dead = set(client.hostnames(events[begun[-1]]["nodes"])) & set(client.down_nodes()) - noted
        if dead:
            _avoid(folder, events[begun[-1]]["id"], sorted(dead))


def waiting(folder: Path, job: str) -> list[str]:
    """The folder's other jobs that have not started."""
    states = client.states([i for i in ledger.job_ids(folder) if i != job and client.JOB_ID.fullmatch(i)])
    return [i for i, state in states.items() if state.state == "PENDING"]


def _avoid(folder: Path, job: str, dead: Sequence[str]) -> None:
    ledger.note(folder, "node failure", job, nodes=list(dead))
    for later in waiting(folder, job):
        client.exclude(later, dead)


LIMIT_S = 30.0  # a step on a healthy node starts in a second or two
OVERLAP_FROM = (20, 11)  # the first SLURM whose steps must say that they share a job's resources

GONE = re.compile(
    r"[Cc]ommunication|[Cc]onnection|[Tt]imed out|[Nn]o route|[Nn]ot responding|[Hh]ost is down|NODE_FAIL|[Nn]ode fail"
)


def sharing(version: str = "") -> list[str]:
    """What lets a step run beside others of its job and take no GPU, by what `srun --version` says ("": a new one).

    Without --overlap it waits for the others' end; with --gres=gpu:0 it asks for no GPU of its own, with --mem=0 for no
    memory: a step that could not end on a dead node still holds the job's.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2]) or OVERLAP_FROM
    return ["--overlap"] * (numbers >= OVERLAP_FROM) + ["--mem=0", "--gres=gpu:0", "--cpus-per-task=1"]


def gone(nodes: Sequence[str], limit_s: float = LIMIT_S) -> list[str]:
    """Those of the job's `nodes` on which no step can be started any more; to be called inside the job.

    None where that holds for all: then srun is at fault, since this process stands on one of them.
    """
    share = sharing(client.call(["srun", "--version"]))
    one = ["srun", *share, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    asked = {node: _started([*one, f"--nodelist={node}", "true"]) for node in nodes}
    end = time.monotonic() + limit_s
    found = [node for node, step in asked.items() if not _answers(step, end)]
    return found if len(found) < len(nodes) else []


def _started(command: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _answers(step: "subprocess.Popen[str]", end: float) -> bool:
    """Whether the step ended well, or failed for another reason than that nobody is there."""
    try:
        _, said = step.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        step.kill()
        step.communicate()
        return False
    return step.returncode == 0 or GONE.search(said) is None
