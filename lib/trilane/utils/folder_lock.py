"""Lock: one process at a time works in a folder, among all hosts that share it; without flock and equal clocks."""

import contextlib
import errno
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trilane.utils.files import NO_LINKS

LOCK = "run.lock"
POLL_S = 0.1
BEAT_S = 5.0  # between two signs of life of a lock's holder
SILENT_S = 120.0  # without one, the holder counts as dead; NFS shows a file's time up to 60 s late


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock: where it runs, its pid and start (kernel ticks), and its SLURM job, if any.

    `system` is the boot and the process table in which `pid` means something.
    """

    nonce: str
    host: str
    system: str
    pid: int
    start: str
    since: str
    job: str

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(
            nonce=uuid.uuid4().hex[:16],
            host=platform.node(),
            system=_system(),
            pid=os.getpid(),
            start=_start(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            job=os.environ.get("SLURM_JOB_ID", ""),
        )

    def __str__(self) -> str:
        job = f" in job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job} since {self.since}"

    @property
    def is_here(self) -> bool:
        """Whether this process sees that process, or would if it had not ended."""
        return bool(self.start) and self.system == _system()

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to be gone."""
        return self.is_here and _start(self.pid) != self.start


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """When the process started, in kernel ticks; "" where there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


class FolderLock:
    """A lock on folders for the processes of all hosts that share them; needs neither flock nor equal clocks.

    The lock is the file `name` in the folder, made by link(2), which is atomic on local file systems, NFS and Lustre;
    O_EXCL where links are not allowed. Its holder touches it every BEAT_S. A holder has died if its process is gone
    (same host), or if it has been silent for SILENT_S (another host). To replace the lock of a dead holder X, a process
    must first create the file .NAME.X, which only one can; if that one dies too, .NAME.ITS-NONCE, and so on. So of
    several that find the same dead holder one replaces the lock, and none removes a lock that is alive.
    """

    def __init__(self, folders: Iterable[Path], name: str = LOCK, field: str = "run folder") -> None:
        """`field` names the subject of the error of a process that waits too long."""
        self._field = field
        self._paths = sorted({folder.resolve() / name for folder in folders})  # one order: no two wait for each other
        self._holder = Holder.this_process()

    @contextlib.contextmanager
    def held(self, patience_s: float) -> Iterator["FolderLock"]:
        """Hold the lock of each folder; ValueError that names the holder where one is not free in `patience_s`."""
        end = time.monotonic() + patience_s
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(ended,), daemon=True).start()
        try:
            for path in self._paths:
                self._take(path, end)
            yield self
        finally:
            ended.set()
            for path in filter(self._has, self._paths):
                path.unlink(missing_ok=True)

    @property
    def is_ours(self) -> bool:
        """Whether all are still held: a process that was suspended for SILENT_S may have lost them."""
        return all(map(self._has, self._paths))

    def _has(self, path: Path) -> bool:
        found = _holder(path)
        return found is not None and found.nonce == self._holder.nonce

    def _take(self, path: Path, end: float) -> None:
        mine = path.with_name(f".{path.name}.new-{self._holder.nonce}")
        try:
            mine.write_text(json.dumps(asdict(self._holder)), encoding="utf-8")
            while (other := self._claim(path, mine)) is not None:
                if time.monotonic() > end:
                    rule = f"is locked by {other}; try again when that has ended"
                    raise ValueError(
                        f"{self._field}={path.parent}: {rule} (on another host: was silent for {SILENT_S:.0f} s)"
                    )
                time.sleep(POLL_S)
                os.utime(mine)
        except OSError as error:
            raise ValueError(f"{self._field}={path.parent}: cannot be locked: {error.strerror}") from None
        finally:
            mine.unlink(missing_ok=True)

    def _claim(self, path: Path, mine: Path) -> Holder | None:
        """Make `mine` the lock; None where that succeeded, else the process to wait for."""
        name, dead = path, list[Holder]()
        while not self._create(name, mine):
            found = _holder(name)
            if found is None:
                name, dead = path, []  # released, or replaced by another, meanwhile
            elif found.nonce == self._holder.nonce:
                break  # NFS: the answer to our link was lost, and it was sent again
            elif found.has_ended or (not found.is_here and _is_silent(name, mine)):
                dead.append(found)
                name = path.with_name(f".{path.name}.{found.nonce}")
            else:
                return found
        if dead:
            self._replace(path, mine, dead)
        return dead[0] if dead and not self._has(path) else None

    def _replace(self, path: Path, mine: Path, dead: list[Holder]) -> None:
        """Replace the lock of dead[0], unless another did so before our claim; the claims on it are then needless."""
        claims = [path.with_name(f".{path.name}.{holder.nonce}") for holder in dead]
        present = _holder(path)
        if present is not None and present.nonce == dead[0].nonce:
            os.replace(mine, path)
        else:
            claims = claims[-1:]
        for claim in claims:
            claim.unlink(missing_ok=True)

    def _create(self, name: Path, mine: Path) -> bool:
        """Whether the file `name` did not exist, and now has the content of `mine`."""
        try:
            os.link(mine, name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with contextlib.suppress(FileExistsError), name.open("x", encoding="utf-8") as file:
                file.write(mine.read_text(encoding="utf-8"))
                return True
            return False
        return True

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            for path in filter(self._has, self._paths):
                with contextlib.suppress(OSError):
                    os.utime(path)


def _is_silent(name: Path, mine: Path) -> bool:
    """Whether a lock's holder has not touched it for SILENT_S, by the clock of the file server."""
    with contextlib.suppress(FileNotFoundError):
        return mine.stat().st_mtime - name.stat().st_mtime > SILENT_S
    return False


def _holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None where nobody does any more."""
    try:
        text, stamp = path.read_text(encoding="utf-8", errors="replace"), path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found = Holder(**json.loads(text))
        names = (found.host, found.system, found.start, found.since, found.job)
        if re.fullmatch(r"[0-9a-f]{16}", found.nonce) and all(len(n) < 200 and n.isprintable() for n in names):
            return replace(found, pid=int(found.pid))
    # its maker died before it wrote, or another program wrote it: only its age counts
    nonce = f"{stamp.st_ino}-{stamp.st_mtime_ns}"
    return Holder(nonce=nonce, host="an unknown host", system="", pid=0, start="", since="?", job="")
