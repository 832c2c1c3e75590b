"""Monitor: when jobs start, end or make progress; nodes and stacks of a running one."""

import html
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from trilane.config.plan import Plan
from trilane.diagnose.capture import capture
from trilane.slurm import client, jobs
from trilane.slurm.jobs import JobStatus
from trilane.utils.process import python
from trilane.utils.tables import short
from trilane.utils.validation import require
from trilane.workspace.heartbeat import read_beats
from trilane.workspace.status import Status

WEBHOOK = "TRILANE_WEBHOOK"


def watch(folders: Sequence[Path], every_s: float, seconds: float) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every `every_s` seconds.

    What a person should know is also sent to the webhook, once by each watch; a failure to send is a line too. While
    SLURM does not answer, one line reports it, and the polling goes on. A run that hangs ends itself, with that reason.
    """
    url = os.environ.get(WEBHOOK, "").strip()
    require(not url or url.startswith(("http://", "https://")), WEBHOOK, "(not shown)", "must be an http or https URL")
    end, is_away = time.monotonic() + seconds, False
    before = dict[Path, JobStatus]()
    while True:
        try:
            client.require_answer()
            found = dict(zip(folders, jobs.job_status(folders), strict=True))
            yield from ["SLURM answers again"] * is_away
            is_away = False
        except client.SlurmError as error:  # an update or a restart of the controller takes minutes
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] * (not is_away)
            is_away, found = True, before
        for folder, job in found.items():
            kind, text = _news(job, before.get(folder))
            yield from [text] if text else []
            yield from [problem] if kind and url and (problem := post(url, kind, job, text)) else []
        before = found
        if not is_away and not any(job.status.is_active for job in found.values()):
            return
        if time.monotonic() + every_s > end:
            return
        time.sleep(every_s)


def _news(job: JobStatus, old: JobStatus | None) -> tuple[str, str]:
    """What is new: its kind, "" where nobody need be alerted, and a line, "" where nothing is."""
    if old is None or (old.id, old.state, old.status) != (job.id, job.state, job.status):
        kind = "died" if job.has_failed else "finished" if job.status is Status.COMPLETED else ""
        word, where = "DIED: " if job.has_failed else "", job.reason or job.nodes
        return kind, f"{job.run}: job {job.id} {job.state} {where}: {word}{job.status} {job.evidence}".rstrip()
    return "", f"{job.run}: iteration {job.iteration} of {job.iterations}" if old.iteration != job.iteration else ""


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


def hostfile(job: str, plan: Plan) -> str:
    """The nodes of a running job as a hostfile of DeepSpeed and pdsh; ValueError where it does not run."""
    client.require_answer()
    state = client.states([job])[job]
    require(state.state in ("RUNNING", "COMPLETING"), "job", job, f"is {state.state}, and has no nodes")
    slots = min(plan.topology.gpus, plan.cluster.gpus_per_node)
    return "".join(f"{host} slots={slots}\n" for host in client.hostnames(state.nodes))


def capture_job(folder: Path, plan: Plan, job: str) -> Path:
    """The stacks of all ranks of a run, taken now; the folder that holds them. ValueError where no rank runs.

    With a job and srun at hand a second step of the job dumps every node, one task each, without a GPU and within the
    job's share; otherwise the other nodes' watchdogs do.
    """
    rule = "no rank has given a sign of life (hang_timeout_s=0, or not started)"
    require(bool(read_beats(folder)), "folder", folder, rule)
    if not (job and shutil.which("srun")):
        return capture(folder, plan)
    require(client.JOB_ID.fullmatch(job) is not None, "job", job, "must be a job's number")
    stacks, nodes = folder / "stacks" / f"job-{job}", -(-plan.topology.gpus // plan.cluster.gpus_per_node)
    stacks.mkdir(parents=True, exist_ok=True)
    share = ["--overlap", "--mem=0", "--gres=gpu:0", "--cpus-per-task=1", "--input=none"]
    head = ["srun", f"--jobid={job}", *share, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words = python("-m", "trilane", "debug", "capture", str(folder), "--here", str(stacks))
    # a node with eight ranks takes seconds; one that does not answer must not hold up who asks
    subprocess.run([*head, *words], check=False, timeout=120)
    return stacks
