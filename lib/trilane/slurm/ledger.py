"""Ledger: jobs.jsonl of a run folder, the events of its jobs (submitted, started, ...), one JSON object a line.

A submission is two lines: "submitting", with the token that marks its job, before sbatch; then "submitted" with the
job's id, or "not submitted". Where the process that submits was killed between them, the token finds the job. `code` is
the hash of the code that the job runs, "" where its script does not use the frozen one. The index
of a sweep, sweep.json, is here too: the attempts of its runs read it.
"""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import append_line, json_lines, read_text
from trilane.utils.validation import from_mapping, read_json, require_path, require_positive

NAME, INDEX = "jobs.jsonl", "sweep.json"
ALERTED = "alerted"
TOKEN = re.compile(r"trilane-[0-9a-f]{12}")
# the fields that each event must have, and their types; a damaged line that lacks one is left out
FIELDS: dict[str, dict[str, type]] = {
    "submitting": {"time": str, "token": str, "suffix": str, "site": str, "script": str},
    "started": {"time": str, "nodes": str, "iteration": int},
    "ended": {"status": str, "evidence": str},
    "refused": {"says": str},
    "node failure": {"nodes": list},
    ALERTED: {"key": str, "state": str, "by": str, "time": str},
    "nodes": {"chosen": list, "left_out": dict},
    "replaced": {"nodes": list, "iteration": int},
}


def note(folder: Path, event: str, job: str, **facts: Any) -> dict[str, Any]:
    """Append one event ("submitted", "started", "ended", "cancelled", ...) of a job; the object written."""
    values = {"event": event, "id": job, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    append_line(folder / NAME, json.dumps(values))
    return values


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of the folder in order; a damaged line is left out. Without `kinds` all that concern its jobs: what a
    watch notes of its alerts, at any moment, is none."""
    found = [e for e in json_lines(read_text(folder / NAME)) if _is_event(e)]
    return [e for e in found if (e["event"] in kinds if kinds else e["event"] != ALERTED)]


def _is_event(values: dict[str, Any]) -> bool:
    wanted = {"event": str, "id": str, **FIELDS.get(str(values.get("event")), {})}
    if not all(isinstance(values.get(name), kind) for name, kind in wanted.items()):
        return False
    nodes = [node for name, kind in wanted.items() if kind is list for node in values[name]]
    return all(isinstance(word, str) for word in [values.get("token", ""), *nodes])


def job_ids(folder: Path) -> list[str]:
    """Ids of the jobs submitted for the folder, oldest first."""
    return list(dict.fromkeys(e["id"] for e in events(folder, "submitted")))


def open_submissions(folder: Path) -> list[dict[str, Any]]:
    """The "submitting" events whose outcome is not recorded."""
    closed = {e.get("token") for e in events(folder, "submitted", "not submitted")}
    return [e for e in events(folder, "submitting") if e["token"] not in closed and TOKEN.fullmatch(e["token"])]


def of_submission(event: Mapping[str, Any]) -> dict[str, Any]:
    """What a "submitting" event has in common with that of its outcome; older ones have no `code`."""
    return {name: event[name] for name in ("token", "site", "script", "code") if name in event}


def age_s(event: Mapping[str, Any]) -> float:
    """Seconds since the event, by this host's clock; infinite where its time is damaged."""
    try:
        return time.time() - datetime.fromisoformat(str(event.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return float("inf")


def fingerprint(text: str) -> str:
    """A short id of a script's text: the first 16 digits of its SHA-256."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Member:
    """A run of a sweep: its folder, and the bytes that its fullest GPU is predicted to need."""

    folder: str
    memory_bytes: float

    def __post_init__(self) -> None:
        require_path("sweep.folder", self.folder)
        require_positive("sweep.memory_bytes", self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class SweepIndex:
    """What sweep.json holds: the name of the site, and the runs in the order of runs.txt."""

    site: str
    members: tuple[Member, ...]


def read_index(sweep: Path) -> SweepIndex:
    """The index of the sweep; ValueError where it is damaged."""
    return from_mapping(SweepIndex, read_json(sweep / INDEX, "sweep"), "sweep")
