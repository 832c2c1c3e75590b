"""The state of a run (`Status`), and how it ended with the line that proves it (`RunStatus`,
status.json).
"""

import contextlib
import json
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from trilane.utils.files import FULL, replace_text
from trilane.utils.frozen import frozen
from trilane.utils.validation import from_mapping, read_json


class Status(StrEnum):
    """The state of a run, a job or a log; the value is the word in files and in JSON.

    `stopped`: asked to end before its last iteration, saved if it could, can be resumed. `timeout`:
    it exceeded a limit of ours, `time limit` one of the scheduler. `unfinished`: the log ends
    without a reason. `OOM`: a GPU had too little memory, `host memory`: a node. `killed`: by
    SIGKILL of unknown origin. docs/guides/my-logs.md has the next step for each.
    """

    NOT_SUBMITTED = "not submitted"
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
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
    def has_failed(self) -> bool:
        """Whether it ended otherwise than as asked; a run that was never started has not failed."""
        return not (self.is_active or self.is_clean or self is Status.NOT_SUBMITTED)

    @property
    def exit_code(self) -> int:
        """What `trilane train` returns: 0 completed, 3 stopped, else 1."""
        return {Status.COMPLETED: 0, Status.STOPPED: 3}.get(self, 1)


@frozen
class RunStatus:
    """How a run ended, the line that proves it, the rank that printed it (None: no single one), and
    nodes at fault, as SLURM's --exclude takes them. ValueError for an unknown status.
    """

    status: Status
    evidence: str
    rank: int | None = None
    exit_code: int = 1
    seconds: float = 0.0
    exclude: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))


def verdict(
    *,
    code: int | None,
    written: RunStatus | None,
    otherwise: RunStatus,
    scheduler: RunStatus | None = None,
    log: Any = None,
) -> RunStatus:
    """How a run ended, by what is known of it: verdict(code=1, written=known_status(folder),
    log=log, otherwise=crash).

    code        of torchrun or of the job's step; None where it is unknown
    written     status.json of this attempt: by the engine, or by who ended a hang, which may be
                before the exit code
    scheduler   its own reason, such as a time limit; None where it says no more than that the job
                failed
    log         the RunLog of its last attempt, which decides where the others know only that it
                failed
    otherwise   what the caller knows without a reason
    """
    known = (Status.HANG, Status.NAN_LOSS)
    if written and written.status in known:  # what was killed for it is in the log
        return written
    if written and not code and (written.status is Status.COMPLETED or not scheduler):
        return written
    if scheduler or code == 0:
        return scheduler or otherwise
    # the last words of the rank that failed say more
    vague = (Status.CRASHED, Status.KILLED, Status.NCCL_ERROR)
    is_silent = log is None or log.status is Status.UNFINISHED or not log.status.has_failed
    if is_silent or (log.status in vague and otherwise.rank is not None):
        return otherwise
    # the rank that torchrun saw fail first need not be the one that printed this
    if log.rank is None:
        evidence = log.evidence
    else:
        evidence = f"rank {log.rank}: {log.evidence}"
    return replace(
        otherwise, status=log.status, evidence=evidence, rank=log.rank, exclude=log.exclude
    )


def write_status(folder: Path, status: RunStatus) -> None:
    """Write status.json, whole or not at all; nothing where the disk is full."""
    try:
        replace_text(folder / "status.json", json.dumps(asdict(status), indent=2) + "\n")
    except OSError as error:
        if error.errno not in FULL:
            raise


def known_status(folder: Path) -> RunStatus | None:
    """The status in status.json; None where it is missing or damaged."""
    with contextlib.suppress(ValueError, OSError):
        return from_mapping(RunStatus, read_json(folder / "status.json", "status"), "status")
    return None
