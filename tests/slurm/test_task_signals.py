"""What a task of the job script does with SLURM's signals where nobody but the task gets them (proctrack/cgroup)."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import PATIENCE_S, REQUEST, SITE, allow, claim, lead, losses, pace, plan
from support import wait_until

from trilane.slurm import script
from trilane.slurm.sites import JobRequest
from trilane.workspace import run_folder
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.status import read_status

pytestmark = pytest.mark.slow


def task(text: str) -> str:
    """What srun starts on each node."""
    found = re.search(r"srun [^\n]* bash -c '\n(.*?)' 2>&1", text, re.S)
    assert found
    return found[1]


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """A run folder, and the only task of its job."""
    p = plan("task", tmp_path / "data", nodes=1, iters=200, gbs=8)
    folder = tmp_path / "run"
    wishes = JobRequest(account=REQUEST.account, time_limit="00:10:00", launcher="deepspeed")
    (folder / "ranks").mkdir(parents=True)
    for name, text in script.files(p, SITE, wishes).items():
        (folder / name).write_text(text)
    (folder / "ranks/hostfile").write_text("localhost slots=2\n")
    pace(monkeypatch)
    allow(folder, 3)
    port, _, guard = claim()
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HOSTFILE": "ranks/hostfile",
        "OMP_NUM_THREADS": "1",
        "TRAIN_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
    }
    code = task((folder / "job.sbatch").read_text()).replace("$SLURM_JOB_ID", "1")
    with (folder / "run.log").open("wb") as log:
        child = subprocess.Popen(["bash", "-c", code], cwd=folder, env=env, stdout=log, stderr=log)
    try:
        yield folder, child
    finally:
        child.kill()
        child.wait()
        guard.close()


def test_the_signal_before_the_limit_saves_and_the_end_of_the_job_ends_all(
    running: tuple[Path, "subprocess.Popen[bytes]"],
) -> None:
    folder, child = running
    says = lambda: (folder / "run.log").read_text()[-2000:]  # noqa: E731
    wait_until(lambda: run_folder.iteration(folder) >= 3 or child.poll() is not None, PATIENCE_S, says())
    assert child.poll() is None, says()
    child.send_signal(signal.SIGUSR1)
    lead(folder, lambda: latest(folder / FOLDER) is not None, "checkpoint")
    saved = int(latest(folder / FOLDER).name.removeprefix("iter_"))
    lead(folder, lambda: run_folder.iteration(folder) > saved, "iteration after the signal")
    child.send_signal(signal.SIGTERM)
    lead(folder, lambda: child.poll() is not None, "end")
    assert read_status(folder).status == "stopped" and len(losses(folder)) > saved, says()
