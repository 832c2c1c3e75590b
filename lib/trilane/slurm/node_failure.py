"""Node failures: an attempt that lost a node is recorded, later jobs avoid the node, and the job is requeued.

The job itself probes its nodes: SLURM notices a dead node only minutes later (SlurmdTimeout).
"""

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trilane.slurm import client, ledger
from trilane.workspace.status import RunStatus, Status, write_status

STEP_S = 30.0  # in which a step starts on a healthy node many times


def handle_node_failure(folder: Path, job: str, nodelist: str, outcome: RunStatus) -> RunStatus:
    """The outcome of this job's attempt, with status "node failure" where one of its nodes cannot be reached.

    Then the folder's later jobs exclude the node, and the job is requeued if its script allows it: SLURM itself does so
    only while the job runs, and notices a dead node minutes after srun has failed.
    """
    if not outcome.status.may_be_node_failure:
        return outcome
    with contextlib.suppress(ValueError):  # without SLURM the outcome stays as it is
        nodes = client.hostnames(nodelist)
        dead = unreachable(nodes) if len(nodes) > 1 else []
        if not dead:
            return outcome
        reason = f"{', '.join(dead)} cannot be reached; the log: {outcome.evidence}"
        outcome = replace(outcome, status=Status.NODE_FAILURE, evidence=reason)
        write_status(folder, outcome)
        _avoid(folder, job, dead)
        if " Requeue=1 " in client.call(["scontrol", "show", "job", "-o", job]):
            client.call(["scontrol", "requeue", job])
    return outcome


def note_lost_nodes(folder: Path) -> None:
    """Record the nodes of the last attempt that SLURM lists as down by now, and exclude them from waiting jobs."""
    events = ledger.events(folder)
    begun = [i for i, e in enumerate(events) if e["event"] == "started"]
    if not begun:
        return
    noted = {node for e in events[begun[-1] :] if e["event"] == "node failure" for node in e["nodes"]}
    with contextlib.suppress(ValueError):  # a SLURM that does not answer must not prevent the training
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


OVERLAP_FROM = (20, 11)  # the first SLURM in which a step shares its job's resources only with --overlap

UNREACHABLE = re.compile(
    r"[Cc]ommunication|[Cc]onnection|[Tt]imed out|[Nn]o route|[Nn]ot responding|[Hh]ost is down|NODE_FAIL|[Nn]ode fail"
)


def step_options(version: str = "") -> list[str]:
    """The srun options of a step that runs next to the others of its job; `version` is `srun --version` ("": recent).

    Without --overlap it would wait until the others end. --gres=gpu:0 and --mem=0 request no GPU and no memory, which
    a step that could not end on a dead node may still hold.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2]) or OVERLAP_FROM
    return ["--overlap"] * (numbers >= OVERLAP_FROM) + ["--mem=0", "--gres=gpu:0", "--cpus-per-task=1"]


def unreachable(nodes: Sequence[str]) -> list[str]:
    """The nodes on which no step can be started within STEP_S seconds; to be called inside the job.

    A step on a healthy node starts in a second or two. Empty where that holds for all nodes: then srun itself fails,
    since this process runs on one of them.
    """
    options = step_options(client.call(["srun", "--version"]))
    one = ["srun", *options, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    steps = {n: subprocess.Popen([*one, f"--nodelist={n}", "true"], **streams, text=True) for n in nodes}
    end = time.monotonic() + STEP_S
    found = [node for node, step in steps.items() if not _is_reachable(step, end)]
    return found if len(found) < len(nodes) else []


def _is_reachable(step: "subprocess.Popen[str]", end: float) -> bool:
    """Whether the step succeeded, or failed for another reason than an unreachable node."""
    try:
        _, error = step.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        step.kill()
        step.communicate()
        return False
    return step.returncode == 0 or UNREACHABLE.search(error) is None
