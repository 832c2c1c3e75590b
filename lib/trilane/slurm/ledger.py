"""Ledger: jobs.jsonl of a run folder, a line for each event of its jobs (submitted, started, ended,
...).
"""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import append_line, json_lines, read_text

NAME = "jobs.jsonl"
# the fields that readers need of an event; a line that lacks one, as a crash or a hand may leave
# it, does not count
FIELDS: dict[str, dict[str, type]] = {
    "started": {"time": str, "nodes": str, "iteration": int},
    "ended": {"status": str, "evidence": str},
    "refused": {"says": str},
    "node failure": {"nodes": list},
    "unreachable": {"nodes": list},
    "nodes": {"chosen": list, "left_out": dict},
    "replaced": {"nodes": list, "iteration": int},
}


def note(folder: Path, event: str, job: str, **facts: Any) -> None:
    """Append one event ("submitted", "started", "ended", "cancelled", ...) of a job."""
    values = {
        "event": event,
        "id": job,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    append_line(folder / NAME, json.dumps(values))


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of the folder in order, those of `kinds` where given."""
    found = [e for e in json_lines(read_text(folder / NAME)) if _is_event(e)]
    return [e for e in found if not kinds or e["event"] in kinds]


def _is_event(values: dict[str, Any]) -> bool:
    wanted = {"event": str, "id": str, **FIELDS.get(str(values.get("event")), {})}
    if not all(isinstance(values.get(name), kind) for name, kind in wanted.items()):
        return False
    return all(
        isinstance(word, str)
        for name, kind in wanted.items()
        if kind is list
        for word in values[name]
    )


def unended(folder: Path) -> list[dict[str, Any]]:
    """The starts ("started", "replaced": with a spare) of jobs that have recorded no end since, by
    their order.
    """
    found = list[dict[str, Any]]()
    for event in events(folder, "started", "ended", "replaced"):
        is_end = event["event"] == "ended"
        found = [e for e in found if e["id"] != event["id"]] if is_end else [*found, event]
    return found


def damaged(folder: Path) -> str:
    """What is wrong with the ledger, in one line; "" where each line is an event."""
    lines = [line for line in read_text(folder / NAME).split("\n") if line.strip()]
    lost = len(lines) - len(events(folder))
    text = f"{folder / NAME}: {lost} of {len(lines)} lines are damaged and do not count; SLURM is asked instead"
    return text * (lost > 0)


def job_ids(folder: Path, kind: str = "submitted") -> list[str]:
    """Ids of the folder's jobs with such an event, oldest first."""
    return list(dict.fromkeys(e["id"] for e in events(folder, kind)))


def age_s(event: Mapping[str, Any]) -> float:
    """Seconds since the event, by this host's clock; 0 where another's is ahead, infinite where its
    time is damaged.
    """
    try:
        return max(0.0, time.time() - datetime.fromisoformat(str(event.get("time"))).timestamp())
    except (ValueError, OverflowError):
        return float("inf")
