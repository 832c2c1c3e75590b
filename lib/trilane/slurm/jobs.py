"""Jobs: run folders written, submitted, asked after, cancelled and submitted again; on SLURM or on this machine."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan, read_plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.interop.megatron_args import ENGINE_OF, megatron_arguments
from trilane.interop.megatron_args import text as megatron_text
from trilane.launch import local
from trilane.slurm import client, ledger
from trilane.slurm.job_status import job_status, telling
from trilane.slurm.request import JobRequest
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import Site
from trilane.utils.validation import require
from trilane.workspace import run_folder
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.run_folder import is_completed, write_text
from trilane.workspace.status import RunStatus, Status


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One job of one run: SLURM's state, the reader's verdict with its evidence, and how far the training is.

    `reason` is why it waits. `waiting` counts the jobs of the same run that come after it.
    """

    run: str
    id: str
    state: str
    reason: str
    elapsed: str
    limit: str
    nodes: str
    verdict: Status
    evidence: str
    iteration: int
    iterations: int
    waiting: int

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than completed, saved and stopped, or pruned."""
        return self.verdict.has_failed


def files(plan: Plan, site: Site, request: JobRequest, prediction: dict[str, Any] | None = None) -> dict[str, str]:
    """The files of a run folder as text: plan.json, job.sbatch, ds_config.json where the engine is DeepSpeed's, and
    the same run as Megatron's arguments where that program could do it."""
    values = plan.to_json() | ({"prediction": prediction} if prediction else {})
    texts = {"plan.json": json.dumps(values, indent=1), SCRIPT: render("train", plan, site, request)}
    if plan.engine.startswith("deepspeed"):
        texts["ds_config.json"] = json.dumps(deepspeed_config(plan, compiler=True), indent=1)
    for flavour in [name for name, engine in ENGINE_OF.items() if engine == plan.engine]:
        with contextlib.suppress(ValueError):
            texts["megatron_args.txt"] = megatron_text(megatron_arguments(plan, flavour)) + "\n"
    return texts


def submit(folder: Path, site: Site, request: JobRequest, options: Sequence[str] = ()) -> str:
    """Submit the run of a folder; its job's id. Its own job.sbatch where there is one, else one made from the template.

    At site `local` the plan trains here and now, and the id begins with "local". Raises ValueError for a folder whose
    run is completed, or has a job that has not ended.
    """
    folder = Path(folder).resolve()
    read_plan(folder / "plan.json")
    require(not is_completed(folder), "run folder", folder, "holds a completed run; take a new one")
    there = going(folder)
    require(not there or bool(options), "run folder", folder, f"has job {', '.join(there)} already; cancel it first")
    if site.is_local:
        return _train_here(folder)
    script = folder / SCRIPT
    if not script.exists():
        rewrite(folder, site, request)
    job = client.submit(script, *options)
    note(folder, job, site.name, script)
    return job


def going(folder: Path) -> list[str]:
    """Ids of the folder's jobs that have not ended: they wait, run, are held or suspended."""
    ids = [job for job in ledger.job_ids(folder) if client.JOB_ID.fullmatch(job)]
    known = client.states(ids) if ids and client.is_installed() else {}
    return [job for job, state in known.items() if not state.has_ended]


def rewrite(folder: Path, site: Site, request: JobRequest) -> None:
    """Write job.sbatch anew from its template; what stood there, edited or not, is kept in earlier/."""
    write_text(folder / SCRIPT, render("train", read_plan(folder / "plan.json"), site, request))


def note(folder: Path, job: str, site: str, script: Path) -> None:
    """Write the submission into the folder's ledger."""
    ledger.note(folder, "submitted", job, site=site, script=ledger.fingerprint(script.read_text(encoding="utf-8")))


def resubmit(folder: Path, site: Site, request: JobRequest) -> str:
    """Submit a run again that has not completed; it goes on where its last checkpoint is, or begins anew."""
    return submit(folder, site, request)


def cancel(folders: Iterable[Path]) -> list[str]:
    """Cancel every job of the runs that squeue knows and that has not ended, all of them or none; their ids.

    What only the accounting still calls running is gone. ValueError where one is somebody else's.
    """
    ids = {job: folder for folder in folders for job in ledger.job_ids(folder) if client.JOB_ID.fullmatch(job)}
    live = [job for job, state in client.states(ids).items() if not state.has_ended]
    live = list(client.owners(live))
    client.cancel(live)
    for job in live:
        ledger.note(ids[job], "cancelled", job)
    return live


def status(folders: Iterable[Path]) -> list[JobStatus]:
    """One line a run folder: of its jobs the one that runs, else the next that waits, else the last that was."""
    jobs = {folder: ledger.job_ids(folder) for folder in map(Path, folders)}
    ours = [job for ids in jobs.values() for job in ids if client.JOB_ID.fullmatch(job)]
    known = client.states(ours) if ours and client.is_installed() else {}
    return [_status(folder, ids, known) for folder, ids in jobs.items()]


def _status(folder: Path, ids: Sequence[str], known: dict[str, client.JobState]) -> JobStatus:
    states = [known.get(job) or _unknown(job) for job in ids]
    live = [s for s in states if not s.has_ended]
    running = [s for s in live if s.state != "PENDING"]
    none = client.JobState(id="", state="NOT SUBMITTED")
    current = next(iter(running or live), None) or telling(folder, states) or none
    word, evidence = job_status(folder, current)
    return JobStatus(
        run=folder.name,
        id=current.id,
        state=current.state,
        reason=current.reason,
        elapsed=current.elapsed,
        limit=current.limit,
        nodes=current.nodes,
        verdict=word,
        evidence=evidence,
        iteration=run_folder.iteration(folder),
        iterations=read_plan(folder / "plan.json").run.goal,
        waiting=len(live) - (current in live),
    )


def _unknown(job: str) -> client.JobState:
    """A job that SLURM does not know."""
    return client.JobState(id=job, state=client.FORGOTTEN if client.JOB_ID.fullmatch(job) else client.ENDED_HERE)


def _train_here(folder: Path) -> str:
    job = f"local-{1 + len(ledger.job_ids(folder))}"
    goes_on = latest(folder / FOLDER) is not None
    run_folder.put_aside(folder, keep=goes_on)
    ledger.note(folder, "submitted", job, site="local", script="")
    ledger.note(folder, "started", job, nodes="", iteration=run_folder.iteration(folder), restarts=0)
    outcome: RunStatus = local.run_local(folder, resume=goes_on)
    ledger.note(folder, "ended", job, status=outcome.status, evidence=outcome.evidence)
    return job
