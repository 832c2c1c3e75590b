"""Monitor: attach to a running job, and report when jobs start, fail, stall or make progress."""

import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trilane.config.plan import Plan
from trilane.diagnose.hang.capture import capture
from trilane.slurm import client, job_status, jobs, node_failure
from trilane.slurm.jobs import JobStatus
from trilane.utils.validation import require, require_known
from trilane.workspace.heartbeat import read_beats

STALL_S = 600.0  # without a new iteration; saving a large checkpoint or a slow start takes less
GOING = ("RUNNING", "COMPLETING")

# The ranks of this job. A launcher, shell or srun with a similar command line has no RANK; a rank of another job of the
# same user on the node has another SLURM_JOB_ID.
RANKS = r"""
for pid in $(pgrep -f -- "trilane.engine plan.json"); do
  environ=$(tr "\0" "\n" 2>/dev/null <"/proc/$pid/environ" | sed -n "/^RANK=/p; /^SLURM_JOB_ID=/p")
  rank=$(echo "$environ" | sed -n "s/^RANK=//p")
  job=$(echo "$environ" | sed -n "s/^SLURM_JOB_ID=//p")
  [ -z "$rank" ] || [ "$job" != "$SLURM_JOB_ID" ] || { echo "== $(hostname) rank $rank pid $pid"; %s; }
done
"""

WHAT = {
    "memory": "echo == $(hostname); "
    "nvidia-smi --query-gpu=index,memory.used,memory.total,utilization.gpu --format=csv || true",
    "stacks": RANKS % "PY_SPY dump --pid $pid || true",
    "processes": RANKS % "ps -o pid,rss,etime,args -p $pid",
}


def srun_command(job: str, nodes: int, words: Sequence[str], version: str = "") -> list[str]:
    """A further step of a running job, as in document 003: one task per node, without a GPU, within the job's share."""
    require(client.JOB_ID.fullmatch(job) is not None, "job", job, "must be a job's number")
    head = ["srun", f"--jobid={job}", *node_failure.step_options(version), f"--nodes={nodes}", f"--ntasks={nodes}"]
    return [*head, "--ntasks-per-node=1", *words]


def attach(job: str, what: str) -> list[str]:
    """The srun command that inspects a running job: one task on each of its nodes, without a GPU of its own.

    memory      nvidia-smi of every GPU
    stacks      the stack of every rank, by py-spy
    processes   the process of every rank

    Raises ValueError where the job belongs to another user, or is not running.
    """
    require_known("what", what, WHAT)
    client.require_own([job])
    state = client.states([job])[job]
    require(state.state in GOING, "job", job, f"is {state.state}; a step can only be attached to a running job")
    words = ["bash", "-c", WHAT[what].replace("PY_SPY", shlex.quote(str(Path(sys.executable).with_name("py-spy"))))]
    nodes, version = len(client.hostnames(state.nodes)), client.call(["srun", "--version"])
    return srun_command(client.raw_id(job), nodes, words, version)


def hostfile(job: str, slots: int) -> str:
    """The job's nodes as a hostfile of DeepSpeed and pdsh."""
    client.require_own([job])
    return "".join(f"{host} slots={slots}\n" for host in client.hostnames(client.states([job])[job].nodes))


def watch(folders: Sequence[Path], every_s: float, seconds: float, stall_s: float = STALL_S) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every `every_s` seconds.

    While SLURM does not answer, one line reports it and the polling goes on.
    """
    end = time.monotonic() + seconds
    before: dict[str, JobStatus] = {}
    stalled: dict[str, bool] = {}
    is_down = False
    while True:
        try:
            now = {str(folder): job for folder, job in zip(folders, jobs.job_status(folders), strict=True)}
        except client.SlurmError as error:
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] if not is_down else []
            is_down = True
        else:
            yield from ["SLURM answers again"] if is_down else []
            is_down = False
            idle = {f: job.state == "RUNNING" and idle_s(Path(f)) > stall_s for f, job in now.items()}
            yield from changes(before, now)
            yield from (f"{now[f].run}: STALLED: {idle_text(Path(f))}" for f in now if idle[f] and not stalled.get(f))
            before, stalled = now, idle
            if not any(job.status.is_active for job in now.values()):
                return
        if time.monotonic() + every_s > end:
            return
        time.sleep(every_s)


def changes(before: Mapping[str, JobStatus], now: Mapping[str, JobStatus]) -> list[str]:
    """A line for each job that started, made progress, failed or completed."""
    lines = []
    for folder, job in now.items():
        old = before.get(folder)
        if old is None or (old.id, old.state, old.status) != (job.id, job.state, job.status):
            word, where = "DIED: " if job.has_failed else "", job.reason or job.nodes
            lines.append(f"{job.run}: job {job.id} {job.state} {where}: {word}{job.status} {job.evidence}".rstrip())
        elif old.iteration != job.iteration:
            lines.append(f"{job.run}: iteration {job.iteration} of {job.iterations}")
    return lines


def idle_s(folder: Path) -> float:
    """Seconds since the last iteration or event of the ledger, whichever is later; 0 where there is neither."""
    signs = [p for p in (folder / "steps.jsonl", folder / "jobs.jsonl") if p.exists()]
    return time.time() - max(p.stat().st_mtime for p in signs) if signs else 0.0


def idle_text(folder: Path) -> str:
    """The seconds without an iteration, and the log's last line."""
    return (
        f"no iteration for {idle_s(folder):.0f} s; the log's last line: {job_status.last_line(folder) or '(nothing)'}"
    )


CAPTURE_S = 120.0
# any other program: the stacks of all python processes of the user, as in document 003
ANY_PROGRAM = (
    "srun --jobid=JOB --overlap --gres=gpu:0 --ntasks-per-node=1 --output=trace-%N.out "
    "sh -c 'pgrep -u $USER -f python | xargs -I {} py-spy dump --pid {}'"
)


def here_command(folder: Path, stacks: Path) -> list[str]:
    """The command with which each node dumps its own ranks."""
    return [sys.executable, "-m", "trilane", "debug", "capture", str(folder), "--here", str(stacks)]


def capture_commands(folder: Path, plan: Plan, job: str) -> str:
    """The commands that take the stacks of a run: srun; pdsh or ds_ssh where nodes allow a login; for any program."""
    words = here_command(folder, folder / "stacks" / "by-hand")
    step = srun_command(client.raw_id(job) if job else "0", nodes_of_plan(plan), ["--input=none", *words])
    by_hostfile = shlex.quote(shlex.join(words))
    lines = [shlex.join(step), f"pdsh -R ssh -w ^hostfile {by_hostfile}", f"ds_ssh -f hostfile {by_hostfile}"]
    comment = "# a program that is not trilane's, then `trilane debug hang` on the folder:"
    return "\n".join([*lines, comment, ANY_PROGRAM])


def capture_job(folder: Path, plan: Plan, job: str) -> Path:
    """The stacks of all ranks of a run, taken now; the folder that holds them. ValueError where no rank runs.

    With a job and srun at hand a second step of the job dumps every node; otherwise the other nodes' watchdogs do.
    """
    beats = read_beats(folder)
    require(bool(beats), "folder", folder, "no rank has given a sign of life (hang_timeout_s=0, or not started)")
    if not (job and shutil.which("srun")):
        return capture(folder, plan, {beat.host for beat in beats.values()} - {platform.node()})
    stacks = folder / "stacks" / f"job-{job}"
    stacks.mkdir(parents=True, exist_ok=True)
    words = ["--input=none", *here_command(folder, stacks)]
    command = srun_command(client.raw_id(job), nodes_of_plan(plan), words)
    subprocess.run(command, check=False, timeout=CAPTURE_S)
    return stacks


def nodes_of_plan(plan: Plan) -> int:
    """Nodes that the plan's GPUs fill."""
    return -(-plan.topology.gpus // plan.cluster.gpus_per_node)
