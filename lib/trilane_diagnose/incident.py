"""Incident: one verdict on a failure from logs, stacks, Flight Recorder and SLURM's accounting."""

import csv
import re
from pathlib import Path

from trilane.logs.endings import Level
from trilane.logs.run import RunLog, read_logs, read_run_folder
from trilane.slurm import attempt
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, Record
from trilane.utils.validation import require, require_folder, shipped_json
from trilane.workspace.status import Status
from trilane_diagnose.hang import diagnose_hang

LOGS = (".log", ".out", ".err", ".gz")
Row = dict[str, str]  # of SLURM's accounting
WEAK = shipped_json("ends")["weak"]  # statuses, less than what a log shows
STATES = attempt.REASONS | shipped_json("ends")["slurm_others"]
NOWHERE = ("", "None assigned")  # of a job that never ran
# slurmstepd's signal where it cannot start a script, in a column of its own or in the reason
UNSTARTED = r"'0:53'|RaisedSignal:53\b"
# of a shell whose program was ended by a signal sacct leaves 128 out
CUT = ("6:0", "9:0", "11:0", "15:0")


@frozen
class Incident(Record):
    """The verdict on a folder in lines, the first of which is how the run ended; `hang`: that on
    its stacks, as JSON.
    """

    status: Status
    verdict: tuple[str, ...]
    hang: Json | None

    def summary(self) -> str:
        return "\n".join(self.verdict)


def read_incident(folder: Path) -> Incident:
    """The incident in a run folder, or in any folder of copied files; ValueError where nothing in
    it can be read.

    SLURM's accounting is what `sacct --parsable2` printed into a file of a folder of copies; the
    last run of a job counts.
    """
    require_folder("folder", folder)
    logs, accounts = _read_files(folder)
    hang = None
    # a run without stacks has none but in its checkpoints, which are no dumps
    if (folder / "stacks").is_dir() or not (folder / "plan.json").is_file():
        try:
            hang = diagnose_hang(folder)
        except ValueError:
            hang = None
    rule = "holds no log, dump or output of `sacct --parsable2` that can be read"
    require(logs or accounts or hang, "folder", folder, rule)
    status, lines = _end(logs, accounts)
    if hang and hang.suspects and status is Status.UNFINISHED:
        status = Status.HANG
        lines = [f"{status}: by its stacks"]
    if hang and hang.paragraph not in lines[0]:
        lines.insert(1, hang.paragraph)
    return Incident(status=status, verdict=tuple(lines), hang=hang.to_json() if hang else None)


def _read_files(folder: Path) -> tuple[list[RunLog], list[Row]]:
    """The last run of each log in the folder, and the rows of SLURM's accounting."""
    if (folder / "plan.json").is_file():
        return [read_run_folder(folder)], []
    logs = []
    accounts = []
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                head = file.readline(1 << 14)
                if "JobID" in head and "|" in head and "State" in head:
                    blank = dict.fromkeys(("JobID", "State", "NodeList", "Reason"), "")
                    rows = csv.DictReader([head, *file], delimiter="|", restval="")
                    accounts += [blank | row for row in rows]
                elif path.suffix in LOGS:
                    logs += read_logs(path)[-1:]
        except (ValueError, OSError, csv.Error):
            continue  # another file
    return logs, accounts


def _end(logs: list[RunLog], accounts: list[Row]) -> tuple[Status, list[str]]:
    """How it ended, in lines: SLURM's reason first; a cancellation, or that it failed or completed,
    counts only where no log has a reason.
    """
    status, lines = _accounted(accounts)
    if status and status not in WEAK:
        return status, lines
    # of several logs the one whose ending is the strongest, then the one that got furthest
    for log in sorted(logs, key=lambda log: (_level(log), -(log.last_iteration or 0))):
        if log.status is not Status.UNFINISHED:
            where = ""
            # who reports a time-out, or that another is gone, is not who began it
            if log.rank is not None and _level(log) < Level.CONSEQUENCE:
                where = f" on rank {log.rank}"
            lines = [f"{log.status}{where}: {log.evidence}"]
            if log.exclude:
                lines.append(f"for the next submission: --exclude={log.exclude}")
            return log.status, lines
    if status:
        return status, lines
    line = "cannot be determined from these files: why it ended, or whether it runs"
    if logs:
        line += f"; last line: {logs[0].evidence}"
    return Status.UNFINISHED, [line]


def _accounted(accounts: list[Row]) -> tuple[Status | None, list[str]]:
    """How the last run of a job ended by its own row, or by a step with a reason, which has the
    node; in lines with what sacct does not tell. Where none ran, of the last job; None without one.

    SLURM marks a step CANCELLED, too, of which a task was ended by a signal. A job that was
    requeued has rows for each time that it ran.
    """
    jobs = [
        number
        for number, row in enumerate(accounts)
        if "." not in row["JobID"] and _state(row) in STATES
    ]
    if not jobs:
        return None, []
    ran = [number for number in jobs if accounts[number]["NodeList"] not in NOWHERE]
    row, *rest = accounts[(ran or jobs)[-1] :]
    steps = [step for step in rest if step["JobID"].startswith(f"{row['JobID']}.")]
    is_killed = any(_state(step) == "CANCELLED" for step in steps)
    for step in steps:
        if STATES.get(_state(step), Status.CANCELLED) not in WEAK:
            row = step
    status = Status(STATES[_state(row)])
    code = row.get("ExitCode") or "unknown"
    where = f"job {row['JobID']}: {row['State']} on {row['NodeList']}"
    if re.search(UNSTARTED, str([row, *steps])):
        status = Status.ENVIRONMENT
        where = f"launch failure: {where}: no script starts (working directory, user, file system)"
    lines = [f"{status}: {where}, exit code {code} ({row['Reason']})".removesuffix(" ()")]
    # with --kill-on-bad-exit srun ends with 143, the code of those that it killed
    if status is Status.CRASHED and (is_killed or code in ("15:0", "143:0")):
        lines.append("a task was ended by a signal; the exit code of the first is not known")
    if status is Status.CRASHED and code in CUT:
        lines.append(f"{code} may be 128 more; scontrol show job has the exit code")
    return status, lines


def _state(row: Row) -> str:
    """The state without who cancelled it, as in "CANCELLED by 1000"."""
    return row["State"].partition(" ")[0]


def _level(log: RunLog) -> int:
    """The level of the ending that a log's status was taken from."""
    levels = [int(ending.level) for ending in log.endings if ending.evidence == log.evidence]
    return min(levels, default=99)  # after all levels
