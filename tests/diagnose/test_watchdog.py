"""A run that stands still is noticed, its ranks are dumped, the right one is named; also without
py-spy.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from plans import changed, run_folder
from plans import small_plan as small
from support import REPOSITORY, small_plan, wait_until

from trilane.launch.local import train_local
from trilane.workspace import heartbeat, ledger
from trilane.workspace.heartbeat import (
    Heartbeat,
    NodeReport,
    encode,
    own_beats,
    place,
    start_id,
)
from trilane.workspace.pace import RESTART, Pace, slowness
from trilane.workspace.status import known_status
from trilane_diagnose import capture
from trilane_diagnose.evidence import read_folder
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.watchdog import Slowness

PLANTED = REPOSITORY / "tests/planted"
LIBRARY = {**os.environ, "PYTHONPATH": str(REPOSITORY / "lib")}  # of a child that needs trilane
# also: lock-held pipe mismatch slow
HANGS = os.environ.get("TRILANE_HANGS", "stopped exit").split()


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
@pytest.mark.parametrize("kind", HANGS)
def test_a_real_training_that_hangs_is_dumped_judged_and_ended(
    kind: str, data, tmp_path, monkeypatch
):
    """The megatron engine with gloo, TP 2 x PP 2."""
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=os.pathsep)
    monkeypatch.setenv("TRILANE_PLANT", f"{kind} 2 3")
    plan = small(data, iters=100_000, source="mock", tp=2, pp=2)
    folder = run_folder(changed(plan, "run", hang_timeout_s=6.0), tmp_path / "run")
    outcome = train_local(folder, show_progress=False, timeout_s=150)
    assert (outcome.rank, known_status(folder).rank) == (2, 2), outcome.evidence
    assert outcome.status == ("crashed" if kind == "exit" else "hang")
    assert 2 in diagnose_hang(folder).suspects


def paced(lost: float) -> dict[int, Heartbeat]:
    """Four ranks that take 1 s on two hosts of two, of which rank 3 works 3 s longer; so much of a
    restart is lost.
    """
    beats = {}
    for rank in range(4):
        excess = (0.0, 3.0 * (rank == 3), 0.0, 0.0)
        late = 20 if lost else 0
        own = Pace(late=late, lost=lost, usual_s=1.0, now_s=4.0, excess_s=excess)
        beats[rank] = Heartbeat(
            rank=rank, host="ab"[rank // 2], pace=own, step=30, phase="x", time=1.0, pid=7
        )
    return beats


@pytest.mark.parametrize(
    ("spares", "advice"), [(1, "it saves now; slow node: again on spare"), (0, "with --exclude=b")]
)
def test_a_slow_node_is_named_once_all_report_it_and_left_for_a_spare(
    spares: int, advice: str, tmp_path, monkeypatch
):
    """Once all nodes say that a restart would have cost less, or that of rank 0 a tenth later;
    again only for another place, until the run is as fast as before.
    """
    plan = small_plan(dp=4, gbs=8)
    plan = replace(plan, cluster=replace(plan.cluster, gpus_per_node=2, max_nodes=2))
    ledger.note(tmp_path, "nodes", "7", chosen=["a", "b"], left_out={"c": "is slow"})
    (tmp_path / "ranks").mkdir()
    (tmp_path / "save").write_text(RESTART)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(3 + spares))
    slow = Slowness(tmp_path, plan)
    assert not (tmp_path / "save").exists(), "of an attempt that ended before"

    def news(lost: float) -> str:
        beats = paced(lost)
        return slow.news({rank: beats[rank] for rank in (0, 1)}, "77.0")

    def report(lost: float) -> None:
        ranks = (paced(lost)[2], paced(lost)[3])
        NodeReport(first=2, host="b", start="77.0", ranks=ranks).write(tmp_path)

    for lost in (0, 0.9, 1.0, 1.05, 0):
        assert news(lost) == "", "the other node has not reported"
    report(1.0)
    line = news(1.05)
    assert line.startswith("SLOW since iteration 10: ranks 3 on b, forward-compute takes")
    assert advice in line
    assert slowness(tmp_path) == (line, ("b",)) and (tmp_path / "save").exists() is bool(spares)
    assert news(1.2) == ""
    assert news(0) == "as fast as usual again, since iteration 30"
    assert slowness(tmp_path) == ("", ()) and not (tmp_path / "save").exists()


STUCK = """
import faulthandler, sys, time
from trilane.workspace.heartbeat import STACKS
faulthandler.register(STACKS, file=open(sys.argv[1], "ab"), all_threads=True)
def waits_for_ever():
    print("ready", flush=True)
    time.sleep(1000)
waits_for_ever()
"""
RECORDER = """
import os, sys, time
from pathlib import Path
from trilane.workspace import flight_recorder as flight
told = flight.environment(Path(sys.argv[1]).parent, "0")
pipe = told["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
os.mkfifo(pipe)
end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while not os.read(end, 128):
    time.sleep(0.05)
Path(told["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_text(sys.argv[2])
time.sleep(1000)
"""
CALL = '{"entries": [{"process_group": ["0"], "profiling_name": "nccl:barrier"}]}'


def captured(code: str, answer: str, folder: Path) -> Path:
    """The stacks of a run whose rank 0 runs the code."""
    (folder / "ranks").mkdir(exist_ok=True)
    command = [sys.executable, "-c", code, str(folder / "ranks" / "0.stack"), answer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=LIBRARY) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            record = heartbeat.create_record(folder, {}, 0)
            record[:] = encode(3, "", time.time(), {**place(), "pid": child.pid})
            return capture.capture(folder, small_plan())
        finally:
            child.kill()


def test_where_py_spy_may_not_attach_faulthandler_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "pyspy_dump", lambda pid, stopped: ("", "Permission denied"))
    stacks = captured(STUCK, "", tmp_path)
    assert "waits_for_ever" in (stacks / "rank_0.txt").read_text()
    assert diagnose_hang(stacks).groups[0].frames[0].startswith("waits_for_ever")


def test_a_capture_asks_the_flight_recorder(tmp_path):
    """As torch's DumpPipe listens: a rank that answers, next to an earlier dump."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/nccl_trace_rank_0").write_text("of an earlier attempt")
    stacks = captured(RECORDER, CALL, tmp_path)
    assert [path.read_text() for path in stacks.glob("nccl_trace_*")] == [CALL]
    assert 0 in read_folder(stacks).recordings


@pytest.mark.slow
def test_without_our_launcher_the_first_rank_of_a_node_starts_the_watchdog_and_it_ends_the_job(
    data, tmp_path
):
    """As srun or a foreign torchrun start the engine: nobody of ours looks on from outside."""
    plan = changed(small(data, iters=100_000, source="mock", dp=2), "run", hang_timeout_s=5.0)
    folder = run_folder(plan, tmp_path / "run")
    env = {**LIBRARY, "TRILANE_PLANT": "pipe 1 3", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] += f"{os.pathsep}{PLANTED}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--standalone", "-m", "trilane_engine", f"{folder}/plan.json"]
    done = subprocess.run(command, env=env, timeout=400, check=False)
    outcome = known_status(folder)
    assert (outcome.status, outcome.rank, done.returncode != 0) == ("hang", 1, True)
    assert len(list((folder / "stacks").glob("*/rank_*.txt"))) == 2


WATCHED = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as ranks do
subprocess.run([sys.executable, "-m", "trilane_diagnose.watchdog", sys.argv[1], str(os.getpid()), "0"])
"""


@pytest.mark.parametrize("has_exited", [False, True])
def test_a_watchdog_answers_a_capture_and_ends_with_its_rank_while_it_waits_for_other_nodes(
    has_exited: bool, tmp_path
):
    """A new folder below stacks/ is a question to every node; a rank that exits makes the watchdog
    ask itself. SLURM waits for every process of a job that it ends, and drains the node that keeps
    one.
    """
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    env = LIBRARY
    asked = itertools.count()
    pids = [place(), {**place(), "pid": 999999999}] if has_exited else [place()]
    records = [heartbeat.create_record(tmp_path, env, rank) for rank in range(len(pids))]
    for record, pid in zip(records, pids, strict=True):
        record[:] = encode(3, "x", time.time(), pid)
    elsewhere = Heartbeat(
        rank=2, step=3, phase="x", time=1.0, pid=7, host="elsewhere"
    )  # never answers
    NodeReport(first=2, host="elsewhere", start=start_id(env), ranks=(elsewhere,)).write(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", WATCHED, str(tmp_path)], env=env)

    def answered() -> bool:
        """Ask again: what is there before the watchdog is, is no question to it."""
        if not has_exited:
            (tmp_path / "stacks" / str(next(asked))).mkdir(parents=True)
        return bool(list(tmp_path.glob("stacks/*/states-*.json")))

    try:
        wait_until(answered, 60, "no answer")
        (watchdog,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    watchdog.wait(5)
    assert list(tmp_path.glob("stacks/*/rank_0.*")) and not own_beats(tmp_path, env)


def test_a_watchdog_whose_rank_has_ended_before_it_began_ends_too(tmp_path):
    """It would hold the job's output open for ever."""
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    command = [sys.executable, "-m", "trilane_diagnose.watchdog", str(tmp_path), "999999999", "0"]
    assert subprocess.run(command, env=LIBRARY, timeout=120, check=False).returncode < 0
