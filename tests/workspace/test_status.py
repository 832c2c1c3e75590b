"""status.json on a disk that is full, or damaged."""

import errno
import os

import pytest

from trilane.workspace import status as module
from trilane.workspace.status import RunStatus, Status, known_status, write_status


def outcome(evidence: str) -> RunStatus:
    return RunStatus(status=Status.STOPPED, evidence=evidence, rank=None, exit_code=0, seconds=1.5)


def test_a_status_on_a_full_disk_is_not_half_written(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "replace_text", refused)
    assert not write_status(tmp_path, outcome("end")) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        "",
        '{"status": 3, "evidence": "", "rank": null, "exit_code": 0, "seconds": 0}',
    ],
)
def test_a_damaged_status_counts_as_none(damage: str, tmp_path):
    (tmp_path / "status.json").write_text(damage)
    assert known_status(tmp_path) is None
