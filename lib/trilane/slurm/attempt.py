"""Attempt: one start of a run's training inside a job; whether it should start, and how
it ended.
"""

import contextlib
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

from trilane.launch.outcome import last_log
from trilane.slurm import client, copies
from trilane.utils.files import read_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import one_line
from trilane.utils.validation import shipped_json
from trilane.workspace.checkpoints import name_of
from trilane.workspace.ledger import age_s
from trilane.workspace.run import Run, put_aside
from trilane.workspace.status import RunStatus, Status, verdict, write_status

# what SLURM itself knows of an end; FAILED is no reason
REASONS = shipped_json("ends")["slurm_reasons"]
# why SLURM started no task, or not where it should; not that one has failed
SLURM_SAYS = re.compile(
    r"^(?:srun|slurmstepd): error: (?!.*(?:task|Exited|Terminat|Killed|STEP \d))(.+)", re.M
)
# another would waste as much again
ATTEMPTS = 3
# verdicts of data/responses.json that a node alone explains
PROVEN = ("dead node", "broken node", "slow node")


def job_id() -> str:
    """This job's id; "0" outside a job."""
    return os.environ.get("SLURM_JOB_ID", "0")


def begin(folder: Path) -> str:
    """Whether the training should start now: "go: ..." or "stop: " and the reason; recorded in the
    ledger.

    Of several jobs that ask at once one gets "go": the folder is locked from the question to the
    record. Files of an earlier attempt without a checkpoint move to attempts/N; else the run
    resumes, and only status.json and ranks/ move.
    """
    # another job may hold the lock while it waits for SLURM
    with FolderLock([folder]).held(600):
        run = Run(folder)
        job = job_id()
        reason = altered(run, job) or competing(run, job)
        reason = reason or finished(run) or blocked(run) or unready(run)
        if reason:
            run.note("refused", job, says=one_line(reason))
            return f"stop: {reason}"
        put_aside(folder, keep=run.newest is not None)
        # submitted by hand, or by a process that was killed
        if job not in ("0", *run.job_ids()):
            run.note("submitted", job, site="", after="")
        # without a frozen copy the installed code runs
        env = os.environ
        code = Path(env.get(copies.USED_BY, "")).name
        nodes = env.get("SLURM_JOB_NODELIST", "")
        restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
        run.note("started", job, iteration=run.iteration, code=code, nodes=nodes, restarts=restarts)
    if run.newest is None:
        return "go: from the beginning"
    return f"go: from {run.newest.name}"


def end(folder: Path, code: int) -> RunStatus:
    """How the attempt ended, by its log and the step's exit code; written to status.json and to the
    ledger.
    """
    run = Run(folder)
    job = job_id()
    if code:
        reason = f"exit code {code} after iteration {run.iteration}"
        said = SLURM_SAYS.findall(read_text(folder / "run.log", 1 << 16).rpartition("\nSTART ")[2])
        reason += f"; SLURM: {said[-1][:300]}" if said else "; the log gives no reason"
        otherwise = RunStatus(status=Status.CRASHED, evidence=reason)
    else:
        status = Status.COMPLETED if finished(run) else Status.STOPPED
        evidence = f"iteration {run.iteration} of {run.plan.run.goal}"
        otherwise = RunStatus(status=status, evidence=evidence)
    outcome = verdict(code=code, written=run.status, log=last_log(folder), otherwise=otherwise)
    seconds = 0.0
    for start in run.events("started"):
        if start["id"] == job:
            seconds = round(age_s(start), 1)
    outcome = replace(outcome, exit_code=code, seconds=seconds)
    write_status(folder, outcome)
    facts = asdict(outcome)
    del facts["rank"]
    with contextlib.suppress(OSError):  # a full disk: the outcome is printed
        run.note("ended", job, **facts)
    return outcome


def finished(run: Run) -> str:
    """Why nothing is left to do; "" while iterations are left, or the checkpoint of the last one is
    missing.
    """
    limits = run.plan.run
    if run.iteration < limits.goal:
        return ""
    has_last = run.newest and run.newest.name == name_of(limits.goal)
    if limits.saves_at_end and not run.is_completed and not has_last:
        return ""
    return f"done: iteration {run.iteration} of {limits.goal} is reached"


def altered(run: Run, job: str) -> str:
    """In what plan.json is not what was submitted as this job, and what to do, a line each; ""
    where it is.

    A job without a hash of its plan, as one submitted by hand, trains what is there.
    """
    kept = ""
    for event in run.events("submitted"):
        plan = str(event.get("plan"))
        if event["id"] == job and re.fullmatch(r"[0-9a-f]{16}", plan):
            kept = plan
    if not kept:
        return ""
    try:
        lines = copies.plan_changes(run, kept)
    except ValueError as error:
        lines = [str(error)]
    if not lines:
        return ""
    remedy = (
        f"bring it back (`cp submitted/{kept}.json plan.json`), or cancel, and submit it as it is"
    )
    return "\n".join(["plan.json is not what was submitted:", *lines, remedy])


def unready(run: Run) -> str:
    """Why a link of a chain cannot start: the run whose checkpoint it loads has not completed; ""
    where it can.
    """
    limits = run.plan.run
    before = Run(Path(limits.load))
    if not limits.start_iteration or run.newest or not (before.folder / "plan.json").exists():
        return ""
    if before.newest and before.newest.name == name_of(limits.start_iteration):
        return ""
    at = f"iteration {before.iteration} of {limits.start_iteration}"
    return f"{before.folder.name}, the link before, is at {at} and has not saved it"


def competing(run: Run, job: str, patience_s: float = 180) -> str:
    """Which other job trains in this folder now, "" where none does: two would mix their logs.

    SLURM starts the next job of a name while the one before is COMPLETING, whose ranks may still
    save until they are killed: this waits for their end. While SLURM does not answer, which it did
    when it started this job, nothing is known.
    """
    others = {event["id"] for event in run.unended()} - {job, "0"}
    others = {other for other in others if client.JOB_ID.fullmatch(other)}
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ValueError):
        while True:
            is_ending = False
            for state in client.states(others).values():
                if state.state in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"):
                    return f"job {state.id} trains here"
                is_ending |= state.state == "COMPLETING"
            if not is_ending or time.monotonic() > deadline:
                break
            time.sleep(2)
    return ""


def blocked(run: Run) -> str:
    """The stop switch, or three attempts at one iteration since the last submission; "" where there
    is neither.
    """
    stop = run.folder.resolve() / "stop"
    if stop.exists():
        return f"the stop switch is set; remove {stop} to resume"
    # the iterations at which attempts began
    starts: list[int] = []
    for event in run.events("submitted", "started", "response"):
        if event["event"] == "submitted" and event.get("site"):  # "": by hand, or by a job
            starts = []
        elif event["event"] == "started":
            starts.append(event["iteration"])
        elif event["event"] == "response" and event["verdict"] in PROVEN:
            # a job has only so many nodes, and the run was not the reason
            starts = starts[:-1]
    if starts[-ATTEMPTS:] != [run.iteration] * ATTEMPTS:
        return ""
    return f"{ATTEMPTS} attempts did not get beyond iteration {run.iteration}"
