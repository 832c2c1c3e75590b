"""Jobs: the submission of run folders, their status and cancellation; when they start, end or make
progress.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan, read_plan
from trilane.costmodel.shipped import constants_of
from trilane.launch.outcome import last_log
from trilane.slurm import attempt, client, copies, ledger
from trilane.slurm.script import SCRIPT, rewrite
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.files import read_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import DataFrame, Table, as_json, frame_of, short
from trilane.utils.validation import require
from trilane.workspace import pace, run_folder, storage
from trilane.workspace.run_folder import is_completed
from trilane.workspace.status import RunStatus, Status, known_status, status_problem, verdict
from trilane.workspace.storage import NO_ROOM, NOT_SAVED

# for the lock of a folder, which a submission holds for a second or two
PATIENCE_S = 15.0
# in which a controller still accepts the request of an sbatch that was killed (MessageTimeout)
SETTLE_S = 10.0


class ActiveJob(ValueError):
    """A run has jobs that have not ended: their ids are the second argument."""

    def __str__(self) -> str:
        return str(self.args[0])


def submit(folder: Path, site: Site, request: JobRequest, options: Sequence[str] = ()) -> str:
    """Submit the run of a folder, as submit_all(); the job's id."""
    return submit_all([folder], site, request, options=options)[0][1]


def submit_all(
    folders: Iterable[Path],
    site: Site,
    request: JobRequest,
    *,
    times: int | Mapping[Path, int] = 1,
    parallel: int = 0,
    options: Sequence[str] = (),
) -> list[tuple[Path, str]]:
    """Submit `times` jobs of each run with its job.sbatch, written from the template where there is
    none; their ids.

    At most `parallel` of them run at a time (0: any number): each waits for the end of the one so
    many before it; jobs of one run never do. ValueError where a run is completed, and ActiveJob
    where it has a job that has not ended, before anything is submitted.
    """
    runs = {folder: folder.resolve() for folder in map(Path, folders)}
    require(not site.is_local, "site", site.name, "has no SLURM; `trilane train PLAN` trains here")
    for path in runs.values():
        read_plan(path / "plan.json")
        require(not is_completed(path), "run folder", path, "holds a completed run; take a new one")
    made, parents = list[tuple[Path, str]](), {path.parent for path in runs.values()}
    # runs of one sweep or chain share a copy of the code
    shared = parents.pop() if len(runs) > 1 == len(parents) else None
    # once a submission: it reads the whole package twice
    freeze = functools.cache(copies.freeze)
    with submitting(runs.values()):
        try:
            often = times if isinstance(times, Mapping) else dict.fromkeys(runs, times)
            for folder, path in [pair for pair in runs.items() for _ in range(often[pair[0]])]:
                if not (path / SCRIPT).exists():
                    rewrite(path, site, request)
                after = [
                    f"afterany:{job}"
                    for _, job in made[-parallel:][:1]
                    if 0 < parallel <= len(made)
                ]
                code = functools.partial(freeze, shared or path)
                made.append((folder, _accept(path, code, site.source, options, after)))
        except ValueError as error:
            earlier = f"; submitted before it: {', '.join(job for _, job in made)}" * bool(made)
            error.args = (f"{error}{earlier}", *error.args[1:])
            raise
    return made


def accept_changes(folder: Path, site: str) -> list[str]:
    """Let the jobs of a run that have not ended begin with the plan as it is now; their ids."""
    with FolderLock([folder]).held(PATIENCE_S):
        jobs, kept = active_jobs(folder), copies.keep_plan(folder)
        for job in jobs:
            ledger.note(folder, "accepted", job, site=site, plan=kept)
    return jobs


def unreached(folder: Path, waiting: Sequence[str]) -> list[str]:
    """A line where jobs that wait have another script than the folder."""
    now = copies.hash_of(read_text(folder / SCRIPT))
    found = ledger.events(folder, "submitted")
    held = [e["id"] for e in found if e["id"] in waiting and e.get("script", now) != now]
    text = f"{folder}: job {', '.join(held)} keeps the {SCRIPT} that SLURM has; cancel, and submit anew"
    return [text] * bool(held)


@contextlib.contextmanager
def submitting(folders: Iterable[Path]) -> Iterator[None]:
    """The run folders locked, none of which has a job that has not ended.

    SLURM alone knows what it has accepted, and finds it by the jobs' name. It does not know what is
    on its way: a process that was killed may have left an sbatch. It leaves its lock, too: then
    SLURM is asked again after SETTLE_S.
    """
    wanted = list(folders)
    was_locked, begin = any((folder / "run.lock").exists() for folder in wanted), time.monotonic()
    with FolderLock(wanted).held(PATIENCE_S):
        was_locked |= (
            time.monotonic() - begin > 0.1
        )  # by one that may have been killed while this waited
        _require_idle(wanted)
        if was_locked:
            time.sleep(SETTLE_S)
            _require_idle(wanted)
        yield


def _require_idle(folders: Sequence[Path]) -> None:
    """ActiveJob where a run has a job that has not ended; the ledger gets the jobs that it lacks."""
    for folder, states in states_of(folders, must_ask=True).items():
        known = ledger.job_ids(folder)
        for job in [state.id for state in states if state.id not in known]:
            # its submission was killed before it could record it
            ledger.note(folder, "submitted", job, site="", after="")
        if active := [state for state in states if not state.has_ended]:
            ids, words = [state.id for state in active], ", ".join(state.state for state in active)
            raise ActiveJob(
                f"run folder={folder}: has job {', '.join(ids)} already ({words}); cancel it first",
                ids,
            )


def _accept(
    folder: Path,
    freeze: Callable[[], Path],
    site: str,
    options: Sequence[str],
    after: Sequence[str],
) -> str:
    """Submit the script of a run folder that is locked; the id of its job, which waits for those
    `after`, too.

    A run's jobs begin one after another (singleton, by name). The folder of the frozen code is the
    script's argument, which a job keeps, whatever `--export` or a site's own sbatch do with the
    environment.
    """
    script = folder / SCRIPT
    code = freeze() if copies.USED_BY in read_text(script) else None
    options = [
        f"--dependency={','.join(['singleton', *after])}",
        "--kill-on-invalid-dep=yes",
        *options,
    ]
    facts = {"plan": copies.keep_plan(folder), "script": copies.hash_of(read_text(script))}
    facts |= {
        "constants": constants_of(read_plan(folder / "plan.json")).hash,
        "code": code.name if code else "",
    }
    name, known, words = (
        client.job_name(folder),
        ledger.job_ids(folder),
        [str(code)] if code else [],
    )
    job = client.sbatch(script, *options, name=name, known=known, arguments=words)
    ledger.note(folder, "submitted", job, site=site, after=",".join(after), **facts)
    return job


def cancel(folders: Iterable[Path]) -> list[str]:
    """Cancel every job of the runs that has not ended; their ids. Raises ValueError where SLURM
    does not answer.
    """
    client.require_answer(
        "; nothing was cancelled: try again, or `touch RUN/stop`, with which a run saves and ends by itself"
    )
    live = [
        (folder, s.id)
        for folder, states in states_of(folders).items()
        for s in states
        if not s.has_ended
    ]
    client.cancel(job for _, job in live)
    for folder, job in live:
        ledger.note(folder, "cancelled", job)
    return [job for _, job in live]


@dataclass(frozen=True, kw_only=True)
class JobStatus(client.JobState):
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

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than completed, or saved and stopped."""
        return self.status.has_failed

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `trilane slurm status`, in which the key of our status is `verdict`."""
        return {
            "verdict" if name == "status" else name: v
            for name, v in as_json(self).items()
            if name != "name"
        }

    def line(self) -> str:
        """A line for the terminal."""
        job = f"{self.id} +{self.waiting}" if self.waiting else self.id
        without = f"--exclude={self.exclude[:80]} " * bool(self.exclude)
        state = f"{self.run:28.28} {job:12} {self.state:13} {self.elapsed:>10}"
        progress = f"{self.reason or self.nodes:22.22} {self.iteration:>7}/{self.iterations} {self.status:10}"
        return f"{state} {progress} {without}{self.evidence[:240]}".rstrip()


class JobTable(list[JobStatus], Table):
    """The status of several runs."""

    def summary(self) -> str:
        return f"{len(self)} runs"

    def to_frame(self) -> DataFrame:
        """A row a run: job, state (of SLURM), status, iteration of iterations, what it waits for,
        the evidence.
        """
        columns: dict[str, str | Callable[[JobStatus], str]] = {"run": "run", "job": "id"}
        columns |= {
            "state": lambda j: j.state if j.id else ""
        }  # of a run that was not submitted its status alone
        columns |= {
            "status": lambda j: str(j.status),
            "iteration": "iteration",
            "iterations": "iterations",
        }
        return frame_of(
            self, columns | {"waits for": "reason", "evidence": lambda j: short(j.evidence)}
        )


def job_status(folders: Iterable[Path]) -> JobTable:
    """The status of each run folder: of its job that runs, else of the next that waits, else of the
    last.
    """
    return JobTable(_status(folder, states) for folder, states in states_of(folders).items())


def _close(folder: Path, states: Sequence[client.JobState]) -> None:
    """Record the ends that killed attempts could not; not where another process has the folder, or
    it is read only.
    """
    alive = {s.id for s in states if not s.has_ended and s.state != "PENDING"}
    if any(e["event"] == "started" and e["id"] not in alive for e in ledger.unended(folder)):
        with contextlib.suppress(ValueError, OSError), FolderLock([folder]).held(0.0):
            attempt.close_ended(folder, {state.id: state for state in states})


def states_of(folders: Iterable[Path], must_ask: bool = False) -> dict[Path, list[client.JobState]]:
    """The jobs of each run folder, oldest first: those of its ledger, and those that squeue has by
    their name.

    Raises SlurmError where SLURM does not answer, unless no ledger has a job and it need not be
    asked.
    """
    ids = {Path(folder): ledger.job_ids(Path(folder)) for folder in folders}
    of_slurm = [job for mine in ids.values() for job in mine if client.JOB_ID.fullmatch(job)]
    folder_of = {client.job_name(folder): folder for folder in ids}
    found = dict[str, client.JobState]()
    try:
        found = client.states(of_slurm, folder_of) if client.is_installed() else {}
    except client.SlurmError:  # SLURM's commands may be installed here, and not configured
        if of_slurm or must_ask:
            raise
    for job, state in found.items():
        folder = folder_of.get(state.name)
        if folder and job not in ids[folder]:
            ids[folder].append(job)
    return {
        folder: [found.get(job) or client.JobState(id=job, state=client.FORGOTTEN) for job in mine]
        for folder, mine in ids.items()
    }


def active_jobs(folder: Path) -> list[str]:
    """Ids of the folder's jobs that have not ended: waiting, running, held or suspended."""
    return [state.id for state in states_of([folder])[Path(folder)] if not state.has_ended]


def _status(folder: Path, states: Sequence[client.JobState]) -> JobStatus:
    _close(folder, states)
    live, begun = [s for s in states if not s.has_ended], ledger.events(folder, "started")[-1:]
    # one that is still COMPLETING, as on a node that has died, is not the one that runs now
    order = {"RUNNING": 0, "COMPLETING": 2, "PENDING": 3}
    running = sorted(
        live, key=lambda s: (order.get(s.state, 1), s.id not in [e["id"] for e in begun])
    )
    none = client.JobState(id="", state="NOT SUBMITTED")
    current = next(iter(running), None) or _decisive(folder, states) or none
    try:
        iterations = read_plan(folder / "plan.json").run.goal
        found = _verdict(folder, current)
        if found.status is Status.TIME_LIMIT and not live:
            found = replace(found, evidence=found.evidence + attempt.how_to_resume(folder))
    except ValueError as error:  # the plan was deleted or damaged while a job waits or runs
        active = Status.WAITING if current.state == "PENDING" else Status.RUNNING
        ended = attempt.REASONS.get(current.state, Status.UNFINISHED)
        iterations, found = 0, attempt.status_of(active if live else ended, str(error))
    return JobStatus(
        **vars(current),
        run=folder.name,
        status=found.status,
        evidence=found.evidence,
        exclude=found.exclude,
        iteration=run_folder.iteration(folder),
        iterations=iterations,
        waiting=len(live) - (current in live),
    )


def _decisive(folder: Path, states: Sequence[client.JobState]) -> client.JobState | None:
    """Of jobs that have ended the last that trained, or failed before it could; None where there is
    no job.

    The later jobs of a chain only find that nothing is left to do, or are cancelled before they
    start.
    """
    began, refused = ledger.job_ids(folder, "started"), ledger.job_ids(folder, "refused")
    nothing = ("COMPLETED", "CANCELLED", client.FORGOTTEN)
    failed = [s.id for s in states if s.id not in refused and s.state not in nothing]
    return next(
        (s for s in reversed(states) if s.id in (*began, *failed)), states[-1] if states else None
    )


def _verdict(folder: Path, job: client.JobState) -> RunStatus:
    """How it stands with the job, and the line that proves it."""
    written, of = known_status(folder), attempt.status_of
    if job.state == "NOT SUBMITTED":
        problem = status_problem(folder)
        return (
            of(Status.UNFINISHED, problem) if problem else written or of(Status.NOT_SUBMITTED, "")
        )
    if not job.has_ended:
        if job.state == "PENDING":
            return of(Status.WAITING, job.reason)
        text, nodes = pace.slowness(folder)
        alarm = "; ".join(
            filter(None, (run_folder.not_finite(folder), storage.trouble(folder), text))
        )
        running = of(Status.RUNNING, alarm or "".join(_tail(folder / "run.log", 1)))
        return replace(running, exclude=",".join(nodes))
    # the files in the folder are of the last job that started, ended or was refused there; without
    # such events in the ledger (a script written by hand) a failed job is assumed to have left none
    events = ledger.events(folder, "started", "ended", "refused")
    is_last = events[-1]["id"] == job.id if events else job.state != "FAILED"
    written = written if written and (is_last or written.status is Status.COMPLETED) else None
    known = attempt.REASONS.get(job.state)  # FAILED is none
    scheduler = of(known, f"SLURM: {job.state}") if known else None
    log = last_log(folder) if is_last and not written and not scheduler else None
    return verdict(
        code=None,
        written=written,
        scheduler=scheduler,
        log=log,
        otherwise=_unexplained(folder, job),
    )


def _unexplained(folder: Path, job: client.JobState) -> RunStatus:
    """The end of a job for which neither its files nor SLURM give a reason: by its ledger, and what
    it printed.
    """
    if job.state in ("COMPLETED", client.FORGOTTEN) and (done := attempt.finished(folder)):
        return attempt.status_of(Status.COMPLETED, done)
    ended = [e for e in ledger.events(folder, "ended") if e["id"] == job.id][-1:]
    if job.state == client.FORGOTTEN and ended and ended[0]["status"] in list(Status):
        return attempt.status_of(Status(ended[0]["status"]), ended[0]["evidence"])
    refused = ledger.events(folder, "refused")
    if refused and refused[-1]["id"] == job.id:
        return attempt.status_of(Status.STOPPED, refused[-1]["says"])
    printed = _output(folder, job.id)
    lines = [line.strip() for line in _tail(printed, 20) if line.strip()] if printed else []
    evidence = (
        f"{printed.name}: {lines[-1]}"
        if printed and lines
        else f"SLURM: {job.state}; the log gives no reason"
    )
    return attempt.status_of(
        Status.UNFINISHED if job.state == client.FORGOTTEN else Status.CRASHED, evidence
    )


def _output(folder: Path, job: str) -> Path | None:
    """The output file of the job, which its script names slurm-JOB.out; None where there is none."""
    path = folder / f"slurm-{job}.out"
    return path if path.is_file() else None


def logs(folder: Path, lines: int = 20) -> list[str]:
    """The last lines of a run's log, or of the output of its last job where this failed before it
    wrote a log.

    Raises ValueError where there is neither.
    """
    log, began, refused = (
        folder / "run.log",
        ledger.job_ids(folder, "started"),
        ledger.job_ids(folder, "refused"),
    )
    jobs = [job for job in ledger.job_ids(folder) if job not in refused and _output(folder, job)]
    if jobs and (jobs[-1] not in began or not log.exists()):
        log = _output(folder, jobs[-1]) or log
    require(log.exists(), "run folder", folder, "has no run.log yet")
    return _tail(log, lines)


def _tail(path: Path, lines: int) -> list[str]:
    return read_text(path, 400 * lines).splitlines()[-lines:]


def watch(folders: Sequence[Path], every_s: float, seconds: float) -> Iterator[str]:
    """A line for each change, until all runs have ended or `seconds` have passed; it polls every
    `every_s` seconds.

    While SLURM does not answer, one line reports it, and the polling goes on. A run that hangs ends
    itself, with that reason.
    """
    end, is_away = time.monotonic() + seconds, False
    before = dict[Path, JobStatus]()
    while True:
        try:
            client.require_answer()
            found = dict(zip(folders, job_status(folders), strict=True))
            yield from ["SLURM answers again"] * is_away
            is_away = False
        except client.SlurmError as error:  # an update or a restart of the controller takes minutes
            yield from [f"SLURM does not answer, asked again every {every_s:g} s: {error}"] * (
                not is_away
            )
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
    elif job.exclude != old.exclude or (
        job.evidence != old.evidence and (_alarms(job) or _alarms(old))
    ):
        yield f"{job.run}: {job.evidence}"
    elif old.iteration != job.iteration:
        yield f"{job.run}: iteration {job.iteration} of {job.iterations}"


def _alarms(job: JobStatus) -> bool:
    return job.evidence.startswith(("SLOW", "NOT FINITE", NOT_SAVED, NO_ROOM))


def hostfile(job: str, plan: Plan) -> str:
    """The nodes of a running job as a hostfile of DeepSpeed and pdsh; ValueError where it does not
    run.
    """
    client.require_answer()
    state = client.states([job])[job]
    require(
        state.state in ("RUNNING", "COMPLETING"), "job", job, f"is {state.state}, and has no nodes"
    )
    slots = min(plan.topology.gpus, plan.cluster.gpus_per_node)
    return "".join(f"{host} slots={slots}\n" for host in client.hostnames(state.nodes))
