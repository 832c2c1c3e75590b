"""Heartbeats lie on the node, of one start of one run, closed to other users, and are gone
afterwards; whoever stands still by them, by this node's clock alone, which the test turns, is
named.
"""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import wait_until

from trilane.workspace import heartbeat
from trilane.workspace.heartbeat import (
    RECORD,
    Heartbeat,
    NodeReport,
    create_record,
    encode,
    own_beats,
    place,
    read_beats,
    remove_records,
    start_id,
)
from trilane_diagnose import stall
from trilane_diagnose.stall import Stall

ENV = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """In place of /dev/shm."""
    found = tmp_path / "shm"
    found.mkdir()
    monkeypatch.setattr(heartbeat, "BASE", found)
    return found


def report(first: int, *steps: int, host: str = "n1", **facts) -> NodeReport:
    ranks = (Heartbeat(rank=first + i, step=n, phase="x", time=0.5, pid=77, host=host, **facts)
             for i, n in enumerate(steps))  # fmt: skip
    return NodeReport(first=first, host=host, start="s", ranks=tuple(ranks))


def test_a_heartbeat_is_read_on_its_node_and_elsewhere_by_the_report(tmp_path, base: Path):
    record = create_record(tmp_path, ENV, 3)
    (path,) = base.iterdir()
    path.with_suffix(".4").write_text("half")
    record[:] = encode(7, "", 12.5, place())
    (found,) = read_beats(tmp_path).values()
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (RECORD, 0o600)
    assert (found.rank, found.step, found.phase, found.time, found.pid) == (
        3,
        7,
        "",
        12.5,
        os.getpid(),
    )
    other = report(9, 1, idle_s=3.0, has_exited=True)
    other.write(tmp_path)
    assert read_beats(tmp_path) == {3: found, 9: other.ranks[0]}
    remove_records(tmp_path, ENV)
    assert not own_beats(tmp_path, ENV)


def test_a_heartbeat_of_a_process_that_no_signal_may_reach_is_damaged(tmp_path, base: Path):
    create_record(tmp_path, ENV, 0)[:] = encode(1, "x", 0.5, {"pid": 1, "host": "n1"})
    assert not own_beats(tmp_path, ENV)


def test_no_other_run_start_or_node_on_the_same_machine_is_mixed_up(tmp_path, base: Path):
    others = [(tmp_path / "other", ENV), *((tmp_path / "run", ENV | {name: "9"}) for name in ENV)]
    kept = [create_record(folder, env, 0) for folder, env in (*others, (tmp_path / "run", ENV))]
    for number, record in enumerate(kept):
        record[:] = encode(number, "x", 1.0, place())
    assert [own_beats(folder, env)[0].step for folder, env in others] == [0, 1, 2, 3]
    assert own_beats(tmp_path / "run", ENV)[0].step == 4
    assert start_id(ENV) == start_id(ENV | {"SLURM_NODEID": "4"})


def test_a_rank_counts_as_running_until_it_is_killed(tmp_path, base: Path):
    code = (
        "import sys, time; from pathlib import Path; from trilane.workspace import heartbeat as h\n"
    )
    code += "h.BASE = Path(sys.argv[1]); r = h.create_record(Path(sys.argv[2]), {'SLURM_JOB_ID': '77'}, 0)\n"
    code += "r[:] = h.encode(1, 'x', 1.0, h.place()); print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(base), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        assert own_beats(tmp_path)[0].pid == rank.pid
        rank.kill()
    wait_until(lambda: not own_beats(tmp_path), 5, "a dead rank counts as running")


class Node:
    """The detector of a node, on a clock that the test turns."""

    def __init__(self, folder: Path, monkeypatch, timeout_s: float) -> None:
        self.now, self.beats = 5000.0, dict[int, Heartbeat]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(stall, "own_beats", lambda *_: dict(self.beats))
        self.stall = Stall(folder, {}, timeout_s)

    def beat(self, *ranks: int, step: int = 7, phase: str = "forward", pid: int = 2) -> None:
        self.beats |= {rank: Heartbeat(rank=rank, step=step, phase=phase, time=self.now, pid=pid, host=platform.node())
                       for rank in ranks}  # fmt: skip

    def stalls_after(self, seconds: float) -> bool:
        self.stall.look()
        self.now += seconds
        self.stall.look()
        return self.stall.is_stalled()


def test_a_change_of_phase_is_progress_and_the_rank_without_is_named(tmp_path, monkeypatch):
    """A rank that has finished may be silent: rank 0 writes the last checkpoint's manifest while
    others have ended.
    """
    node = Node(tmp_path, monkeypatch, 100.0)
    node.beat(2, step=5, phase="end")
    assert not node.stalls_after(101)
    node.beat(0, 1, step=5)
    assert not node.stalls_after(90)
    node.beat(0, step=5, phase="backward")
    assert (
        node.stalls_after(90)
        and node.stall.cause(3) == "no progress for 180 s: rank 1 in iteration 5, forward"
    )


def test_a_rank_that_has_exited_stalls_the_others_until_all_have(tmp_path, monkeypatch):
    """Then torchrun, which may take some seconds to end, says how."""
    node = Node(tmp_path, monkeypatch, 100.0)
    node.beat(0, pid=999_999_999)
    node.beat(1)
    monkeypatch.setattr(stall, "process_state", lambda pid: "gone" if pid > 2 else "S")
    assert node.stalls_after(101)
    assert node.stall.cause(2).endswith("which has exited or does not answer")
    node.beat(1, pid=999_999_998)
    assert not node.stalls_after(101)


def test_a_rank_that_never_began_is_named(tmp_path, monkeypatch):
    node = Node(tmp_path, monkeypatch, 200.0)
    assert node.stalls_after(1050)
    node.beat(0, 2, step=1)
    assert node.stalls_after(1050)
    assert node.stall.cause(3) == "no progress for 1050 s: rank 1 before its first heartbeat"


def test_the_rank_that_has_stood_still_longest_is_named_on_whichever_node(tmp_path, monkeypatch):
    """In the earliest iteration; before it one whose node does not answer, for the others wait for
    its ranks.
    """
    node = Node(tmp_path, monkeypatch, 1000.0)
    node.beat(0, 1, step=7)
    assert node.stalls_after(1001)
    later, earlier = report(2, 7, 7, idle_s=1003.0), report(4, 8, 6, host="n2", idle_s=1.0)
    named = "no progress for 1001 s: rank {} in iteration {}, x"
    assert node.stall.cause(4, [later], {"n1"}) == named.format(2, 7)
    assert node.stall.cause(6, [later, earlier], {"n1", "n2"}) == named.format(5, 6)
    assert (
        node.stall.cause(6, [later, earlier], {"n2"})
        == f"{named.format(2, 7)} on n1, which has exited or does not answer"
    )
