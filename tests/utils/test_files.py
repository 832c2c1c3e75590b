"""Files that others read while they are written, and that a crash or a full disk may damage."""

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest

from trilane.utils.files import (
    Appended,
    json_lines,
    patient_text,
    read_text,
    replace_text,
    set_aside,
)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_replaced_stays_and_no_temporary_file_is_left(
    call: str, tmp_path: Path, monkeypatch
) -> None:
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


def kept(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "earlier").iterdir()}


def test_no_kept_version_takes_the_name_of_another(tmp_path: Path) -> None:
    """Also where one was deleted, and where several are kept at one moment."""
    for text in ("one", "two"):
        (tmp_path / "x").write_text(text)
        set_aside(tmp_path / "x")
    (tmp_path / "earlier/x.1").unlink()
    (tmp_path / "x").write_text("three")
    threads = [threading.Thread(target=set_aside, args=(tmp_path / "x",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(tmp_path) == {"x.2": "two", **{f"x.{number}": "three" for number in range(3, 19)}}


@pytest.mark.parametrize(
    "damage",
    [
        b'{"a": ',
        b'{"a": "\xe2\x82',
        b"[1]",
        b"\x80\x03garbage",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "half a character", "list", "binary", "deep", "huge number"],
)
def test_a_damaged_line_is_left_out_and_the_others_are_read(damage: bytes, tmp_path: Path) -> None:
    """A crash leaves NULs, behind which the next attempt appends."""
    (tmp_path / "x").write_bytes(b'{"n": 1}\n' + damage + b"\n\n" + b"\0" * 5000 + b'{"n": 2}\n')
    text = read_text(tmp_path / "x")
    assert json_lines(text) == [{"n": 1}, {"n": 2}]


def test_the_end_of_a_file_is_read_alone_a_missing_one_is_empty_and_a_folder_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").write_bytes(b"first\n" * 100 + "last ü\n".encode())
    assert (
        read_text(tmp_path / "log", 8) == "last ü\n" and read_text(tmp_path / "log", 7) == "ast ü\n"
    )
    assert (
        read_text(tmp_path / "log", 10**6) == read_text(tmp_path / "log")
        and read_text(tmp_path / "no", 8) == ""
    )
    with pytest.raises(ValueError, match=rf"^file={tmp_path}: cannot be read"):
        read_text(tmp_path)


def test_what_a_full_disk_refuses_is_written_in_order_once_there_is_room_and_reported_once(
    tmp_path: Path,
) -> None:
    notes: list[str] = []
    (tmp_path / "x").symlink_to("/dev/full")
    file = Appended(tmp_path / "x", notes.append)
    for number in range(5):
        file.write(b"line %d\n" % number)
    assert len(notes) == 1 and notes[0].startswith("x cannot be written (No space left on device)")
    (tmp_path / "x").unlink()
    file.write(b"line 5\n")
    assert (tmp_path / "x").read_bytes() == b"".join(b"line %d\n" % number for number in range(6))
    assert len(notes) == 2 and "can be written again" in notes[1]
    with pytest.raises(OSError, match="No such file"):
        Appended(tmp_path / "gone/x", print).write(b"line")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can be mounted by root alone")
def test_half_a_line_that_still_fitted_is_taken_back(tmp_path: Path) -> None:
    """write(2) on a disk that becomes full writes as many bytes as fit."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        (tmp_path / "filler").write_bytes(b"x" * 8192)
        file = Appended(tmp_path / "x")
        file.write(b"one\n")
        file.write(b"2" * 9000 + b"\n")
        assert (tmp_path / "x").read_bytes() == b"one\n"
        (tmp_path / "filler").unlink()
        file.write(b"three\n")
        assert (tmp_path / "x").read_bytes() == b"one\n" + b"2" * 9000 + b"\nthree\n"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_what_a_process_prints_on_a_full_disk_is_kept_for_later(tmp_path: Path) -> None:
    handle = os.open("/dev/full", os.O_WRONLY)
    stream = patient_text(handle)
    print("one", file=stream, flush=True)
    print("two \ud800", file=stream)
    with (tmp_path / "log").open("wb") as log:
        os.dup2(log.fileno(), handle)
    print("three", file=stream)
    os.close(handle)
    assert (tmp_path / "log").read_text() == "one\ntwo \\ud800\nthree\n"
