"""Where a node's heartbeats lie: on the node, of one start of one run, closed to other users, gone afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import wait_until

from trilane.workspace import node_folder
from trilane.workspace.heartbeat import beats_in, encode, place, read_beats

ENV = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """In place of /dev/shm and /tmp."""
    found = (tmp_path / "shm", tmp_path / "tmp")
    for base in found:
        base.mkdir()
    monkeypatch.setattr(node_folder, "BASES", found)
    return found


def run(tmp_path: Path, name: str = "run") -> Path:
    (tmp_path / name).mkdir(exist_ok=True)
    return tmp_path / name


def test_all_ranks_of_a_node_share_a_folder_and_nobody_else_does(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    """Not another run, start, or node of the run that happens to be on the same machine."""
    first = node_folder.enter(run(tmp_path), ENV)
    assert first.path.parent == bases[0] and first.path.stat().st_mode & 0o777 == 0o700
    assert node_folder.enter(run(tmp_path), ENV).path == first.path
    assert node_folder.Places(run(tmp_path), ENV)() == [first.path]
    others = [
        node_folder.enter(run(tmp_path, "other"), ENV),
        *(node_folder.enter(run(tmp_path), ENV | {name: "9"}) for name in ENV),
    ]
    assert len({node.path for node in (first, *others)}) == 1 + len(others)
    assert node_folder.start_id(ENV) == node_folder.start_id(ENV | {"SLURM_NODEID": "4"})
    assert (run(tmp_path) / node_folder.NODES / "key").stat().st_mode & 0o777 == 0o600


def test_where_the_memory_cannot_be_used_it_is_the_disk_and_then_the_run_folder(
    tmp_path: Path, bases: tuple[Path, Path]
) -> None:
    bases[0].rmdir()
    on_disk = node_folder.enter(run(tmp_path), ENV)
    assert on_disk.path.parent == bases[1] and on_disk.notes == f"{bases[0]}: No such file or directory"

    def is_full(path: Path) -> None:
        if path.parent != run(tmp_path) / node_folder.NODES:
            raise OSError(28, "No space left on device")

    last = node_folder.enter(run(tmp_path), ENV, is_full)
    assert last.path.parent == run(tmp_path) / node_folder.NODES and "No space left" in last.notes
    (last.path / "3.beat").write_bytes(encode(5, "x", 1.0, place()))
    assert read_beats(run(tmp_path))[3].step == 5


def test_a_folder_that_others_could_write_to_or_a_link_is_not_used(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    """As another user may prepare it where the name is known."""
    name = node_folder.enter(run(tmp_path), ENV).path.name
    for prepare in (
        lambda path: path.chmod(0o777),
        lambda path: (path.rename(tmp_path / "aim"), path.symlink_to("aim")),
    ):
        prepare(bases[0] / name)
        assert node_folder.enter(run(tmp_path), ENV).path.parent == bases[1]


def test_a_killed_run_leaves_nothing_for_long_and_a_living_one_is_left_alone(
    tmp_path: Path, bases: tuple[Path, Path]
) -> None:
    code = "import sys, time; from pathlib import Path; from trilane.workspace import node_folder as n\n"
    code += "n.BASES = (Path(sys.argv[1]),); node = n.enter(Path(sys.argv[2]), {'SLURM_JOB_ID': '77'})\n"
    code += "(node.path / '0.beat').write_bytes(b'x'); print(node.path, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(bases[0]), str(run(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        path = Path(rank.stdout.readline().strip())
        os.utime(path, (0, 0))
        node_folder.sweep()
        assert (path / "0.beat").exists() and node_folder.find(run(tmp_path)) == [path]
        rank.kill()
    wait_until(lambda: not node_folder.find(run(tmp_path)), 5, "a dead rank's folder counts as used")
    again = node_folder.enter(run(tmp_path), {"SLURM_JOB_ID": "77"})
    assert again.path == path and not beats_in(path), "the same start again finds no heartbeat of the killed one"
    again.close()
    node_folder.sweep()
    assert path.exists(), "it may be somebody's who is about to lock it"
    os.utime(path, (0, 0))
    node_folder.sweep()
    assert not path.exists()
