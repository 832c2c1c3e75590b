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
from trilane.slurm.copies import USED_BY as CODE
from trilane.slurm.nodes.node_failure import Test, handle_node_failure, note_lost_nodes, waiting
from trilane.utils.files import json_object, read_text
from trilane.utils.folder_lock import FolderLock
from trilane.utils.validation import require
from trilane.workspace.checkpoints import FOLDER, latest, name_of
from trilane.workspace.run_folder import STOP, is_completed, iteration, put_aside
from trilane.workspace.status import RunStatus, Status, known_status, write_status

TRIES = 3  # attempts that may start at the same iteration
SWEEP = "TRILANE_SWEEP"  # the folder of the sweep that this attempt belongs to
RUNS = "runs.txt"  # of a sweep: its run folders, relative, one a line


def begin(folder: Path, env: Mapping[str, str] = os.environ) -> str:
    """Whether the training should start now: "go: ..." or "stop: " and the reason; recorded in the ledger.

    Of several jobs that ask at once one gets "go": the folder is locked from the question to the record. Nothing of an
    earlier attempt is lost: the files of one without a checkpoint move to attempts/N, and the run starts from the
    beginning; otherwise it resumes, and only the earlier status.json moves.
    """
    # another job may hold the lock while it waits for SLURM
    with FolderLock([folder]).held(600):
        job, at, known = job_id(env), iteration(folder), ledger.job_ids(folder)
        reason = finished(folder) or blocked(folder) or competing(folder, job)
        reason = reason or unready(folder) or pruned(folder, env.get(SWEEP, ""))
        if reason:
            ledger.note(folder, "refused", job, says=reason)
            if reason.startswith("done"):
                _cancel_later(folder, job)
            return f"stop: {reason}"
        newest = latest(folder / FOLDER)
        put_aside(folder, keep=newest is not None)
        note_lost_nodes(folder)
        if job not in ("0", *known):  # submitted by hand, or by a process that was killed
            ledger.note(folder, "submitted", job, site="", script="")
        nodes, restarts = env.get("SLURM_JOB_NODELIST", ""), int(env.get("SLURM_RESTART_COUNT") or 0)
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
    outcome = verdict(known_status(folder), last_log(folder), code=code)
    at, goal = iteration(folder), read_plan(folder / "plan.json").run.goal
    if outcome is None and code == 0:
        status = Status.COMPLETED if finished(folder) else Status.STOPPED
        outcome = _ended(status, f"iteration {at} of {goal}")
    outcome = outcome or _ended(Status.CRASHED, f"exit code {code} after iteration {at}; the log gives no reason")
    outcome = replace(outcome, exit_code=code, seconds=round(seconds, 1))
    write_status(folder, outcome)
    ledger.note(folder, "ended", job, **{k: v for k, v in asdict(outcome).items() if k != "rank"})
    if outcome.status is Status.COMPLETED:
        _cancel_later(folder, job)
    return handle_node_failure(folder, job, env.get("SLURM_JOB_NODELIST", ""), outcome, test)


# SLURM's states that are a reason by themselves; where SLURM reports only a failure, the log decides
REASONS = {
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), Status.TIME_LIMIT),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), Status.NODE_FAILURE),
    **{"OUT_OF_MEMORY": Status.HOST_MEMORY, "CANCELLED": Status.CANCELLED, "PREEMPTED": Status.PREEMPTED},
}


def verdict(
    written: RunStatus | None, log: RunLog | None, *, code: int | None = None, state: str = ""
) -> RunStatus | None:
    """How a run ended, by its status.json, its log, the step's exit code and SLURM's state, as far as they are known;
    None where they give no reason.

    A completed run has completed. SLURM's own reason comes next: a job over its limit is killed by signals, which looks
    like a crash. What the watchdog wrote of a hang counts before the log, where the processes that it killed are.
    """
    if written and written.status is Status.COMPLETED and not code:
        return written
    if state in REASONS:
        return _ended(REASONS[state], f"SLURM: {state}")
    if written and (not code or written.status is Status.HANG):
        return written
    if log is None or code == 0 or log.status.is_open or (code and log.status is Status.COMPLETED):
        return None
    return replace(_ended(log.status, log.evidence), rank=log.rank, exclude=log.exclude)


def _ended(status: Status, evidence: str) -> RunStatus:
    return RunStatus(status=status, evidence=evidence, rank=None, exit_code=1, seconds=0.0)


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


def competing(folder: Path, job: str, patience_s: float = 180, every_s: float = 2) -> str:
    """Which other job trains in this folder now, "" where none does: two would mix their logs.

    While SLURM does not answer, or the other job is ending, this waits. What counts after `patience_s` is the folder:
    a training would have written there.
    """
    last = {e["id"]: e["event"] for e in ledger.events(folder, "started", "ended", "replaced")}
    others = [i for i, event in last.items() if event != "ended" and i != job and i != "0"]
    others = [i for i in others if client.JOB_ID.fullmatch(i)]
    before, end = _written(folder), time.monotonic() + patience_s
    while others:
        known = dict.fromkeys(others, "")
        with contextlib.suppress(ValueError):
            known = {i: state.state for i, state in client.states(others).items()}
        if going := [i for i, state in known.items() if state in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING")]:
            return f"job {going[0]} trains here"
        unknown = [i for i, state in known.items() if state in ("", "COMPLETING")]
        if unknown and _written(folder) != before:
            return f"job {unknown[0]} still writes here"
        if not unknown or time.monotonic() > end:
            break
        time.sleep(every_s)
    return ""


def _written(folder: Path) -> dict[str, int]:
    """When a training last wrote: of folders the time of their newest entry, since a look at each file of 1,000 ranks
    would cost a shared file system as many operations."""
    found = {}
    for name in ("run.log", "steps.jsonl", "ranks", FOLDER):
        with contextlib.suppress(FileNotFoundError):
            found[name] = (folder / name).stat().st_mtime_ns
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
    mine = _predicted_bytes(folder)
    for line in read_text(Path(sweep) / RUNS).splitlines() if sweep else ():
        other, written = Path(sweep) / line, known_status(Path(sweep) / line)
        need = _predicted_bytes(other) if written and written.status is Status.OOM else float("nan")
        if need <= mine and other.resolve() != folder.resolve():
            reason = f"pruned: predicted {mine / 2**30:.2f} GiB, and {other.name} ran out with {need / 2**30:.2f} GiB"
            write_status(folder, replace(_ended(Status.PRUNED, reason), exit_code=0))
            return reason
    return ""


def _predicted_bytes(folder: Path) -> float:
    """The memory that plan.json predicts; NaN, which is less than nothing, where it has no prediction."""
    found = (json_object(read_text(folder / "plan.json")) or {}).get("prediction")
    need = found.get("memory_bytes") if isinstance(found, dict) else None
    return float(need) if isinstance(need, int | float) else float("nan")


def _cancel_later(folder: Path, job: str) -> None:
    with contextlib.suppress(ValueError):  # they would find nothing to do, and end
        client.cancel(waiting(folder, job))
