"""Outcome: how a run on this machine ended, with the line that proves it; status.json holds it."""

import json
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trilane.utils.files import replace_text
from trilane.utils.validation import require_known

# stopped: it was asked to end before its last iteration, saved if it could, and can be resumed. hang: its ranks stood
# still, and a watchdog ended it. The second line is what the log's reader tells of a job, and a run of a sweep that was
# not started because another ran out of memory
STATUSES = (
    *("completed", "stopped", "crashed", "cancelled", "timeout"),
    *("OOM", "time limit", "node failure", "hang", "NCCL error", "NaN loss", "pruned"),
)


NOTHING = "(nothing)"  # of a rank that never said a word


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run ended, and the line that proves it. `rank` is who said that line, None where nobody is to blame."""

    status: str
    evidence: str
    rank: int | None
    exit_code: int
    seconds: float

    def __post_init__(self) -> None:
        require_known("status", self.status, STATUSES)


def judge(folder: Path, ranks: int, code: int, seconds: float) -> RunStatus:
    """What torchrun's exit code, its list of failed ranks (of `ranks`) and their last lines amount to."""
    if code == 0:
        return _clean_end(folder, ranks - 1, seconds)
    rank, how = culprit(folder)
    if rank is None:
        evidence = f"torchrun: {last_line(folder, 'torchrun')}"
    else:
        evidence = f"rank {rank}: {how}{last_line(folder, rank)}"
    return RunStatus(status="crashed", evidence=evidence, rank=rank, exit_code=code, seconds=seconds)


def _clean_end(folder: Path, last: int, seconds: float) -> RunStatus:
    """The engine's own word where it was stopped, or had nothing left to train; else the last rank's last iteration."""
    said = read_status(folder) if (folder / "status.json").exists() else None
    line = last_line(folder, last, "| number of nan iterations")
    if said and (said.status == "stopped" or line == NOTHING):
        return replace(said, seconds=seconds)
    return RunStatus(status="completed", evidence=f"rank {last}: {line}", rank=last, exit_code=0, seconds=seconds)


def culprit(folder: Path) -> tuple[int | None, str]:
    """The rank that failed first, and how if by a signal; None where torchrun itself failed.

    torchrun looks ten times a second, may find several dead at once, and lists those that it then ended itself. Who
    was killed is no follower, unless by torchrun (SIGTERM) or by himself, as gloo and NCCL abort when a peer is gone.
    Among equals the root fell silent first, since the rest only broke when its connections closed; who never said a
    word left it to another.
    """
    path = folder / "ranks" / "failures.json"
    failures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if not failures:
        return None, ""
    first = min(failures, key=lambda f: (_follows(f["exitcode"]), _fell_silent(folder / "ranks" / f"{f['rank']}.log")))
    if first["exitcode"] >= 0:
        return first["rank"], ""
    return first["rank"], f"killed by {signal.Signals(-first['exitcode']).name} after: "


def failed_ranks(folder: Path) -> set[int]:
    """The ranks that torchrun saw fail."""
    path = folder / "ranks" / "failures.json"
    return {f["rank"] for f in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else set()


def last_line(folder: Path, rank: int | str, words: str = "") -> str:
    """The last line that is not blank, and holds `words`, in ranks/<rank>.log; "(nothing)" where there is none."""
    path = folder / "ranks" / f"{rank}.log"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip() and words in line), NOTHING)


def write_status(folder: Path, outcome: RunStatus) -> None:
    """status.json, whole or not at all."""
    replace_text(folder / "status.json", json.dumps(asdict(outcome), indent=2) + "\n")


def read_status(folder: Path) -> RunStatus:
    """The Outcome in status.json."""
    return RunStatus(**json.loads((folder / "status.json").read_text(encoding="utf-8")))


def _follows(exit_code: int) -> int:
    """For sorting: how likely this one only followed another."""
    if exit_code >= 0:
        return 1
    return {-signal.SIGABRT: 2, -signal.SIGTERM: 3}.get(exit_code, 0)


def _fell_silent(log: Path) -> tuple[bool, int]:
    """For sorting: those who said something first, by the time of their last word."""
    facts = log.stat() if log.exists() else None
    return (True, 0) if facts is None or facts.st_size == 0 else (False, facts.st_mtime_ns)
