"""Heartbeats lie on the node, of one start of one run, closed to other users, and are gone afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import wait_until

from trilane.workspace import heartbeat
from trilane.workspace.heartbeat import (
    RECORD,
    Heartbeat,
    NodeReport,
    beats_in,
    encode,
    enter,
    node_folders,
    place,
    read_beats,
    start_id,
    sweep,
)

ENV = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """In place of /dev/shm and /tmp."""
    found = (tmp_path / "shm", tmp_path / "tmp")
    for base in found:
        base.mkdir()
    monkeypatch.setattr(heartbeat, "BASES", found)
    return found


def test_a_heartbeat_survives_its_file_and_a_report(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    where, notes = enter(tmp_path, ENV)
    (where / "3.beat").write_bytes(encode(7, "", 12.5, place()))
    (where / "4.beat").write_text("half")
    (found,) = read_beats(tmp_path).values()
    assert (notes, where.parent, (where / "3.beat").stat().st_size) == ("", bases[0], RECORD)
    assert (found.rank, found.step, found.phase, found.time, found.pid) == (3, 7, "", 12.5, os.getpid())
    other = Heartbeat(rank=9, step=1, phase="x", time=0.5, pid=77, host="n1", idle_s=3.0, has_exited=True)
    NodeReport(first=8, host="n1", start="s", number=1, ranks=(other,)).write(tmp_path)
    assert read_beats(tmp_path) == {3: found, 9: other}


def test_all_ranks_of_a_node_share_a_folder_and_nobody_else_does(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    """Not another run, start, or node of the run that happens to be on the same machine."""
    first, _ = enter(tmp_path / "run", ENV)
    assert first.stat().st_mode & 0o777 == 0o700 and enter(tmp_path / "run", ENV)[0] == first
    assert node_folders(tmp_path / "run", ENV) == node_folders(tmp_path / "run") == [first]
    others = [enter(tmp_path / "other", ENV)[0], *(enter(tmp_path / "run", ENV | {name: "9"})[0] for name in ENV)]
    assert len({first, *others}) == 1 + len(others)
    assert start_id(ENV) == start_id(ENV | {"SLURM_NODEID": "4"})


def test_where_the_memory_is_full_missing_or_of_others_it_is_the_disk(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    def is_full(path: Path) -> None:
        if path.parent == bases[0]:
            raise OSError(28, "No space left on device")

    where, notes = enter(tmp_path, ENV, is_full)
    assert (where.parent, notes) == (bases[1], f"{bases[0]}: No space left on device")
    prepared = bases[0] / where.name
    prepared.chmod(0o777)
    assert enter(tmp_path, ENV)[0] == where
    prepared.rename(tmp_path / "aim")
    prepared.symlink_to(tmp_path / "aim")
    assert enter(tmp_path, ENV)[0] == where
    prepared.unlink()
    bases[0].rmdir()
    assert enter(tmp_path, ENV)[1] == f"{bases[0]}: No such file or directory"


def test_a_killed_run_leaves_nothing_for_long_and_a_living_one_is_left_alone(
    tmp_path: Path, bases: tuple[Path, Path]
) -> None:
    code = "import sys, time; from pathlib import Path; from trilane.workspace import heartbeat as h\n"
    code += "h.BASES = (Path(sys.argv[1]),); path, _ = h.enter(Path(sys.argv[2]), {'SLURM_JOB_ID': '77'})\n"
    code += "(path / '0.beat').write_bytes(b'x'); print(path, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(bases[0]), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        path = Path(rank.stdout.readline().strip())
        sweep()
        assert (path / "0.beat").exists() and node_folders(tmp_path) == [path]
        rank.kill()
    wait_until(lambda: not node_folders(tmp_path), 5, "a dead rank's folder counts as used")
    assert enter(tmp_path, {"SLURM_JOB_ID": "77"})[0] == path
    assert not beats_in(path), "the same start again finds no heartbeat of the killed one"
    left = bases[1] / path.name
    left.mkdir(mode=0o700)
    sweep()
    assert path.exists() and not left.exists()
