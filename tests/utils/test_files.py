"""Files that others read while they are written, and that a crash or a full disk may damage."""

import errno
import os
import subprocess
import sys

import pytest

from trilane.utils.files import (
    Appended,
    json_lines,
    patient_text,
    read_text,
    replace_text,
)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_replaced_stays_and_no_temporary_file_is_left(
    call: str, tmp_path, monkeypatch
):
    """The system reports a full disk at the write, at fsync or at the rename."""

    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replace_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (
        tmp_path / "a"
    ).read_text() == "old"


@pytest.mark.parametrize(
    "damage",
    [
        b'{"a": ',
        b'{"a": "\xe2\x82',
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "half a character", "deep", "huge number"],
)
def test_a_damaged_line_is_left_out_and_the_others_are_read(damage: bytes, tmp_path):
    """A crash leaves NULs, behind which the next attempt appends."""
    (tmp_path / "x").write_bytes(b'{"n": 1}\n' + damage + b"\n\n" + b"\0" * 5000 + b'{"n": 2}\n')
    text = read_text(tmp_path / "x")
    assert json_lines(text) == [{"n": 1}, {"n": 2}]


def test_what_a_full_disk_refuses_is_written_in_order_once_there_is_room(tmp_path):
    (tmp_path / "x").symlink_to("/dev/full")
    file = Appended(tmp_path / "x")
    for number in range(5):
        file.write(b"line %d\n" % number)
    (tmp_path / "x").unlink()
    file.write(b"line 5\n")
    assert (tmp_path / "x").read_bytes() == b"".join(b"line %d\n" % number for number in range(6))
    with pytest.raises(OSError, match="No such file"):
        Appended(tmp_path / "gone/x").write(b"line")
    command = [sys.executable, "-m", "trilane.utils.append", f"{tmp_path}/y"]
    with open("/dev/full", "wb") as full:
        subprocess.run(command, input=b"line\n", stdout=full, check=True)
    assert (tmp_path / "y").read_bytes() == b"line\n", "whatever becomes of the other copy"


def test_what_a_process_prints_on_a_full_disk_is_kept_for_later(tmp_path):
    handle = os.open("/dev/full", os.O_WRONLY)
    stream = patient_text(handle)
    print("one", file=stream, flush=True)
    print("two \ud800", file=stream)
    with (tmp_path / "log").open("wb") as log:
        os.dup2(log.fileno(), handle)
    print("three", file=stream)
    os.close(handle)
    assert (tmp_path / "log").read_text() == "one\ntwo \\ud800\nthree\n"
