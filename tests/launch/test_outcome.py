"""The cause of a run's end by its log."""

from pathlib import Path

import pytest

from trilane.launch.outcome import with_cause
from trilane.workspace.status import RunStatus, Status

CRASH = RunStatus(status=Status.CRASHED, evidence="rank 1: exit", rank=1, exit_code=1, seconds=1.0)
XID = "n2: NVRM: Xid (PCI:0000:1b:00): 79, pid=8, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("text", "status", "evidence", "exclude"),
    [
        (XID, "GPU error", f"rank 1: {XID}", "n2"),
        (
            "[rank0]: OSError: [Errno 122] Disk quota exceeded",
            "file system",
            "rank 0: [rank0]: OSError: [Errno 122]",
            "",
        ),
        ("ValueError: heads", "crashed", "rank 1: exit", ""),
        ("Training completed", "crashed", "rank 1: exit", ""),
        ("MemoryError\nSTART b\nValueError: heads", "crashed", "rank 1: exit", ""),
    ],
)
def test_a_crash_has_the_cause_that_its_log_gives(
    text: str, status: str, evidence: str, exclude: str, tmp_path: Path
) -> None:
    (tmp_path / "run.log").write_text(f"START a\n{text}\n")
    found = with_cause(CRASH, tmp_path)
    assert (found.status, found.exclude) == (status, exclude) and found.evidence.startswith(evidence)
    stopped = RunStatus(status=Status.STOPPED, evidence="", rank=None, exit_code=0, seconds=1.0)
    assert with_cause(stopped, tmp_path) == stopped and with_cause(CRASH, tmp_path / "none") == CRASH
