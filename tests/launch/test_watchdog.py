"""A run that stands still is noticed, its ranks are dumped, the right one is named; also without py-spy."""

import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import real_hangs
from plans import changed, run_folder
from plans import small_plan as small
from support import small_plan, wait_until

from trilane.diagnose import capture
from trilane.diagnose.evidence import read_folder
from trilane.diagnose.hang import diagnose_hang
from trilane.slurm.monitor import srun_command
from trilane.workspace import flight_recorder, heartbeat, node_folder, stall_detector
from trilane.workspace.heartbeat import Heartbeat, NodeReport, Progress, encode, place, read_beats
from trilane.workspace.run_folder import reopen
from trilane.workspace.stall_detector import StallDetector
from trilane.workspace.status import read_status


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
@pytest.mark.parametrize(("kind", "single"), [("lock-held", "tp"), ("stopped", "dp"), ("exit", "pp")])
def test_a_real_training_that_hangs_is_dumped_judged_and_ended(
    kind: str, single: str, data: Path, tmp_path: Path
) -> None:
    """Three of the ten of docs/hangs.md, with gloo, in two dimensions of TP, PP and DP each: four processes."""
    result = real_hangs.hang(kind, tmp_path / "run", data, **{single: 1})
    assert result.outcome.rank == result.rank and result.stacks >= 3, result.outcome.evidence
    assert result.outcome.status == ("crashed" if kind == "exit" else "hang")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["rank"] == result.rank
    assert result.rank in diagnose_hang(tmp_path / "run").suspects


def write(folder: Path, rank: int, step: int, phase: str = "forward-compute") -> None:
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / f"{rank}.beat").write_bytes(encode(step, phase, time.time(), place()))


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, 3, 17, "")
    (tmp_path / "ranks" / "4.beat").write_text("half")
    (found,) = read_beats(tmp_path).values()
    assert isinstance(found, Heartbeat) and (found.rank, found.step, found.phase) == (3, 17, "")
    assert (tmp_path / "ranks" / "3.beat").stat().st_size == heartbeat.RECORD


def test_a_pulse_stops_when_one_rank_does_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stall_detector.time, "monotonic", lambda: now[0])
    pulse = StallDetector(tmp_path, 2, 10.0)
    for second in range(40):
        now[0] += 1.0
        write(tmp_path, 0, 5 + second)
        if second <= 25:
            write(tmp_path, 1, 5 + second)
        assert bool(pulse.stalled()) == (second - 25 > 10), second


@pytest.mark.parametrize(("step", "phase", "after"), [(1, "x", 1000.0), (9, "end", 1e9)])
def test_the_first_iteration_may_last_and_the_end_too(
    step: int, phase: str, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(stall_detector.time, "monotonic", lambda: now[0])
    pulse = StallDetector(tmp_path, 1, 200.0)
    write(tmp_path, 0, step, phase)
    assert not pulse.stalled()
    now[0] += after - 10
    assert not pulse.stalled()
    now[0] += 20
    assert bool(pulse.stalled()) == (phase != "end")


def test_off_looks_at_nothing(tmp_path: Path) -> None:
    assert StallDetector(tmp_path / "nowhere", 4, 0.0).stalled() == ""


STUCK = """
import faulthandler, sys, time
from trilane.diagnose.capture import STACKS
faulthandler.register(STACKS, file=open(sys.argv[1], "ab"), all_threads=True)
def waits_for_ever():
    print("ready", flush=True)
    time.sleep(1000)
waits_for_ever()
"""


def test_where_py_spy_may_not_attach_faulthandler_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "pyspy_dump", lambda pid, stopped: ("", "Permission denied"))
    (tmp_path / "ranks").mkdir()
    command = [sys.executable, "-c", STUCK, str(tmp_path / "ranks" / "0.stack")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=real_hangs.library()) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            pid = b"%d %s" % (child.pid, place().split()[1])
            (tmp_path / "ranks" / "0.beat").write_bytes(encode(3, "", time.time(), pid))
            stacks = capture.capture(tmp_path, small_plan())
        finally:
            child.kill()
    assert "waits_for_ever" in (stacks / "rank_0.txt").read_text()
    assert diagnose_hang(stacks).groups[0].frames[0].startswith("waits_for_ever")


RECORDER = """
import os, sys, time
from pathlib import Path
from trilane.workspace import flight_recorder as flight
ranks, answer = Path(sys.argv[1]), sys.argv[2]
told = flight.environment(ranks, "0")
pipe = told["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
os.mkfifo(pipe)
end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while not os.read(end, 128):
    time.sleep(0.05)
if answer:
    Path(told["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_text(answer)
time.sleep(1000)
"""
CALL = '{"entries": [{"process_group": ["0", "default_pg"], "collective_seq_id": 1, "profiling_name": "nccl:barrier"}]}'


@pytest.mark.parametrize("answer", [CALL, ""], ids=["answers", "is stuck"])
def test_a_capture_asks_the_flight_recorder_and_does_not_wait_for_ever(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's DumpPipe listens: a rank that answers, beside an earlier dump, and one that is stuck."""
    monkeypatch.setattr(flight_recorder, "DUMP_S", 20.0 if answer else 0.5)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / f"{flight_recorder.DUMP}0").write_text("of an earlier attempt")
    command = [sys.executable, "-c", RECORDER, str(ranks), answer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=real_hangs.library()) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            pid = b"%d %s" % (child.pid, place().split()[1])
            (ranks / "0.beat").write_bytes(encode(3, "", time.time(), pid))
            stacks = capture.capture(tmp_path, small_plan())
        finally:
            child.kill()
    found = [path.read_text() for path in stacks.glob(f"{flight_recorder.DUMP}*")]
    assert found == ([answer] if answer else [])
    assert (0 in read_folder(stacks).recordings) == bool(answer)


def test_without_nccl_nobody_is_asked_and_nothing_is_waited_for(tmp_path: Path) -> None:
    """No pipe; one at which nobody reads any more; a file system that takes none."""
    os.mkfifo(tmp_path / f"{flight_recorder.PIPE}1.pipe")
    assert flight_recorder.ask(tmp_path, [0, 1]) == {}
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in flight_recorder.environment(tmp_path, "1")
    assert not list(tmp_path.iterdir()), "what was left is gone, and nothing new is there"
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in flight_recorder.environment(tmp_path / "missing", "1")


def test_a_pipe_of_an_earlier_attempt_is_taken_away_and_not_kept(tmp_path: Path) -> None:
    """Whoever copies or reads a run folder would wait at it for ever."""
    (tmp_path / "ranks").mkdir()
    os.mkfifo(tmp_path / "ranks" / f"{flight_recorder.PIPE}0.pipe")
    (tmp_path / "ranks" / "0.log").write_text("said")
    reopen(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if not path.is_dir()] == ["0.log.1"]


def test_the_second_step_takes_no_gpu_and_overlaps() -> None:
    said = " ".join(srun_command("2180718", 40, ["true"]))
    beside = "--overlap --mem=0 --gres=gpu:0 --cpus-per-task=1"
    assert said.startswith(f"srun --jobid=2180718 {beside} --nodes=40 --ntasks=40 --ntasks-per-node=1")
    with pytest.raises(ValueError, match="job=1;rm: must be a job's number"):
        srun_command("1;rm", 1, ["true"])


@pytest.mark.slow
def test_without_our_launcher_the_first_rank_of_a_node_starts_the_watchdog_and_it_ends_the_job(
    data: Path, tmp_path: Path
) -> None:
    """As srun or a foreign torchrun start the engine: nobody of ours looks on from outside."""
    plan = changed(small(data, iters=100_000, source="mock", dp=2), "run", hang_timeout_s=5.0)
    folder = run_folder(plan, tmp_path / "run")
    planted = str(Path(real_hangs.__file__).parent / "planted")
    env = real_hangs.library()
    env |= {"PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], planted]), "TRILANE_PLANT": "pipe 1 3"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    command += ["-m", "trilane.engine", str(folder / "plan.json")]
    done = subprocess.run(command, env=env | {"GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=400)
    outcome = read_status(folder)
    assert (outcome.status, outcome.rank, done.returncode != 0) == ("hang", 1, True), done.stderr[-2000:]
    assert "sitecustomize.py" in outcome.evidence and len(list((folder / "stacks").glob("*/rank_*.json"))) == 2


def test_a_watchdog_of_another_node_answers_a_capture(tmp_path: Path) -> None:
    """Any new folder below stacks/ is a question to every node: here it is asked by hand."""
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    write(tmp_path, 0, 3)
    parent = subprocess.Popen([sys.executable, "-c", WATCHED, str(tmp_path)], env=real_hangs.library())
    try:
        asked = itertools.count()

        def answered() -> bool:
            """Ask again: what is there before the watchdog is, is no question to it."""
            (tmp_path / "stacks" / str(next(asked))).mkdir(parents=True)
            return bool(list(tmp_path.glob("stacks/*/states-*.json")))

        wait_until(answered, 60, "no answer")
    finally:
        parent.kill()
        parent.wait()
    assert list(tmp_path.glob("stacks/*/rank_0.*"))


def test_a_watchdog_whose_rank_has_ended_before_it_began_ends_too(tmp_path: Path) -> None:
    """It would hold the job's output open for ever."""
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    command = [sys.executable, "-m", "trilane.launch.watchdog", str(tmp_path), "999999999"]
    done = subprocess.run(command, env=real_hangs.library(), timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, "by its own hand"


def test_a_watchdog_ends_with_its_rank_while_it_waits_for_other_nodes(tmp_path: Path) -> None:
    """SLURM waits for every process of a job that it ends, and drains the node that keeps one."""
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    write(tmp_path, 0, 3)
    left = f"999999999 {platform.node()}".encode()
    (tmp_path / "ranks" / "1.beat").write_bytes(encode(3, "x", time.time(), left))
    beat = Heartbeat(rank=2, step=3, phase="x", time=1.0, pid=7, host="elsewhere")  # never answers
    start, ranks = node_folder.start_id(real_hangs.library()), (Progress(beat=beat, idle_s=0.0),)
    (tmp_path / node_folder.NODES).mkdir()
    NodeReport(first=2, host="elsewhere", start=start, number=1, ranks=ranks).write(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", WATCHED, str(tmp_path)], env=real_hangs.library())
    wait_until(lambda: bool(list(tmp_path.glob("stacks/*/states-*.json"))), 60, "no capture")
    (watchdog,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    watchdog.wait(5)
    assert list(tmp_path.glob("stacks/*/topology.json"))


WATCHED = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as ranks do
subprocess.run([sys.executable, "-m", "trilane.launch.watchdog", sys.argv[1], str(os.getpid())])
"""
