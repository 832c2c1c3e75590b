"""Incident: what logs, watchdogs, stacks, Flight Recorder, the run's own files and SLURM's
accounting say of a failure, as one timeline by rank and time, and one verdict.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.logs.endings import Level, caveat
from trilane.logs.prefixes import timestamp
from trilane.logs.run import RunLog, read_logs
from trilane.slurm import attempt, client, ledger
from trilane.utils.files import json_lines, natural, read_text
from trilane.utils.numbers import ranges
from trilane.utils.tables import Record, as_json, grouped, short
from trilane.utils.validation import require, require_folder
from trilane.workspace import storage
from trilane.workspace.place import Known
from trilane.workspace.status import RunStatus, Status, known_status, status_problem, verdict
from trilane_diagnose.evidence import read_file
from trilane_diagnose.hang import Verdict, diagnose_hang

MOST, SHOWN = 4096, 100  # files that are looked at; events that are shown, and as many stacks
HEADS = ("time", "ranks", "node", "source", "what")


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a source says; `at`: seconds since 1970 as the source's clock shows them (NaN: it has
    none); the ranks and the node where they are known.
    """

    source: str
    what: str
    at: float = math.nan
    ranks: tuple[int, ...] = ()
    node: str = ""

    def cells(self) -> tuple[str, ...]:
        """Texts by HEADS."""
        time = (
            ""
            if math.isnan(self.at)
            else f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%d %H:%M:%S}"
        )
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {ranges(self.ranks)}" if self.ranks else ""
        return time, ranks, self.node, self.source, short(self.what, 400)


@dataclass(frozen=True, kw_only=True)
class Incident(Record):
    """The verdict on a folder in lines, the first of which is how the run ended; the events in the
    order of time.
    """

    folder: Path
    status: Status
    verdict: tuple[str, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...]
    hang: Verdict | None

    def to_text(self) -> str:
        """The verdict, the timeline, the notes."""
        rows = [" | ".join(filter(None, event.cells())) for event in self.events[:SHOWN]]
        return "\n".join(
            [
                *self.verdict,
                "timeline:",
                *(f"  {row}" for row in rows),
                *map("note: {}".format, self.notes),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        events = [
            dict(zip(HEADS, e.cells(), strict=True)) | {"ranks": e.ranks} for e in self.events
        ]
        named = {
            "status": self.status,
            "verdict": self.verdict,
            "events": events,
            "notes": self.notes,
        }
        return as_json(named | {"hang": self.hang and self.hang.to_json()})


def read_incident(folder: Path) -> Incident:
    """The incident in a run folder, or in any folder of copied files; ValueError where nothing in
    it can be read.

    SLURM's accounting is what `sacct --parsable2` printed into a file of the folder, else asked by
    sacct for the jobs that the run has recorded.
    """
    require_folder("folder", folder)
    notes = list[str]()
    logs, accounts = _files(folder, notes)
    accounts = accounts or _asked(folder)
    try:
        # a run without stacks has none but in its checkpoints, which are no dumps
        is_run = (folder / "plan.json").is_file() and not (folder / "stacks").is_dir()
        hang = None if is_run else diagnose_hang(folder)
    except ValueError:
        hang = None
    own = [*_own(folder)]
    found = [*(e for path, runs in logs.items() for e in _logged(path, runs)), *own, *_stacks(hang)]
    found += [_accounted(row) for row in accounts]
    rule = "holds no log, dump or output of `sacct --parsable2` that can be read"
    require(bool(found or known_status(folder)), "folder", folder, rule)
    found = _ordered(found)
    end = _end(folder, logs, accounts, hang)
    left_open = caveat(end.status, end.evidence, end.rank, (end.exclude,) * bool(end.exclude))
    notes += [
        *_limits(found),
        *filter(None, [left_open, status_problem(folder)]),
        *(hang.notes if hang else ()),
    ]
    lines = tuple(_verdict(end, hang, own, logs))
    return Incident(
        folder=folder,
        status=end.status,
        verdict=lines,
        events=tuple(found),
        notes=tuple(notes),
        hang=hang,
    )


def _limits(found: Sequence[Event]) -> Iterator[str]:
    """What the order of the events does not prove."""
    if len({e.source for e in found if not math.isnan(e.at)}) > 1:
        yield "times are as each source's clock shows them: between sources the order is not proved"
    if any(math.isnan(e.at) for e in found):
        yield "what has no clock stands where its source has it, at the end where no line of that has one"
    if len(found) > SHOWN:
        yield f"{len(found)} events, of which the first {SHOWN} are shown; --json has all"


def _files(folder: Path, notes: list[str]) -> tuple[dict[Path, list[RunLog]], list[dict[str, str]]]:
    """The logs of the folder with their runs, and the rows of SLURM's accounting."""
    is_run = (folder / "plan.json").is_file()
    paths = [*folder.glob("*"), *folder.glob("ranks/*.log")] if is_run else [*folder.rglob("*")]
    paths = sorted(filter(Path.is_file, paths), key=lambda path: natural(str(path)))
    notes += [f"of {len(paths)} files the first {MOST} are read"] * (len(paths) > MOST)
    logs, accounts = dict[Path, list[RunLog]](), list[dict[str, str]]()
    for path in paths[:MOST]:
        try:
            if path.suffix in (".json", ".jsonl", ".html", ".stack"):
                continue
            with path.open(encoding="utf-8", errors="replace") as file:
                if "JobID" in (head := file.readline(1 << 14)) and "|" in head and "State" in head:
                    accounts += csv.DictReader([head, *file], delimiter="|", restval="")
                    continue
            if path.suffix in (".log", ".out", ".err", ".gz") or not read_file(path):
                logs[path] = read_logs(path)
        except (ValueError, OSError, csv.Error):
            continue  # another file
    return logs, accounts


def _asked(folder: Path) -> list[dict[str, str]]:
    """What sacct has of the run's jobs, by the names of its columns."""
    jobs = [job for job in ledger.job_ids(folder) if client.JOB_ID.fullmatch(job)]
    names = ("State", "End", "ExitCode")
    return [
        {"JobID": job, **dict(zip(names, row, strict=True))}
        for job, rows in client.past(jobs).items()
        for row in rows
    ]


def _accounted(row: dict[str, str]) -> Event:
    facts = [
        f"{name} {value}"
        for name in ("ExitCode", "Elapsed", "Reason", "MaxRSS")
        if (value := row.get(name))
    ]
    what = ", ".join([f"job {row.get('JobID')}: {row.get('State')}", *facts])
    return Event(
        source="sacct", what=what, at=_time(row.get("End")), node=row.get("NodeList") or ""
    )


def _time(printed: object) -> float:
    """The time that a text has; NaN where it has none."""
    return timestamp(re.sub(r"(T\d\d:\d\d)(?=[+Z]|$)", r"\1:00", str(printed)[:4096]).encode())


def _logged(path: Path, runs: list[RunLog]) -> Iterator[Event]:
    """What a log says of its runs: the last iteration, what the run printed of itself, its endings,
    its watchdogs.
    """
    named = re.fullmatch(r"(?:.*rank[_-]?)?(\d{1,6})", path.stem)
    own = (int(named[1]),) if named else ()
    for log in runs:
        yield from (Event(source=path.name, what=line) for line in log.own)
        if log.last_iteration is not None:
            what = f"iteration {log.last_iteration}, the last that is printed"
            yield Event(source=path.name, what=what, at=log.printed_at)
        for end in log.endings:
            place = end.place
            ranks = (
                own if place.rank is None or place.rank_known <= Known.ASSUMED else (place.rank,)
            )
            what, node = f"{end.status}: {end.evidence}", ",".join(end.hosts) or place.node
            yield Event(source=path.name, what=what, at=_time(end.evidence), ranks=ranks, node=node)
        yield from (
            Event(source=f"watchdogs in {path.name}", what=line) for line in log.collectives
        )


def _own(folder: Path) -> Iterator[Event]:
    """What the run and its jobs have recorded of themselves."""
    for e in ledger.events(folder):
        facts = [str(e[name]) for name in ("status", "evidence", "says", "nodes") if e.get(name)]
        what = ": ".join([f"job {e['id']} {e['event']}", *facts])
        yield Event(source=ledger.NAME, what=what, at=_time(e.get("time")))
    for e in json_lines(read_text(folder / "ranks/pace.jsonl")):
        what = str(e.get("text") or f"as fast as usual again, since iteration {e.get('iteration')}")
        yield Event(source="ranks/pace.jsonl", what=what)
    if trouble := storage.trouble(folder):
        yield Event(source="ranks/storage.jsonl", what=trouble, at=_time(trouble))


def _stacks(hang: Verdict | None) -> Iterator[Event]:
    """A line for each group of equal stacks, and each suspect."""
    if hang is None:
        return
    for group in hang.groups[:SHOWN]:
        guilty = [rank for rank in group.ranks if rank in hang.reasons]
        places = dict.fromkeys(place.node for rank in guilty if (place := hang.grid[rank]).named)
        what = f"{group.where}: {group.stack}" + "".join(
            f"; SUSPECT: {hang.reasons[rank]}" for rank in guilty[:1]
        )
        yield Event(source="stacks", what=what, ranks=group.ranks, node=",".join(places))


def _ordered(found: Sequence[Event]) -> list[Event]:
    """By time; an event without a clock stands after the one before it in its source, else before
    the next. Equal words of several sources are one event, of all their ranks.
    """
    keys = list[tuple[float, Event]]()
    for events in grouped(found, lambda e: e.source.rpartition(" ")[2]).values():
        at = next((e.at for e in events if not math.isnan(e.at)), math.inf)
        for event in events:
            at = at if math.isnan(event.at) else event.at
            keys.append((at, event))
    same = grouped((e for _, e in sorted(keys, key=lambda key: key[0])), lambda e: (e.what, e.node))
    return [_joined(events) for events in same.values()]


def _joined(events: Sequence[Event]) -> Event:
    sources = [*dict.fromkeys(e.source for e in events)]
    source = sources[0] + f" and {len(sources) - 1} more" * (len(sources) > 1)
    return replace(
        events[0], source=source, ranks=tuple(sorted({r for e in events for r in e.ranks}))
    )


def _end(
    folder: Path,
    logs: dict[Path, list[RunLog]],
    accounts: list[dict[str, str]],
    hang: Verdict | None,
) -> RunStatus:
    """How it ended, by the rules for runs (workspace/status.py)."""
    last = [runs[-1] for runs in logs.values()]
    # of several logs the one whose ending is the strongest, then the one that got furthest
    log = min(
        last,
        key=lambda one: (not one.status.has_failed, _level(one), -(one.last_iteration or 0)),
        default=None,
    )
    # of several jobs the last counts, of one its steps, which name the node
    reasons = []
    for row in sorted(
        accounts, key=lambda row: [natural(part) for part in str(row.get("JobID")).split(".")]
    ):
        if status := attempt.REASONS.get(str(row.get("State")).partition(" ")[0]):
            words = filter(None, (_accounted(row).what, row.get("NodeList")))
            reasons.append(attempt.status_of(status, " on ".join(words)))
    # a cancellation counts only without another reason: who cancels has one
    scheduler = next((one for one in reversed(reasons) if one.status is not Status.CANCELLED), None)
    unfinished = attempt.status_of(Status.UNFINISHED, log.evidence if log else "")
    otherwise = reasons[-1] if reasons and not scheduler else unfinished
    if log and (log.status.is_clean or log.status.has_failed):
        # who reports a time-out, or that another is gone, is not who began it
        rank = None if _level(log) >= Level.CONSEQUENCE else log.rank
        otherwise = replace(
            attempt.status_of(log.status, log.evidence), rank=rank, exclude=log.exclude
        )
    elif hang and hang.suspects:
        otherwise = attempt.status_of(Status.HANG, "by its stacks")
    return verdict(
        code=None, written=known_status(folder), scheduler=scheduler, otherwise=otherwise
    )


def _level(log: RunLog) -> int:
    return min((int(e.level) for e in log.endings if e.evidence == log.evidence), default=99)


def _verdict(
    end: RunStatus, hang: Verdict | None, own: list[Event], logs: dict[Path, list[RunLog]]
) -> Iterator[str]:
    """What happened, which rank began it, and what cannot be told."""
    before = [log for runs in logs.values() for log in runs[:-1] if log.status.has_failed]
    alarms = [e for e in own if e.source.startswith("ranks/")]
    where = f" on rank {end.rank}" * (end.rank is not None)
    if end.status is Status.UNFINISHED:
        yield f"cannot be determined from these files: why it ended, or whether it runs; last line: {end.evidence}"
    else:
        is_calm = end.status.is_clean and not (before or alarms or (hang and hang.suspects))
        yield f"{'nothing happened: ' * is_calm}{end.status}{where}: {end.evidence}"
    if hang:
        yield from [hang.paragraph] * (hang.paragraph not in end.evidence)
        if end.rank is not None and hang.suspects and end.rank not in hang.suspects:
            yield f"its log names rank {end.rank}, stacks {ranges(hang.suspects)}: which began it cannot be determined"
    elif end.rank is None and end.status in (
        Status.HANG,
        Status.NCCL_ERROR,
        Status.CRASHED,
        Status.KILLED,
    ):
        yield "which rank began it cannot be determined: a line may follow from another rank, and there are no stacks"
    yield from [f"for the next submission: --exclude={end.exclude}"] * bool(end.exclude)
