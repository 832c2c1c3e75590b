"""The lock on a folder: one holder at a time among real processes, also after one died, without flock and links."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trilane.utils import folder_lock
from trilane.utils.files import append_line
from trilane.utils.folder_lock import LOCK, FolderLock, Holder


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "POLL_S", 0.001)


def refuse(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def forked(work: Callable[[], None]) -> int:
    """The pid of a child that does the work; it exits with 1 where that raises."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def died_with_the_lock(folder: Path) -> None:
    """A process takes the lock and dies in it."""

    def die() -> None:
        with FolderLock([folder]).held(5):
            os._exit(0)

    os.waitpid(forked(die), 0)
    assert (folder / LOCK).exists()


def hold_again_and_again(folder: Path, times: int) -> None:
    """Enter so often; whoever is inside owns the file `inside`."""
    for _ in range(times):
        with FolderLock([folder]).held(60):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            time.sleep(0.001)
            (folder / "inside").unlink()
            append_line(folder / "count", "1")


@pytest.mark.parametrize("missing", ["nothing", "flock", "link"])
def test_of_several_processes_that_find_a_dead_one_never_two_are_inside(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "flock":
        monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    if missing == "link":
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    for round_ in (1, 2):
        died_with_the_lock(tmp_path)
        pids = [forked(lambda: hold_again_and_again(tmp_path, 5)) for _ in range(4)]
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
        assert (tmp_path / "count").read_text() == "1\n" * 20 * round_
    assert sorted(path.name for path in tmp_path.iterdir()) == ["count"]


def test_a_taker_that_was_delayed_does_not_remove_the_lock_of_the_one_that_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen the dead holder; before it claims that place, another replaces the lock, and holds it."""
    died_with_the_lock(tmp_path)
    create, faster = FolderLock._create, FolderLock([tmp_path])
    inside = faster.held(1)

    def late(self: FolderLock, name: Path, mine: Path) -> bool:
        if self is not faster and name.name != LOCK and not faster.is_ours:
            inside.__enter__()
        return create(self, name, mine)

    monkeypatch.setattr(FolderLock, "_create", late)
    with pytest.raises(ValueError, match=rf"is locked by process {os.getpid()} on "), FolderLock([tmp_path]).held(0.1):
        pass
    assert faster.is_ours
    inside.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())


def test_a_taker_that_died_in_between_is_replaced_too(tmp_path: Path) -> None:
    died_with_the_lock(tmp_path)
    dead = folder_lock._holder(tmp_path / LOCK)
    assert dead is not None
    second = replace(dead, nonce="0123456789abcdef")
    (tmp_path / f".{LOCK}.{dead.nonce}").write_text(json.dumps(asdict(second)))
    with FolderLock([tmp_path]).held(1) as lock:
        assert lock.is_ours and [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(asdict(replace(Holder.this_process(), host="elsewhere", system="b 2", job="7"))),
        json.dumps(asdict(replace(Holder.this_process(), nonce="../../x"))),
        json.dumps(asdict(replace(Holder.this_process(), host="\x1b[2J", system="b 2"))),
        '{"nonce": 1}',
        "[" * 100_000,
        "",
        "\0\0\0",
    ],
    ids=["elsewhere", "a path", "control", "a number", "deep", "empty", "nul"],  # the same in each worker
)
def test_a_holder_that_cannot_be_asked_has_the_lock_until_it_is_silent(text: str, tmp_path: Path) -> None:
    """Of another host, or unreadable: only the age of the file counts, by the clock of the file system."""
    lock = tmp_path / LOCK
    lock.write_text(text)
    with (
        pytest.raises(ValueError, match=r"^run folder=.*: is locked by process \d+ on [ -~]+; try again"),
        FolderLock([tmp_path]).held(0),
    ):
        pass
    os.utime(lock, (time.time(), time.time() - folder_lock.SILENT_S - 5))
    with FolderLock([tmp_path]).held(0) as mine:
        assert mine.is_ours
    assert not list(tmp_path.iterdir())


def test_a_living_holder_gives_signs_of_life_and_sees_when_it_lost_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.001)
    with FolderLock([tmp_path]).held(0) as lock:
        os.utime(tmp_path / LOCK, (0, 0))
        with pytest.raises(ValueError, match="is locked by"), FolderLock([tmp_path]).held(0):
            pass  # silent, but its process is here, and lives
        end = time.monotonic() + 10
        while (tmp_path / LOCK).stat().st_mtime == 0:
            assert time.monotonic() < end
        (tmp_path / LOCK).write_text(json.dumps(asdict(Holder.this_process())))
        assert not lock.is_ours
    assert (tmp_path / LOCK).exists(), "the lock of another stays"


def test_several_folders_are_locked_together_and_all_given_back(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with FolderLock([tmp_path / "b"]).held(0):
        with pytest.raises(ValueError, match="/b: is locked by"), FolderLock([tmp_path / "b", tmp_path / "a"]).held(0):
            pass
        assert not (tmp_path / "a" / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^run folder=.*: cannot be locked: No such file"):
        FolderLock([tmp_path / "none"]).held(0).__enter__()
    monkeypatch.setattr(os, "link", refuse(errno.ENOSPC))
    with pytest.raises(ValueError, match=r"^run folder=.*: cannot be locked: No space left"):
        FolderLock([tmp_path]).held(0).__enter__()


def test_a_line_after_a_torn_one_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, '{"a": 1}')
    with path.open("ab") as file:
        file.write(b'{"b": "\xc3')
    append_line(path, '{"c": 3}')
    assert path.read_bytes() == b'{"a": 1}\n{"b": "\xc3\n{"c": 3}\n'
