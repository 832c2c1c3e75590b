"""Jobs: the files of run folders, their submission, status and cancellation; on SLURM or on this machine."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan, read_plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.interop.megatron_args import ENGINE_OF, megatron_args, megatron_text
from trilane.launch import local
from trilane.slurm import client, ledger
from trilane.slurm.job_status import decisive, status_of
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import Columns, DataFrame, Table, short
from trilane.utils.validation import require
from trilane.workspace import run_folder
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.run_folder import is_completed, write_text
from trilane.workspace.status import Status

PATIENCE_S = 15.0  # for the lock of a folder, which a submission holds for a second or two
SETTLE_S = 10.0  # in which a controller still accepts the request of an sbatch that was killed (MessageTimeout)


@dataclass(frozen=True, kw_only=True)
class JobStatus(client.JobState):
    """A run's current job, our status with its evidence, the training's progress, and how many later jobs wait."""

    run: str
    status: Status
    evidence: str
    iteration: int
    iterations: int
    waiting: int

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than completed, saved and stopped, or pruned."""
        return self.status.has_failed

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `trilane slurm status`; the key of the status is `verdict`."""
        return {"verdict" if name == "status" else name: value for name, value in asdict(self).items()}


class ActiveJob(ValueError):
    """A run has jobs that have not ended: their ids are the second argument."""

    def __str__(self) -> str:
        return str(self.args[0])


class JobTable(list[JobStatus], Table):
    """The status of several runs."""

    def to_frame(self) -> DataFrame:
        names = ("run", "job", "state", "status", "iteration", "waits for", "evidence")
        rows = [
            (j.run, j.id, j.state, str(j.status), f"{j.iteration} of {j.iterations}", j.reason, short(j.evidence))
            for j in self
        ]
        return Columns.of_rows(names, rows).to_frame()


def files(plan: Plan, site: Site, request: JobRequest, prediction: dict[str, Any] | None = None) -> dict[str, str]:
    """A run folder's files by name: plan.json, job.sbatch, and ds_config.json or megatron_args.txt where it has one."""
    values = plan.to_json() | ({"prediction": prediction} if prediction else {})
    texts = {"plan.json": json.dumps(values, indent=1), SCRIPT: render("train", plan, site, request)}
    if plan.engine.startswith("deepspeed"):
        texts["ds_config.json"] = json.dumps(deepspeed_config(plan, compiler=True), indent=1)
    for flavour in [name for name, engine in ENGINE_OF.items() if engine == plan.engine]:
        with contextlib.suppress(ValueError):
            texts["megatron_args.txt"] = megatron_text(megatron_args(plan, flavour)) + "\n"
    return texts


def submit(folder: Path, site: Site, request: JobRequest, options: Sequence[str] = ()) -> str:
    """Submit the run of a folder with its job.sbatch, written from the template where there is none; the job's id.

    At site `local` the plan trains here, to its end, and the id begins with "local". Raises ValueError where the run
    is completed, has a job that has not ended, or another process submits or trains it now.
    """
    folder = Path(folder).resolve()
    read_plan(folder / "plan.json")
    with exclusive([folder], takes_more=bool(options)) as lock:
        require(not is_completed(folder), "run folder", folder, "holds a completed run; take a new one")
        if site.is_local:
            return _train_here(folder)
        if not (folder / SCRIPT).exists():
            rewrite(folder, site, request)
        return submit_script(folder / SCRIPT, {folder: ""}, site.name, options, lock)


@contextlib.contextmanager
def exclusive(folders: Iterable[Path], *, takes_more: bool = False) -> Iterator[FolderLock]:
    """The run folders locked against other submissions, and earlier ones that were interrupted recorded.

    Raises ActiveJob where a run has a job that has not ended, unless it `takes_more`.
    """
    wanted = list(folders)
    with FolderLock(wanted).held(PATIENCE_S) as lock:
        _record_interrupted(wanted)
        for folder, active in _active(wanted).items():
            if active and not takes_more:
                ids, states = [job.id for job in active], ", ".join(job.state for job in active)
                raise ActiveJob(
                    f"run folder={folder}: has job {', '.join(ids)} already ({states}); cancel it first", ids
                )
        yield lock


def submit_script(
    script: Path, runs: Mapping[Path, str], site: str, options: Sequence[str], lock: FolderLock, **facts: Any
) -> str:
    """Submit a script for run folders that are locked; the id of its job, to which each adds its suffix ("", "_3").

    Their ledgers get a line before sbatch and one after it.
    """
    token = client.new_token()
    common = {"token": token, "site": site, "script": ledger.fingerprint(script.read_text(encoding="utf-8")), **facts}
    for folder, suffix in runs.items():
        ledger.note(folder, "submitting", "", suffix=suffix, **common)
    require(lock.is_ours, "run folder", next(iter(runs)), "was taken by another process while this one was suspended")
    try:
        job = client.submit(script, *options, token=token)
    except client.SlurmUnreachable:
        raise  # the job may exist: the next submission finds it by the token
    except ValueError as error:
        for folder in runs:
            ledger.note(folder, "not submitted", "", token=token, says=str(error))
        raise
    for folder, suffix in runs.items():
        ledger.note(folder, "submitted", f"{job}{suffix}", **common)
    return job


def _record_interrupted(folders: Iterable[Path]) -> None:
    """Record what became of submissions that were killed before they recorded it: their job, or that there is none.

    An sbatch may outlive its submission, and the controller may accept a request that it has received for some seconds
    more. A job that appears even later does not train: attempt.begin knows that its submission was given up.
    """
    left = {folder: found for folder in folders if (found := ledger.open_submissions(folder))}
    jobs = _interrupted([event for found in left.values() for event in found], wait=True)
    for folder, found in left.items():
        for event in found:
            facts = {name: event[name] for name in ("token", "site", "script")}
            if job := jobs.get(event["token"]):
                ledger.note(folder, "submitted", f"{job}{event['suffix']}", **facts)
            else:
                ledger.note(folder, "not submitted", "", **facts, says="SLURM has no such job")


def _interrupted(found: Sequence[Mapping[str, Any]], *, wait: bool) -> dict[str, str]:
    """The jobs of submissions whose outcome is not recorded, by token; with `wait`, once there can be no more.

    Raises SlurmError with the command that looks for them where SLURM does not answer, or an sbatch does not end.
    """
    tokens, end = sorted({event["token"] for event in found}), time.monotonic() + SETTLE_S
    look = f"an earlier submission may have been accepted: {client.look_command(*tokens)}"
    while tokens:
        going = any(map(client.is_submitting, tokens))  # asked before squeue is
        try:
            jobs = client.find(tokens)
        except client.SlurmUnreachable as error:
            raise client.SlurmUnreachable(f"{error}; {look}") from None
        is_young = any(ledger.age_s(e) < SETTLE_S for e in found if e["token"] not in jobs)
        if not wait or not (going or (is_young and time.monotonic() < end)):
            return jobs
        if time.monotonic() > end + PATIENCE_S:
            raise client.SlurmError(f"slurm=sbatch: has not ended; {look}")
        time.sleep(0.5)
    return {}


def job_ids(folders: Iterable[Path], *, wait: bool = False) -> dict[Path, list[str]]:
    """Ids of the jobs of each folder, oldest first, with those whose submission was killed before it recorded them."""
    left = {folder: ledger.open_submissions(folder) for folder in map(Path, folders)}
    found = [event for events in left.values() for event in events] if client.is_installed() else []
    jobs = _interrupted(found, wait=wait)
    return {
        folder: [*ledger.job_ids(folder), *(jobs[e["token"]] + e["suffix"] for e in events if e["token"] in jobs)]
        for folder, events in left.items()
    }


def active_jobs(folder: Path) -> list[str]:
    """Ids of the folder's jobs that have not ended: waiting, running, held or suspended."""
    return [job.id for job in _active([Path(folder)])[Path(folder)]]


def _active(folders: Sequence[Path]) -> dict[Path, list[client.JobState]]:
    """The jobs of each folder that have not ended."""
    ids = job_ids(folders)
    known = _states(ids)
    found = {folder: [known[job] for job in mine if job in known] for folder, mine in ids.items()}
    return {folder: [job for job in mine if not job.has_ended] for folder, mine in found.items()}


def _states(ids: Mapping[Path, Iterable[str]]) -> dict[str, client.JobState]:
    """The states of all these jobs that are SLURM's."""
    wanted = [job for mine in ids.values() for job in mine if client.JOB_ID.fullmatch(job)]
    return client.states(wanted) if wanted and client.is_installed() else {}


def rewrite(folder: Path, site: Site, request: JobRequest) -> None:
    """Write job.sbatch from its template; the one before, edited or not, is kept in earlier/."""
    write_text(folder / SCRIPT, render("train", read_plan(folder / "plan.json"), site, request))


def cancel(folders: Iterable[Path]) -> list[str]:
    """Cancel every job of the runs that squeue lists and that has not ended; their ids.

    A job that only the accounting lists as running no longer exists. Raises ValueError, and cancels none, where one
    belongs to another user.
    """
    known = job_ids(folders, wait=True)
    live = [job for job, state in _states(known).items() if not state.has_ended]
    live = list(client.owners(live))
    client.cancel(live)
    for folder, job in ((folder, job) for folder, mine in known.items() for job in mine if job in live):
        ledger.note(folder, "cancelled", job)
    return live


def job_status(folders: Iterable[Path]) -> JobTable:
    """The status of each run folder: of its job that runs, else of the next that waits, else of the last."""
    jobs = job_ids(folders)
    known = _states(jobs)
    return JobTable(_status(folder, ids, known) for folder, ids in jobs.items())


def _status(folder: Path, ids: Sequence[str], known: dict[str, client.JobState]) -> JobStatus:
    states = [known.get(job) or _unknown(job) for job in ids]
    live = [s for s in states if not s.has_ended]
    running = [s for s in live if s.state != "PENDING"]
    none = client.JobState(id="", state="NOT SUBMITTED")
    current = next(iter(running or live), None) or decisive(folder, states) or none
    word, evidence = status_of(folder, current)
    return JobStatus(
        **asdict(current),
        run=folder.name,
        status=word,
        evidence=evidence,
        iteration=run_folder.iteration(folder),
        iterations=read_plan(folder / "plan.json").run.goal,
        waiting=len(live) - (current in live),
    )


def _unknown(job: str) -> client.JobState:
    """The state of a job that SLURM has forgotten, or never had."""
    return client.JobState(id=job, state=client.FORGOTTEN if client.JOB_ID.fullmatch(job) else client.ENDED_HERE)


def _train_here(folder: Path) -> str:
    job = f"local-{1 + len(ledger.job_ids(folder))}"
    has_checkpoint = latest(folder / FOLDER) is not None
    run_folder.put_aside(folder, keep=has_checkpoint)
    ledger.note(folder, "submitted", job, site="local", script="")
    ledger.note(folder, "started", job, nodes="", iteration=run_folder.iteration(folder), restarts=0)
    outcome = local.train_local(folder, resume=has_checkpoint)
    ledger.note(folder, "ended", job, status=outcome.status, evidence=outcome.evidence)
    return job
