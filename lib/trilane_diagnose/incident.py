"""Incident: one verdict on a failure from logs, stacks, Flight Recorder and SLURM's accounting."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.logs.endings import Level
from trilane.logs.run import RunLog, read_logs
from trilane.slurm import attempt
from trilane.utils.files import natural
from trilane.utils.numbers import ranges
from trilane.utils.tables import Record
from trilane.utils.validation import require, require_folder
from trilane.workspace.status import RunStatus, Status, known_status, verdict
from trilane_diagnose.hang import Verdict, diagnose_hang

LOGS = (".log", ".out", ".err", ".gz")
Row = dict[str, str]  # of SLURM's accounting


@dataclass(frozen=True, kw_only=True)
class Incident(Record):
    """The verdict on a folder in lines, the first of which is how the run ended; `hang`: that on
    its stacks, as JSON.
    """

    status: Status
    verdict: tuple[str, ...]
    hang: dict[str, Any] | None

    def summary(self) -> str:
        return "\n".join(self.verdict)


def read_incident(folder: Path) -> Incident:
    """The incident in a run folder, or in any folder of copied files; ValueError where nothing in
    it can be read.

    SLURM's accounting is what `sacct --parsable2` printed into a file of the folder.
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
    require(bool(logs or accounts or hang or known_status(folder)), "folder", folder, rule)
    end = _end(folder, logs, accounts, hang)
    lines = tuple(_verdict(end, hang))
    return Incident(status=end.status, verdict=lines, hang=hang.to_json() if hang else None)


def _read_files(folder: Path) -> tuple[list[RunLog], list[Row]]:
    """The last run of each log in the folder, and the rows of SLURM's accounting."""
    paths = [*folder.rglob("*")]
    if (folder / "plan.json").is_file():
        paths = [*folder.glob("*"), *folder.glob("ranks/*.log")]
    logs: list[RunLog] = []
    accounts: list[Row] = []
    for path in sorted(filter(Path.is_file, paths)):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                head = file.readline(1 << 14)
                if "JobID" in head and "|" in head and "State" in head:
                    accounts += csv.DictReader([head, *file], delimiter="|", restval="")
                elif path.suffix in LOGS:
                    logs += read_logs(path)[-1:]
        except (ValueError, OSError, csv.Error):
            continue  # another file
    return logs, accounts


def _end(folder: Path, logs: list[RunLog], accounts: list[Row], hang: Verdict | None) -> RunStatus:
    """How it ended, by the rules for runs (workspace/status.py)."""
    # of several logs the one whose ending is the strongest, then the one that got furthest
    log = min(
        logs,
        key=lambda log: (not log.status.has_failed, _level(log), -(log.last_iteration or 0)),
        default=None,
    )
    # of several jobs the last counts, of one its steps, which name the node
    scheduler = None
    cancelled = None
    for row in sorted(accounts, key=lambda row: natural(str(row.get("JobID")))):
        state = str(row.get("State"))
        status = attempt.REASONS.get(state.partition(" ")[0])
        evidence = f"job {row.get('JobID')}: {state} on {row.get('NodeList') or 'its nodes'}"
        # a cancellation counts only without another reason: who cancels has one
        if status is Status.CANCELLED:
            cancelled = attempt.status_of(status, evidence)
        elif status:
            scheduler = attempt.status_of(status, evidence)
    otherwise = attempt.status_of(Status.UNFINISHED, log.evidence if log else "")
    if log and (log.status.is_clean or log.status.has_failed):
        # who reports a time-out, or that another is gone, is not who began it
        rank = None if _level(log) >= Level.CONSEQUENCE else log.rank
        otherwise = attempt.status_of(log.status, log.evidence)
        otherwise = replace(otherwise, rank=rank, exclude=log.exclude)
    elif hang and hang.suspects:
        otherwise = attempt.status_of(Status.HANG, "by its stacks")
    elif cancelled:
        otherwise = cancelled
    written = known_status(folder)
    return verdict(code=None, written=written, scheduler=scheduler, otherwise=otherwise)


def _level(log: RunLog) -> int:
    """The level of the ending that a log's status was taken from."""
    levels = [int(ending.level) for ending in log.endings if ending.evidence == log.evidence]
    return min(levels, default=99)  # after all levels


def _verdict(end: RunStatus, hang: Verdict | None) -> Iterator[str]:
    """What happened, which rank began it, and what cannot be told."""
    where = f" on rank {end.rank}" if end.rank is not None else ""
    if end.status is Status.UNFINISHED:
        line = "cannot be determined from these files: why it ended, or whether it runs"
        yield f"{line}; last line: {end.evidence}"
    else:
        yield f"{end.status}{where}: {end.evidence}"
    if hang and hang.paragraph not in end.evidence:
        yield hang.paragraph
    if hang and end.rank is not None and hang.suspects and end.rank not in hang.suspects:
        line = f"its log names rank {end.rank}, stacks {ranges(hang.suspects)}"
        yield f"{line}: which began it cannot be determined"
    if not hang and end.rank is None and end.status.has_failed:
        yield "which rank began it cannot be determined: there are no stacks"
    if end.exclude:
        yield f"for the next submission: --exclude={end.exclude}"
