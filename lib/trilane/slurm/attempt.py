"""Attempt: one start of a run's training inside a job; whether it should start, and how it ended."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from trilane.config.plan import read_plan
from trilane.launch.outcome import last_log
from trilane.logs.run import RunLog
from trilane.slurm import client, ledger
from trilane.slurm.frozen_code import USED_BY as CODE
from trilane.slurm.nodes.node_failure import Test, handle_node_failure, note_lost_nodes, waiting
from trilane.utils.folder_lock import FolderLock
from trilane.utils.validation import require
from trilane.workspace.checkpoints import FOLDER, latest, name_of
from trilane.workspace.run_folder import STOP, is_completed, iteration, put_aside
from trilane.workspace.status import RunStatus, Status, known_status, write_status

TRAINING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING")
PATIENCE_S = 600.0  # for the lock of the folder, which another job may hold while it waits for SLURM
UNKNOWN_S = 180.0  # without an answer of SLURM about another job
ASK_EVERY_S = 2.0
TRIES = 3  # attempts that may start at the same iteration
SWEEP = "TRILANE_SWEEP"  # the folder of the sweep that this attempt belongs to


def begin(folder: Path, env: Mapping[str, str] = os.environ) -> str:
    """Whether the training should start now: "go: ..." or "stop: " and the reason; recorded in the ledger.

    Of several jobs that ask at once one gets "go": the folder is locked from the question to the record. Nothing of an
    earlier attempt is lost: the files of one without a checkpoint move to attempts/N, and the run starts from the
    beginning; otherwise it resumes, and only the earlier status.json moves.
    """
    with FolderLock([folder]).held(PATIENCE_S) as lock:
        job, at = job_id(env), iteration(folder)
        reason = unwanted(folder, job) or finished(folder) or blocked(folder) or competing(folder, job)
        reason = reason or unready(folder) or pruned(folder, env.get(SWEEP, ""))
        reason = reason or (
            "" if lock.is_ours else "this job was suspended while it asked, and another job took its place"
        )
        if reason:
            ledger.note(folder, "refused", job, says=reason)
            if reason.startswith("done"):
                _cancel_later(folder, job)
            return f"stop: {reason}"
        newest = latest(folder / FOLDER)
        put_aside(folder, keep=newest is not None)
        nodes, restarts = env.get("SLURM_JOB_NODELIST", ""), int(env.get("SLURM_RESTART_COUNT") or 0)
        note_lost_nodes(folder)
        if job not in ("0", *ledger.job_ids(folder)):  # submitted by hand
            ledger.note(folder, "submitted", job, site="", script="")
        code = Path(env.get(CODE, "")).name  # "": submitted by hand, and the installed code runs
        ledger.note(folder, "started", job, nodes=nodes, iteration=at, restarts=restarts, code=code)
    return f"go: from {newest.name if newest else 'the beginning'}"


def end(folder: Path, code: int, env: Mapping[str, str] = os.environ, test: Test | None = None) -> RunStatus:
    """How the attempt ended, by its log and the step's exit code; written to status.json and to the ledger.

    Where a node cannot be reached, or the test finds one broken, that is the reason: see handle_node_failure.
    """
    job = job_id(env)
    starts = [e for e in ledger.events(folder, "started") if e["id"] == job]
    seconds = time.time() - datetime.fromisoformat(starts[-1]["time"]).timestamp() if starts else 0.0
    outcome = attempt_status(folder, last_log(folder), code, round(seconds, 1))
    write_status(folder, outcome)
    ledger.note(folder, "ended", job, **{k: v for k, v in asdict(outcome).items() if k != "rank"})
    if outcome.status is Status.COMPLETED:
        _cancel_later(folder, job)
    return handle_node_failure(folder, job, env.get("SLURM_JOB_NODELIST", ""), outcome, test)


def attempt_status(folder: Path, log: RunLog | None, code: int, seconds: float) -> RunStatus:
    """The status that the watchdog wrote; else by the step's exit code first, then by the text of the log."""
    at, rank, exclude = iteration(folder), None, ""
    written = known_status(folder)
    if written and written.status is Status.HANG:  # by the watchdog; what it killed is in the log
        return replace(written, exit_code=code, seconds=seconds)
    if code == 0 and written:  # by the engine
        status, evidence = written.status, written.evidence
    elif code == 0:
        status = Status.COMPLETED if finished(folder) else Status.STOPPED
        evidence = f"iteration {at} of {read_plan(folder / 'plan.json').run.goal}"
    elif log is None or log.status is Status.COMPLETED or log.status.is_open:
        status, evidence = Status.CRASHED, f"exit code {code} after iteration {at}; the log gives no reason"
    else:
        status, evidence, rank, exclude = log.status, log.evidence, log.rank, log.exclude
    return RunStatus(status=status, evidence=evidence, rank=rank, exit_code=code, seconds=seconds, exclude=exclude)


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """This job's id as SLURM's commands take it: ARRAY_INDEX in an array; "0" outside a job."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "0")


def job_nodes(env: Mapping[str, str] = os.environ) -> str:
    """This job's nodes as SLURM lists them; ValueError outside a job."""
    nodes = env.get("SLURM_JOB_NODELIST", "")
    require(bool(nodes), "SLURM_JOB_NODELIST", nodes, "is not set: this runs inside a job")
    return nodes


def finished(folder: Path) -> str:
    """Why nothing is left to do; "" while iterations are left, or the checkpoint of the last one is missing."""
    at, run = iteration(folder), read_plan(folder / "plan.json").run
    newest = latest(folder / FOLDER)
    is_saved = not run.saves_at_end or is_completed(folder) or (newest and newest.name == name_of(run.goal))
    return f"done: iteration {at} of {run.goal} is reached" if at >= run.goal and is_saved else ""


def unready(folder: Path) -> str:
    """Why a link of a chain cannot start: the run whose checkpoint it loads has not completed; "" where it can."""
    plan = read_plan(folder / "plan.json")
    before = Path(plan.run.load)
    if not plan.run.start_iteration or latest(folder / FOLDER) or not (before / "plan.json").exists():
        return ""
    newest = latest(before / FOLDER)
    if newest and newest.name == name_of(plan.run.start_iteration):
        return ""
    at, saved = iteration(before), f"its newest checkpoint is {newest.name}" if newest else "it has no checkpoint"
    return f"{before.name}, the link before, is at iteration {at} of {plan.run.start_iteration}; {saved}"


def unwanted(folder: Path, job: str) -> str:
    """Which job has the place of this one, which the ledger does not name; "" where there is none.

    The submission of this job was killed before it recorded it: it is recorded now, unless the submission was given up
    and another made, or SLURM had accepted it twice.
    """
    mine = {} if job in ledger.job_ids(folder) else _submission(folder, job)
    if not mine:
        return ""
    events = ledger.events(folder, "submitted", "not submitted")
    closed = [i for i, e in enumerate(events) if e.get("token") == mine["token"]]
    others = [e["id"] for e in events[closed[0] :] if e["event"] == "submitted"] if closed else []
    if others:
        return f"job {others[-1]} was submitted in its place"
    ledger.note(folder, "submitted", job, **ledger.of_submission(mine))
    return ""


def _submission(folder: Path, job: str) -> dict[str, Any]:
    """The "submitting" event of a job, by its comment; empty where there is none, or SLURM does not answer."""
    events = ledger.events(folder, "submitting")
    with contextlib.suppress(ValueError):
        token = client.comment(job) if events else ""
        return next((e for e in events if e["token"] == token), {})
    return {}


def competing(folder: Path, job: str) -> str:
    """Which other job trains in this folder now, "" where none does: two would mix their logs.

    While SLURM does not answer, or the other job is ending, this waits. What counts after UNKNOWN_S is the folder: a
    training would have written there.
    """
    last = {e["id"]: e["event"] for e in ledger.events(folder, "started", "ended", "replaced")}
    ended = {i for i, event in last.items() if event == "ended"}
    begun = dict.fromkeys(e["id"] for e in ledger.events(folder, "started"))
    others = [i for i in begun if i not in (job, "0", *ended) and client.JOB_ID.fullmatch(i)]
    before, end = _written(folder), time.monotonic() + UNKNOWN_S
    while others:
        known = dict.fromkeys(others, "")
        with contextlib.suppress(ValueError):
            known = {i: state.state for i, state in client.states(others).items()}
        if going := [i for i, state in known.items() if state in TRAINING]:
            return f"job {going[0]} trains here"
        unknown = [i for i, state in known.items() if state in ("", "COMPLETING")]
        if unknown and _written(folder) != before:
            return f"job {unknown[0]} still writes here"
        if not unknown or time.monotonic() > end:
            break
        time.sleep(ASK_EVERY_S)
    return ""


def _written(folder: Path) -> dict[Path, int]:
    """What a training changes: when its log, the files of its ranks and its checkpoints were last written."""
    found = {}
    for path in (folder / "run.log", folder / "steps.jsonl", *folder.glob("ranks/*"), *folder.glob(f"{FOLDER}/*")):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return found


def blocked(folder: Path) -> str:
    """The stop switch, or repeated failures at one iteration since the last submission; "" where there is neither."""
    if (folder / STOP).exists():
        return f"the stop switch is set; remove {folder.resolve() / STOP} to resume"
    events = ledger.events(folder)
    asked = [i for i, e in enumerate(events) if e["event"] == "submitted" and e.get("site")]  # "": by hand, or by a job
    last = max(asked, default=-1)
    starts = [e for e in _spent(events[last + 1 :]) if e["event"] == "started"]
    at = iteration(folder)
    if len(starts) >= TRIES and all(e["iteration"] == at for e in starts[-TRIES:]):
        ends = [e for e in events if e["event"] == "ended"]
        why = f": {ends[-1]['status']}: {ends[-1]['evidence']}" if ends else ""
        return f"{TRIES} attempts did not get beyond iteration {at}{why}"
    return ""


def _spent(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without the starts that a spare repeated: a job has only so many, and the run was not the reason."""
    starts = [i for i, e in enumerate(events) if e["event"] in ("started", "replaced")]
    repeated = {i for i, later in pairwise(starts) if events[later]["event"] == "replaced"}
    return [e for i, e in enumerate(events) if i not in repeated]


def pruned(folder: Path, sweep: str) -> str:
    """Which run of the sweep ran out of memory though predicted to need no more than this one; "" where none did."""
    if not sweep:
        return ""
    needs = dict[Path, float]()
    with contextlib.suppress(ValueError):  # a damaged list prunes nothing
        needs = {Path(m.folder).resolve(): m.memory_bytes for m in ledger.read_index(Path(sweep)).members}
    mine = needs.pop(folder.resolve(), 0.0)
    for other, need in needs.items():
        written = known_status(other) if need <= mine else None
        if written and written.status is Status.OOM:
            reason = f"pruned: predicted {mine / 2**30:.2f} GiB, and {other.name} ran out with {need / 2**30:.2f} GiB"
            write_status(folder, RunStatus(status=Status.PRUNED, evidence=reason, rank=None, exit_code=0, seconds=0.0))
            return reason
    return ""


def _cancel_later(folder: Path, job: str) -> None:
    with contextlib.suppress(ValueError):  # they would find nothing to do, and end
        client.cancel(waiting(folder, job))
