"""Storage of a run: what is free where it saves, and why a save failed or the next will
(ranks/storage.jsonl).
"""

import contextlib
import json
import math
import os
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from trilane.config.plan import Plan
from trilane.utils.files import append_line, json_lines, read_text
from trilane.utils.tables import one_line
from trilane.workspace.checkpoints import FOLDER, checkpoint_bytes, checkpoint_files, complete

NOT_SAVED, NO_ROOM = "CHECKPOINT NOT SAVED", "NEXT CHECKPOINT WILL NOT BE SAVED"


def available(place: Path) -> tuple[float, float]:
    """Free bytes and inodes of a file system; infinite inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def shortage(folder: Path, plan: Plan) -> str:
    """Why the run's next save will fail, by what is free now: others may take it, or free some,
    until then; "" where it fits. A checkpoint that keep_last deletes counts as free space; quotas
    by user are not seen, as in storage().
    """
    root, keep = folder / FOLDER, plan.run.keep_last
    place = root if root.is_dir() else folder
    try:
        free, inodes = available(place)
        if not os.access(place, os.W_OK):
            return f"{NO_ROOM}: {place} cannot be written"
        replaces_one = 0 < keep < len(complete(root))
    except OSError as error:
        return f"{NO_ROOM}: {place}: {error.strerror}"
    need, files = checkpoint_bytes(plan.shape), checkpoint_files(plan.topology.gpus)
    if replaces_one or (need <= free and files <= inodes):
        return ""
    has = f"{free / 1e6:,.1f} MB and {inodes:.0f} inodes"
    return f"{NO_ROOM}: it takes {need / 1e6:,.1f} MB and {files} files, {place} has {has} free: delete files"


def note(folder: Path, text: str) -> None:
    """Record why saving fails or will, "" where it works again; where the disk is full only run.log
    has it.
    """
    event = json.dumps({"time": datetime.now(UTC).isoformat(timespec="minutes"), "text": text})
    with contextlib.suppress(OSError, ValueError):
        if text != next(reversed(_events(folder)), ("", ""))[1]:
            append_line(folder / "ranks/storage.jsonl", event)


def trouble(folder: Path) -> str:
    """Why the run's saves fail or the next will, in one line with since when; "" where nothing is
    wrong.
    """
    events = _events(folder)
    head, _, rest = events[-1][1].partition(": ") if events else ("", "", "")
    same = list(takewhile(lambda event: event[1].startswith(head), reversed(events)))
    return one_line(f"{head} since {same[-1][0]}: {rest}") if head else ""


def _events(folder: Path) -> list[tuple[str, str]]:
    """(time, text) of each event, oldest first."""
    values = json_lines(read_text(folder / "ranks/storage.jsonl"))
    return [
        (e["time"], e["text"])
        for e in values
        if all(isinstance(e.get(k), str) for k in ("time", "text"))
    ]
