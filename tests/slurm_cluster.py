"""A real SLURM for the tests: the daemons that tests/slurm/cluster.sh starts on this machine, and small runs on them.

The tests that need it skip where SLURM is not installed, and fail where TRILANE_REQUIRE_SLURM is set (as in CI).
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY, small_cluster, small_plan, wait_until

from trilane.config.plan import Plan
from trilane.slurm import client, jobs
from trilane.slurm.sites import JobRequest, Site

SCRIPT = REPOSITORY / "tests/slurm/cluster.sh"
# Nodes of two processes; /tmp is shared here, since all nodes are this machine.
SITE = Site(name="test", partition="gpu_p5", local=("/dev/shm",))
REQUEST = JobRequest(account="xyz@a100", time_limit="00:10:00", signal_s=60)
PATIENCE_S = 480.0


class Cluster:
    """The running daemons."""

    def __init__(self, folder: Path, nodes: str = "") -> None:
        base = 17000 + os.getpid() % 200 * 60  # ports of its own, so that two test runs do not meet
        self.env = {"LOCAL_SLURM_DIR": str(folder), "LOCAL_SLURM_PORT": str(base), "LOCAL_SLURM_NODES": nodes}

    def do(self, *command: str) -> str:
        """Run a command of cluster.sh; what it prints."""
        env = {**os.environ, **self.env}
        done = subprocess.run([SCRIPT, *command], env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def heir(self) -> "subprocess.Popen[bytes]":
        """A process that ends the daemons if this one is killed before it can."""
        loop = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 2; done; {shlex.quote(str(SCRIPT))} stop --purge"
        return subprocess.Popen(["bash", "-c", loop], env={**os.environ, **self.env}, start_new_session=True)

    def variables(self) -> dict[str, str]:
        """What SLURM's commands need in their environment."""
        words = shlex.split(self.do("env"))
        return dict(word.split("=", 1) for word in words if "=" in word)


def started(nodes: str = "", accounting: bool = True) -> Iterator[Cluster]:
    """A cluster until the tests are over; skipped, or failed where it is required, if it cannot be had."""
    needed = os.environ.get("TRILANE_REQUIRE_SLURM")
    if not client.is_installed():
        reason = "SLURM is not installed here (tests/slurm/cluster.sh install --accounting)"
        pytest.fail(reason) if needed else pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as place:
        cluster = Cluster(Path(place) / "c", nodes)
        heir = cluster.heir()
        try:
            cluster.do("start", *(["--accounting"] if accounting else []))
        except AssertionError as error:
            pytest.fail(str(error)) if needed else pytest.skip(f"SLURM does not start here: {error}")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.variables().items():
                patch.setenv(name, value)
            patch.setenv("TRILANE_VENV", sys.prefix)
            patch.setenv("PYTHONPATH", str(REPOSITORY / "lib"))
            try:
                yield cluster
            finally:
                cluster.do("stop", "--purge")
                heir.kill()
                heir.wait()


def plan(label: str, folder: Path, nodes: int = 2, iters: int = 4, **topology: Any) -> Plan:
    """A small GPT on `nodes` nodes of two processes each."""
    run = {name: topology.pop(name) for name in ("save_interval", "load", "exit_duration_minutes") if name in topology}
    engine = topology.pop("engine", "megatron")
    p = small_plan(label, train_iters=iters, **{"dp": 2 * nodes, "gbs": 8 * nodes, **topology})
    cluster = replace(small_cluster(), gpus_per_node=2, max_nodes=4)
    return replace(
        p, engine=engine, cluster=cluster, data=replace(p.data, folder=str(folder)), run=replace(p.run, **run)
    )


def run_folder(root: Path, p: Plan, request: JobRequest = REQUEST) -> Path:
    """A run folder below `root` with the plan and its script."""
    folder = root / p.label
    folder.mkdir(parents=True)
    for name, text in jobs.files(p, SITE, request).items():
        (folder / name).write_text(text)
    return folder


def one(folder: Path) -> jobs.JobStatus:
    """The status of a run."""
    return jobs.job_status([folder])[0]


def ended(folder: Path) -> jobs.JobStatus:
    """The status of a run once its jobs have ended."""
    done = (*client.ENDED, client.FORGOTTEN)
    wait_until(lambda: one(folder).state in done, PATIENCE_S, f"{folder.name} goes on: {says(folder)}")
    return one(folder)


def says(folder: Path) -> str:
    """What a run's job printed so far."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("slurm-*.out")))[-3000:]


def losses(folder: Path) -> list[float]:
    """The loss of each iteration."""
    lines = (folder / "steps.jsonl").read_text().splitlines() if (folder / "steps.jsonl").exists() else []
    return [json.loads(line)["lm_loss"] for line in lines]
