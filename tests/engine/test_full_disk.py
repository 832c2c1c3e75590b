"""A disk that is 100 % full: the training goes on, says so, loses nothing that fits later, and ends
with a status.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plans import changed, run_folder, small_plan, steps
from support import wait_until

from trilane.config.plan import Plan
from trilane.workspace.heartbeat import read_beats
from trilane.workspace.status import read_status

pytestmark = pytest.mark.slow

END = 60
FULL = 10  # iterations, at least, on the full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def plan_for(data: Path) -> Plan:
    """A tiny plan that writes all that a run can write: a line an iteration, and phases."""
    plan = small_plan(data, iters=END, source="mock", mbs=1, gbs=1)
    shape = replace(plan.shape, num_layers=1, seq_length=16)
    plan = changed(plan, "run", timers=True)
    return replace(plan, shape=shape)


def at(folder: Path) -> int:
    """The iteration by the heartbeat, which is in memory that the disk has already given."""
    return max((beat.step for beat in read_beats(folder).values()), default=0)


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    for size in (65536, 1):
        with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
            while file.write(b"x" * size):
                pass


def interrupt(disk: Path, folder: Path) -> None:
    """Fill the disk in the middle of the run, and free it some iterations later."""
    wait_until(lambda: at(folder) > 5, 180, "iteration 5")
    fill(disk)
    full_at = at(folder)
    wait_until(lambda: at(folder) > full_at + FULL, 180, "iterations on the full disk")
    (disk / "filler").unlink()


def test_a_disk_that_is_full_for_a_while_changes_and_loses_nothing(
    disk: Path, fork: Callable[..., None], data: Path, tmp_path: Path
) -> None:
    plan = plan_for(data)
    calm, folder = run_folder(plan, tmp_path / "calm"), run_folder(plan, disk / "run")
    fork(1, calm)
    other = threading.Thread(target=interrupt, args=(disk, folder))
    other.start()
    fork(1, folder)
    other.join()
    assert [s["iteration"] for s in steps(folder)] == list(range(1, END + 1))
    assert [s["lm_loss"] for s in steps(folder)] == [s["lm_loss"] for s in steps(calm)]
    assert read_status(folder).evidence == f"iteration {END} of {END}"
    log = (folder / "0.log").read_text()
    first, again = [line for line in log.splitlines() if "steps.jsonl" in line]
    assert "cannot be written (No space left" in first and "can be written again" in again
    assert log.count("consumed samples") == END, "the lines of the log wait for free space, too"
    phases = [len((f / "ranks/0.phases").read_text().splitlines()) for f in (calm, folder)]
    assert phases == [END, END]
