"""The state of a run (`Status`), and how it ended with the line that proves it (`RunStatus`, status.json)."""

import contextlib
import errno
import json
import signal
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from trilane.utils.files import read_text, replace_text, set_aside
from trilane.utils.validation import from_mapping, read_json, require_known


class Status(StrEnum):
    """The state of a run, a job or a log; the value is the word in files and in JSON.

    `stopped`: the run was asked to end before its last iteration, saved if it could, and can be resumed. `hang`: its
    ranks made no progress and were ended; `timeout`: it exceeded a limit of ours, `time limit` one of the scheduler.
    `pruned`: a run of a sweep that was not started, because one that needs no more memory ran out of it.
    `unfinished`: the log ends without a reason. `rendezvous`: it never began, as not all nodes came in time. `OOM`: a
    GPU had too little memory, `host memory`: a node. `killed`: by SIGKILL of unknown origin. The next step for
    each is in docs/guides/my-logs.md.
    """

    NOT_SUBMITTED = "not submitted"
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    PRUNED = "pruned"
    UNFINISHED = "unfinished"
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    TIME_LIMIT = "time limit"
    OOM = "OOM"
    HOST_MEMORY = "host memory"
    GPU_ERROR = "GPU error"
    NODE_FAILURE = "node failure"
    NETWORK = "network"
    FILE_SYSTEM = "file system"
    PREEMPTED = "preempted"
    KILLED = "killed"
    RENDEZVOUS = "rendezvous"
    HANG = "hang"
    NCCL_ERROR = "NCCL error"
    NAN_LOSS = "NaN loss"
    PORT_IN_USE = "port in use"
    ENVIRONMENT = "environment"
    CHECKPOINT = "checkpoint"
    MISSING_FILE = "missing file"

    @property
    def is_active(self) -> bool:
        """Whether a job waits or runs."""
        return self in (Status.WAITING, Status.RUNNING)

    @property
    def is_clean(self) -> bool:
        """Whether the training ran and ended as asked."""
        return self in (Status.COMPLETED, Status.STOPPED)

    @property
    def is_open(self) -> bool:
        """Whether a log shows no end: the run goes on, or was ended without a line about it."""
        return self in (Status.RUNNING, Status.UNFINISHED)

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than as asked; a run that was never started has not failed."""
        return not (self.is_active or self.is_clean or self in (Status.PRUNED, Status.NOT_SUBMITTED))

    @property
    def can_retry(self) -> bool:
        """Whether it failed and another attempt of the same plan may succeed."""
        return self.has_failed and self is not Status.OOM

    @property
    def is_hang(self) -> bool:
        """Whether it was ended because it made no progress."""
        return self in (Status.HANG, Status.TIMEOUT)

    @property
    def may_be_node_failure(self) -> bool:
        """Whether a lost node can look like this in the log."""
        seen = (Status.CRASHED, Status.NCCL_ERROR, Status.HANG, Status.NODE_FAILURE, Status.RENDEZVOUS)
        return self in (*seen, Status.GPU_ERROR, Status.NETWORK, Status.KILLED)

    @property
    def exit_code(self) -> int:
        """What `trilane train` returns: 0 completed, 3 stopped, else 1."""
        return {Status.COMPLETED: 0, Status.STOPPED: 3}.get(self, 1)


NOTHING = "(nothing)"  # of a rank that printed nothing


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run ended, the line that proves it, and the rank that printed this line (None: no single rank); nodes at
    fault, if any, as SLURM's --exclude takes them.

    Raises ValueError for an unknown status.
    """

    status: Status
    evidence: str
    rank: int | None
    exit_code: int
    seconds: float
    exclude: str = ""

    def __post_init__(self) -> None:
        require_known("status", self.status, tuple(Status))
        object.__setattr__(self, "status", Status(self.status))


def judge(folder: Path, ranks: int, code: int, seconds: float) -> RunStatus:
    """The status by torchrun's exit code, its list of failed ranks (of `ranks`) and their last lines."""
    if code == 0:
        return _clean_end(folder, ranks - 1, seconds)
    rank, how = culprit(folder)
    of = "torchrun" if rank is None else f"rank {rank}"
    evidence = f"{of}: {how}{last_line(folder, 'torchrun' if rank is None else rank)}"
    status = Status.KILLED if how.startswith("killed by SIGKILL") else Status.CRASHED
    return RunStatus(status=status, evidence=evidence, rank=rank, exit_code=code, seconds=seconds)


def _clean_end(folder: Path, last: int, seconds: float) -> RunStatus:
    """The engine's own status where it stopped or had nothing left to train; else the last rank's last iteration."""
    written = known_status(folder)
    line = last_line(folder, last, "| number of nan iterations")
    if written and (written.status is Status.STOPPED or line == NOTHING):
        return replace(written, seconds=seconds)
    return RunStatus(status=Status.COMPLETED, evidence=f"rank {last}: {line}", rank=last, exit_code=0, seconds=seconds)


def culprit(folder: Path) -> tuple[int | None, str]:
    """The rank that failed first, and how if by a signal; None where torchrun itself failed.

    torchrun polls ten times a second, may find several ranks dead at once, and lists those that it then ended itself.
    A rank killed by a signal failed first, unless by torchrun's SIGTERM or its own SIGABRT (gloo and NCCL abort when a
    peer is gone). Among equals it is the one whose log ends first, since the others broke only when its connections
    closed; ranks that printed nothing come last.
    """
    failures = _failures(folder)
    if not failures:
        return None, ""
    later = {-signal.SIGABRT: 2, -signal.SIGTERM: 3}
    order = {rank: later.get(code, int(code >= 0)) for rank, code in failures.items()}
    rank = min(failures, key=lambda r: (order[r], _fell_silent(folder / "ranks" / f"{r}.log")))
    code = failures[rank]
    names = {number.value: number.name for number in signal.Signals}
    return rank, f"killed by {names.get(-code, f'signal {-code}')} after: " if code < 0 else ""


def failed_ranks(folder: Path) -> set[int]:
    """The ranks that torchrun saw fail."""
    return set(_failures(folder))


def _failures(folder: Path) -> dict[int, int]:
    """The exit codes of these ranks; {} where torchrun's list is missing or damaged."""
    try:
        listed = json.loads(read_text(folder / "ranks/failures.json") or "[]")
        return {int(failure["rank"]): int(failure["exitcode"]) for failure in listed}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return {}


def last_line(folder: Path, rank: int | str, words: str = "") -> str:
    """The last line that is not blank, and holds `words`, in ranks/<rank>.log; "(nothing)" where there is none."""
    path = folder / "ranks" / f"{rank}.log"
    lines = read_text(path).splitlines() if path.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip() and words in line), NOTHING)


def write_status(folder: Path, status: RunStatus) -> bool:
    """Write status.json, whole or not at all; False where the disk is full."""
    if (folder / "status.json").is_dir():
        set_aside(folder / "status.json")
    try:
        replace_text(folder / "status.json", json.dumps(asdict(status), indent=2) + "\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
            raise
        return False
    return True


def read_status(folder: Path) -> RunStatus:
    """The status in status.json; ValueError with its name where it is missing or damaged."""
    path = folder / "status.json"
    try:
        return from_mapping(RunStatus, read_json(path, "status"), "status")
    except ValueError as error:
        raise ValueError(f"status={path}: is damaged ({error})") from None


def status_problem(folder: Path) -> str:
    """What is wrong with status.json, in one line; "" where it is whole or missing."""
    if (folder / "status.json").exists():
        try:
            read_status(folder)
        except (ValueError, OSError) as error:
            return str(error)
    return ""


def known_status(folder: Path) -> RunStatus | None:
    """The status in status.json; None where it is missing or damaged."""
    with contextlib.suppress(ValueError, OSError):
        return read_status(folder)
    return None


def _fell_silent(log: Path) -> tuple[bool, int]:
    """Sort key: ranks that printed something first, by the time of their last line."""
    facts = log.stat() if log.exists() else None
    return (True, 0) if facts is None or facts.st_size == 0 else (False, facts.st_mtime_ns)
