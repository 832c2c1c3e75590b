"""Ledger: jobs.jsonl of a folder, what was submitted there, what started and how it ended, one JSON object a line."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import lock

NAME = "jobs.jsonl"


def note(folder: Path, event: str, job: str, **facts: Any) -> dict[str, Any]:
    """Append one event ("submitted", "started", "ended", "cancelled", ...) of a job; what was written is returned."""
    values = {"event": event, "id": job, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    with (folder / NAME).open("a", encoding="utf-8") as file:
        lock(file)
        file.write(json.dumps(values) + "\n")
    return values


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of the folder in order, those of `kinds` alone where any is given; a torn last line is left out."""
    path, found = folder / NAME, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a node died while it wrote
    return [e for e in found if not kinds or e["event"] in kinds]


def job_ids(folder: Path) -> list[str]:
    """Ids of the jobs submitted for the folder, oldest first."""
    return [e["id"] for e in events(folder, "submitted")]


def fingerprint(text: str) -> str:
    """What tells one script from another: the start of its SHA-256."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]
