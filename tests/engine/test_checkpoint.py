"""What was saved is what goes on: a resumed run gives the losses of a run that was never stopped."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import changed, run_folder, small_plan, steps

from trilane.plan import Plan

pytestmark = pytest.mark.slow

HALFWAY, END = 6, 12
Fork = Callable[[int, Path], None]


def saving(data: Path, **topology: object) -> Plan:
    """A plan that saves halfway."""
    plan = small_plan(data, iters=END, source="mock", **topology)
    return changed(plan, "run", save_interval=HALFWAY)


def halfway(folder: Path, plan: Plan, to: Path) -> Path:
    """A new run folder for `plan` that holds what a run in `folder`, killed behind its first checkpoint, left."""
    run_folder(plan, to)
    shutil.copytree(folder / "checkpoints" / "iter_0000006", to / "checkpoints" / "iter_0000006")
    (to / "checkpoints" / "latest").write_text("iter_0000006\n")
    (to / "steps.jsonl").write_text("".join((folder / "steps.jsonl").read_text().splitlines(True)[: HALFWAY + 2]))
    return to


def losses(folder: Path) -> list[float]:
    return [s["lm_loss"] for s in steps(folder)]


SAME = {
    "megatron": {},
    "TP2 PP2 DP2 distributed optimizer": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "PP2 interleaved": {"pp": 2, "interleaving": 2},
    "DP2 distributed optimizer bf16": {"dp": 2, "zero": 1, "precision": "bf16"},
    "TP2 fp16": {"tp": 2, "precision": "fp16"},
    "ZeRO-0 TP2": {"engine": "deepspeed-zero", "tp": 2},
    "ZeRO-1 DP2": {"engine": "deepspeed-zero", "dp": 2, "zero": 1},
    "ZeRO-2 DP2 optimizer offload": {"engine": "deepspeed-zero", "dp": 2, "zero": 2, "offload": "optimizer"},
    "ZeRO-3 TP2 DP2 fp16": {"engine": "deepspeed-zero", "tp": 2, "dp": 2, "zero": 3, "precision": "fp16"},
    "ZeRO-3 DP2 full offload": {"engine": "deepspeed-zero", "dp": 2, "zero": 3, "offload": "full"},
    "3D TP2 PP2": {"engine": "deepspeed-3d", "tp": 2, "pp": 2, "zero": 1},
    "3D PP2 DP2 bf16 fp32 sums": {
        "engine": "deepspeed-3d",
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "precision": "bf16",
        "fp32_gradients": True,
    },
}


@pytest.mark.parametrize("topology", SAME.values(), ids=SAME.keys())
def test_a_resumed_run_gives_the_losses_of_one_never_stopped(
    topology: dict, fork: Fork, data: Path, tmp_path: Path
) -> None:
    """To the last bit; what it had trained beyond the checkpoint stands once, the first attempt aside."""
    plan = saving(data, **topology)
    whole = run_folder(plan, tmp_path / "whole")
    fork(plan.topology.gpus, whole)
    again = halfway(whole, plan, tmp_path / "again")
    fork(plan.topology.gpus, again)
    assert losses(again) == losses(whole)
    assert [s["iteration"] for s in steps(again)] == list(range(1, END + 1))
    assert len((again / "earlier/steps.jsonl.1").read_text().splitlines()) == HALFWAY + 2
