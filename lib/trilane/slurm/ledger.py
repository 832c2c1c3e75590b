"""Ledger: jobs.jsonl of a run folder, the events of its jobs (submitted, started, ...), one JSON object a line."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import append_line, json_lines

NAME = "jobs.jsonl"
# the fields that each event must have, and their types; a damaged line that lacks one is left out
FIELDS: dict[str, dict[str, type]] = {
    "started": {"time": str, "nodes": str, "iteration": int},
    "ended": {"status": str, "evidence": str},
    "refused": {"says": str},
    "node failure": {"nodes": list},
}


def note(folder: Path, event: str, job: str, **facts: Any) -> dict[str, Any]:
    """Append one event ("submitted", "started", "ended", "cancelled", ...) of a job; the object written."""
    values = {"event": event, "id": job, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    append_line(folder / NAME, json.dumps(values))
    return values


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of the folder in order, only those of `kinds` where given; a damaged line is left out."""
    path = folder / NAME
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [e for e in json_lines(text) if _is_event(e) and (not kinds or e["event"] in kinds)]


def _is_event(values: dict[str, Any]) -> bool:
    wanted = {"event": str, "id": str, **FIELDS.get(str(values.get("event")), {})}
    return all(isinstance(values.get(name), kind) for name, kind in wanted.items())


def job_ids(folder: Path) -> list[str]:
    """Ids of the jobs submitted for the folder, oldest first."""
    return [e["id"] for e in events(folder, "submitted")]


def fingerprint(text: str) -> str:
    """A short id of a script's text: the first 16 digits of its SHA-256."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]
