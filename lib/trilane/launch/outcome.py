"""How a run on this machine ended: torchrun's exit code and list of failed ranks, their last lines,
the log.
"""

import json
import signal
import tempfile
from pathlib import Path

from trilane.logs.run import RunLog, read_log
from trilane.utils.files import is_inside, read_text
from trilane.workspace.status import RunStatus, Status, known_status, verdict

SIGNALS = {-number.value: number.name for number in signal.Signals}


class Hang(Exception):
    """The run hangs; the argument is its RunStatus, which names the suspected rank."""


def judge(folder: Path, code: int, done: int = 0) -> RunStatus:
    """The status by torchrun's exit code, its list of failed ranks and their last lines, and the
    log.

    `done` is the last iteration by the heartbeats.
    """
    written = known_status(folder)
    # where a disk stays full the engine cannot write its status.json
    evidence = f"iteration {done}; the disk was full, and holds no status.json"
    status = Status.STOPPED
    rank = None
    log = None
    if code:
        log = last_log(folder)
        rank, how = culprit(folder)
        status = Status.CRASHED
        if how.startswith("killed by SIGKILL"):
            status = Status.KILLED
        name = "torchrun" if rank is None else f"rank {rank}"
        evidence = f"{name}: {how}{_last_line(folder, rank)}"
    otherwise = RunStatus(status=status, evidence=evidence, rank=rank, exit_code=code)
    return verdict(code=code, written=written, log=log, otherwise=otherwise)


def last_log(folder: Path) -> RunLog | None:
    """run.log from its last START line on, parsed; None where there is nothing to parse."""
    path = folder / "run.log"
    if not path.is_file() or not is_inside(folder, path):
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


def culprit(folder: Path) -> tuple[int | None, str]:
    """The rank that failed first, and how if by a signal; None where torchrun itself failed.

    torchrun polls ten times a second, may find several ranks dead at once, and lists those that it
    then ended itself. A rank killed by a signal failed first, unless by torchrun's SIGTERM or its
    own SIGABRT (gloo and NCCL abort when a peer is gone). Among equals it is the one whose log ends
    first, since the others broke only when its connections closed; ranks that printed nothing come
    last.
    """
    failures = failed_ranks(folder)
    if not failures:
        return None, ""

    def order(rank: int) -> tuple[int, bool, int]:
        code = failures[rank]
        log = folder / f"ranks/{rank}.log"
        group = {-signal.SIGABRT: 2, -signal.SIGTERM: 3}.get(code, int(code >= 0))
        if not log.exists() or log.stat().st_size == 0:
            return group, True, 0
        return group, False, log.stat().st_mtime_ns

    rank = min(failures, key=order)
    code = failures[rank]
    if code >= 0:
        return rank, ""
    return rank, f"killed by {SIGNALS.get(code, f'signal {-code}')} after: "


def failed_ranks(folder: Path) -> dict[int, int]:
    """The exit codes of the ranks that torchrun saw fail; {} where its list is missing
    or damaged.
    """
    try:
        listed = json.loads(read_text(folder / "ranks/failures.json") or "[]")
        return {int(failure["rank"]): int(failure["exitcode"]) for failure in listed}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return {}


def _last_line(folder: Path, rank: int | None) -> str:
    """The last line that is not blank of a rank's log, or of torchrun's; "(nothing)" where there is
    none.
    """
    name = "torchrun" if rank is None else rank
    for line in reversed(read_text(folder / f"ranks/{name}.log").split("\n")):
        if line.strip():
            return line.strip()
    return "(nothing)"
