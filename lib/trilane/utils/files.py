"""Files that other processes read while they are written: atomic replacement, kept versions, appended lines, locks."""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

EARLIER = "earlier"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a Lustre mounted without -o flock, some NFS
# FAT and some FUSE file systems have no links; others' files may not be linked (fs.protected_hardlinks)
NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
NO_FOLDER_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)
# A disk or a quota that is full, or storage that is away for a while
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
REPLACED = "\ufffd"  # what stands for bytes that are not UTF-8


def read_text(path: Path, last: int = 0) -> str:
    """The text of a file as far as it can be read, of its `last` bytes where that is given; "" where there is none.

    A host that crashes leaves NULs at the end of a file, a cut write half a character: NULs are left out, bytes that
    are not UTF-8 replaced. Raises ValueError for a folder, and for a file that must not be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - last) if last else 0)
            return file.read().replace(b"\0", b"").decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ValueError(f"file={path}: cannot be read ({error.strerror})") from None


def json_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a text; damaged lines, as a killed process or a crash leaves, are left out."""
    return [values for line in text.split("\n") if (values := json_object(line)) is not None]


def damaged_lines(text: str) -> int:
    """How many lines json_lines() leaves out; a blank one is not damaged."""
    return sum(bool(line.strip()) for line in text.split("\n")) - len(json_lines(text))


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None for any other text."""
    try:
        found = json.loads(text.strip("\0"))
    except (ValueError, RecursionError):  # a number of over 4300 digits is a ValueError too
        return None
    return found if isinstance(found, dict) and REPLACED not in text else None


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which the numbers in names count: node2 before node10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def lock(file: IO[Any]) -> None:
    """Lock the file, waiting for other processes; without effect where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, and fsync; a last line that a killed process left half-written stays a line alone.

    One write to a file opened with O_APPEND is atomic on a local file system and on Lustre. NFS computes the end of the
    file in the client: there the lock keeps two hosts apart.
    """
    with path.open("ab+", buffering=0) as file:
        lock(file)
        end = file.seek(0, os.SEEK_END)
        is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        text = b"\n" * is_torn + line.encode() + b"\n"
        if file.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


class Appended:
    """A file to which one process appends: what a full disk refuses is kept in memory, and written in order later.

    `report` receives one line when the file cannot be written and one when it can be again. Beyond `most` bytes in
    memory the oldest are lost. Each piece, such as a line, is written whole or not at all. Not synchronised.
    """

    def __init__(self, path: Path, report: Callable[[str], None], most: int = 1 << 26) -> None:
        self._path, self._report, self._most = path, report, most
        self._waiting: deque[bytes] = deque()
        self._bytes = self._lost = 0
        self._problem = ""

    @property
    def waiting(self) -> int:
        """How many pieces are not written yet."""
        return len(self._waiting)

    def add(self, data: bytes) -> None:
        """Append one piece, and what waits before it, as far as the disk takes it; OSError where it is not full."""
        self._waiting.append(data)
        self._bytes += len(data)
        while self._bytes > self._most:
            self._bytes -= len(self._waiting.popleft())
            self._lost += 1
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the disk takes it."""
        problem, before = self._write(), self._problem
        self._problem = problem
        if problem and not before:
            kept = f"up to {self._most >> 20} MiB are kept in memory until it can be"
            self._report(f"{self._path.name} cannot be written ({problem}); the training goes on, and {kept}")
        elif before and not problem:
            lost = f"; {self._lost} of its lines, the oldest that waited, are lost" if self._lost else ""
            self._report(f"{self._path.name} can be written again, and what was kept in memory is in it{lost}")
            self._lost = 0

    def _write(self) -> str:
        """Write what waits; why that failed, "" where it did not."""
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._waiting:
                    end, data = file.seek(0, os.SEEK_END), self._waiting[0]
                    if file.write(data) < len(data):
                        file.truncate(end)
                        return os.strerror(errno.ENOSPC)
                    self._bytes -= len(self._waiting.popleft())
        except OSError as error:
            if error.errno not in FULL:
                raise
            return os.strerror(error.errno)
        return ""


class PatientStream(io.RawIOBase):
    """The terminal or log behind a file descriptor: what a full disk refuses is kept, up to `most` bytes, for later."""

    def __init__(self, handle: int, most: int = 1 << 24) -> None:
        self._handle, self._most, self._waiting = handle, most, bytearray()
        self.name = f"<{handle}>"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def write(self, data: Any) -> int:
        """Take all of `data`; OSError where the disk is not full, such as for a closed pipe."""
        self._waiting += data
        del self._waiting[: max(0, len(self._waiting) - self._most)]
        try:
            while self._waiting:
                del self._waiting[: os.write(self._handle, self._waiting)]
        except OSError as error:
            if error.errno not in FULL:
                raise
        return len(data)


def patient_text(handle: int) -> io.TextIOWrapper:
    """A text stream of whole lines for a file descriptor, such as 1 or 2, that outlasts a full disk."""
    return io.TextIOWrapper(PatientStream(handle), "utf-8", "backslashreplace", line_buffering=True, write_through=True)


def replace_text(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`: nobody sees half of it, also after a crash.

    It is on the disk when this returns. Where that fails (a full disk) the old file stays, and nothing else is left.
    """
    # Random, since processes of several hosts, whose ids can be equal, may write the same file at once.
    aside = path.with_name(f".{path.name[:150]}.{secrets.token_hex(6)}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write to the disk what was created, renamed or removed in `folder`; nothing where a file system cannot."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def numbered(folder: Path, prefix: str, make: Callable[[Path], None]) -> Path:
    """The path PREFIX1, PREFIX2, ... of `folder` after all that are there, at which `make` created a file or folder.

    Another process may take a number at the same moment: `make` raises FileExistsError, and the next one is tried.
    """
    folder.mkdir(exist_ok=True)
    names = [path.name.removeprefix(prefix) for path in folder.iterdir() if path.name.startswith(prefix)]
    taken = [int(name) for name in names if name.isdecimal()]
    number = 1 + max(taken, default=0)
    while True:
        try:
            make(folder / f"{prefix}{number}")
            return folder / f"{prefix}{number}"
        except FileExistsError:
            number += 1


def set_aside(path: Path) -> None:
    """Keep the file at `path`, if there is one, under a second name too: earlier/NAME.1, .2, ...

    A folder in its place is moved there.
    """
    if path.exists():
        numbered(path.parent / EARLIER, f"{path.name}.", lambda target: _keep(path, target))


def _keep(path: Path, target: Path) -> None:
    if path.is_dir():
        target.mkdir()
        path.rename(target)
        return
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _copy(path, target)


def _copy(path: Path, target: Path) -> None:
    """Copy to a file that must not exist; where that fails, nothing of it is left."""
    with path.open("rb") as file, target.open("xb") as copy:
        try:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
        except BaseException:
            target.unlink()
            raise
