"""Lock: one process at a time works in a folder, among all hosts that share it; without flock."""

import contextlib
import fcntl
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from flufl.lock import Lock, LockState, NotLockedError, TimeOutError

CLOCKS_DIFFER_S = 10


class FolderLock:
    """A lock on folders for the processes of all hosts that share them: `with
    FolderLock([folder]).held(20):`.

    The lock is the file `name` in the folder, made by link(2), which is atomic on local file
    systems, NFS and Lustre (flufl.lock, of GNU Mailman). A holder that was killed loses it at once
    to a process of its host, and a minute after its last sign of life to one of another host, whose
    clock may be 10 s ahead. Hosts need different names.
    """

    def __init__(
        self, folders: Iterable[Path], name: str = "run.lock", field: str = "run folder"
    ) -> None:
        """`field` names the subject of the error of a process that waits too long."""
        self._field = field
        paths = {folder.resolve() / name for folder in folders}
        self._locks = [_Lock(path) for path in sorted(paths)]  # one order: no deadlock

    @contextlib.contextmanager
    def held(self, patience_s: float) -> Iterator["FolderLock"]:
        """Hold the lock of each folder; ValueError that names the holder where one is not free in
        `patience_s`.
        """
        end = time.monotonic() + patience_s
        ended = threading.Event()
        threading.Thread(target=self._refresh, args=(ended,), daemon=True).start()
        try:
            for lock in self._locks:
                self._take(lock, end)
            yield self
        finally:
            ended.set()
            for lock in self._locks:
                lock.unlock(unconditionally=True)

    def _refresh(self, ended: threading.Event) -> None:
        while not ended.wait(10):
            for lock in self._locks:
                lock.refresh(unconditionally=True)

    def _take(self, lock: Lock, end: float) -> None:
        where = f"{self._field}={Path(lock.lockfile).parent}"
        try:
            while True:
                _release_dead(lock)
                with contextlib.suppress(TimeOutError):
                    return lock.lock(timeout=0)
                if time.monotonic() > end:
                    holder = "an unknown process"
                    with contextlib.suppress(NotLockedError, ValueError):
                        host, pid, _ = lock.details
                        holder = f"process {pid} on {host}"
                    raise ValueError(f"{where}: is locked by {holder}; try again when it has ended")
                time.sleep(0.2)
        except OSError as error:
            raise ValueError(f"{where}: cannot be locked: {error.strerror}") from None


class _Lock(Lock):
    def __init__(self, path: Path) -> None:
        super().__init__(str(path), lifetime=60, separator="\x1f")  # in no path
        # flufl.lock 10 asks for the address's name, which /etc/hosts often gives as localhost, on
        # every node
        self._hostname = platform.node()
        self._set_claimfile()


def _release_dead(lock: Lock) -> None:
    """Remove the lock of a holder that has died; flock on its very file lets one do so of several
    that find it.
    """
    with (
        contextlib.suppress(FileNotFoundError, PermissionError),
        open(lock.lockfile, "rb+") as file,
    ):
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        late_s = (datetime.now() - lock.expiration).total_seconds()
        is_dead = lock.state is LockState.stale or late_s > CLOCKS_DIFFER_S
        if is_dead and os.path.samestat(os.fstat(file.fileno()), os.stat(lock.lockfile)):
            claim = Path(file.read(4096).decode(errors="replace"))
            os.unlink(lock.lockfile)
            if claim.name.startswith(f"{Path(lock.lockfile).name}\x1f"):
                (Path(lock.lockfile).parent / claim.name).unlink(missing_ok=True)
