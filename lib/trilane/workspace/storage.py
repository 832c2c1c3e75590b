"""Storage of a run: what is free where it saves, and why a save failed
(ranks/storage.jsonl).
"""

import contextlib
import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.utils.files import append_line, json_lines, read_text
from trilane.utils.tables import one_line

NOT_SAVED = "CHECKPOINT NOT SAVED"
EVENTS = "ranks/storage.jsonl"


def available(place: Path) -> tuple[float, float]:
    """Free bytes and inodes of a file system; infinite inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def note(folder: Path, text: str) -> None:
    """Record why saving fails, "" where it works again; where the disk is full only run.log
    has it.
    """
    with contextlib.suppress(OSError, ValueError):
        if text != _last(folder).get("text", ""):
            time = datetime.now(UTC).isoformat(timespec="minutes")
            append_line(folder / EVENTS, json.dumps({"time": time, "text": text}))


def trouble(folder: Path) -> str:
    """Why the run's saves fail, in one line with since when; "" where nothing is
    wrong.
    """
    event = _last(folder)
    text = str(event.get("text") or "")
    if text:
        return one_line(f"{text} (since {event.get('time')})")
    return ""


def _last(folder: Path) -> dict[str, Any]:
    """The last event, {"time", "text"}; {} where there is none."""
    events = json_lines(read_text(folder / EVENTS))
    return events[-1] if events else {}
