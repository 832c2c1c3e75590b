"""Files of slices: what is closed is on the disk, and a full disk is reported and not raised."""

import errno
import os
from pathlib import Path

import torch

from trilane.engine.checkpoint.slices import SliceFile


def test_a_closed_file_was_synchronised_with_all_its_bytes(tmp_path: Path, monkeypatch) -> None:
    """fsync(2): without it, a crash after the save may leave a complete-looking checkpoint of zeros."""
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    file = SliceFile(tmp_path / "a", [("w", (2, 3))])
    file.add(torch.ones(2, 3))
    size, _ = file.close()
    assert sizes == [size] == [(tmp_path / "a").stat().st_size]


def test_a_disk_that_is_full_at_the_last_moment_is_an_error_of_the_file(tmp_path: Path, monkeypatch) -> None:
    """fsync is where a network file system reports it; the other ranks wait in a collective meanwhile."""

    def full(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    file = SliceFile(tmp_path / "a", [("w", (2,))])
    file.add(torch.ones(2))
    file.close()
    assert file.error == "Disk quota exceeded"
