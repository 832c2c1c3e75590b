"""The lock on a folder: one holder at a time among real processes, also after one died."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trilane.utils.files import append_line
from trilane.utils.folder_lock import FolderLock


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
    assert (folder / "run.lock").exists()


def hold_again_and_again(folder: Path, times: int) -> None:
    """Enter so often; whoever is inside owns the file `inside`."""
    for _ in range(times):
        with FolderLock([folder]).held(60):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            time.sleep(0.001)
            (folder / "inside").unlink()
            append_line(folder / "count", "1")


def test_of_several_processes_that_find_a_dead_one_never_two_are_inside(tmp_path):
    for round_ in range(1, 4):
        died_with_the_lock(tmp_path)
        pids = [forked(lambda: hold_again_and_again(tmp_path, 3)) for _ in range(4)]
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
        assert (tmp_path / "count").read_text() == "1\n" * 12 * round_
    assert sorted(path.name for path in tmp_path.iterdir()) == ["count"]


@pytest.mark.parametrize("text", ["\0\0\0", "run.lock\x1felsewhere\x1f7\x1f1"])
def test_a_holder_that_cannot_be_asked_has_the_lock_until_it_is_silent(text: str, tmp_path):
    """Of another host, or unreadable: only the age of the file counts, which says until when it is
    held.
    """
    lock = tmp_path / "run.lock"
    lock.write_text(text)
    os.utime(lock, (time.time(), time.time() - 5))
    with (
        pytest.raises(ValueError, match=r"is locked by .*; try again"),
        FolderLock([tmp_path]).held(0),
    ):
        pass
    os.utime(lock, (time.time(), time.time() - 11))
    with FolderLock([tmp_path]).held(0):
        pass
    assert not list(tmp_path.iterdir())


def test_several_folders_are_locked_together_and_all_given_back(tmp_path):
    with pytest.raises(ValueError, match=r"^run folder=.*: cannot be locked: No such file"):
        FolderLock([tmp_path / "none"]).held(0).__enter__()
    for name in "ab":
        (tmp_path / name).mkdir()
    with FolderLock([tmp_path / "b"]).held(0):
        with (
            pytest.raises(ValueError, match="/b: is locked by"),
            FolderLock([tmp_path / "b", tmp_path / "a"]).held(0),
        ):
            pass
        assert not list((tmp_path / "a").iterdir())
