"""A real SLURM for the tests: the daemons that tests/slurm/cluster.sh starts on this machine, and
small runs on them.

The tests that need it skip where SLURM is not installed, and fail where TRILANE_REQUIRE_SLURM is
set (as in CI).
"""

import functools
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY, small_cluster, small_plan, wait_until

from trilane.config.plan import Plan
from trilane.slurm import client, jobs, script
from trilane.slurm.sites import JobRequest, Site
from trilane.workspace.run import Run, iteration

SCRIPT = REPOSITORY / "tests/slurm/cluster.sh"
# Nodes of two processes; /tmp is shared here, since all nodes are this machine.
SITE = Site(name="test", partition="gpu_p5", local=("/dev/shm",))
# without the test of the nodes, which imports torch on each of them
REQUEST = JobRequest(account="xyz@a100", time_limit="00:10:00", signal_s=60, preflight=False)
PATIENCE_S = 480.0
# 48 and 4 spare for the rehearsal; a node costs 10 MB and no CPU
NODES = "jz-a100=52 jz-v32=2 jz-v16=2 jz-h100=2"
# ports of a cluster: the database's two, the controller's, one a node; the last claims the others
SPAN = 64
JOBS_PER_RUN = 460


class Cluster:
    """The daemons of one SLURM, in a folder and on ports of their own."""

    def __init__(self, folder: Path) -> None:
        base, first_job, self.guard = claim()
        ports = {"LOCAL_SLURM_PORT": str(base), "LOCAL_SLURM_FIRST_JOB": str(first_job)}
        self.env = {"LOCAL_SLURM_DIR": str(folder), "LOCAL_SLURM_NODES": NODES, **ports}

    def do(self, *command: str) -> str:
        """Run a command of cluster.sh; what it prints."""
        env = {**os.environ, **self.env}
        done = subprocess.run(
            [SCRIPT, *command], env=env, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> None:
        """Start what does not run: daemons that a test has killed, or all."""
        self.do("start", "--accounting")

    def controller(self) -> int:
        """The process id of the controller."""
        return int((Path(self.env["LOCAL_SLURM_DIR"]) / "run/slurmctld.pid").read_text().split()[0])

    def heir(self) -> "subprocess.Popen[bytes]":
        """A process that ends the daemons if this one is killed before it can."""
        loop = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 2; done; {shlex.quote(str(SCRIPT))} stop --purge"
        return subprocess.Popen(
            ["bash", "-c", loop], env={**os.environ, **self.env}, start_new_session=True
        )

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """The environment of SLURM's commands and of the jobs."""
        words = dict(word.split("=", 1) for word in shlex.split(self.do("env")) if "=" in word)
        return {**words, "TRILANE_VENV": sys.prefix, "PYTHONPATH": str(REPOSITORY / "lib")}

    def clean(self) -> None:
        """Bring it back to no job and every node idle, whatever a test has left; SLURM's variables
        must be set.
        """
        if left := client.call(["squeue", "-h", "-o", "%A"]).split():
            client.call(["scancel", *left])
        if down := out_of_service():
            client.call(["scontrol", "update", f"NodeName={','.join(down)}", "State=RESUME"])
        self.start()
        wait_until(lambda: not client.call(["squeue", "-h"]), 60, "jobs go on")
        wait_until(lambda: not out_of_service(), 60, "nodes are down")


def out_of_service() -> list[str]:
    """The nodes that SLURM lists as down, failing or drained."""
    lines = [
        line.split("|") for line in client.call(["sinfo", "-h", "-N", "-o", "%N|%T"]).splitlines()
    ]
    return sorted({name for name, state in lines if state.startswith(("down", "drain", "fail"))})


def claim() -> tuple[int, int, socket.socket]:
    """Ports for a cluster: the first, the number of its first job, and a socket that claims
    them until closed.

    Below the ports that Linux gives out by itself (32768 and up) and above those that the job
    scripts derive from a job's number, which differ between clusters because their job numbers do.
    """
    for slot in range((32_768 - 30_000) // SPAN):
        base = 30_000 + slot * SPAN
        guard = socket.socket()
        try:
            guard.bind(("", base + SPAN - 1))
        except OSError:
            guard.close()
        else:
            return base + 2, 1 + slot * JOBS_PER_RUN, guard
    raise OSError("no free ports between 30000 and 32767")


def started() -> Iterator[Cluster]:
    """A cluster until the tests have ended; skipped, or failed where it is required, if it cannot
    be had.
    """
    needed = os.environ.get("TRILANE_REQUIRE_SLURM")
    if not client.is_installed():
        reason = "SLURM is not installed here (tests/slurm/cluster.sh install --accounting)"
        pytest.fail(reason) if needed else pytest.skip(reason)
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="slurm-", dir=parent if len(parent) < 40 else "/tmp"
    ) as place:
        cluster = Cluster(Path(place) / "c")
        heir = cluster.heir()
        try:
            cluster.start()
        except AssertionError as error:
            pytest.fail(str(error)) if needed else pytest.skip(
                f"SLURM does not start here: {error}"
            )
        try:
            yield cluster
        finally:
            cluster.do("stop", "--purge")
            heir.kill()
            heir.wait()
            cluster.guard.close()


def plan(label: str, folder: Path, nodes: int = 2, iters: int = 4, **topology: Any) -> Plan:
    """A small GPT on `nodes` nodes of two processes each, its corpus in `folder`, which several
    tests may share.
    """
    run = {
        name: topology.pop(name)
        for name in ("save_interval", "load", "exit_duration_minutes")
        if name in topology
    }
    engine = topology.pop("engine", "megatron")
    p = small_plan(label, train_iters=iters, **{"dp": 2 * nodes, "gbs": 8 * nodes, **topology})
    cluster = replace(small_cluster(), gpus_per_node=2, max_nodes=4)
    return replace(
        p,
        engine=engine,
        cluster=cluster,
        data=replace(p.data, folder=str(folder)),
        run=replace(p.run, **run),
    )


def one_process_a_node(p: Plan) -> Plan:
    """The plan on nodes of one process each: what many nodes do, at the cost of few processes."""
    return replace(p, cluster=replace(p.cluster, gpus_per_node=1, cores_per_node=1))


def run_folder(root: Path, p: Plan, request: JobRequest = REQUEST) -> Path:
    """A run folder below `root` with the plan and its script."""
    (folder,) = script.create({root / p.label: p}, SITE, request)
    return folder


class Commands:
    """SLURM's commands as scripts of one's own; `calls` is what was asked of them."""

    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "calls"
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun"):
            self.say(name, "true")

    def say(self, command: str, does: str) -> None:
        """Let the command do so."""
        path = self.place / command
        path.write_text(f'#!/bin/bash\necho "{command} $*" >>{self.log}\n{does}\n')
        path.chmod(0o755)

    def calls(self, command: str) -> list[str]:
        """The calls of the command, a line each."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(f"{command} ")]


def fake_commands(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH for commands in place of SLURM's, which are asked without long
    waits.
    """
    (folder / "bin").mkdir()
    patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    patch.setattr(client, "DELAYS_S", (0.01,))
    patch.setattr(client.getpass, "getuser", lambda: "me")
    return folder / "bin"


def pace(patch: pytest.MonkeyPatch) -> None:
    """Trainings that begin from now on wait before every iteration until `allow` lets
    them go on.
    """
    patch.setenv("TRILANE_PLANT", "paced 0 0")
    patch.setenv("PYTHONPATH", f"{REPOSITORY / 'lib'}:{REPOSITORY / 'tests/planted'}")


def allow(folder: Path, last: int) -> None:
    """Let a training under `pace` begin all iterations up to this one."""
    (folder / "allowed").write_text(str(last))


def lead(folder: Path, true: Callable[[], bool], what: str) -> None:
    """Let a training under `pace` begin one iteration after the other until `true()`."""

    def has_come() -> bool:
        if not true():
            allow(folder, iteration(folder) + 1)
        return true()

    wait_until(has_come, PATIENCE_S, what)


def links(folder: Path) -> list[Path]:
    """The run folders of a chain in order."""
    paths = [plan.parent for plan in folder.glob("*/plan.json")]
    return sorted(paths, key=lambda path: Run(path).plan.run.start_iteration)


def submit(folder: Path, site: Site = SITE, request: JobRequest = REQUEST) -> str:
    """Submit the run of a folder; the job's id."""
    return jobs.submit_all([Run(folder)], site, request)[0][1]


def submit_chain(folder: Path, times: int = 1) -> list[str]:
    """Submit the stages of a chain in order, `times` jobs each; their ids."""
    runs = [Run(path) for path in links(folder)]
    made = jobs.submit_all(runs, SITE, REQUEST, times=times, parallel=1)
    return [job for _, job in made]


def send(job: str, signal: str) -> None:
    """Send a signal, such as USR1, to the steps of a job."""
    client.call(["scancel", f"--signal={signal}", job])


def one(folder: Path) -> jobs.JobStatus:
    """The status of a run."""
    return jobs.job_status([folder])[0]


def ended(folder: Path) -> jobs.JobStatus:
    """The status of a run once its jobs have ended."""
    done = (*client.ENDED, client.FORGOTTEN)
    wait_until(
        lambda: one(folder).state in done, PATIENCE_S, f"{folder.name} goes on: {says(folder)}"
    )
    return one(folder)


def says(folder: Path) -> str:
    """What a run's job printed so far."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("slurm-*.out")))[-3000:]


def losses(folder: Path) -> list[float]:
    """The loss of each iteration."""
    lines = (
        (folder / "steps.jsonl").read_text().splitlines()
        if (folder / "steps.jsonl").exists()
        else []
    )
    return [json.loads(line)["lm_loss"] for line in lines]
