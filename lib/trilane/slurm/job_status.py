"""The status of a job of a run folder and the line that proves it: by SLURM's state first, then by its output."""

import getpass
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from trilane.launch.outcome import last_log
from trilane.slurm import attempt, client, ledger, preparation
from trilane.slurm.script import SCRIPT, directives
from trilane.utils.files import read_text
from trilane.utils.validation import require
from trilane.workspace.status import Status, known_status, status_problem

# SLURM's states that are a reason by themselves; where SLURM reports only a failure, the log decides
REASONS = {
    "TIMEOUT": Status.TIME_LIMIT,
    "DEADLINE": Status.TIME_LIMIT,
    "NODE_FAIL": Status.NODE_FAILURE,
    "BOOT_FAIL": Status.NODE_FAILURE,
    "OUT_OF_MEMORY": Status.HOST_MEMORY,
    "CANCELLED": Status.CANCELLED,
    "PREEMPTED": Status.PREEMPTED,
}


def decisive(folder: Path, states: Sequence[client.JobState]) -> client.JobState | None:
    """Of jobs that have ended the last that trained, or failed before it could; None where there is no job.

    The later jobs of a chain only find that nothing is left to do, or are cancelled before they start.
    """
    began, refused = _ids(folder, "started"), _ids(folder, "refused")

    def trained_or_failed(job: client.JobState) -> bool:
        if job.id in began or job.id in refused or job.state == "COMPLETED":
            return job.id in began
        return job.state not in ("CANCELLED", client.FORGOTTEN, client.ENDED_HERE) or output(folder, job.id) is not None

    return next(filter(trained_or_failed, reversed(states)), states[-1] if states else None)


def status_of(folder: Path, job: client.JobState) -> tuple[Status, str]:
    """The job's status, and the line that proves it."""
    written = known_status(folder)
    if job.state == "NOT SUBMITTED":
        problem = status_problem(folder)
        found = (written.status, written.evidence) if written else (Status.NOT_SUBMITTED, "")
        return (Status.UNFINISHED, problem) if problem else found
    if not job.has_ended:
        return (Status.WAITING, job.reason) if job.state == "PENDING" else (Status.RUNNING, last_line(folder))
    is_last = _is_last(folder, job)
    if written and (written.status is Status.COMPLETED or (is_last and job.state not in REASONS)):
        return written.status, written.evidence
    if job.state in REASONS:
        return REASONS[job.state], f"SLURM: {job.state}{_corpus_failure(folder, job)}"
    return _by_log(folder, job, is_last)


def _corpus_failure(folder: Path, job: client.JobState) -> str:
    """What the job printed last that was to prepare the corpus, where SLURM cancelled this one before it began."""
    submitted = [e for e in ledger.events(folder, "submitted") if e["id"] == job.id and e.get("after")]
    printed = preparation.output(folder, submitted[-1]["after"]) if submitted else None
    if not printed or job.id in _ids(folder, "started"):
        return ""
    return f"; {printed.name}: {next(iter(_tail(printed, 1)), '')}"


def _by_log(folder: Path, job: client.JobState, is_last: bool) -> tuple[Status, str]:
    """For a job that ended without a status of its own; run.log is an earlier job's where this one never started."""
    log = last_log(folder) if is_last else None
    if log is not None and not log.status.is_open:
        return log.status, log.evidence
    if job.state in ("COMPLETED", client.FORGOTTEN) and attempt.finished(folder):
        return Status.COMPLETED, attempt.finished(folder)
    refused = ledger.events(folder, "refused")
    if refused and refused[-1]["id"] == job.id:
        return Status.STOPPED, refused[-1]["says"]
    printed = output(folder, job.id)
    lines = [line.strip() for line in _tail(printed, 20) if line.strip()] if printed else []
    evidence = f"{printed.name}: {lines[-1]}" if printed and lines else f"SLURM: {job.state}; the log gives no reason"
    return Status.UNFINISHED if job.state == client.FORGOTTEN else Status.CRASHED, evidence


def _is_last(folder: Path, job: client.JobState) -> bool:
    """Whether the files in the folder are of this job: it was the last to start, end or be refused there.

    A job that starts moves the status.json of the one before. Without such events in the ledger (a script written by
    hand) a failed job is assumed to have left no files.
    """
    events = ledger.events(folder, "started", "ended", "refused")
    return events[-1]["id"] == job.id if events else job.state != "FAILED"


def output(folder: Path, job: str) -> Path | None:
    """The output file of the job, by the --output of its script, which may be edited; None where there is none.

    The array of a sweep writes into the sweep's folder, two above the run's.
    """
    sweep = folder.resolve().parent.parent
    scripts = [folder / SCRIPT, *(sorted(sweep.glob("sweep-*.sbatch")) if (sweep / ledger.INDEX).exists() else ())]
    found = [path for script in scripts for path in _outputs(folder, job, script) if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _outputs(folder: Path, job: str, script: Path) -> list[Path]:
    """The files that the script's --output may mean for the job (man sbatch, "filename pattern").

    What is not known of the job, such as its node before it starts, stands for any text.
    """
    default = f"slurm-{job}.out"
    try:
        asked = directives(read_text(script))
    except ValueError:  # an unclosed quote
        asked = {}
    pattern, array, index = asked.get("output") or default, *job.partition("_")[::2]
    started = [e["nodes"] for e in ledger.events(folder, "started") if e["id"] == job]
    first = re.match(r"([^\[,]*)(?:\[(\d+))?", started[-1]) if started else None
    known = {"A": array, "a": index, "x": asked.get("job-name", script.name), "u": getpass.getuser(), "%": "%"}
    known |= {"j": job, "N": "".join(filter(None, first.groups())).partition(".")[0] if first else ""}

    def value(found: re.Match[str]) -> str:
        width, letter = found.groups()
        return glob.escape(known[letter].zfill(int(width or 0))) if known.get(letter) else "*"

    if index and re.search(r"%[0-9]*[jJ]", pattern):  # the job's own number, which is not that of the array
        return []
    if "\\" in pattern:  # then sbatch replaces nothing
        return [script.parent / pattern.replace("\\", "")]
    words = re.split(r"(%[0-9]{0,2}[A-Za-z%])", pattern)
    name = "".join(re.sub(r"%(\d*)(.)", value, w) if i % 2 else glob.escape(w) for i, w in enumerate(words))
    return [Path(path) for path in glob.glob(str(Path(glob.escape(str(script.parent)), asked.get("chdir", ""), name)))]


def logs(folder: Path, lines: int = 20) -> list[str]:
    """The last lines of a run's log, or of the output of its last job where this failed before it wrote a log.

    Raises ValueError where there is neither.
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


def last_line(folder: Path) -> str:
    """The last line of run.log; "" where there is none."""
    return next(iter(logs(folder, 1)), "") if (folder / "run.log").exists() else ""


def _tail(path: Path, lines: int) -> list[str]:
    return read_text(path, 400 * lines).splitlines()[-lines:]
