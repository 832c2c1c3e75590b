"""Files that others read while we write: replaced whole or not at all, and kept before they are replaced."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

EARLIER = "earlier"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a Lustre mounted without -o flock, some NFS


def lock(file: IO[str]) -> None:
    """Wait until no other process holds the file; where the file system has no locks nothing is waited for."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` under a temporary name, then rename: a reader never sees half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def set_aside(path: Path) -> None:
    """Keep what stands at `path`, if anything, under a second name, earlier/NAME.1, .2, ..., too."""
    if path.exists():
        folder = path.parent / EARLIER
        folder.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in folder.glob(f"{path.name}.*"))
        os.link(path, folder / f"{path.name}.{number}")
