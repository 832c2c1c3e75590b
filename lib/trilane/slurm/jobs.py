"""Jobs: the submission of run folders, their status and cancellation; when they start, end or make
progress.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trilane.launch.outcome import last_log
from trilane.slurm import attempt, client, copies
from trilane.slurm.client import FORGOTTEN, JobState
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.files import free_bytes, is_inside, read_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Json, Table, as_json, middle
from trilane.utils.validation import require
from trilane.workspace import pace
from trilane.workspace.checkpoints import checkpoint_bytes
from trilane.workspace.run import NOT_FINITE, NOT_SAVED, Run, alarm, free_space, write_text
from trilane.workspace.status import RunStatus, Status, verdict

# for the lock of a folder, which a submission holds for a second or two
PATIENCE_S = 15.0
# in which a controller still accepts the request of an sbatch that was killed (MessageTimeout)
SETTLE_S = 10.0
# who gets a lock only after so long has waited for another process
WAITED_S = 0.1


class ActiveJob(ValueError):
    """A run has jobs that have not ended: their ids are the second argument."""

    def __str__(self) -> str:
        return str(self.args[0])


def submit_all(
    runs: Sequence[Run],
    site: Site,
    request: JobRequest,
    *,
    times: int = 1,
    parallel: int = 0,
) -> list[tuple[Run, str]]:
    """Submit the runs with their job.sbatch, written from the template where there is none; each
    with the ids of its jobs, `times` of them.

    At most `parallel` jobs run at a time (0: any number): each waits for the end of the one so many
    before it; jobs of one run never do. ValueError where a run is completed, and ActiveJob where it
    has a job that has not ended, before anything is submitted.
    """
    require(not site.is_local, "site", site.name, "has no SLURM; `trilane train PLAN` trains here")
    for run in runs:
        assert run.plan
        rule = "holds a completed run; take a new one"
        require(not run.is_completed, "run folder", run.folder, rule)
    home = {run.folder.resolve().parent for run in runs}
    # runs of one sweep or chain share a copy of the code
    is_shared = len(runs) > 1 and len(home) == 1
    # once a submission: it reads the whole package twice
    freeze = functools.cache(copies.freeze)
    submitted: list[tuple[Run, str]] = []
    with submitting(runs):
        for run in runs:
            path = run.folder.resolve()
            if not (path / SCRIPT).exists():
                write_text(path / SCRIPT, render("train", run.plan, site, request))
            code = ""
            if copies.USED_BY in read_text(path / SCRIPT):
                code = str(freeze(path.parent if is_shared else path))
            for _ in range(times):
                after = ""
                if 0 < parallel <= len(submitted):
                    after = f"afterany:{submitted[-parallel][1]}"
                submitted.append((run, _submit_one(run, code, site.name, after)))
    return submitted


def _submit_one(run: Run, code: str, site: str, after: str) -> str:
    """Submit the script of a run that is locked; the id of its job, which waits for that `after`.

    A run's jobs begin one after another (singleton, by name). The folder of the frozen code is the
    script's argument, which a job keeps, whatever `--export` or a site's own sbatch do with the
    environment.
    """
    kept = copies.keep_plan(run)
    waits = ",".join(filter(None, ["singleton", after]))
    job = client.sbatch(
        run.folder.resolve() / SCRIPT,
        f"--dependency={waits}",
        "--kill-on-invalid-dep=yes",
        name=client.job_name(run.folder),
        known=run.job_ids(),
        arguments=[code] if code else [],
    )
    run.note("submitted", job, site=site, after=after, plan=kept, code=Path(code).name)
    return job


@contextlib.contextmanager
def submitting(runs: Sequence[Run]) -> Iterator[None]:
    """The run folders locked, none of which has a job that has not ended.

    SLURM alone knows what it has accepted, and finds it by the jobs' name. It does not know what is
    on its way: a process that was killed may have left an sbatch. It leaves its lock, too: then
    SLURM is asked again after SETTLE_S.
    """
    folders = [run.folder for run in runs]
    was_locked = any((folder / "run.lock").exists() for folder in folders)
    begin = time.monotonic()
    with FolderLock(folders).held(PATIENCE_S):
        # by one that may have been killed while this waited
        was_locked |= time.monotonic() - begin > WAITED_S
        for run in runs:
            run.renew()
        _require_idle(runs)
        if was_locked:
            time.sleep(SETTLE_S)
            _require_idle(runs)
        yield


def _require_idle(runs: Sequence[Run]) -> None:
    """ActiveJob where a run has a job that has not ended; the ledger gets the jobs that
    it lacks.
    """
    for run, states in zip(runs, states_of(runs, must_ask=True), strict=True):
        recorded = run.job_ids()
        own = [state.id for state in states]
        for job in own:
            if job not in recorded:
                # its submission was killed before it could record it
                run.note("submitted", job, site="", after="")
        for job in recorded:
            if job not in own:
                run.note("elsewhere", job)  # or the run's own job would wait for its end
        active = [state for state in states if not state.has_ended]
        if active:
            ids = [state.id for state in active]
            rule = f"has job {', '.join(ids)} already; cancel it first"
            raise ActiveJob(f"run folder={run.folder}: {rule}", ids)


def cancel(folders: Iterable[Path]) -> list[str]:
    """Cancel every job of the runs that has not ended; their ids. Raises ValueError where SLURM
    does not answer.
    """
    client.require_answer()
    ids = active_jobs(*folders)
    client.cancel(ids)
    return ids


def states_of(runs: Sequence[Run], must_ask: bool = False) -> list[list[JobState]]:
    """The jobs of each run, oldest first: those of its ledger, and those that squeue has by their
    name.

    Left out are jobs of another folder, which a copied ledger names: with these nothing may be done
    from here. Raises SlurmError where SLURM does not answer, unless no ledger has a job and it need
    not be asked.
    """
    ids = [run.job_ids() for run in runs]
    names = [client.job_name(run.folder) for run in runs]
    of_slurm = [job for of_run in ids for job in of_run if client.JOB_ID.fullmatch(job)]
    found = {}
    if client.is_installed():
        try:
            found = client.states(of_slurm, names)
        except client.SlurmError:  # SLURM's commands may be installed here, and not configured
            if of_slurm or must_ask:
                raise
    for job, state in found.items():
        if state.name in names and job not in ids[names.index(state.name)]:
            ids[names.index(state.name)].append(job)
    states = []
    for run, of_run in zip(runs, ids, strict=True):
        every = [found.get(job) or JobState(id=job, state=FORGOTTEN) for job in of_run]
        states.append([state for state in every if state.is_of(run.folder)])
    return states


def active_jobs(*folders: Path) -> list[str]:
    """Ids of the folders' jobs that have not ended: waiting, running, held or suspended."""
    ids = []
    for states in states_of([Run(folder) for folder in folders]):
        ids += [state.id for state in states if not state.has_ended]
    return ids


@frozen
class JobStatus(JobState):
    """A run's current job, our status with its evidence, the training's progress, how many later
    jobs wait; nodes at fault, as --exclude takes them.
    """

    run: str
    status: Status
    evidence: str
    iteration: int
    iterations: int
    waiting: int
    exclude: str = ""

    def to_json(self) -> Json:
        """The JSON object of `trilane slurm status`, in which the key of our status is
        `verdict`.
        """
        values = as_json(self)
        del values["name"], values["folder"]
        values["verdict"] = values.pop("status")
        return values

    def summary(self) -> str:
        """A line for the terminal."""
        job = self.id
        if self.waiting:
            job += f" +{self.waiting}"
        evidence = self.evidence[:240]
        if self.exclude:
            evidence = f"--exclude={self.exclude[:80]} {evidence}"
        state = f"{middle(self.run, 28):28} {job:12} {self.state:13} {self.elapsed:>10}"
        place = f"{self.reason or self.nodes:22.22} {self.iteration:>7}/{self.iterations}"
        return f"{state} {place} {self.status:10} {evidence}".rstrip()


class JobTable(list[JobStatus], Table):
    """The status of several runs."""

    shown = "run id state verdict iteration iterations reason evidence"

    def summary(self) -> str:
        return f"{len(self)} runs"

    def to_frame(self) -> DataFrame:
        """A row a run, with the fields of its JSON."""
        import pandas as pd

        return pd.DataFrame([job.to_json() for job in self])


def job_status(folders: Iterable[Path]) -> JobTable:
    """The status of each run folder: of its job that runs, else of the next that waits, else of the
    last.
    """
    runs = [Run(folder) for folder in folders]
    return JobTable(map(_status, runs, states_of(runs)))


def _status(run: Run, states: Sequence[JobState]) -> JobStatus:
    live = [state for state in states if not state.has_ended]
    current = _current(run, states, live)
    waiting = len(live)
    if current in live:
        waiting -= 1
    found = _verdict(run, current)
    iterations = 0
    try:
        iterations = run.goal
    except ValueError as error:  # the plan was deleted or damaged while a job waits or runs
        found = replace(found, evidence=str(error))
    return JobStatus(
        **vars(current),
        run=run.folder.name,
        status=found.status,
        evidence=found.evidence,
        exclude=found.exclude,
        iteration=run.iteration,
        iterations=iterations,
        waiting=waiting,
    )


def _current(run: Run, states: Sequence[JobState], live: Sequence[JobState]) -> JobState:
    """The job that shows how a run stands: that which runs, else the next that waits, else the last
    that trained, or failed before it could.

    The later jobs of a chain only find that nothing is left to do, or are cancelled before they
    start.
    """
    started = [event["id"] for event in run.events("started")]
    # one that is still COMPLETING, as on a node that has died, is not the one that runs now
    order = {"RUNNING": 0, "COMPLETING": 2, "PENDING": 3}
    if live:
        return min(live, key=lambda job: order.get(job.state, 1))
    refused = run.job_ids("refused")
    for job in reversed(states):
        has_failed = job.state not in ("COMPLETED", "CANCELLED", FORGOTTEN)
        if job.id in started or (has_failed and job.id not in refused):
            return job
    if states:
        return states[-1]
    return JobState(id="", state="NOT SUBMITTED")


def _verdict(run: Run, job: JobState) -> RunStatus:
    """How it stands with the job, and the line that proves it."""
    written = run.status
    if job.state == "NOT SUBMITTED":
        # of a copy, as far as the run had come
        return written or RunStatus(status=Status.NOT_SUBMITTED, evidence="")
    if job.state == "PENDING":
        return RunStatus(status=Status.WAITING, evidence=job.reason)
    if not job.has_ended:
        slow, nodes = pace.slowness(run.folder)
        alarms = [alarm(run.folder, NOT_FINITE), alarm(run.folder, NOT_SAVED), slow]
        alarms += [_full_disk(run), _response(run, job.id)]
        evidence = "; ".join(filter(None, alarms)) or "".join(_tail(run.folder, "run.log", 1))
        return RunStatus(status=Status.RUNNING, evidence=evidence, exclude=",".join(nodes))
    # the files in the folder are of the last job that started, ended or was refused there
    events = run.events("started", "ended", "refused")
    is_last = events and events[-1]["id"] == job.id
    if written and not is_last and written.status is not Status.COMPLETED:
        written = None
    scheduler = None
    if job.state in attempt.REASONS:
        scheduler = RunStatus(status=attempt.REASONS[job.state], evidence=f"SLURM: {job.state}")
    log = None
    if is_last and not written and not scheduler:
        log = last_log(run.folder)
    otherwise = written or _unexplained(run, job)
    return verdict(code=None, written=written, scheduler=scheduler, log=log, otherwise=otherwise)


def _full_disk(run: Run) -> str:
    """That the run's disk has no space for its next save, and since when its log stands still; ""
    where it has.
    """
    with contextlib.suppress(ValueError, OSError):
        needed = checkpoint_bytes(run.plan.shape)
        if run.plan.run.save_interval and free_bytes(run.folder) < needed:
            since = datetime.fromtimestamp((run.folder / "run.log").stat().st_mtime)
            text = free_space(run.folder, needed)
            return f"DISK FULL: {text}; last line of the log {since:%Y-%m-%d %H:%M:%S}"
    return ""


def _response(run: Run, job: str) -> str:
    """Why the job has started again, until the run is beyond that iteration; "" else."""
    for event in reversed(run.events("response")):
        if event["id"] == job and event["iteration"] >= run.iteration:
            return str(event.get("says"))
    return ""


def _unexplained(run: Run, job: JobState) -> RunStatus:
    """The end of a job for which neither its files nor SLURM give a reason: by its ledger, and what
    it printed.
    """
    is_forgotten = job.state == FORGOTTEN
    # without a plan nobody knows
    with contextlib.suppress(ValueError):
        if (is_forgotten or job.state == "COMPLETED") and (done := attempt.finished(run)):
            return RunStatus(status=Status.COMPLETED, evidence=done)
    for event in run.events("refused"):
        if event["id"] == job.id:
            return RunStatus(status=Status.STOPPED, evidence=event["says"])
    evidence = f"SLURM: {job.state}; the log gives no reason"
    printed = f"slurm-{job.id}.out"
    lines = [line for line in _tail(run.folder, printed, 20) if line.strip()]
    if lines:
        evidence = f"{printed}: {lines[-1].strip()}"
    status = Status.UNFINISHED if is_forgotten else Status.CRASHED
    return RunStatus(status=status, evidence=evidence)


def _tail(folder: Path, name: str, lines: int) -> list[str]:
    path = folder / name
    if not is_inside(folder, path):
        return [f"{name} is a link that leads out of the run folder"]
    return read_text(path, 400 * lines).splitlines()[-lines:]


def watch(folders: Sequence[Path], every_s: float, seconds: float) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every
    `every_s` seconds.

    While SLURM does not answer, a line reports it, and the polling goes on. A run that hangs ends
    itself, with that reason.
    """
    deadline = time.monotonic() + seconds
    shown = []
    while True:
        goes_on = True
        try:
            client.require_answer()
            jobs = job_status(folders)
            lines = [replace(job, elapsed="").summary() for job in jobs]
            goes_on = any(job.status.is_active for job in jobs)
        except client.SlurmError as error:  # an update or a restart of the controller takes minutes
            lines = [f"SLURM does not answer, asked again every {every_s:g} s: {error}"]
        yield from [line for line in lines if line not in shown]
        shown = lines
        if not goes_on or time.monotonic() + every_s > deadline:
            return
        time.sleep(every_s)
