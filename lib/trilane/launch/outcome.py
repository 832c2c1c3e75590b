"""The cause of a run's end by its log, where the launcher knows only an exit code."""

import tempfile
from dataclasses import replace
from pathlib import Path

from trilane.logs.run import RunLog, read_log
from trilane.workspace.status import RunStatus, Status


def last_log(folder: Path) -> RunLog | None:
    """run.log from its last START line on, parsed; None where there is nothing to parse."""
    path = folder / "run.log"
    if not path.is_file():
        return None
    text = path.read_bytes()
    begin = max(text.rfind(b"\nSTART "), 0)
    with tempfile.NamedTemporaryFile(suffix=".log") as part:
        part.write(text[begin:])
        part.flush()
        try:
            return read_log(part.name)
        except ValueError:
            return None


def with_cause(outcome: RunStatus, folder: Path) -> RunStatus:
    """A crash with the cause that the log gives, its line and the nodes at fault; any other outcome as it is."""
    log = last_log(folder) if outcome.status in (Status.CRASHED, Status.KILLED) else None
    if log is None or not log.status.has_failed or log.status in (Status.CRASHED, Status.KILLED, Status.NCCL_ERROR):
        return outcome
    rank = outcome.rank if log.rank is None else log.rank
    evidence = log.evidence if rank is None else f"rank {rank}: {log.evidence}"
    return replace(outcome, status=log.status, evidence=evidence, rank=rank, exclude=log.exclude)
