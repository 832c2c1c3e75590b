"""Ledger: jobs.jsonl of a run folder, a line for each event of its jobs (submitted, started, ended,
...).
"""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import append_line, json_object, read_text
from trilane.utils.validation import require

NAME = "jobs.jsonl"
Event = dict[str, Any]
# the fields that readers need of an event, beside its own name and the job's id
FIELDS: dict[str, dict[str, type]] = {
    "started": {"iteration": int},
    "refused": {"says": str},
    "node failure": {"nodes": list},
    "unreachable": {"nodes": list},
    "nodes": {"chosen": list, "left_out": dict},
    "response": {"verdict": str, "action": str, "again": bool, "nodes": list, "iteration": int},
}


def note(folder: Path, event: str, job: str, **facts: Any) -> Event:
    """Append one event ("submitted", "started", "ended", "cancelled", ...) of a job; the event."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    values = {"event": event, "id": job, "time": now, **facts}
    append_line(folder / NAME, json.dumps(values))
    return values


def events(folder: Path, *kinds: str) -> list[Event]:
    """The events of the folder in order, those of `kinds` where given.

    ValueError for a line that is no event: whoever mends the file must know which jobs there are.
    """
    found = []
    for number, line in enumerate(read_text(folder / NAME).split("\n"), 1):
        if not line.strip():
            continue
        event = json_object(line) or {}
        rule = (
            f"line {number} is damaged; look for the run's jobs with squeue, then mend or remove it"
        )
        wanted = {"event": str, "id": str, **FIELDS.get(str(event.get("event")), {})}
        is_event = all(isinstance(event.get(name), kind) for name, kind in wanted.items())
        require(is_event, "ledger", folder / NAME, rule)
        if not kinds or event["event"] in kinds:
            found.append(event)
    return found


def age_s(event: Event) -> float:
    """Seconds since the event, by this host's clock; 0 where another's is ahead, infinite where its
    time is damaged.
    """
    try:
        then = datetime.fromisoformat(str(event.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return float("inf")
    return max(0.0, time.time() - then)
