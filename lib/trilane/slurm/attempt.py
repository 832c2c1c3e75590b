"""Attempt: one start of a run's training inside a job; whether it should start, and how it ended."""

import contextlib
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from trilane.config.plan import read_plan
from trilane.launch.outcome import last_log
from trilane.slurm import client, copies, ledger
from trilane.slurm.copies import USED_BY as CODE
from trilane.utils.files import append_line, json_object, read_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.tables import one_line
from trilane.workspace.checkpoints import FOLDER, latest, name_of
from trilane.workspace.run_folder import is_completed, iteration, put_aside
from trilane.workspace.status import RunStatus, Status, known_status, verdict, write_status


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """This job's id; "0" outside a job."""
    return env.get("SLURM_JOB_ID", "0")


def begin(folder: Path, env: Mapping[str, str] = os.environ) -> str:
    """Whether the training should start now: "go: ..." or "stop: " and the reason; recorded in the
    ledger.

    Of several jobs that ask at once one gets "go": the folder is locked from the question to the
    record. Files of an earlier attempt without a checkpoint move to attempts/N; else the run
    resumes, and only status.json and ranks/ move.
    """
    # another job may hold the lock while it waits for SLURM
    with FolderLock([folder]).held(600):
        job, at, known = job_id(env), iteration(folder), ledger.job_ids(folder)
        reason, other = altered(folder, job), competing(folder, job)
        if not reason and not other:
            close_ended(folder, {}, begins=True)
        if reason := reason or finished(folder) or blocked(folder) or other or unready(folder):
            ledger.note(folder, "refused", job, says=one_line(reason))
            return f"stop: {reason}"
        newest = latest(folder / FOLDER)
        put_aside(folder, keep=newest is not None)
        if job not in ("0", *known):  # submitted by hand, or by a process that was killed
            ledger.note(folder, "submitted", job, site="", after="")
        facts = {
            "nodes": env.get("SLURM_JOB_NODELIST", ""),
            "restarts": int(env.get("SLURM_RESTART_COUNT") or 0),
        }
        # without: submitted by hand, and the installed code runs
        code = Path(env.get(CODE, "")).name
        ledger.note(folder, "started", job, iteration=at, code=code, **facts)
    return f"go: from {newest.name if newest else 'the beginning'}"


def end(folder: Path, code: int, env: Mapping[str, str] = os.environ) -> RunStatus:
    """How the attempt ended, by its log and the step's exit code; written to status.json and to the
    ledger.
    """
    job, at, goal = job_id(env), iteration(folder), read_plan(folder / "plan.json").run.goal
    starts = [e for e in ledger.events(folder, "started") if e["id"] == job]
    if code:
        otherwise = status_of(
            Status.CRASHED, f"exit code {code} after iteration {at}; the log gives no reason"
        )
    else:
        status = Status.COMPLETED if finished(folder) else Status.STOPPED
        otherwise = status_of(status, f"iteration {at} of {goal}")
    outcome = verdict(
        code=code, written=known_status(folder), log=last_log(folder), otherwise=otherwise
    )
    seconds = round(ledger.age_s(starts[-1]), 1) if starts else 0.0
    if restarts := restarts_in_job(folder):
        outcome = replace(
            outcome, evidence=f"{outcome.evidence}; ranks restarted in the job {restarts} times"
        )
    outcome = replace(outcome, exit_code=code, seconds=seconds)
    write_status(folder, outcome)
    ledger.note(folder, "ended", job, **{k: v for k, v in asdict(outcome).items() if k != "rank"})
    return outcome


def status_of(status: Status, evidence: str) -> RunStatus:
    """An end that no rank reported."""
    return RunStatus(
        status=status, evidence=evidence, rank=None, exit_code=int(status.has_failed), seconds=0.0
    )


# what SLURM itself knows of an end; FAILED is no reason
REASONS = {
    "TIMEOUT": Status.TIME_LIMIT,
    "DEADLINE": Status.TIME_LIMIT,
    "OUT_OF_MEMORY": Status.HOST_MEMORY,
}
REASONS |= {"NODE_FAIL": Status.NODE_FAILURE, "BOOT_FAIL": Status.NODE_FAILURE}
REASONS |= {"CANCELLED": Status.CANCELLED, "PREEMPTED": Status.PREEMPTED}


def close_ended(folder: Path, states: Mapping[str, client.JobState], begins: bool = False) -> None:
    """Record the ends of attempts that were killed before they could, by SLURM's accounting; the
    folder is locked.

    `states` are those of the folder's jobs. A job that SLURM has forgotten may run, if SLURM errs:
    its attempt is closed by the next that begins, when none competes. A time limit with no job left
    to go on is also in run.log.
    """
    ended = [
        job for job, state in states.items() if state.has_ended and state.state != client.FORGOTTEN
    ]
    gone = [*ended, *(job for job, state in states.items() if state.state == "PENDING")]  # requeued
    starts = [
        e for e in ledger.unended(folder) if e["event"] == "started" and (begins or e["id"] in gone)
    ]
    past = client.past({e["id"] for e in starts if client.JOB_ID.fullmatch(e["id"])} - {"0"})
    for job, start in ((e["id"], e.get("restarts")) for e in starts):
        rows, number = past.get(job, []), start if type(start) is int else -1
        state, end, code = rows[number] if 0 <= number < len(rows) else ("", "", "")
        is_late = state == "REQUEUED" and job in ended and number == len(rows) - 1
        if is_late or state not in (
            *client.ENDED,
            "REQUEUED",
        ):  # the accounting is late, or there is none
            state, end, code = states[job].state if job in ended else "", "", ""
        if not state and not begins:
            continue
        known = Status.COMPLETED if state == "COMPLETED" and finished(folder) else Status.UNFINISHED
        status = REASONS.get(state, Status.CRASHED if state == "FAILED" else known)
        evidence = f"SLURM: {state or 'does not know the job any more'}"
        ledger.note(
            folder, "ended", job, status=status, evidence=evidence, state=state, end=end, exit=code
        )
        if status is Status.TIME_LIMIT and all(s.has_ended for s in states.values()) and not begins:
            with contextlib.suppress(OSError):
                append_line(folder / "run.log", f"END job {job}: {evidence}{how_to_resume(folder)}")


def how_to_resume(folder: Path) -> str:
    """What to type where a run has ended by its time limit and no job goes on; "" where it is
    completed.
    """
    if not (folder / "plan.json").exists() or finished(folder):
        return ""
    site = next(
        (e["site"] for e in reversed(ledger.events(folder, "submitted")) if e.get("site")), "SITE"
    )
    newest = latest(folder / FOLDER)
    at = int(newest.name.removeprefix("iter_")) if newest else 0
    command = shlex.join(["trilane", "slurm", "submit", str(folder), "--site", str(site)])
    return f"; `{command}` resumes at iteration {at}"


def restarts_in_job(folder: Path) -> int:
    """How often ft_launcher had started the ranks anew when they last began; 0 where no rank wrote
    it.
    """
    restarts = (json_object(read_text(folder / "env.json")) or {}).get("restarts")
    return restarts if isinstance(restarts, int) else 0


def finished(folder: Path) -> str:
    """Why nothing is left to do; "" while iterations are left, or the checkpoint of the last one is
    missing.
    """
    at, run = iteration(folder), read_plan(folder / "plan.json").run
    newest = latest(folder / FOLDER)
    is_saved = (
        not run.saves_at_end
        or is_completed(folder)
        or (newest and newest.name == name_of(run.goal))
    )
    return f"done: iteration {at} of {run.goal} is reached" if at >= run.goal and is_saved else ""


def altered(folder: Path, job: str) -> str:
    """In what plan.json is not what was submitted as this job, and what to type, a line each; ""
    where it is.

    A job without a hash of its plan, as one submitted by hand, trains what is there.
    """
    found = [
        e
        for e in ledger.events(folder, "submitted", "accepted")
        if e["id"] == job and e.get("plan")
    ][-1:]
    for event in found:
        again = shlex.join(
            ["trilane", "slurm", "submit", str(folder.resolve()), "--site", str(event.get("site"))]
        )
        try:
            lines = copies.plan_changes(folder, event["plan"])
            lines[:0] = ["plan.json is not what was submitted:"] * bool(lines)
        except ValueError as error:
            lines = [str(error)]
        ways = [f"`{again}` submits it as it is (a job that waits: --accept-changes)"]
        ways *= (folder / "plan.json").exists()
        if lines and copies.kept_plan(folder, event["plan"]):
            ways.append(f"`cp submitted/{event['plan']}.json plan.json` there brings it back")
        return "\n".join([*lines, "; ".join(ways)]).strip() if lines else ""
    return ""


def unready(folder: Path) -> str:
    """Why a link of a chain cannot start: the run whose checkpoint it loads has not completed; ""
    where it can.
    """
    plan = read_plan(folder / "plan.json")
    before = Path(plan.run.load)
    if (
        not plan.run.start_iteration
        or latest(folder / FOLDER)
        or not (before / "plan.json").exists()
    ):
        return ""
    newest = latest(before / FOLDER)
    if newest and newest.name == name_of(plan.run.start_iteration):
        return ""
    at, saved = (
        iteration(before),
        f"its newest checkpoint is {newest.name}" if newest else "it has no checkpoint",
    )
    return f"{before.name}, the link before, is at iteration {at} of {plan.run.start_iteration}; {saved}"


def competing(folder: Path, job: str, patience_s: float = 180, every_s: float = 2) -> str:
    """Which other job trains in this folder now, "" where none does: two would mix their logs.

    SLURM starts the next job of a name while the one before is COMPLETING, whose ranks may still
    save until they are killed: this waits for their end. While SLURM does not answer, which it did
    when it started this job, nothing is known. A job whose start a damaged ledger has lost has
    printed its "go: " (see train.sbatch).
    """
    starts = [e["id"] for e in ledger.unended(folder)]
    others = [
        i for i in dict.fromkeys(starts) if i not in (job, "0") and client.JOB_ID.fullmatch(i)
    ]
    known = {job, *(e["id"] for e in ledger.events(folder, "started", "ended", "refused"))}
    printed = {path.stem.removeprefix("slurm-"): path for path in folder.glob("slurm-*.out")}
    lost = [i for i in printed if i not in known and client.JOB_ID.fullmatch(i)]
    others += [i for i in lost if "\ngo: " in f"\n{read_text(printed[i])}"]
    going, end = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"), time.monotonic() + patience_s
    with contextlib.suppress(ValueError):
        while found := [
            s for s in client.states(others).values() if s.state in (*going, "COMPLETING")
        ]:
            if trains := [s.id for s in found if s.state in going]:
                return f"job {trains[0]} trains here"
            if time.monotonic() > end:
                break
            time.sleep(every_s)
    return ""


def blocked(folder: Path) -> str:
    """The stop switch, or three attempts at one iteration since the last submission; "" where there
    is neither.
    """
    if (folder / "stop").exists():
        return f"the stop switch is set; remove {folder.resolve() / 'stop'} to resume"
    # iterations at which attempts began; a fourth would waste as much again
    starts, why = list[int](), ""
    for event in ledger.events(folder):
        if event["event"] == "submitted" and event.get("site"):  # "": by hand, or by a job
            starts = []
        elif event["event"] == "started":
            starts.append(event["iteration"])
        elif (
            event["event"] == "replaced"
        ):  # a job has only so many spares, and the run was not the reason
            starts = starts[:-1]
        elif event["event"] == "ended":
            why = f": {event['status']}: {event['evidence']}"
    at = iteration(folder)
    return f"3 attempts did not get beyond iteration {at}{why}" if starts[-3:] == [at] * 3 else ""
