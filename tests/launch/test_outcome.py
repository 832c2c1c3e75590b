"""The cause of a run's end by its log."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from trilane.launch.outcome import judge, last_log
from trilane.workspace.status import RunStatus, Status, verdict

CRASH = RunStatus(status=Status.CRASHED, evidence="rank 1: exit", rank=1, exit_code=1, seconds=1.0)
XID = "n2: NVRM: Xid (PCI:0000:1b:00): 79, pid=8, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("text", "status", "evidence", "exclude"),
    [
        (XID, "GPU error", XID, "n2"),
        (
            "[rank0]: OSError: [Errno 122] Disk quota exceeded",
            "file system",
            "rank 0: [rank0]: OSError: [Errno ",
            "",
        ),
        ("ValueError: heads", "crashed", "rank 1: exit", ""),
        ("MemoryError\nSTART b\nValueError: heads", "crashed", "rank 1: exit", ""),
    ],
)
def test_a_crash_has_the_cause_that_its_log_gives(
    text: str, status: str, evidence: str, exclude: str, tmp_path
):
    (tmp_path / "run.log").write_text(f"START a\n{text}\n")
    found = verdict(code=1, written=None, log=last_log(tmp_path), otherwise=CRASH)
    assert (found.status, found.exclude) == (status, exclude) and found.evidence.startswith(
        evidence
    )


STOPPED = RunStatus(status=Status.STOPPED, evidence="stop", rank=None, exit_code=0, seconds=1.0)
COMPLETED = replace(STOPPED, status=Status.COMPLETED)
HANG = replace(CRASH, status=Status.HANG)
LIMIT = replace(CRASH, status=Status.TIME_LIMIT, rank=None)
OOM = replace(CRASH, status=Status.OOM, evidence="CUDA out of memory", rank=3)
VAGUE = replace(OOM, status=Status.CRASHED)
UNFINISHED = replace(
    OOM, status=Status.UNFINISHED, evidence="iteration 7", rank=None
)  # all fell silent


@pytest.mark.parametrize(
    ("code", "written", "scheduler", "log", "status"),
    [
        (0, STOPPED, None, OOM, "stopped"),
        (0, None, None, OOM, "crashed"),
        (1, HANG, LIMIT, OOM, "hang"),
        (1, STOPPED, None, OOM, "OOM"),
        (1, None, LIMIT, OOM, "time limit"),
        (1, None, None, COMPLETED, "crashed"),
        (None, COMPLETED, LIMIT, None, "completed"),
    ],
)
def test_one_verdict_is_made_of_all_that_is_known(code, written, scheduler, log, status):
    found = verdict(code=code, written=written, scheduler=scheduler, log=log, otherwise=CRASH)
    assert found.status == status
    assert verdict(code=1, written=None, log=VAGUE, otherwise=CRASH) == CRASH, "which names a rank"
    assert (
        verdict(code=1, written=None, log=VAGUE, otherwise=LIMIT).evidence
        == "rank 3: CUDA out of memory"
    )


def failed(folder: Path, *ranks: tuple[int, int, str]) -> Path:
    """A run folder with these failures: rank, exit code and last words, in the order in which they
    were spoken.
    """
    (folder / "ranks").mkdir(parents=True)
    for second, (rank, _, words) in enumerate(ranks):
        log = folder / "ranks" / f"{rank}.log"
        log.write_text(f"Traceback ...\n{words}\n\n" * bool(words))
        os.utime(log, (1000 + second, 1000 + second))
    failures = [{"rank": rank, "pid": 1, "exitcode": code} for rank, code, _ in sorted(ranks)]
    (folder / "ranks" / "failures.json").write_text(json.dumps(failures))
    return folder


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([(2, 1, "OSError: disk"), (0, 1, "Connection closed by peer")], (2, "")),
        (
            [(0, 1, "Connection closed by peer"), (3, -9, "iteration 7")],
            (3, "killed by SIGKILL after: "),
        ),
        ([(3, -15, "iteration 7"), (1, 1, "OSError: disk"), (0, -6, "terminate called")], (1, "")),
        ([(3, 0, ""), (0, 1, "last")], (0, "")),
    ],
    ids=[
        "spoke first",
        "was killed",
        "others aborted",
        "printed nothing",
    ],
)
def test_the_rank_that_broke_first_is_blamed_and_not_those_that_followed(ranks, found, tmp_path):
    folder = failed(tmp_path, *ranks)
    words = {rank: text for rank, _, text in ranks}[found[0]]
    status, evidence = (
        Status.KILLED if "KILL" in found[1] else Status.CRASHED,
        f"rank {found[0]}: {found[1]}{words}",
    )
    assert judge(folder, 1) == RunStatus(
        status=status, evidence=evidence, rank=found[0], exit_code=1
    )
