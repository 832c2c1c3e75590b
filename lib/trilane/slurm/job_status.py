"""Standing: how a job of a run folder stands, and the line that proves it: SLURM's word first, then its output."""

from collections.abc import Sequence
from pathlib import Path

from trilane.slurm import attempt, client, ledger
from trilane.utils.validation import require
from trilane.workspace.status import Status, read_status

# SLURM's word, in the words of the log's reader; the log decides where SLURM only knows that something failed
WORDS = {
    "TIMEOUT": Status.TIME_LIMIT,
    "DEADLINE": Status.TIME_LIMIT,
    "NODE_FAIL": Status.NODE_FAILURE,
    "BOOT_FAIL": Status.NODE_FAILURE,
    "OUT_OF_MEMORY": Status.OOM,
    "CANCELLED": Status.CANCELLED,
    "PREEMPTED": Status.CANCELLED,
}


def telling(folder: Path, states: Sequence[client.JobState]) -> client.JobState | None:
    """Of jobs that have ended the last that tells something: it trained, or died before it could.

    A chain's later links only find that nothing is left to do, or are cancelled before they start.
    """
    began, refused = _ids(folder, "started"), _ids(folder, "refused")

    def tells(job: client.JobState) -> bool:
        if job.id in began or job.id in refused or job.state == "COMPLETED":
            return job.id in began
        return job.state not in ("CANCELLED", client.FORGOTTEN, client.ENDED_HERE) or output(folder, job.id) is not None

    return next(filter(tells, reversed(states)), states[-1] if states else None)


def job_status(folder: Path, job: client.JobState) -> tuple[Status, str]:
    """How the job stands, and the line that proves it."""
    said = read_status(folder) if (folder / "status.json").exists() else None
    if job.state == "NOT SUBMITTED":
        return (said.status, said.evidence) if said else (Status.NOT_SUBMITTED, "")
    if not job.has_ended:
        return (Status.WAITING, job.reason) if job.state == "PENDING" else (Status.RUNNING, _last_line(folder))
    is_last = _is_last(folder, job)
    if said and (said.status is Status.COMPLETED or (is_last and job.state not in WORDS)):
        return said.status, said.evidence
    if job.state in WORDS:
        return WORDS[job.state], f"SLURM: {job.state}"
    return _by_log(folder, job, is_last)


def _by_log(folder: Path, job: client.JobState, is_last: bool) -> tuple[Status, str]:
    """For a job that ended without a word of its own; run.log is an earlier job's where this one never began."""
    log = attempt.last_log(folder) if is_last else None
    if log is not None and not log.status.is_open:
        return log.status, log.evidence
    if job.state in ("COMPLETED", client.FORGOTTEN) and attempt.done(folder):
        return Status.COMPLETED, attempt.done(folder)
    refused = ledger.events(folder, "refused")
    if refused and refused[-1]["id"] == job.id:
        return Status.STOPPED, refused[-1]["says"]
    printed = output(folder, job.id)
    lines = [line.strip() for line in _tail(printed, 20) if line.strip()] if printed else []
    told = f"{printed.name}: {lines[-1]}" if printed and lines else f"SLURM: {job.state}; the log says no more"
    return Status.UNFINISHED if job.state == client.FORGOTTEN else Status.CRASHED, told


def _is_last(folder: Path, job: client.JobState) -> bool:
    """Whether what lies in the folder is of this job: it was the last to begin, end or be refused there.

    A job that begins moves the status.json of the one before out of the way, so there is none of an earlier one. Where
    nobody noted such a thing (a script of one's own), a job that failed is believed to have left nothing.
    """
    events = ledger.events(folder, "started", "ended", "refused")
    return events[-1]["id"] == job.id if events else job.state != "FAILED"


def output(folder: Path, job: str) -> Path | None:
    """What SLURM wrote of the job's script, by the templates' --output; None where there is no such file.

    A sweep's array writes into the sweep's folder, two above the run's. Left out: an --output that was edited.
    """
    places = (folder, folder.resolve().parent.parent)
    return next((p for place in places if (p := place / f"slurm-{job}.out").is_file()), None)


def logs(folder: Path, lines: int = 20) -> list[str]:
    """The last lines of a run's log, or of what its last job printed that died before it began to log.

    ValueError where there is neither yet.
    """
    began, refused = _ids(folder, "started"), _ids(folder, "refused")
    outputs = ((job, output(folder, job)) for job in reversed(ledger.job_ids(folder)) if job not in refused)
    job, printed = next(((job, path) for job, path in outputs if path), ("", None))
    path = folder / "run.log"
    if printed and (job not in began or not path.exists()):
        return _tail(printed, lines)
    require(path.exists(), "run folder", folder, "has no run.log yet")
    return _tail(path, lines)


def _ids(folder: Path, kind: str) -> set[str]:
    return {e["id"] for e in ledger.events(folder, kind)}


def _last_line(folder: Path) -> str:
    return next(iter(logs(folder, 1)), "") if (folder / "run.log").exists() else ""


def _tail(path: Path, lines: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400 * lines))
        return file.read().decode("utf-8", "replace").splitlines()[-lines:]
