"""Ledger: jobs.jsonl of a run folder, the events of its jobs (submitted, started, ...), one JSON object a line."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import json_lines, lock

NAME = "jobs.jsonl"


def note(folder: Path, event: str, job: str, **facts: Any) -> dict[str, Any]:
    """Append one event ("submitted", "started", "ended", "cancelled", ...) of a job; the object written."""
    values = {"event": event, "id": job, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    with (folder / NAME).open("a", encoding="utf-8") as file:
        lock(file)
        file.write(json.dumps(values) + "\n")
    return values


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of the folder in order, only those of `kinds` where given; an incomplete line is left out."""
    path = folder / NAME
    found = json_lines(path.read_text(encoding="utf-8")) if path.exists() else []
    return [e for e in found if not kinds or e["event"] in kinds]


def job_ids(folder: Path) -> list[str]:
    """Ids of the jobs submitted for the folder, oldest first."""
    return [e["id"] for e in events(folder, "submitted")]


def fingerprint(text: str) -> str:
    """A short id of a script's text: the first 16 digits of its SHA-256."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]
