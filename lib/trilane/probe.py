"""Probe: which nodes of the job that runs this are gone. SLURM itself knows only minutes later (SlurmdTimeout)."""

import re
import subprocess
import time
from collections.abc import Sequence

from trilane import slurm

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
    share = sharing(slurm.call(["srun", "--version"]))
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
