"""Incident: one verdict on a failure from logs, stacks, Flight Recorder, the run's own files and
SLURM's accounting, and what each of these sources has.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.logs.endings import Level
from trilane.logs.run import RunLog, read_logs
from trilane.slurm import attempt, client
from trilane.utils.files import json_lines, natural, read_text
from trilane.utils.numbers import ranges
from trilane.utils.tables import Html, as_json, short
from trilane.utils.validation import require, require_folder
from trilane.workspace import ledger, storage
from trilane.workspace.run import Run
from trilane.workspace.status import RunStatus, Status, known_status, verdict
from trilane_diagnose.evidence import read_file
from trilane_diagnose.hang import Verdict, diagnose_hang

MOST_FILES = 4096  # that are read of a folder
OTHER_FILES = (".json", ".jsonl", ".html", ".stack")  # which are neither logs nor dumps in text
LOGS = (".log", ".out", ".err", ".gz")
Row = dict[str, str]  # of SLURM's accounting


@dataclass(frozen=True, kw_only=True)
class Incident:
    """The verdict on a folder in lines, the first of which is how the run ended; the lines of each
    source.
    """

    folder: Path
    status: Status
    verdict: tuple[str, ...]
    sources: dict[str, list[str]]
    hang: Verdict | None

    def to_json(self) -> dict[str, Any]:
        values = {"status": self.status, "verdict": self.verdict, "sources": self.sources}
        return as_json({**values, "hang": self.hang and self.hang.to_json()})

    def summary(self) -> str:
        """The verdict, and a section for each source."""
        lines = list(self.verdict)
        for source, own in self.sources.items():
            lines += [f"{source}:", *(f"  {short(line, 400)}" for line in own)]
        return "\n".join(lines)


def read_incident(folder: Path) -> Incident:
    """The incident in a run folder, or in any folder of copied files; ValueError where nothing in
    it can be read.

    SLURM's accounting is what `sacct --parsable2` printed into a file of the folder, else asked by
    sacct for the jobs that the run has recorded.
    """
    require_folder("folder", folder)
    logs, accounts = _read_files(folder)
    accounts = accounts or _asked(folder)
    hang = None
    # a run without stacks has none but in its checkpoints, which are no dumps
    if (folder / "stacks").is_dir() or not (folder / "plan.json").is_file():
        try:
            hang = diagnose_hang(folder)
        except ValueError:
            hang = None
    sources = {}
    for path, runs in logs.items():
        sources[str(path.relative_to(folder))] = list(_log_lines(runs))
    sources["stacks"] = list(_stack_lines(hang)) if hang else []
    sources |= _recorded(folder)
    sources["sacct"] = [_account_line(row) for row in accounts]
    sources = {source: lines for source, lines in sources.items() if lines}
    rule = "holds no log, dump or output of `sacct --parsable2` that can be read"
    require(bool(sources or known_status(folder)), "folder", folder, rule)
    end = _end(folder, logs, accounts, hang)
    lines = tuple(_verdict(end, hang, sources, logs))
    return Incident(folder=folder, status=end.status, verdict=lines, sources=sources, hang=hang)


def write_incident(incident: Incident, path: Path) -> Path:
    """Write the incident as one page: the verdict, a section for each source; its path."""
    from trilane.report.index import write_page

    heading = Html.of("Incident “{}”", incident.folder.resolve().name)
    parts = [Html.of("<h1>{}</h1>", heading)]
    parts.append(Html.of('<p class="card"><b>{}</b></p>', incident.status))
    parts += [Html.pre(line) for line in incident.verdict]
    for source, lines in incident.sources.items():
        parts += [Html.of("<h2>{}</h2>", source), Html.pre("\n".join(lines))]
    return write_page(path, heading, parts)


def _read_files(folder: Path) -> tuple[dict[Path, list[RunLog]], list[Row]]:
    """The logs of the folder with their runs, and the rows of SLURM's accounting."""
    paths = [*folder.rglob("*")]
    if (folder / "plan.json").is_file():
        paths = [*folder.glob("*"), *folder.glob("ranks/*.log")]
    paths = sorted(filter(Path.is_file, paths), key=lambda path: natural(str(path)))
    logs: dict[Path, list[RunLog]] = {}
    accounts: list[Row] = []
    for path in paths[:MOST_FILES]:
        if path.suffix in OTHER_FILES:
            continue
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                head = file.readline(1 << 14)
                if "JobID" in head and "|" in head and "State" in head:
                    accounts += csv.DictReader([head, *file], delimiter="|", restval="")
                    continue
            if path.suffix in LOGS or not read_file(path):
                logs[path] = read_logs(path)
        except (ValueError, OSError, csv.Error):
            continue  # another file
    return logs, accounts


def _asked(folder: Path) -> list[Row]:
    """What sacct has of the run's jobs, by the names of its columns."""
    jobs = [job for job in Run(folder).job_ids() if client.JOB_ID.fullmatch(job)]
    found = []
    for rows in client.past(jobs).values():
        for row in rows:
            facts = {"State": row.state, "End": row.end, "ExitCode": row.exit_code}
            found.append({"JobID": row.id, **facts})
    return found


def _account_line(row: Row) -> str:
    names = ("End", "ExitCode", "Elapsed", "Reason", "MaxRSS", "NodeList")
    facts = [f"{name} {row[name]}" for name in names if row.get(name)]
    return ", ".join([f"job {row.get('JobID')}: {row.get('State')}", *facts])


def _log_lines(runs: list[RunLog]) -> Iterator[str]:
    """What a log has of its runs: the last iteration, what the run printed of itself, its endings,
    its watchdogs.
    """
    for log in runs:
        yield from log.own
        if log.last_iteration is not None:
            yield f"iteration {log.last_iteration}, the last that is printed"
        for ending in log.endings:
            yield f"{ending.status}: {ending.evidence}"
        yield from log.collectives


def _stack_lines(hang: Verdict) -> Iterator[str]:
    """A line for each group of equal stacks, with its first suspect."""
    for group in hang.groups:
        line = f"ranks {ranges(group.ranks)}: {group.where}: {group.stack}"
        suspects = [rank for rank in group.ranks if rank in hang.reasons]
        if suspects:
            line += f"; SUSPECT: {hang.reasons[suspects[0]]}"
        yield line
    yield from hang.notes


def _recorded(folder: Path) -> dict[str, list[str]]:
    """What the run and its jobs have recorded of themselves."""
    jobs = []
    for event in ledger.events(folder):
        names = ("time", "status", "evidence", "says", "nodes")
        facts = [str(event[name]) for name in names if event.get(name)]
        jobs.append(": ".join([f"job {event['id']} {event['event']}", *facts]))
    pace = json_lines(read_text(folder / "ranks/pace.jsonl"))
    trouble = storage.trouble(folder)
    return {
        ledger.NAME: jobs,
        "ranks/pace.jsonl": [str(event.get("text") or "as fast as usual again") for event in pace],
        "ranks/storage.jsonl": [trouble] if trouble else [],
    }


def _end(
    folder: Path, logs: dict[Path, list[RunLog]], accounts: list[Row], hang: Verdict | None
) -> RunStatus:
    """How it ended, by the rules for runs (workspace/status.py)."""
    last_runs = [runs[-1] for runs in logs.values()]
    # of several logs the one whose ending is the strongest, then the one that got furthest
    log = min(
        last_runs,
        key=lambda log: (not log.status.has_failed, _level(log), -(log.last_iteration or 0)),
        default=None,
    )
    # of several jobs the last counts, of one its steps, which name the node
    reasons = []
    for row in sorted(
        accounts, key=lambda row: list(map(natural, str(row.get("JobID")).split(".")))
    ):
        status = attempt.REASONS.get(str(row.get("State")).partition(" ")[0])
        if status:
            reasons.append(attempt.status_of(status, _account_line(row)))
    # a cancellation counts only without another reason: who cancels has one
    others = [reason for reason in reasons if reason.status is not Status.CANCELLED]
    scheduler = others[-1] if others else None
    otherwise = attempt.status_of(Status.UNFINISHED, log.evidence if log else "")
    if log and (log.status.is_clean or log.status.has_failed):
        # who reports a time-out, or that another is gone, is not who began it
        rank = None if _level(log) >= Level.CONSEQUENCE else log.rank
        otherwise = attempt.status_of(log.status, log.evidence)
        otherwise = replace(otherwise, rank=rank, exclude=log.exclude)
    elif hang and hang.suspects:
        otherwise = attempt.status_of(Status.HANG, "by its stacks")
    elif reasons and not scheduler:
        otherwise = reasons[-1]
    written = known_status(folder)
    return verdict(code=None, written=written, scheduler=scheduler, otherwise=otherwise)


def _level(log: RunLog) -> int:
    """The level of the ending that a log's status was taken from."""
    levels = [int(ending.level) for ending in log.endings if ending.evidence == log.evidence]
    return min(levels, default=99)  # after all levels


def _verdict(
    end: RunStatus,
    hang: Verdict | None,
    sources: dict[str, list[str]],
    logs: dict[Path, list[RunLog]],
) -> Iterator[str]:
    """What happened, which rank began it, and what cannot be told."""
    has_failed = any(log.status.has_failed for runs in logs.values() for log in runs[:-1])
    has_failed |= "ranks/pace.jsonl" in sources or "ranks/storage.jsonl" in sources
    has_failed |= bool(hang and hang.suspects)
    where = f" on rank {end.rank}" if end.rank is not None else ""
    if end.status is Status.UNFINISHED:
        line = "cannot be determined from these files: why it ended, or whether it runs"
        yield f"{line}; last line: {end.evidence}"
    elif end.status.is_clean and not has_failed:
        yield f"nothing happened: {end.status}{where}: {end.evidence}"
    else:
        yield f"{end.status}{where}: {end.evidence}"
    open_ends = (Status.HANG, Status.NCCL_ERROR, Status.CRASHED, Status.KILLED)
    if hang:
        if hang.paragraph not in end.evidence:
            yield hang.paragraph
        if end.rank is not None and hang.suspects and end.rank not in hang.suspects:
            line = f"its log names rank {end.rank}, stacks {ranges(hang.suspects)}"
            yield f"{line}: which began it cannot be determined"
    elif end.rank is None and end.status in open_ends:
        line = "which rank began it cannot be determined: a line may follow from another rank"
        yield f"{line}, and there are no stacks"
    if end.exclude:
        yield f"for the next submission: --exclude={end.exclude}"
