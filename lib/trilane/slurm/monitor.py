"""Monitor: report when jobs start, fail, stall or make progress, and look into a running one."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.diagnose.capture import capture
from trilane.slurm import client, jobs, ledger
from trilane.slurm.jobs import JobStatus
from trilane.slurm.nodes.node_failure import step_options
from trilane.utils.files import read_text
from trilane.utils.process import python
from trilane.utils.tables import short
from trilane.utils.validation import require, require_known
from trilane.workspace.checkpoints import FOLDER, iteration_of, latest
from trilane.workspace.heartbeat import read_beats
from trilane.workspace.status import Status

WEBHOOK = "TRILANE_WEBHOOK"


def watch(folders: Sequence[Path], every_s: float, seconds: float, stall_s: float = 600.0) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every `every_s` seconds.

    What a person should know is also sent to the webhook, once by each watch; a failure to send is a line too. While
    SLURM does not answer, one line reports it, and the polling goes on. 600 s without an iteration are a stall: saving
    a large checkpoint or a slow start takes less.
    """
    url = os.environ.get(WEBHOOK, "").strip()
    require(not url or url.startswith(("http://", "https://")), WEBHOOK, "(not shown)", "must be an http or https URL")
    end, watched, is_down = time.monotonic() + seconds, [_Watched(Path(f), stall_s) for f in folders], False
    while True:
        is_active = True
        try:
            client.require_answer()
            found = jobs.job_status([one.folder for one in watched])
        except client.SlurmError as error:
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] if not is_down else []
            is_down = True
        else:
            yield from ["SLURM answers again"] if is_down else []
            is_down, is_active = False, any(job.status.is_active for job in found)
            for one, job in zip(watched, found, strict=True):
                for kind, text in one.news(job):
                    yield text
                    if problem := post(url, kind, job.run, job.id, text) if kind and url else "":
                        yield problem
        if not is_active or time.monotonic() + every_s > end:
            return
        time.sleep(every_s)


class _Watched:
    """A run that is watched: what was reported of it."""

    def __init__(self, folder: Path, stall_s: float) -> None:
        self.folder, self._stall_s = folder, stall_s
        self._before: JobStatus | None = None
        self._events = len(ledger.events(folder))
        self._reported = set[str]()

    def news(self, job: JobStatus) -> Iterator[tuple[str, str]]:
        """What is new since the last call: its kind, "" where nobody need be alerted, and a line."""
        old, self._before = self._before, job
        events = ledger.events(self.folder)
        for event in events[self._events :]:
            if event["event"] == "replaced":
                nodes = ", ".join(event["nodes"])
                yield "replaced", f"{job.run}: REPLACED: job {event['id']} lost {nodes}, and goes on with a spare node"
            if event["event"] == "started" and event.get("restarts"):
                where = f"goes on from iteration {event['iteration']} on {event['nodes']}"
                yield "requeued", f"{job.run}: REQUEUED: job {event['id']} was put back into the queue, and {where}"
        self._events = len(events)
        if old is None or (old.id, old.state, old.status) != (job.id, job.state, job.status):
            kind = "died" if job.has_failed else "finished" if job.status is Status.COMPLETED else ""
            word, where = "DIED: " if job.has_failed else "", job.reason or job.nodes
            yield kind, f"{job.run}: job {job.id} {job.state} {where}: {word}{job.status} {job.evidence}".rstrip()
        elif old.iteration != job.iteration:
            yield "", f"{job.run}: iteration {job.iteration} of {job.iterations}"
        for key, kind, text in self._troubles(job) if job.state == "RUNNING" else ():
            if key not in self._reported:
                self._reported.add(key)
                yield kind, f"{job.run}: {kind.upper()}: {text}"

    def _troubles(self, job: JobStatus) -> Iterator[tuple[str, str, str]]:
        """What is wrong with a running job: a key, its kind and a text."""
        if (seconds := idle_s(self.folder)) > self._stall_s:
            last = jobs.last_line(self.folder) or "(nothing)"
            text = f"no iteration for {seconds:.0f} s; the log's last line: {last}"
            yield f"stalled:{job.id}:{job.iteration}", "stalled", text
        run, newest = read_plan(self.folder / "plan.json").run, latest(self.folder / FOLDER)
        saved = max(iteration_of(newest) if newest else 0, run.start_iteration)
        # a save ends before the next one begins, so that only the last one that was due may be missing
        due = (job.iteration // run.save_interval - 1) * run.save_interval if run.save_interval else 0
        if due > saved:
            # the engine prints the reason, unless the disk is full, too
            log = read_text(self.folder / "run.log", 1 << 20).splitlines()
            said = [line.partition("CHECKPOINT NOT SAVED: ")[2] for line in log if "CHECKPOINT NOT SAVED: " in line]
            text = f"iteration {job.iteration}, and the newest checkpoint is of iteration {saved}"
            yield f"unsaved:{due}", "checkpoint not saved", "; ".join([text, *said[-1:]])


def idle_s(folder: Path) -> float:
    """Seconds since the last iteration or event of the ledger, whichever is later; 0 where there is neither."""
    steps = folder / "steps.jsonl"
    ages = [time.time() - steps.stat().st_mtime] if steps.exists() else []
    return min([*ages, *(ledger.age_s(event) for event in ledger.events(folder)[-1:])], default=0.0)


def post(url: str, kind: str, run: str, job: str, text: str, within_s: float = 8.0) -> str:
    """POST an event as JSON in the form of Slack's webhooks; why that failed in one line, "" otherwise.

    The URL is a secret, which an exception's text may hold: only the exception's kind is shown.
    """
    answers = list[str]()
    # a log's `<!channel>` or link stays text: https://docs.slack.dev/messaging/formatting-message-text
    shown = short(text, 600).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    body = json.dumps({"text": shown, "kind": kind, "run": run, "job": job, "source": "trilane"}).encode()

    def send() -> None:
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=within_s):
                answers.append("")
        except Exception as error:
            answers.append(f"{type(error).__name__} {getattr(error, 'code', '')}".strip())

    # a thread, since an answer may come byte by byte, each within the time-out
    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(within_s)
    problem = answers[0] if answers else f"no answer within {within_s:g} s"
    return f"alert {kind!r} of {run} not sent: {problem}" if problem else ""


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
    """A further step of a running job: one task per node, without a GPU, within the job's share."""
    require(client.JOB_ID.fullmatch(job) is not None, "job", job, "must be a job's number")
    head = ["srun", f"--jobid={job}", *step_options(version), f"--nodes={nodes}", f"--ntasks={nodes}"]
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
    is_going = state.state in ("RUNNING", "COMPLETING")
    require(is_going, "job", job, f"is {state.state}; a step can only be attached to a running job")
    words = ["bash", "-c", WHAT[what].replace("PY_SPY", shlex.quote(str(Path(sys.executable).with_name("py-spy"))))]
    nodes, version = len(client.hostnames(state.nodes)), client.call(["srun", "--version"])
    return srun_command(client.raw_id(job), nodes, words, version)


def hostfile(job: str, slots: int) -> str:
    """The job's nodes as a hostfile of DeepSpeed and pdsh."""
    client.require_own([job])
    return "".join(f"{host} slots={slots}\n" for host in client.hostnames(client.states([job])[job].nodes))


def look(job: str, what: str, plan: Plan) -> str:
    """What `attach` prints of a running job, or its hostfile."""
    client.require_answer()
    if what == "hostfile":
        return hostfile(job, min(plan.topology.gpus, plan.cluster.gpus_per_node))
    return client.call(attach(job, what))


def here_command(folder: Path, stacks: Path) -> list[str]:
    """The command with which each node dumps its own ranks."""
    return python("-m", "trilane", "debug", "capture", str(folder), "--here", str(stacks))


def capture_commands(folder: Path, plan: Plan, job: str) -> str:
    """The commands that take the stacks of a run: srun; pdsh or ds_ssh where nodes allow a login; for any program."""
    words = here_command(folder, folder / "stacks" / "by-hand")
    step = srun_command(client.raw_id(job) if job else "0", nodes_of_plan(plan), ["--input=none", *words])
    by_hostfile = shlex.quote(shlex.join(words))
    lines = [shlex.join(step), f"pdsh -R ssh -w ^hostfile {by_hostfile}", f"ds_ssh -f hostfile {by_hostfile}"]
    lines.append("# a program that is not trilane's, then `trilane debug hang` on the folder:")
    # the step of the BLOOM chronicles: the stacks of all python processes of the user
    lines.append("srun --jobid=JOB --overlap --gres=gpu:0 --ntasks-per-node=1 --output=trace-%N.out sh -c ")
    lines[-1] += "'pgrep -u $USER -f python | xargs -I {} py-spy dump --pid {}'"
    return "\n".join(lines)


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
    subprocess.run(srun_command(client.raw_id(job), nodes_of_plan(plan), words), check=False, timeout=120)
    return stacks


def nodes_of_plan(plan: Plan) -> int:
    """Nodes that the plan's GPUs fill."""
    return -(-plan.topology.gpus // plan.cluster.gpus_per_node)
