"""Files that other processes read while they are written: atomic replacement, kept versions, locks."""

import contextlib
import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import IO, Any

EARLIER = "earlier"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a Lustre mounted without -o flock, some NFS


def json_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a text, without a line that a killed process left half-written."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return [values for values in found if isinstance(values, dict)]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which the numbers in names count: node2 before node10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def lock(file: IO[str]) -> None:
    """Lock the file, waiting for other processes; without effect where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def replace_text(path: Path, text: str) -> None:
    """Write `text` under a temporary name, then rename it to `path`: a reader never sees half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def set_aside(path: Path) -> None:
    """Keep the file at `path`, if there is one, under a second name too: earlier/NAME.1, .2, ..."""
    if path.exists():
        folder = path.parent / EARLIER
        folder.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in folder.glob(f"{path.name}.*"))
        os.link(path, folder / f"{path.name}.{number}")
