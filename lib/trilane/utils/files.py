"""Files that other processes read while they are written: atomic replacement, kept versions,
appended lines.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trilane.utils.tables import Json
from trilane.utils.validation import require_new

# of a disk or a quota that is full, or of storage that is away for a while
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


def read_text(path: Path, last: int = 0) -> str:
    """The text of a file, of its `last` bytes where that is given; "" where it is missing,
    ValueError for a folder.
    """
    try:
        with path.open("rb") as file:
            if last:
                file.seek(max(0, path.stat().st_size - last))
            # a host that crashes leaves NULs at the end of a file, a cut write half a character
            return file.read().replace(b"\0", b"").decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ValueError(f"file={path}: cannot be read ({error.strerror})") from None


def hash_of(text: str, digits: int = 16) -> str:
    """The first hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def is_inside(folder: Path, path: Path) -> bool:
    """Whether no link on the way to `path` leads out of the folder, to what nobody asked for."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def json_lines(text: str) -> list[Json]:
    """The JSON objects in the lines of a text; lines that a killed process or a crash damaged are
    skipped.
    """
    return [values for values in map(json_object, text.split("\n")) if values is not None]


def json_object(text: str) -> Json | None:
    """The JSON object in a text; None for any other text."""
    try:
        values = json.loads(text.strip("\0"))
    except (ValueError, RecursionError):  # a number of over 4300 digits is a ValueError too
        return None
    if isinstance(values, dict) and "\ufffd" not in text:  # half a character
        return values
    return None


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which the numbers in names count: node2 before node10."""
    parts = re.split(r"(\d+)", name)  # texts and numbers in turn
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, and fsync; a last line that a killed process left half-written
    stays a line alone.
    """
    with path.open("ab+", buffering=0) as file:
        # O_APPEND is atomic on a local file system and on Lustre, not on NFS; a Lustre may have no
        # locks
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        data = line.encode() + b"\n"
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data
        if file.write(data) != len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


class Appended(io.RawIOBase):
    """A file, or the stream of a descriptor, that outlasts a full disk: Appended(path).write(b"x").

    What the disk refuses waits in memory, and is written with the next piece that it takes; in a
    file nothing is ever in halves. Any other OSError is raised.
    """

    name = "appended"  # which io.TextIOWrapper wants

    def __init__(self, file: Path | int):
        self._file = file
        self.waiting = b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if isinstance(self._file, int):
            return self._file
        return super().fileno()

    def write(self, data: Any) -> int:
        """Append `data`, after what waits, as far as the disk takes it."""
        self.waiting += bytes(data)
        is_path = isinstance(self._file, Path)
        try:
            with open(self._file, "ab", buffering=0, closefd=is_path) as file:
                written = file.write(self.waiting)
                if is_path and written < len(self.waiting):
                    file.truncate(file.tell() - written)
                    written = 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            written = 0
        self.waiting = self.waiting[written:]
        return len(data)


def patient_text(handle: int) -> io.TextIOWrapper:
    """A text stream of whole lines for a file descriptor, such as 1 or 2, that outlasts a full
    disk.
    """
    return io.TextIOWrapper(
        Appended(handle), "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the folder's disk, quotas left out; 0 while it does not answer."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def replace_text(path: Path, text: str) -> Path:
    """Replace `path` by a file that holds `text`: nobody sees half of it, also after a crash.

    It is on the disk when this returns. Where that fails (a full disk) the old file stays, and
    nothing else is left.
    """
    # Random, since processes of several hosts, whose ids can be equal, may write the same file at
    # once.
    aside = path.with_name(f".{path.name[:150]}.{secrets.token_hex(6)}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def write_new(path: Path, text: str) -> None:
    """Write a file that is new; FileExistsError where another process has just made it."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def sync_folder(folder: Path) -> None:
    """Write to the disk what was created, renamed or removed in `folder`; nothing where a file
    system cannot.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def numbered(folder: Path, prefix: str, make: Callable[[Path], object]) -> Path:
    """The path PREFIX1, PREFIX2, ... of `folder` after all that are there, at which `make` created
    a file or folder.
    """
    folder.mkdir(exist_ok=True)
    number = 0
    for path in folder.iterdir():
        end = path.name.removeprefix(prefix)
        if path.name == f"{prefix}{end}" and end.isdecimal():
            number = max(number, int(end))
    while True:
        number += 1
        path = folder / f"{prefix}{number}"
        with contextlib.suppress(FileExistsError):  # another process took it at this moment
            make(path)
            return path


def set_aside(path: Path) -> None:
    """Keep a copy of the file at `path`, if there is one: earlier/NAME.1, .2, ..."""

    def keep(target: Path) -> None:
        with target.open("xb") as copy:
            copy.write(path.read_bytes())

    if path.exists():
        numbered(path.parent / "earlier", f"{path.name}.", keep)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` once the block has written all of it; of a failure nothing
    stays.
    """
    require_new("out", out)
    aside = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(out)
    except OSError as error:
        raise ValueError(f"out={out}: {error.strerror}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
