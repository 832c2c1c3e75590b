"""Monitor: when jobs start, end or make progress; the nodes of a running one."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trilane.config.plan import Plan
from trilane.slurm import client, jobs
from trilane.slurm.jobs import JobStatus
from trilane.utils.validation import require
from trilane.workspace.storage import NO_ROOM, NOT_SAVED


def watch(folders: Sequence[Path], every_s: float, seconds: float) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every `every_s` seconds.

    While SLURM does not answer, one line reports it, and the polling goes on. A run that hangs ends itself, with that
    reason.
    """
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
            yield from _news(job, before.get(folder))
        before = found
        if not is_away and not any(job.status.is_active for job in found.values()):
            return
        if time.monotonic() + every_s > end:
            return
        time.sleep(every_s)


def _news(job: JobStatus, old: JobStatus | None) -> Iterator[str]:
    """A line where something is new."""
    if old is None or (old.id, old.state, old.status) != (job.id, job.state, job.status):
        word, where = "DIED: " * job.has_failed, job.reason or job.nodes
        yield f"{job.run}: job {job.id} {job.state} {where}: {word}{job.status} {job.evidence}".rstrip()
    elif job.exclude != old.exclude or (job.evidence != old.evidence and (_alarms(job) or _alarms(old))):
        yield f"{job.run}: {job.evidence}"
    elif old.iteration != job.iteration:
        yield f"{job.run}: iteration {job.iteration} of {job.iterations}"


def _alarms(job: JobStatus) -> bool:
    return job.evidence.startswith(("SLOW", "NOT FINITE", NOT_SAVED, NO_ROOM))


def hostfile(job: str, plan: Plan) -> str:
    """The nodes of a running job as a hostfile of DeepSpeed and pdsh; ValueError where it does not run."""
    client.require_answer()
    state = client.states([job])[job]
    require(state.state in ("RUNNING", "COMPLETING"), "job", job, f"is {state.state}, and has no nodes")
    slots = min(plan.topology.gpus, plan.cluster.gpus_per_node)
    return "".join(f"{host} slots={slots}\n" for host in client.hostnames(state.nodes))
