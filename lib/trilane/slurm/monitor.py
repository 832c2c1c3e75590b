"""Monitor: look into a running job from outside, and say when one dies, stalls or goes on."""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trilane.slurm import client, job_status, jobs, node_failure
from trilane.slurm.jobs import JobStatus
from trilane.utils.validation import require, require_known

STALL_S = 600.0  # without a new iteration: a save of a large checkpoint or a slow start is shorter
GOING = ("RUNNING", "COMPLETING")

# Every rank of the job, and no launcher, shell or srun whose command line looks alike: only ranks have RANK. A rank of
# another job of the same user on the node has another SLURM_JOB_ID.
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


def step(job: str, what: str, state: client.JobState, version: str) -> list[str]:
    """The srun command that looks into a running job, one task on each of its nodes; it takes no GPU.

    memory      what nvidia-smi shows of every GPU
    stacks      where every rank stands, by py-spy
    processes   every rank's process
    """
    require_known("what", what, WHAT)
    require(state.state in GOING, "job", job, f"is {state.state}; a step can only be attached to a running job")
    nodes = len(client.hostnames(state.nodes))
    command = ["srun", f"--jobid={job}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    command += node_failure.sharing(version)
    py_spy = Path(sys.executable).with_name("py-spy")
    return [*command, "bash", "-c", WHAT[what].replace("PY_SPY", shlex.quote(str(py_spy)))]


def attach(job: str, what: str) -> list[str]:
    """The command that looks into that job of ours; ValueError where it is not ours, or does not run."""
    client.require_own([job])
    state, version = client.states([job])[job], client.call(["srun", "--version"])
    return step(client.raw_id(job), what, state, version)


def hostfile(job: str, slots: int) -> str:
    """The job's nodes as DeepSpeed's and pdsh's hostfile."""
    client.require_own([job])
    return "".join(f"{host} slots={slots}\n" for host in client.hostnames(client.states([job])[job].nodes))


def watch(folders: Sequence[Path], every_s: float, seconds: float, stall_s: float = STALL_S) -> Iterator[str]:
    """A line whenever something changes, until all runs have ended or `seconds` are over.

    While SLURM does not answer, that is said once, and asked again at every turn.
    """
    end = time.monotonic() + seconds
    before: dict[str, JobStatus] = {}
    stalled: dict[str, bool] = {}
    away = False
    while True:
        try:
            now = {str(folder): job for folder, job in zip(folders, jobs.status(folders), strict=True)}
        except client.SlurmError as error:
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] if not away else []
            away = True
        else:
            yield from ["SLURM answers again"] if away else []
            away = False
            still = {folder: is_stalled(Path(folder), job, stall_s) for folder, job in now.items()}
            yield from changes(before, now)
            yield from (
                f"{now[f].run}: STALLED: {still_since(Path(f))}" for f in now if still[f] and not stalled.get(f)
            )
            before, stalled = now, still
            if not any(job.verdict.is_active for job in now.values()):
                return
        if time.monotonic() + every_s > end:
            return
        time.sleep(every_s)


def changes(before: Mapping[str, JobStatus], now: Mapping[str, JobStatus]) -> list[str]:
    """What is new: a job that began, moved on, died or completed."""
    said = []
    for folder, job in now.items():
        old = before.get(folder)
        if old is None or (old.id, old.state, old.verdict) != (job.id, job.state, job.verdict):
            word = "DIED: " if job.has_failed else ""
            where = job.reason or job.nodes
            said.append(f"{job.run}: job {job.id} {job.state} {where}: {word}{job.verdict} {job.evidence}".rstrip())
        elif old.iteration != job.iteration:
            said.append(f"{job.run}: iteration {job.iteration} of {job.iterations}")
    return said


def is_stalled(folder: Path, job: JobStatus, stall_s: float) -> bool:
    """Whether a job that runs has not finished an iteration, nor begun, for so long."""
    return job.state == "RUNNING" and still_s(folder) > stall_s


def still_s(folder: Path) -> float:
    """Seconds since the training's last sign: an iteration, or where there is none yet the log's last line."""
    signs = [p for p in (folder / "steps.jsonl", folder / "jobs.jsonl") if p.exists()]
    return time.time() - max(p.stat().st_mtime for p in signs) if signs else 0.0


def still_since(folder: Path) -> str:
    """How long nothing happened, and the log's last line."""
    last = job_status.logs(folder, 1) if (folder / "run.log").exists() else []
    return f"no iteration for {still_s(folder):.0f} s; the log's last line: {last[0] if last else '(nothing)'}"
