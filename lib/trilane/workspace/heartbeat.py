"""Heartbeats: what each rank last did, in its node's memory; and what each node wrote of its ranks
in the run folder.

A rank overwrites one record of fixed size, which stays readable when the process is stuck, stopped
or killed: /dev/shm/trilane-<user id>-<run>-<start and node>.<rank>. It holds a lock on it until it
ends, however it ends. In the run folder one process of each node replaces ranks/nodes/<its first
rank>.json when a rank begins or exits, when stacks are asked for, and at the end.
"""

import contextlib
import errno
import fcntl
import functools
import json
import mmap
import os
import platform
import signal
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from pathlib import Path

from trilane.utils.files import hash_of, json_object, read_text, replace_text
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json
from trilane.utils.validation import HostError, from_mapping, require
from trilane.workspace.pace import Pace

# the node's memory; a system without this folder is one machine
BASE = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
RECORD = 1024  # bytes of a record: one padded line of JSON
MOST = 1 << 40  # ranks or iterations; more is a damaged number
# what names a start of a run
START = (
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)
END = "end"  # the phase of a rank that has finished
SAVE = "save-checkpoint"
# The signal on which faulthandler writes the stacks: no library and no scheduler uses it.
STACKS = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


@frozen
class Heartbeat:
    """A rank's state: iteration `step` (0: before the first), `phase`, since `time` (Unix, s),
    process, host.

    In a report also the seconds without a change, by the clock of its node, and whether its process
    has exited. ValueError for what no rank writes.
    """

    rank: int
    step: int
    phase: str
    time: float
    pid: int
    host: str
    idle_s: float = 0.0
    has_exited: bool = False
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        # a signal to process -1, 0 or 1 would reach others
        ok = 0 <= self.rank < MOST and 0 <= self.step < MOST and self.pid > 1
        require(ok, "heartbeat", f"of rank {self.rank}", "is damaged")

    def __str__(self) -> str:
        return f"rank {self.rank} in iteration {self.step}, {self.phase or 'between phases'}"


def encode(step: int, phase: str, now: float, process: Json) -> bytes:
    """The record of a heartbeat; `process` as place() gives it, and the pace."""
    values = {"step": step, "phase": phase, "time": now, **process}
    return json.dumps(values).encode().ljust(RECORD - 1) + b"\n"


def place() -> Json:
    """This process: its pid and its host."""
    return {"pid": os.getpid(), "host": platform.node() or "localhost"}


def create_record(folder: Path, env: Mapping[str, str], rank: int) -> mmap.mmap:
    """The memory-mapped record of a rank in this start of the run, locked until this process ends.

    HostError where the node's memory is full, or another user has a file of this name.
    """
    path = BASE / f"{_prefix(folder)}{_start_on_node(env)}.{rank}"
    try:
        return _mapped(path)
    except OSError as error:
        rule = f"{error.strerror}; with run.hang_timeout_s=0 none is written"
        raise HostError(f"heartbeat={path}: {rule}") from None


def _mapped(path: Path) -> mmap.mmap:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a killed start of this name; another user's stays, and is refused
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # which lasts as long as the mapping
        # Not a sparse file: the kernel ends a process (SIGBUS) that writes to a mapped page of a
        # full disk.
        if os.write(handle, b"\0" * RECORD) < RECORD:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return mmap.mmap(handle, RECORD)
    except OSError:
        path.unlink()  # half a record would count as a rank that stands still
        raise
    finally:
        os.close(handle)


def own_beats(folder: Path, env: Mapping[str, str] | None = None) -> dict[int, Heartbeat]:
    """The last heartbeat of each rank on this machine: of the start of the run in `env`, else of
    starts of which a rank still runs.
    """
    start = "*" if env is None else _start_on_node(env)
    paths = list(_records(_prefix(folder) + start))
    starts = {path.stem for path in paths if env is not None or _is_held(path)}
    beats = {}
    for path in sorted(paths):
        if path.stem in starts:
            with contextlib.suppress(OSError, ValueError):
                values = json_object(read_text(path)) or {}
                rank = int(path.suffix[1:])
                beats[rank] = from_mapping(Heartbeat, {**values, "rank": rank}, "heartbeat")
    return beats


def remove_records(folder: Path, env: Mapping[str, str]) -> None:
    """Remove the records on this machine of this start of the run."""
    for path in _records(_prefix(folder) + _start_on_node(env)):
        path.unlink(missing_ok=True)


def _records(start: str) -> Iterable[Path]:
    """The records whose names begin so: files of this user alone, as others may write to these
    folders.
    """
    for path in BASE.glob(f"{start}.*"):
        with contextlib.suppress(OSError):
            if not path.is_symlink() and path.is_file() and path.stat().st_uid == os.geteuid():
                yield path


def _is_held(path: Path) -> bool:
    """Whether the process of the record lives."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def start_id(env: Mapping[str, str]) -> str:
    """What names this start of a run: the same on all its nodes, and of no other start."""
    return env.get("TRILANE_START") or _hash_of(env, START)


@functools.cache  # to resolve the path asks the shared file system each time
def _prefix(folder: Path) -> str:
    return f"trilane-{os.geteuid()}-{hash_of(str(folder.resolve()))}-"


def _start_on_node(env: Mapping[str, str]) -> str:
    # a launcher that names the start has one node, and does not know what torchrun calls it
    if "TRILANE_START" in env:
        return hash_of(start_id(env))
    return _hash_of(env, (*START, "SLURM_NODEID", "GROUP_RANK"))


def _hash_of(env: Mapping[str, str], names: Iterable[str]) -> str:
    return hash_of("\0".join(env.get(name, "") for name in names))


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this host ("R", "S", "D", "T" stopped, "Z" dead), "gone"
    without one; "" where there is no /proc (macOS).
    """
    if not Path("/proc/self").exists():
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    # the name in parentheses may itself hold parentheses
    return stat.rpartition(")")[2].split()[0]


@frozen
class NodeReport:
    """The heartbeats of all ranks of a node, whose first is `first`, in the start `start_id()` of
    the run.
    """

    first: int
    host: str
    start: str
    ranks: tuple[Heartbeat, ...]

    def write(self, folder: Path) -> None:
        """Replace the node's report. OSError where the disk is full."""
        path = folder / "ranks/nodes" / f"{self.first}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(self)) + "\n")


def read_reports(folder: Path) -> list[NodeReport]:
    """The last report of each node of a run folder, by first rank; damaged ones are left out."""
    reports = []
    for path in (folder / "ranks/nodes").glob("[0-9]*.json"):
        with contextlib.suppress(ValueError, OSError):
            reports.append(from_mapping(NodeReport, json_object(read_text(path)), "report"))
    return sorted(reports, key=lambda report: report.first)


def read_beats(folder: Path) -> dict[int, Heartbeat]:
    """The last known heartbeat of each rank of a run: of ranks of this machine now, of others as
    last reported.
    """
    reported = {beat.rank: beat for report in read_reports(folder) for beat in report.ranks}
    return dict(sorted((reported | own_beats(folder)).items()))
