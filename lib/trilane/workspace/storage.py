"""Storage of a run: what is free where it saves, and why a save failed or the next will
(ranks/storage.jsonl).
"""

import contextlib
import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.files import append_line, json_lines, read_text
from trilane.utils.tables import one_line
from trilane.workspace.checkpoints import FOLDER, checkpoint_bytes, checkpoint_files, complete

NOT_SAVED = "CHECKPOINT NOT SAVED"
NO_ROOM = "NEXT CHECKPOINT WILL NOT BE SAVED"
EVENTS = "ranks/storage.jsonl"


def available(place: Path) -> tuple[float, float]:
    """Free bytes and inodes of a file system; infinite inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def shortage(folder: Path, plan: Plan) -> str:
    """Why the run's next save will fail, by what is free now: others may take it, or free some,
    until then; "" where it fits. A checkpoint that keep_last deletes counts as free space; quotas
    by user are not seen.
    """
    root = folder / FOLDER
    place = root if root.is_dir() else folder
    try:
        free_bytes, inodes = available(place)
        replaces_one = 0 < plan.run.keep_last < len(complete(root))
    except OSError as error:
        return f"{NO_ROOM}: {place}: {error.strerror}"
    if not os.access(place, os.W_OK):
        return f"{NO_ROOM}: {place} cannot be written"
    needed_bytes = checkpoint_bytes(plan.shape)
    files = checkpoint_files(plan.topology.gpus)
    if replaces_one or (needed_bytes <= free_bytes and files <= inodes):
        return ""
    has = f"{free_bytes / 1e6:,.1f} MB and {inodes:.0f} inodes"
    return f"{NO_ROOM}: it takes {needed_bytes / 1e6:,.1f} MB and {files} files, {place} has {has} free"


def note(folder: Path, text: str) -> None:
    """Record why saving fails or will, "" where it works again; where the disk is full only run.log
    has it.
    """
    with contextlib.suppress(OSError, ValueError):
        if text != _last(folder).get("text", ""):
            time = datetime.now(UTC).isoformat(timespec="minutes")
            append_line(folder / EVENTS, json.dumps({"time": time, "text": text}))


def trouble(folder: Path) -> str:
    """Why the run's saves fail or the next will, in one line with since when; "" where nothing is
    wrong.
    """
    event = _last(folder)
    text = str(event.get("text") or "")
    return one_line(f"{text} (since {event.get('time')})") if text else ""


def _last(folder: Path) -> dict[str, Any]:
    """The last event, {"time", "text"}; {} where there is none."""
    events = json_lines(read_text(folder / EVENTS))
    return events[-1] if events else {}
