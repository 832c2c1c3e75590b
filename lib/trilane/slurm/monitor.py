"""Monitor: report when jobs start, fail, stall or make progress, and look into a running one."""

import html
import json
import os
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.diagnose.capture import capture
from trilane.slurm import client, jobs, ledger
from trilane.slurm.jobs import JobStatus
from trilane.utils.process import python
from trilane.utils.tables import short
from trilane.utils.validation import require
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
    end, is_down = time.monotonic() + seconds, False
    before = dict[Path, JobStatus]()
    events = {folder: len(ledger.events(folder)) for folder in folders}
    stalled = dict[Path, tuple[str, int]]()
    while True:
        try:
            client.require_answer()
            found = dict(zip(folders, jobs.job_status(folders), strict=True))
        except client.SlurmError as error:
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] if not is_down else []
            is_down = True
        else:
            yield from ["SLURM answers again"] if is_down else []
            is_down = False
            for folder, job in found.items():
                new = ledger.events(folder)[events[folder] :]
                events[folder] += len(new)
                for kind, text in _news(folder, job, before.get(folder), new, stall_s):
                    if kind == "stalled" and stalled.get(folder) == (job.id, job.iteration):
                        continue
                    if kind == "stalled":
                        stalled[folder] = (job.id, job.iteration)
                    yield text
                    yield from [problem] if kind and url and (problem := post(url, kind, job, text)) else []
            before = found
            if not any(job.status.is_active for job in found.values()):
                return
        if time.monotonic() + every_s > end:
            return
        time.sleep(every_s)


def _news(
    folder: Path, job: JobStatus, old: JobStatus | None, events: Sequence[Mapping[str, Any]], stall_s: float
) -> Iterator[tuple[str, str]]:
    """What is new: its kind, "" where nobody need be alerted, and a line."""
    for event in events:
        if event["event"] == "replaced" or event.get("restarts"):
            kind = "requeued" if event.get("restarts") else "replaced"
            nodes = event["nodes"] if event.get("restarts") else "lost " + ", ".join(event["nodes"])
            yield kind, f"{job.run}: {kind.upper()}: job {event['id']}, {nodes}, from iteration {event['iteration']}"
    if old is None or (old.id, old.state, old.status) != (job.id, job.state, job.status):
        kind = "died" if job.has_failed else "finished" if job.status is Status.COMPLETED else ""
        word, where = "DIED: " if job.has_failed else "", job.reason or job.nodes
        yield kind, f"{job.run}: job {job.id} {job.state} {where}: {word}{job.status} {job.evidence}".rstrip()
    elif old.iteration != job.iteration:
        yield "", f"{job.run}: iteration {job.iteration} of {job.iterations}"
    steps, last = folder / "steps.jsonl", ledger.events(folder)[-1:]
    ages = [time.time() - steps.stat().st_mtime] if steps.exists() else []
    idle_s = min([*ages, *map(ledger.age_s, last)], default=0.0)
    if job.state == "RUNNING" and idle_s > stall_s:
        line = f"the log's last line: {jobs.last_line(folder) or '(nothing)'}"
        yield "stalled", f"{job.run}: STALLED: no iteration for {idle_s:.0f} s; {line}"


def post(url: str, kind: str, job: JobStatus, text: str, within_s: float = 8.0) -> str:
    """POST an event as JSON in the form of Slack's webhooks; why that failed in one line, "" otherwise.

    The URL is a secret, which an exception's text may hold: only the exception's kind is shown.
    """
    # a log's `<!channel>` or link stays text: https://docs.slack.dev/messaging/formatting-message-text
    values = {"text": html.escape(short(text, 600), quote=False), "kind": kind, "run": job.run, "job": job.id}
    body = json.dumps({**values, "source": "trilane"}).encode()
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=within_s).close()
    except Exception as error:
        problem = f"{type(error).__name__} {getattr(error, 'code', '')}".strip()
        return f"alert {kind!r} of {job.run} not sent: {problem}"
    return ""


# Processes are the ranks of this job: a launcher, shell or srun with a similar command line has no RANK, and a rank of
# another job of the same user on the node has another SLURM_JOB_ID.
WHAT = {
    "memory": "echo == $(hostname); "
    "nvidia-smi --query-gpu=index,memory.used,memory.total,utilization.gpu --format=csv || true",
    "processes": r"""
for pid in $(pgrep -f -- "trilane.engine plan.json"); do
  value() { tr "\0" "\n" 2>/dev/null <"/proc/$pid/environ" | sed -n "s/^$1=//p"; }
  [ -z "$(value RANK)" ] || [ "$(value SLURM_JOB_ID)" != "$SLURM_JOB_ID" ] || {
    echo "== $(hostname) rank $(value RANK) pid $pid"; ps -o pid,rss,etime,args -p $pid; }
done
""",
}


def look(job: str, what: str, plan: Plan) -> str:
    """What a step of a running job prints: the `memory` of every GPU, the `processes` of its ranks; or its nodes as a
    hostfile of DeepSpeed and pdsh. ValueError where the job is not running."""
    client.require_answer()
    state = client.states([job])[job]
    is_going = state.state in ("RUNNING", "COMPLETING")
    require(is_going, "job", job, f"is {state.state}; a step can only be attached to a running job")
    hosts = client.hostnames(state.nodes)
    if what != "hostfile":
        return client.call(srun_command(client.raw_id(job), len(hosts), ["bash", "-c", WHAT[what]]))
    slots = min(plan.topology.gpus, plan.cluster.gpus_per_node)
    return "".join(f"{host} slots={slots}\n" for host in hosts)


def srun_command(job: str, nodes: int, words: Sequence[str]) -> list[str]:
    """A further step of a running job: one task per node, without a GPU, within the job's share."""
    require(client.JOB_ID.fullmatch(job) is not None, "job", job, "must be a job's number")
    head = ["srun", f"--jobid={job}", "--overlap", "--mem=0", "--gres=gpu:0", "--cpus-per-task=1"]
    return [*head, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *words]


def _step(folder: Path, plan: Plan, job: str, stacks: Path) -> tuple[list[str], list[str]]:
    """The command with which each node dumps its own ranks, and the step of srun that runs it on all."""
    words = python("-m", "trilane", "debug", "capture", str(folder), "--here", str(stacks))
    nodes = -(-plan.topology.gpus // plan.cluster.gpus_per_node)
    return words, srun_command(client.raw_id(job) if job else "0", nodes, ["--input=none", *words])


def capture_commands(folder: Path, plan: Plan, job: str) -> str:
    """The commands that take the stacks of a run: srun; pdsh or ds_ssh where nodes allow a login; for any program."""
    words, step = _step(folder, plan, job, folder / "stacks" / "by-hand")
    by_hostfile = shlex.quote(shlex.join(words))
    # the last is the step of the BLOOM chronicles: the stacks of all python processes of the user
    return f"""{shlex.join(step)}
pdsh -R ssh -w ^hostfile {by_hostfile}
ds_ssh -f hostfile {by_hostfile}
# a program that is not trilane's, then `trilane debug hang` on the folder:
srun --jobid=JOB --overlap --gres=gpu:0 --ntasks-per-node=1 --output=trace-%N.out sh -c \
'pgrep -u $USER -f python | xargs -I {{}} py-spy dump --pid {{}}'"""


def capture_job(folder: Path, plan: Plan, job: str) -> Path:
    """The stacks of all ranks of a run, taken now; the folder that holds them. ValueError where no rank runs.

    With a job and srun at hand a second step of the job dumps every node; otherwise the other nodes' watchdogs do.
    """
    rule = "no rank has given a sign of life (hang_timeout_s=0, or not started)"
    require(bool(read_beats(folder)), "folder", folder, rule)
    if not (job and shutil.which("srun")):
        return capture(folder, plan)
    stacks = folder / "stacks" / f"job-{job}"
    stacks.mkdir(parents=True, exist_ok=True)
    subprocess.run(_step(folder, plan, job, stacks)[1], check=False, timeout=120)
    return stacks
