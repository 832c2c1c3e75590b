"""Node folder: where the ranks of one node keep what they write often, on the node, not on the shared file system.

It is /dev/shm/trilane-<user id>-<hash>, else the same below /tmp, else below ranks/nodes/ of the run folder. The hash
is of the run folder, the start (job, step, rendezvous), the node, and a random key that only the run's owner can read:
two runs never share a folder, and another user cannot prepare one. Mode 0700; refused where somebody else owns it.

Each process that uses the folder holds a shared lock on its file `lock` until it ends, however it ends: a folder that
can be locked alone was left by a killed run, and the next start removes it.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BASES = (Path("/dev/shm"), Path("/tmp"))  # the node's memory, the node's disk
NODES = "ranks/nodes"  # of a run folder: the report of each node, the key, and folders where BASES cannot be used
START = "TRILANE_START"  # in the environment: what names this start, from a launcher that uses the folder, too
# What else names a start, the same on all its ranks, and the node.
SAME = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
NODE = ("SLURM_NODEID", "GROUP_RANK")
LOOK_S = 15.0  # between two looks at which folders the ranks of this node use
NEW_S = 60.0  # a folder younger than this may not be locked yet
KEY_S = 5.0  # for the process that makes the key to write it


@dataclass(frozen=True, kw_only=True)
class NodeFolder:
    """The folder `path`, locked by this process until close(); `notes`: why a better place could not be used."""

    path: Path
    lock: int
    notes: str = ""

    def close(self) -> None:
        """Give up the lock."""
        os.close(self.lock)


def start_id(env: Mapping[str, str]) -> str:
    """What names this start of a run: the same on all its nodes, and of no other start."""
    return env.get(START) or hashlib.sha256("\0".join(env.get(name, "") for name in SAME).encode()).hexdigest()[:16]


def enter(folder: Path, env: Mapping[str, str], make: Callable[[Path], object] = lambda path: None) -> NodeFolder:
    """This node's folder for this start of the run in `folder`, in which `make` could write its files.

    OSError where no place can be used, neither on the node nor in the run folder.
    """
    name, notes = _name(folder, env), list[str]()
    for base in (*BASES, folder / NODES):
        try:
            node = _enter(base / name, folder)
        except OSError as error:
            notes.append(f"{base}: {error.strerror}")
            continue
        try:
            make(node.path)
            return NodeFolder(path=node.path, lock=node.lock, notes="; ".join(notes))
        except OSError as error:  # full
            notes.append(f"{base}: {error.strerror}")
            node.close()
    raise OSError("; ".join(notes))


class Places:
    """The folders in which ranks of this node and start write: one, or more where a place became full in between."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        name = _name(folder, env)
        self._all, self._used, self._next = [base / name for base in (*BASES, folder / NODES)], list[Path](), 0.0

    def __call__(self) -> list[Path]:
        """Looked for again every LOOK_S: the last of them is on the shared file system."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_S
            self._used = [path for path in self._all if _is_own(path)]
        return self._used


def find(folder: Path) -> list[Path]:
    """The folders on this machine that processes of the run in `folder` use now."""
    run, bases = _run(folder), (*BASES, folder / NODES)
    found = (path for base in bases for path in sorted(base.glob(f"{_prefix()}*")))
    return [path for path in found if _is_own(path) and _text(path / "run") == run and not _is_left(path)]


def remove(place: Path) -> None:
    """Remove a node's folder; processes that have mapped its files do not notice."""
    shutil.rmtree(place, ignore_errors=True)


def sweep() -> None:
    """Remove what killed runs of this user left on this machine."""
    for path in (path for base in BASES for path in base.glob(f"{_prefix()}*")):
        with contextlib.suppress(OSError), _locked_alone(path) as is_left:
            if is_left and time.time() - path.stat().st_mtime > NEW_S:
                shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    return f"trilane-{os.geteuid()}-"


def _name(folder: Path, env: Mapping[str, str]) -> str:
    node = "" if START in env else "\0".join(env.get(name, "") for name in NODE)
    parts = (_run(folder), start_id(env), node, _key(folder))
    return _prefix() + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _run(folder: Path) -> str:
    """The content of the file `run`: whose ranks use the folder."""
    return f"{folder.resolve()}\n{platform.node()}\n"


def _key(folder: Path) -> str:
    """The run's key, made by whoever comes first; "" where the disk is full: the names are then guessable, no more."""
    path = folder / NODES / "key"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(handle, secrets.token_hex(16).encode())
            finally:
                os.close(handle)
    end = time.monotonic() + KEY_S
    while len(text := _text(path)) < 32 and path.exists() and time.monotonic() < end:
        time.sleep(0.05)  # another process is about to write it
    return text


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def _enter(path: Path, folder: Path) -> NodeFolder:
    """Make the folder where it is missing, and lock it. What a killed start of the same name left is removed first."""
    while True:
        if path.is_relative_to(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not _is_own(path):
            raise PermissionError(1, "belongs to somebody else, or is open to others", str(path))
        handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for left in (*path.glob("*.beat"), *path.glob("*.calls")):
                left.unlink(missing_ok=True)
        _flock(handle, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):  # removed in between, as left by a killed run
            if os.stat(path / "lock").st_ino == os.fstat(handle).st_ino:
                (path / "run").write_text(_run(folder), encoding="utf-8")
                return NodeFolder(path=path, lock=handle)
        os.close(handle)


def _flock(handle: int, how: int) -> bool:
    """Lock; False where another process holds a lock, or the file system has none."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _is_own(path: Path) -> bool:
    """Whether this is a folder, no link, that belongs to this user and to nobody else."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return False


def _is_left(path: Path) -> bool:
    """Whether no process uses the folder any more."""
    with contextlib.suppress(OSError), _locked_alone(path) as is_left:
        return is_left
    return False


@contextlib.contextmanager
def _locked_alone(path: Path) -> Iterator[bool]:
    """Whether the folder could be locked against all others, who then wait for the end of the block."""
    if not _is_own(path):
        yield False
        return
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)
