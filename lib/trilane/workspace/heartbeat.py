"""Heartbeats: what each rank last did, in its node's memory; and a report of each node in the run folder.

A rank overwrites one record of fixed size, <rank>.beat, which stays readable when the process is stuck, stopped or
killed. It changes many times a second, so it lies on the node: in /dev/shm/trilane-<user id>-<run>-<start and node>,
else in the same folder below /tmp. Each process that uses such a folder holds a shared lock on it until it ends,
however it ends: a folder that can be locked alone was left by a killed run, and the next start removes it. One process
of each node replaces ranks/nodes/<its first rank>.json in the run folder every 15 s, by which others see its ranks.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trilane.utils.files import json_object, read_text
from trilane.utils.validation import from_mapping, require

BASES = (Path("/dev/shm"), Path("/tmp"))  # the node's memory, the node's disk
RECORD = 128  # bytes of a heartbeat file: one padded line
END = "end"  # the phase of a rank that has finished
# The signal on which faulthandler writes the stacks: no library and no scheduler uses it.
STACKS = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's state: iteration `step` (0: before the first), `phase`, since `time` (Unix, s), process, host.

    In a report also the seconds without a change, by the clock of its node, and whether its process has exited.
    ValueError for what no rank writes.
    """

    rank: int
    step: int
    phase: str
    time: float
    pid: int
    host: str
    idle_s: float = 0.0
    has_exited: bool = False

    def __post_init__(self) -> None:
        # a signal to process -1, 0 or 1 would reach others
        numbers = min(self.rank, self.step, self.pid - 2) >= 0 and max(self.rank, self.step) < 1 << 40
        times = math.isfinite(self.time) and 0 <= self.idle_s < math.inf
        texts = max(len(self.phase), len(self.host)) < 256
        require(numbers and times and texts, "heartbeat", f"of rank {self.rank}", "is damaged")

    def __str__(self) -> str:
        return f"rank {self.rank} in iteration {self.step}, {self.phase or 'between phases'}"


def encode(step: int, phase: str, now: float, rest: bytes) -> bytes:
    """The record of a heartbeat; `rest` is the constant part, place()."""
    return (b"%d %s %.3f " % (step, phase.encode() or b"-", now) + rest)[: RECORD - 1].ljust(RECORD - 1) + b"\n"


def place() -> bytes:
    """This process: its pid and its host."""
    return f"{os.getpid()} {platform.node() or 'localhost'}".encode()


def beats_in(folder: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of each rank that keeps its own in the node's folder, where readable."""
    found = {}
    for path in sorted(folder.glob("*.beat")):
        with contextlib.suppress(OSError, ValueError):
            step, phase, now, pid, host = path.read_bytes()[:RECORD].decode().split()
            facts = {"phase": "" if phase == "-" else phase, "time": float(now), "pid": int(pid), "host": host}
            found[int(path.stem)] = Heartbeat(rank=int(path.stem), step=int(step), **facts)  # type: ignore[arg-type]
    return found


def read_beats(folder: Path) -> dict[int, Heartbeat]:
    """The last known heartbeat of each rank of a run: of ranks of this machine now, of others as last reported."""
    found = {beat.rank: beat for report in read_reports(folder) for beat in report.ranks}
    for where in node_folders(folder):
        found |= beats_in(where)
    return dict(sorted(found.items()))


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this host ("R", "S", "D", "T" stopped, "Z" dead), "gone" without one; ""
    where there is no /proc (macOS)."""
    if not Path("/proc/self").exists():
        return ""
    try:
        # The name in parentheses may itself hold parentheses.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What is reported of all ranks of a node, whose first is `first`, in the start `start_id()` of the run."""

    first: int
    host: str
    start: str
    number: int  # it rises: a reader needs no clock to see that the node lives
    ranks: tuple[Heartbeat, ...]

    def write(self, folder: Path) -> None:
        """Replace the node's report: one open and one rename, nothing forced to the disk. OSError where it is full."""
        path = folder / "ranks/nodes" / f"{self.first}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}")
        aside.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")
        aside.replace(path)


def read_reports(folder: Path) -> list[NodeReport]:
    """The last report of each node of a run folder, by first rank; damaged ones are left out."""
    found = []
    for path in (folder / "ranks/nodes").glob("[0-9]*.json"):
        with contextlib.suppress(ValueError, OSError):
            found.append(from_mapping(NodeReport, json_object(read_text(path)), "report"))
    return sorted(found, key=lambda report: report.first)


def start_id(env: Mapping[str, str]) -> str:
    """What names this start of a run: the same on all its nodes, and of no other start."""
    slurm, torchrun = ("JOB_ID", "RESTART_COUNT", "STEP_ID"), ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    names = (*(f"SLURM_{name}" for name in slurm), *torchrun)
    return env.get("TRILANE_START") or _hash(*(env.get(name, "") for name in names))


def node_folders(folder: Path, env: Mapping[str, str] | None = None) -> list[Path]:
    """The folders on this machine in which ranks of the run in `folder` write now, or those of the start in `env`."""
    # two where a place became full in between
    paths = (path for base in BASES for path in base.glob(_prefix(folder) + (_own(env) if env else "*")))
    return [path for path in paths if _is_private(path) and (env or not _left(path))]


def enter(folder: Path, env: Mapping[str, str], make: Callable[[Path], object] = lambda path: None) -> tuple[Path, str]:
    """This node's folder for this start of the run, used until this process ends, and why no better place was.

    `make` writes the process's files into it. OSError where neither place can be used.
    """
    problems = list[str]()
    for base in BASES:
        path = base / (_prefix(folder) + _own(env))
        try:
            _use(path)
            make(path)
            return path, "; ".join(problems)
        except OSError as error:  # full, missing, or of somebody else
            problems.append(f"{base}: {error.strerror}")
    raise OSError("; ".join(problems))


def sweep() -> None:
    """Remove what killed runs of this user left on this machine."""
    for path in (path for base in BASES for path in base.glob(f"trilane-{os.geteuid()}-*")):
        if _is_private(path) and _left(path):
            shutil.rmtree(path, ignore_errors=True)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _prefix(folder: Path) -> str:
    # the host's name, because /tmp of several may be one folder
    return f"trilane-{os.geteuid()}-{_hash(str(folder.resolve()), platform.node())}-"


def _own(env: Mapping[str, str]) -> str:
    # a launcher that names the start has one node, and does not know what torchrun calls it
    names = () if "TRILANE_START" in env else ("SLURM_NODEID", "GROUP_RANK")
    return _hash(start_id(env), *(env.get(name, "") for name in names))


def _use(path: Path) -> None:
    """Make the folder where it is missing, and hold a lock on it; what a killed start of its name left is removed."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not _is_private(path):  # as another user may prepare it
            raise PermissionError(1, "belongs to somebody else, or is open to others", str(path))
        with contextlib.suppress(FileNotFoundError):  # swept at this moment
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            if _locks(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
                for left in path.glob("*.beat"):
                    left.unlink()
            _locks(handle, fcntl.LOCK_SH)
            if path.stat().st_ino == os.fstat(handle).st_ino:
                return  # the lock lasts until the process ends
            os.close(handle)


def _is_private(path: Path) -> bool:
    """Whether this is a folder, no link, that belongs to this user and is closed to others."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return False


def _left(path: Path) -> bool:
    """Whether no process uses the folder any more."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return _locks(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)
    return False


def _locks(handle: int, how: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(handle, how)
        return True
    return False
