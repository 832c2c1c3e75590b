"""A batch that grows while the run goes on trains what one process trains that grows its batch alike."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import changed, run_folder, small_plan

from trilane.config.batch_rampup import Ramp
from trilane.config.plan import Plan

pytestmark = pytest.mark.slow

RAMP = Ramp(start=4, increment=4, samples=16)
SIZES = [4, 4, 8, 12]


def growing(data: Path, **topology: object) -> Plan:
    return changed(small_plan(data, iters=len(SIZES), gbs=12, **topology), "run", ramp=RAMP)


@pytest.fixture(scope="module")
def grown(fork: Callable[[int, Path], None], data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = run_folder(growing(data), tmp_path_factory.mktemp("grown") / "run")
    fork(0, folder)
    return json.loads((folder / "truth.json").read_text())


TOPOLOGIES = {
    "PP2 interleaved": {"pp": 2, "interleaving": 2},
    "ZeRO-3 DP2": {"engine": "deepspeed-zero", "dp": 2, "zero": 3},
    "HF ZeRO-3 DP2": {"engine": "hf-zero3", "dp": 2, "zero": 3},
    "3D PP2 DP2": {"engine": "deepspeed-3d", "pp": 2, "dp": 2, "zero": 1},
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_a_growing_batch_gives_the_losses_of_one_process(
    topology: dict, train: Callable, grown: list, data: Path
) -> None:
    """One microbatch a replica at first, then two, then three: DeepSpeed's own count of them would be out of step."""
    plan = growing(data, **topology)
    steps = train(plan)
    assert [s["global_batch_size"] for s in steps] == SIZES
    assert [s["consumed_samples"] for s in steps] == [sum(SIZES[: k + 1]) for k in range(len(SIZES))]
    assert [s["lm_loss"] for s in steps] == pytest.approx([loss for loss, _ in grown], abs=1e-5, rel=0)
    assert [s["grad_norm"] for s in steps] == pytest.approx([norm for _, norm in grown], rel=1e-4)
    flops = [plan.shape.flops_per_iteration(size) / plan.topology.gpus for size in SIZES]
    assert [s["tflops"] * s["sec_per_it"] * 1e12 for s in steps] == pytest.approx(flops), "of the samples of now"
