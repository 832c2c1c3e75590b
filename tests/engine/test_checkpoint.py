"""What was saved is what goes on: a resumed run gives the losses of a run that was
never stopped.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import parity
import pytest
from plans import LLAMA, changed, run_folder, small_plan, steps

from trilane.config.plan import Plan
from trilane.launch.local import environment
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.run import NOT_SAVED, alarm
from trilane.workspace.status import known_status
from trilane_diagnose.restart import compare_restart
from trilane_diagnose.snapshot import read_snapshot, states

pytestmark = pytest.mark.slow

HALFWAY, END = 2, 4
Fork = Callable[..., None]
Whole = Callable[[Plan], Path]


def saving(data: Path, **topology: object) -> Plan:
    """A plan that saves halfway."""
    return changed(
        small_plan(data, iters=END, source="mock", **topology), "run", save_interval=HALFWAY
    )


@pytest.fixture(scope="module")
def whole(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder of a run of the plan that was never stopped; each plan runs once."""
    folders: dict[str, Path] = {}

    def trained(plan: Plan) -> Path:
        if repr(plan) not in folders:
            folders[repr(plan)] = run_folder(plan, tmp_path_factory.mktemp("whole") / "run")
            fork(plan.topology.gpus, folders[repr(plan)])
        return folders[repr(plan)]

    return trained


def halfway(folder: Path, plan: Plan, to: Path, *iterations: int) -> Path:
    """A run folder for `plan` as a run like that in `folder` leaves it if it is killed some time
    after these saves.
    """
    run_folder(plan, to)
    for iteration in iterations or (HALFWAY,):
        name = f"iter_{iteration:07d}"
        shutil.copytree(folder / "checkpoints" / name, to / "checkpoints" / name)
    (to / "steps.jsonl").write_text(
        "".join((folder / "steps.jsonl").read_text().splitlines(True)[: HALFWAY + 1])
    )
    return to


def losses(folder: Path) -> list[float]:
    return [s["lm_loss"] for s in steps(folder)]


ZERO = "deepspeed-zero"
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS = {"shape": parity.MIXTURE}
SHARED = {"shape": parity.SHARED, "sequence_parallel": True}
INSTANCES = {"dp": 4, "zero": 1, "shards": 2}
SAME = {
    "TP2 PP2 DP2 distributed optimizer": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "TP2 DP2 EP4 distributed optimizer": {**SHARED, "tp": 2, "dp": 2, "ep": 4, "zero": 1},
    "DP4 in two instances, bf16": {**INSTANCES, "precision": "bf16", **OVERLAPS},
    "ZeRO-3 TP2 DP2 fp16": {"engine": ZERO, "tp": 2, "dp": 2, "zero": 3, "precision": "fp16"},
    "HF ZeRO-3 DP2 full offload": {"engine": "hf-zero3", "dp": 2, "zero": 3, "offload": "full"},
    "3D PP2 bf16": {"engine": "deepspeed-3d", "pp": 2, "zero": 1, "precision": "bf16"},
}


@pytest.mark.parametrize("topology", SAME.values(), ids=SAME.keys())
def test_a_resumed_run_gives_the_losses_of_one_never_stopped(
    topology: dict, whole: Whole, fork, data, tmp_path
):
    """To the last bit; what it had trained beyond the checkpoint stands once, the first attempt
    aside. And the states of the restart are compared without a finding.
    """
    plan = saving(data, **topology)
    again = halfway(whole(plan), plan, tmp_path / "again")
    fork(plan.topology.gpus, again)
    assert losses(again) == losses(whole(plan))
    assert not compare_restart(whole(plan), again).findings
    assert [s["iteration"] for s in steps(again)] == list(range(1, END + 1))
    assert len((again / "earlier/steps.jsonl.1").read_text().splitlines()) == HALFWAY + 1


# From a topology and engine to another, with the same model and batch.
RESUMED = {
    "megatron interleaved -> ZeRO-3 TP2 DP2, Llama": (
        {"pp": 2, "interleaving": 2, "shape": LLAMA},
        {"engine": ZERO, "tp": 2, "dp": 2, "zero": 3, "shape": LLAMA},
    ),
    "3D TP2 PP2 -> megatron DP4 in two instances, Llama": (
        {"engine": "deepspeed-3d", "tp": 2, "pp": 2, "zero": 1, "shape": LLAMA},
        {**INSTANCES, "shape": LLAMA},
    ),
    "TP4 EP2 distributed optimizer -> PP2 DP2, shared experts": (
        {**SHARED, "tp": 4, "ep": 2, "zero": 1},
        {"pp": 2, "dp": 2, "shape": parity.SHARED},
    ),
    "DP4 EP2 in two instances -> TP2 ETP2": (
        {**EXPERTS, **INSTANCES, "ep": 2},
        {**EXPERTS, "tp": 2, "etp": 2, "sequence_parallel": True},
    ),
    "TP2 ETP2 DP2 -> EP4 DP4 distributed optimizer": (
        {**EXPERTS, "tp": 2, "etp": 2, "dp": 2, "sequence_parallel": True},
        {**EXPERTS, "dp": 4, "ep": 4, "zero": 1},
    ),
    "megatron CP2 DP2 -> ZeRO-3 DP3 full offload": (
        {"cp": 2, "dp": 2, "gbs": 12},
        {"engine": ZERO, "dp": 3, "zero": 3, "offload": "full", "gbs": 12},
    ),
}


@pytest.mark.parametrize(("there", "here"), RESUMED.values(), ids=RESUMED.keys())
def test_a_run_goes_on_elsewhere(there: dict, here: dict, whole: Whole, fork, data, tmp_path):
    """On another topology and in another engine, from the checkpoint of a run that is left as it
    is: within 1e-5, and without a finding where the states are compared, each tensor as a whole.
    """
    first = whole(saving(data, **there))
    other = changed(saving(data, **here), "run", load=str(first / "checkpoints" / "iter_0000002"))
    folder = run_folder(other, tmp_path / "other")
    fork(other.topology.gpus, folder)
    assert [s["iteration"] for s in steps(folder)] == list(range(HALFWAY + 1, END + 1))
    assert losses(folder) == pytest.approx(losses(first)[HALFWAY:], abs=1e-5, rel=0)
    wholes = read_snapshot(states("A", first)[0]).wholes
    assert all(marks.keys() >= set(KINDS) for marks in wholes.values())
    assert not compare_restart(first, folder).findings


def a_byte(folder: Path) -> None:
    file = next(folder.glob("rank_*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    whole: Whole, fork, data, tmp_path
):
    """And where there is none before, one line and exit code 2 on all ranks."""
    plan = changed(saving(data, tp=2), "run", save_interval=1, keep_last=0)
    folder = halfway(whole(plan), plan, tmp_path / "again", 1, 2)
    a_byte(folder / "checkpoints/iter_0000002")
    problem = "rank_00000.safetensors is damaged (its checksum differs)"
    shutil.copytree(folder, tmp_path / "alone")
    fork(2, folder)
    line = f"trilane: checkpoint iter_0000002: {problem}; trying the one before"
    assert line in (folder / "0.log").read_text().splitlines()
    assert losses(folder)[1:] == losses(whole(plan))[1:]

    shutil.rmtree(tmp_path / "alone/checkpoints/iter_0000001")
    fork(2, tmp_path / "alone", code=2)
    last = (tmp_path / "alone/0.log").read_text().splitlines()[-1]
    assert (
        last
        == f"checkpoints=iter_0000002: {problem}: none of them can be used, and there is no older one"
    )


def test_a_full_disk_leaves_the_old_checkpoint_and_the_training_goes_on(
    whole: Whole, fork, data, tmp_path
):
    """A disk of 5 MB: a checkpoint of 2.9 MB fits once. A save that works clears the note."""
    plan = saving(data)
    folder = run_folder(plan, tmp_path / "run")
    disk = folder / "checkpoints"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        fork(1, folder)
        assert losses(folder) == losses(whole(plan))
        log = (folder / "0.log").read_text()
        line = "iter_0000004 could not be saved: rank 0: No space left on device"
        assert f"trilane: CHECKPOINT NOT SAVED: {line}; the newest is iter_0000002" in log
        assert alarm(folder, NOT_SAVED).startswith(f"CHECKPOINT NOT SAVED: {line}")
        assert known_status(folder).status == "stopped", "its last checkpoint is missing"
        assert sorted(path.name for path in disk.iterdir()) == ["iter_0000002"]
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        fork(1, folder)
        assert known_status(folder).status == "completed" and not alarm(folder, NOT_SAVED)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


SLOW_DISK = """
import re, time
from pathlib import Path
from trilane_engine import __main__ as engine
from trilane_engine.checkpoint import slices
folder = Path(sys._getframe().f_code.co_filename).parent
checksum = slices.checksum  # the last that a file takes
def slow(crc):
    end = time.monotonic() + 60
    while (folder / "steps.jsonl").read_bytes().count(b"\\n") < 4 and time.monotonic() < end:
        time.sleep(0.01)
    return checksum(crc)
slices.checksum = slow
engine.main([str(folder / "plan.json")])
words = re.findall(r"(?:iteration +|saved checkpoints/iter_0*)\\d+", (folder / "0.log").read_text())
(folder / "answer.0").write_text(" ".join(word.replace("iteration ", "").replace(" ", "") for word in words))
"""


def test_the_training_goes_on_while_a_checkpoint_is_written(ask, data):
    """A disk that takes the first two until four are trained: what is saved is the state of
    iteration 2 (above), the next save waits for it, and so does the end of the run.
    """
    plan = changed(small_plan(data, iters=5, source="mock"), "run", save_interval=2)
    answer = ask(plan, SLOW_DISK, joined=False).replace("savedcheckpoints/iter_0000", "saved ")
    assert answer == "1 2 3 4 saved 002 5 saved 004 saved 005"


def test_runs_killed_at_random_moments_go_on_right():
    """One more, like the seventy whose result is docs/engine.md."""
    script = Path(__file__).parents[2] / "benchmarks/kill_saves.py"
    command = [sys.executable, str(script), "--trials", "1", "--seed", "7"]
    command += ["--layout", "megatron DP2 distributed optimizer"]
    env = {k: v for k, v in environment(8).items() if k != "TRILANE_PARENT_PID"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No partial or damaged checkpoint was ever loaded" in done.stdout
