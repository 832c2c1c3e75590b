"""A disk that is 100 % full: the training goes on, says so, loses nothing that fits later, and ends
with a status.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plans import changed, run_folder, small_plan, steps
from support import wait_until

from trilane.config.plan import Plan
from trilane.launch.local import environment
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
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]).returncode
    ):
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
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while file.write(b"x" * 65536):
            pass
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while file.write(b"x"):
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
    assert (read_status(folder).status, read_status(folder).evidence) == (
        "completed",
        f"iteration {END} of {END}",
    )
    log = (folder / "0.log").read_text()
    said = [line for line in log.splitlines() if "steps.jsonl" in line]
    assert (
        len(said) == 2
        and "cannot be written (No space left" in said[0]
        and "can be written again" in said[1]
    )
    assert log.count("consumed samples") == END, "the lines of the log wait for free space, too"
    phases = [len((f / "ranks/0.phases").read_text().splitlines()) for f in (calm, folder)]
    assert phases == [END, END]


def test_a_disk_that_stays_full_ends_with_a_status(disk: Path, data: Path) -> None:
    """By the launcher: on its terminal and by its exit code."""
    plan = changed(plan_for(data), "run", train_iters=100_000)
    folder = run_folder(plan, disk / "run")
    command = [sys.executable, "-m", "trilane", "train", str(folder / "plan.json")]
    with subprocess.Popen(command, env=environment(1), stdout=-1, stderr=-1, text=True) as launcher:
        wait_until(lambda: at(folder) > 5, 180, "iteration 5")
        fill(disk)
        full_at = at(folder)
        wait_until(lambda: at(folder) > full_at + 20 * FULL, 180, "some seconds on the full disk")
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=180)
    assert err.count("no space is left on the disk") == 1, err
    assert "stopped after" in out and launcher.returncode == 3
    assert not (folder / "status.json").exists()
    lines = (folder / "steps.jsonl").read_bytes()
    assert lines.endswith(b"}\n") and [s["iteration"] for s in steps(folder)] == list(
        range(1, lines.count(b"\n") + 1)
    )
