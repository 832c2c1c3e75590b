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
from trilane.slurm import client, job_status, jobs, ledger
from trilane.slurm.alerting import alerts
from trilane.slurm.alerting.alerts import Alert, SaveCheck
from trilane.slurm.alerting.delivery import Sender
from trilane.slurm.jobs import JobStatus
from trilane.slurm.nodes import node_failure
from trilane.utils.process import python
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


def watch(
    folders: Sequence[Path], every_s: float, seconds: float, stall_s: float = STALL_S, sender: Sender | None = None
) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every `every_s` seconds.

    `sender` sends the alerts, in a thread of its own, and its failures are lines too. While SLURM does not answer, one
    line reports it, the polling goes on, and the alerts are those of the ledgers.
    """
    end, round_ = time.monotonic() + seconds, Round(folders, stall_s)
    is_down = False
    while True:
        is_active = True
        try:
            lines, found = round_.look()
        except client.SlurmError as error:
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] if not is_down else []
            is_down, found = True, {Path(f): alerts.recorded(Path(f), alerts.UNSURE_S) for f in folders}
        else:
            yield from ["SLURM answers again"] if is_down else []
            is_down, is_active = False, round_.is_active
            yield from lines
        for folder, news in found.items():
            sender.offer(folder, news) if sender else None
        yield from sender.problems() if sender else ()
        if not is_active or time.monotonic() + every_s > end:
            break
        time.sleep(every_s)
    yield from sender.close() if sender else ()


PRINTED = ("checkpoint not saved", "requeued", "replaced", "stalled")  # what changes() has no line for


class Round:
    """What is new in the run folders since the last look."""

    def __init__(self, folders: Sequence[Path], stall_s: float) -> None:
        self._folders, self._stall_s = [Path(folder) for folder in folders], stall_s
        self._before: dict[str, JobStatus] = {}
        self._saves = dict[Path, SaveCheck]()
        self._seen = dict[Path, set[str]]()
        self.is_active = True

    def look(self) -> tuple[list[str], dict[Path, list[Alert]]]:
        """A line for each change, and all alerts of each folder, old and new. Raises SlurmError."""
        client.require_answer()
        jobs_now = dict(zip(self._folders, jobs.job_status(self._folders), strict=True))
        now = {str(folder): job for folder, job in jobs_now.items()}
        lines = changes(self._before, now)
        found = {folder: self._alerts(folder, job) for folder, job in jobs_now.items()}
        for folder, all_of_it in found.items():
            # what happened before the first look is sent, if nobody has, but only what still holds is printed
            old = self._seen.get(folder, {a.key for a in all_of_it if a.kind in ("requeued", "replaced")})
            lines += [str(a) for a in all_of_it if a.kind in PRINTED and a.key not in old]
            self._seen[folder] = old | {a.key for a in all_of_it}
        self._before, self.is_active = now, any(job.status.is_active for job in now.values())
        return lines, found

    def _alerts(self, folder: Path, job: JobStatus) -> list[Alert]:
        found = [*alerts.recorded(folder, alerts.UNSURE_S), *alerts.of_job(folder, job)]
        if job.state == "RUNNING":
            self._saves.setdefault(folder, SaveCheck(folder))
            if idle_s(folder) > self._stall_s:
                key = f"stalled:{job.id}:{job.iteration}"
                found.append(Alert(kind="stalled", run=folder.name, job=job.id, key=key, text=idle_text(folder)))
        if folder in self._saves:
            found += self._saves[folder].failed(job.id, job.iteration)
        return found


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
    steps = folder / "steps.jsonl"
    ages = [time.time() - steps.stat().st_mtime] if steps.exists() else []
    return min([*ages, *(ledger.age_s(event) for event in ledger.events(folder)[-1:])], default=0.0)


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
    return python("-m", "trilane", "debug", "capture", str(folder), "--here", str(stacks))


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
