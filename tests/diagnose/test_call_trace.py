"""Where each rank's trace ends is read from its tail alone, and the ring of calls keeps the last ones only."""

import subprocess
import sys
from pathlib import Path

import pytest

from trilane.cli.app import main
from trilane.diagnose.hang.call_trace import groups, last_calls
from trilane.engine.monitor.heartbeat import Ring
from trilane.workspace.heartbeat import SLOT, read_calls

LOOP = " --- modulename: training, funcname: train\ntraining.py(851):     loss = train_step(\n"
STUCK = " --- modulename: distributed_c10d, funcname: broadcast\ndistributed_c10d.py(1191):         work.wait()\n"


def trace(path: Path, end: str, size: int = 0) -> Path:
    """A trace that ends like that, with a hole of `size` bytes before it."""
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(b"\n" + (LOOP * 3 + end).encode())
    return path


def test_the_last_call_of_each_rank_comes_from_the_tail_the_rarest_first(tmp_path: Path) -> None:
    for rank in range(8):
        trace(tmp_path / f"trace-node0-{rank}-83599{rank}.txt", STUCK if rank == 3 else LOOP, 45_000_000)
    first, *_ = groups(last_calls(tmp_path))
    assert first == (
        "broadcast (distributed_c10d)",
        "distributed_c10d.py:1191  work.wait()",
        ["trace-node0-3-835993"],
    )


def test_a_last_call_long_before_the_end_is_found_too(tmp_path: Path) -> None:
    """A loop that runs a million lines calls nothing."""
    trace(tmp_path / "rank_0.txt", STUCK + "data.py(7):     i += 1\n" * 20_000)
    (call,) = last_calls(tmp_path)
    assert (call.rank, call.function, call.line) == ("0", "broadcast (distributed_c10d)", "data.py:7  i += 1")


def test_a_trace_cut_within_a_line_and_other_files_do_no_harm(tmp_path: Path) -> None:
    trace(tmp_path / "rank_0.txt", STUCK + "distributed_c10d.py(11")
    (tmp_path / "notes.txt").write_text("nothing\n")
    (tmp_path / "empty.txt").touch()
    assert [call.line for call in last_calls(tmp_path)] == ["distributed_c10d.py:1191  work.wait()"]


def test_a_folder_without_traces_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "calls", str(tmp_path)]) == 2
    assert "holds no trace" in capsys.readouterr().err
    assert main(["debug", "calls", str(tmp_path / "no")]) == 2


TRACED = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from trilane.engine.monitor import heartbeat
import chosen, other
heartbeat.trace(Path({ring!r}), ["chosen"], 6)
for _ in range(1000):
    other.f()
    chosen.outer()
import os
os._exit(9)
"""


def test_the_ring_keeps_the_last_calls_of_the_chosen_packages_also_of_a_process_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "chosen.py").write_text("def inner(): pass\ndef outer():\n    inner()\n")
    (tmp_path / "other.py").write_text("def f(): pass\n")
    ring = tmp_path / "0.calls"
    code = TRACED.format(folder=str(tmp_path), ring=str(ring))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    calls = [line.split(" ", 2)[1:] for line in read_calls(ring)]
    assert len(calls) == 6 and {sign for sign, _ in calls} == {">", "<"}
    assert all("chosen.py" in name for _, name in calls) and ring.stat().st_size == 6 * SLOT
    assert last_calls(tmp_path)[0].function.startswith(("inner", "outer"))


def test_the_ring_writes_over_its_oldest_call(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "0.calls", ["trilane"], 3)
    for number in range(5):
        ring.write(b">", b" f%d" % number)
    assert [line.split()[2] for line in read_calls(tmp_path / "0.calls")] == ["f2", "f3", "f4"]
