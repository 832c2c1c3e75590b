"""Files that others read while they are written, and that a crash or a full disk may damage."""

import errno
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from trilane.utils.files import Appended, damaged_lines, json_lines, patient_text, read_text, replace_text, set_aside


def failing(number: int, name: str = ""):
    """A function that raises OSError of that number."""

    def raising(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), name)

    return raising


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_replaced_stays_and_no_temporary_file_is_left(call: str, tmp_path: Path, monkeypatch) -> None:
    """The system reports a full disk at the write, at fsync or at the rename."""
    replace_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, call, failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_replaced_file_is_on_the_disk_before_its_name_and_the_name_afterwards(tmp_path: Path, monkeypatch) -> None:
    """fsync(2): a rename is durable only once its folder is synchronised; a file renamed before its content may be
    empty after a crash."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    replace_text(tmp_path / "a", "text")
    assert done == ["file", "rename", "folder"]


def test_a_file_system_that_cannot_sync_folders_is_written_all_the_same(tmp_path: Path, monkeypatch) -> None:
    def files_only(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", files_only)
    replace_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"


def test_two_processes_of_one_id_on_two_hosts_do_not_share_a_temporary_file(tmp_path: Path, monkeypatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(os, "replace", lambda aside, path: names.append(str(aside)))
    for _ in range(2):
        replace_text(tmp_path / "a", "text")
    assert len(set(names)) == 2


def kept(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "earlier").iterdir()}


def test_no_kept_version_takes_the_name_of_another(tmp_path: Path) -> None:
    """Also where one was deleted: three were kept, and .1 is gone."""
    for text in ("one", "two", "three"):
        (tmp_path / "x").write_text(text)
        set_aside(tmp_path / "x")
        (tmp_path / "x").unlink()
    (tmp_path / "earlier/x.1").unlink()
    (tmp_path / "x").write_text("four")
    set_aside(tmp_path / "x")
    assert kept(tmp_path) == {"x.2": "two", "x.3": "three", "x.4": "four"}


def test_versions_kept_at_one_moment_are_all_kept(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("text")
    threads = [threading.Thread(target=set_aside, args=(tmp_path / "x",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(tmp_path) == {f"x.{number}": "text" for number in range(1, 17)}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_version_is_copied_where_the_file_system_has_no_links(number: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    for _ in range(2):
        (tmp_path / "x").write_text("text")
        set_aside(tmp_path / "x")
    assert kept(tmp_path) == {"x.1": "text", "x.2": "text"}


def test_a_folder_in_the_place_of_a_file_moves(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/inside").touch()
    set_aside(tmp_path / "x")
    assert (tmp_path / "earlier/x.1/inside").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "damage",
    [
        b'{"a": ',
        b'{"a": "\xe2\x82',
        b"[1]",
        b"null",
        b"\x80\x03garbage",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "half a character", "list", "null", "binary", "deep", "huge number"],
)
def test_a_damaged_line_is_left_out_and_counted_and_the_others_are_read(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"n": 1}\n' + damage + b'\n\n{"n": 2}\n' + b"\0" * 5000)
    text = read_text(tmp_path / "x")
    assert json_lines(text) == [{"n": 1}, {"n": 2}] and damaged_lines(text) == 1


def test_what_is_appended_behind_the_nuls_of_a_crash_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"n": 1}\n' + b"\0" * 100 + json.dumps({"n": 2}).encode() + b"\n")
    assert [line["n"] for line in json_lines(read_text(tmp_path / "x"))] == [1, 2]


def test_a_missing_file_is_an_empty_text_and_a_folder_is_named(tmp_path: Path) -> None:
    assert read_text(tmp_path / "none") == ""
    with pytest.raises(ValueError, match=rf"^file={tmp_path}: cannot be read"):
        read_text(tmp_path)


def full(path: Path) -> Path:
    """A file on a disk that is full."""
    path.symlink_to("/dev/full")
    return path


def test_what_a_full_disk_refuses_is_written_in_order_once_there_is_room_and_reported_once(tmp_path: Path) -> None:
    notes: list[str] = []
    file = Appended(full(tmp_path / "x"), notes.append)
    for number in range(5):
        file.write(b"line %d\n" % number)
    assert (
        file.waiting == 5 and len(notes) == 1 and notes[0].startswith("x cannot be written (No space left on device)")
    )
    (tmp_path / "x").unlink()
    file.write(b"line 5\n")
    file.write(b"line 6\n")
    assert (tmp_path / "x").read_bytes() == b"".join(b"line %d\n" % number for number in range(7))
    assert file.waiting == 0 and len(notes) == 2 and "can be written again" in notes[1]


def test_memory_for_a_full_disk_is_bounded_and_the_oldest_lines_are_lost(tmp_path: Path) -> None:
    file = Appended(full(tmp_path / "x"), most=30)
    for number in range(10):
        file.write(b"line %d\n" % number)
    (tmp_path / "x").unlink()
    file.flush()
    assert (tmp_path / "x").read_bytes() == b"line 6\nline 7\nline 8\nline 9\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can be mounted by root alone")
def test_half_a_line_that_still_fitted_is_taken_back(tmp_path: Path) -> None:
    """write(2) on a disk that becomes full writes as many bytes as fit."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        (tmp_path / "filler").write_bytes(b"x" * 8192)
        file = Appended(tmp_path / "x")
        file.write(b"one\n")
        file.write(b"2" * 9000 + b"\n")
        assert (tmp_path / "x").read_bytes() == b"one\n" and file.waiting == 1
        (tmp_path / "filler").unlink()
        file.write(b"three\n")
        assert (tmp_path / "x").read_bytes() == b"one\n" + b"2" * 9000 + b"\nthree\n"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_file_that_cannot_be_written_for_another_reason_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Appended(tmp_path / "gone/x", print).write(b"line")


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


def test_the_end_of_a_large_file_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\n" * 100 + "last ü\n".encode())
    assert read_text(tmp_path / "log", 8) == "last ü\n" and read_text(tmp_path / "log", 7) == "ast ü\n"
    assert read_text(tmp_path / "log", 10**6) == read_text(tmp_path / "log") and read_text(tmp_path / "no", 8) == ""
