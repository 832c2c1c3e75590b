"""Jobs: the files of run folders, their submission, status and cancellation; on SLURM or on this machine."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan, read_plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.interop.megatron_args import ENGINE_OF, megatron_args, megatron_text
from trilane.launch import local
from trilane.slurm import client, frozen_code, ledger
from trilane.slurm.job_status import decisive, status_of
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site
from trilane.slurm.submission import exclusive, job_ids, states_of, submit_script
from trilane.utils.tables import Columns, DataFrame, Table, short
from trilane.utils.validation import require
from trilane.workspace import run_folder
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.run_folder import is_completed, write_text
from trilane.workspace.status import Status, known_status


@dataclass(frozen=True, kw_only=True)
class JobStatus(client.JobState):
    """A run's current job, our status with its evidence, the training's progress, and how many later jobs wait; nodes
    at fault, as --exclude takes them.

    `as_of` is the time of the ledger's last event of the job where SLURM did not answer; "" where it did.
    """

    run: str
    status: Status
    evidence: str
    iteration: int
    iterations: int
    waiting: int
    exclude: str = ""
    as_of: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than completed, saved and stopped, or pruned."""
        return self.status.has_failed

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `trilane slurm status`; the key of the status is `verdict`."""
        return {"verdict" if name == "status" else name: value for name, value in asdict(self).items()}


class JobTable(list[JobStatus], Table):
    """The status of several runs."""

    def to_frame(self) -> DataFrame:
        names = ("run", "job", "state", "status", "iteration", "waits for", "evidence")
        rows = [
            (j.run, j.id, j.state, str(j.status), f"{j.iteration} of {j.iterations}", j.reason, short(j.evidence))
            for j in self
        ]
        return Columns.of_rows(names, rows).to_frame()


def files(plan: Plan, site: Site, request: JobRequest, beside: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A run folder's files by name: plan.json, job.sbatch, and ds_config.json or megatron_args.txt where it has one.

    `beside` is what plan.json has beside the plan's own fields: its prediction, and the constants that made it.
    """
    texts = {
        "plan.json": json.dumps({**plan.to_json(), **(beside or {})}, indent=1),
        SCRIPT: render("train", plan, site, request),
    }
    if plan.engine.startswith("deepspeed"):
        texts["ds_config.json"] = json.dumps(deepspeed_config(plan, compiler=True), indent=1)
    for flavour in [name for name, engine in ENGINE_OF.items() if engine == plan.engine]:
        with contextlib.suppress(ValueError):
            texts["megatron_args.txt"] = megatron_text(megatron_args(plan, flavour)) + "\n"
    return texts


def submit(folder: Path, site: Site, request: JobRequest, options: Sequence[str] = (), after: str = "") -> str:
    """Submit the run of a folder with its job.sbatch, written from the template where there is none; the job's id.

    It starts once job `after` has succeeded, and is cancelled where that fails. At site `local` the plan trains here,
    to its end, and the id begins with "local". Raises ValueError where the run
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
        waits = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
        facts: dict[str, Any] = {"after": after} if after else {}
        return submit_script(folder / SCRIPT, {folder: ""}, site.name, [*options, *waits], lock, **facts)


def rewrite(folder: Path, site: Site, request: JobRequest) -> None:
    """Write job.sbatch from its template; the one before, edited or not, is kept in earlier/."""
    write_text(folder / SCRIPT, render("train", read_plan(folder / "plan.json"), site, request))


def cancel(folders: Iterable[Path]) -> list[str]:
    """Cancel every job of the runs that squeue lists and that has not ended; their ids.

    A job that only the accounting lists as running no longer exists. Raises ValueError, and cancels none, where one
    belongs to another user.
    """
    wanted = list(folders)
    then = "; nothing was cancelled: try again, or `touch RUN/stop`, with which a run saves and ends by itself"
    client.require_answer(then)
    known = job_ids(wanted, wait=True)
    live = [job for job, state in states_of(known).items() if not state.has_ended]
    live = list(client.owners(live))
    client.cancel(live)
    for folder, job in ((folder, job) for folder, mine in known.items() for job in mine if job in live):
        ledger.note(folder, "cancelled", job)
    return live


def current_status(folders: Iterable[Path]) -> tuple[JobTable, str]:
    """The status of each run folder, and why SLURM does not answer: then by the ledgers; "" where it answers."""
    wanted = list(folders)
    try:
        client.require_answer()
        return job_status(wanted), ""
    except client.SlurmUnreachable as error:
        return JobTable(_status_by_ledger(folder) for folder in wanted), str(error)


def _status_by_ledger(folder: Path) -> JobStatus:
    """The status of a run by what its ledger and its files record."""
    of_event = {"submitted": "PENDING", "started": "RUNNING", "cancelled": "CANCELLED"}
    last = {e["id"]: e for e in ledger.events(folder, *of_event, "ended", "refused")}
    states = {job: of_event.get(e["event"], client.ENDED_BY_LEDGER) for job, e in last.items()}
    known = {job: client.JobState(id=job, state=state) for job, state in states.items()}
    found = _status(folder, ledger.job_ids(folder), known)
    return replace(found, as_of=str(last[found.id].get("time", "")) if found.id in last else "")


def job_status(folders: Iterable[Path]) -> JobTable:
    """The status of each run folder: of its job that runs, else of the next that waits, else of the last."""
    jobs = job_ids(folders)
    known = states_of(jobs)
    return JobTable(_status(folder, ids, known) for folder, ids in jobs.items())


def _status(folder: Path, ids: Sequence[str], known: dict[str, client.JobState]) -> JobStatus:
    states = [known.get(job) or _unknown(job) for job in ids]
    live = [s for s in states if not s.has_ended]
    running = [s for s in live if s.state != "PENDING"]
    none = client.JobState(id="", state="NOT SUBMITTED")
    current = next(iter(running or live), None) or decisive(folder, states) or none
    word, evidence = status_of(folder, current)
    written = known_status(folder)
    return JobStatus(
        **asdict(current),
        run=folder.name,
        status=word,
        evidence=evidence,
        exclude=written.exclude if written and written.evidence == evidence else "",
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
    # it starts now, with the installed code
    ledger.note(folder, "submitted", job, site="local", script="", code=frozen_code.fingerprint())
    ledger.note(folder, "started", job, nodes="", iteration=run_folder.iteration(folder), restarts=0)
    outcome = local.train_local(folder, resume=has_checkpoint)
    ledger.note(folder, "ended", job, status=outcome.status, evidence=outcome.evidence)
    return job
