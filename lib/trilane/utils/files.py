"""Files that other processes read while they are written: atomic replacement, kept versions, appended lines."""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def read_text(path: Path, last: int = 0) -> str:
    """The text of a file, of its `last` bytes where that is given; "" where it is missing.

    A host that crashes leaves NULs at the end of a file, a cut write half a character: NULs are removed, bytes that
    are not UTF-8 replaced by U+FFFD. Raises ValueError for a folder, and for a file that must not be read.
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
    """The JSON objects in the lines of a text; lines that a killed process or a crash damaged are skipped."""
    return [values for line in text.split("\n") if (values := json_object(line)) is not None]


def damaged_lines(text: str) -> int:
    """How many lines json_lines() skips; a blank one is not damaged."""
    return sum(bool(line.strip()) for line in text.split("\n")) - len(json_lines(text))


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None for any other text."""
    try:
        found = json.loads(text.strip("\0"))
    except (ValueError, RecursionError):  # a number of over 4300 digits is a ValueError too
        return None
    return found if isinstance(found, dict) and "\ufffd" not in text else None


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which the numbers in names count: node2 before node10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def lock(file: IO[Any]) -> None:
    """Lock the file, waiting for other processes; without effect where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        # a Lustre mounted without -o flock, some NFS
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
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


class Appended(io.RawIOBase):
    """A file, or the stream of a descriptor, that outlasts a full disk: Appended(path, print).write(b"line").

    What the disk refuses is kept in memory, up to `most` bytes, and written in order later; the oldest is lost first.
    Each piece is in a file whole or not at all. `report` receives a line when writing fails and when it works again.
    """

    def __init__(self, file: Path | int, report: Callable[[str], None] = lambda text: None, most: int = 1 << 26):
        self._file, self._report, self._most = file, report, most
        self.name = file.name if isinstance(file, Path) else f"<{file}>"
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._problem = ""

    @property
    def waiting(self) -> int:
        """How many pieces are not written yet."""
        return len(self._pieces)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file if isinstance(self._file, int) else super().fileno()

    def write(self, data: Any) -> int:
        """Append `data`, after what waits, as far as the disk takes it; OSError where it is not full."""
        self._pieces.append(bytes(data))
        self._bytes += len(data)
        while self._bytes > self._most:
            self._bytes -= len(self._pieces.popleft())
        self.flush()
        return len(data)

    def flush(self) -> None:
        """Write what waits, as far as the disk takes it."""
        before, self._problem = self._problem, self._write()
        if self._problem and not before:
            kept = f"buffering up to {self._most >> 20} MiB in memory"
            self._report(f"{self.name} cannot be written ({self._problem}); training continues, {kept}")
        elif before and not self._problem:
            self._report(f"{self.name} can be written again")

    def _write(self) -> str:
        """Write what waits; why that failed, "" where it did not."""
        is_own = isinstance(self._file, Path)  # other processes may write to a stream too: nothing is taken back
        try:
            with open(self._file, "ab", buffering=0, closefd=is_own) as file:
                while self._pieces:
                    written, piece = file.write(self._pieces[0]), self._pieces.popleft()
                    if written < len(piece) and is_own:
                        file.truncate(file.tell() - written)
                        written = 0
                    if written < len(piece):
                        self._pieces.appendleft(piece[written:])
                    self._bytes -= written
                    if not written:
                        return os.strerror(errno.ENOSPC)
        except OSError as error:
            # a disk or a quota that is full, or storage that is away for a while
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
                raise
            return os.strerror(error.errno)
        return ""


def patient_text(handle: int) -> io.TextIOWrapper:
    """A text stream of whole lines for a file descriptor, such as 1 or 2, that outlasts a full disk."""
    return io.TextIOWrapper(Appended(handle), "utf-8", "backslashreplace", line_buffering=True, write_through=True)


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
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def numbered(folder: Path, prefix: str, make: Callable[[Path], None]) -> Path:
    """The path PREFIX1, PREFIX2, ... of `folder` after all that are there, at which `make` created a file or folder.

    Another process may take a number at the same moment: `make` raises FileExistsError, and the next one is tried.
    """
    folder.mkdir(exist_ok=True)
    names = [path.name.removeprefix(prefix) for path in folder.iterdir() if path.name.startswith(prefix)]
    number = 1 + max((int(name) for name in names if name.isdecimal()), default=0)
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
        numbered(path.parent / "earlier", f"{path.name}.", lambda target: _keep(path, target))


def _keep(path: Path, target: Path) -> None:
    if path.is_dir():
        target.mkdir()
        path.rename(target)
        return
    try:
        os.link(path, target)
    except FileExistsError:
        raise
    except OSError:  # FAT and some FUSE file systems have no links; others' files may not be linked
        with target.open("xb") as copy:
            copy.write(path.read_bytes())
