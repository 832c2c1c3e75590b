"""A run that grows its batch, is extended, skips iterations or is evaluated trains what one process
does.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import changed, evaluations, losses_and_norms, run_folder, small_plan, steps

from trilane.config.batch_rampup import Ramp
from trilane.config.plan import Plan
from trilane.config.training import Dropout

RAMP = Ramp(start=4, increment=4, samples=16)
SIZES = [4, 4, 8, 12]


def growing(data: Path, **topology: object) -> Plan:
    return changed(small_plan(data, iters=len(SIZES), gbs=12, **topology), "run", ramp=RAMP)


@pytest.fixture(scope="module")
def grown(
    fork: Callable[[int, Path], None], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[float]]:
    folder = run_folder(growing(data), tmp_path_factory.mktemp("grown") / "run")
    fork(0, folder)
    return losses_and_norms(folder)


TOPOLOGIES = {
    "ZeRO-3 DP2": {"engine": "deepspeed-zero", "dp": 2, "zero": 3},
    "3D PP2 DP2": {"engine": "deepspeed-3d", "pp": 2, "dp": 2, "zero": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_a_growing_batch_gives_the_losses_of_one_process(topology: dict, train, grown: list, data):
    """One microbatch a replica at first, then two, then three: DeepSpeed's own count of them would
    be out of step.
    """
    plan = growing(data, **topology)
    steps = train(plan)
    assert [s["global_batch_size"] for s in steps] == SIZES
    assert [s["lm_loss"] for s in steps] == pytest.approx(
        [loss for loss, _ in grown], abs=1e-5, rel=0
    )
    assert [s["grad_norm"] for s in steps] == pytest.approx([norm for _, norm in grown], rel=1e-4)


@pytest.fixture
def text(tmp_path):
    """A file of 1,999 tokens: 31 samples of 64 tokens an epoch."""
    path = tmp_path / "few.txt"
    path.write_text(" ".join(str(number * number) for number in range(1000))[:1998])
    return str(path)


def test_an_extended_run_is_the_one_that_was_longer_from_the_start(fork, data, text, tmp_path):
    """Four iterations of 8 samples take more than the first epoch of 31, eleven take 88: all of the
    next two.
    """
    plan = small_plan(data, iters=4, source=text)
    longer = changed(plan, "run", train_iters=11)
    folder = run_folder(changed(plan, "run", save_interval=4), tmp_path / "run")
    fork(1, folder)
    (folder / "plan.json").write_text(json.dumps(longer.to_json()))
    fork(1, folder)
    whole = run_folder(longer, tmp_path / "whole")
    fork(1, whole)
    rows = [[(s["lm_loss"], s["grad_norm"]) for s in steps(f)] for f in (folder, whole)]
    assert len(rows[0]) == 11 and rows[0] == rows[1]


def test_after_a_spike_a_run_goes_on_without_those_iterations(fork, data, tmp_path):
    """From the checkpoint before, on two replicas, as the reference that skipped them; bit for bit
    on one layout.
    """
    plan = changed(small_plan(data, iters=7, dp=2, zero=1), "run", save_interval=2, keep_last=0)
    spiked = run_folder(changed(plan, "run", exit_iteration=4), tmp_path / "spiked")
    fork(2, spiked)
    plan = changed(plan, "run", skip="3-4,6")
    start = changed(plan, "run", load=f"{spiked}/checkpoints/iter_0000002")
    folder = run_folder(start, tmp_path / "run")
    fork(2, folder)
    found = steps(spiked)[:2] + steps(folder)
    places = [(s["iteration"], s["consumed_samples"]) for s in found]
    assert places == [(1, 8), (2, 16), (5, 40), (7, 56)]
    truth = run_folder(plan, tmp_path / "truth")
    fork(0, truth)
    assert [s["lm_loss"] for s in found] == pytest.approx(
        [s["lm_loss"] for s in steps(truth)], abs=1e-5
    )


def test_training_with_dropout_goes_on_as_if_it_had_not_been_evaluated_also_after_a_resume(
    fork, data, tmp_path
):
    """Dropout draws from the generators that a checkpoint keeps."""
    plan = changed(small_plan(data, iters=6, pp=2), "data", split="900,100,0")
    plan = changed(plan, "run", eval_interval=4, eval_iters=3)
    plan, gpus = replace(plan, dropout=Dropout(hidden=0.1, attention=0.1)), plan.topology.gpus
    without = run_folder(changed(plan, "run", eval_interval=0, eval_iters=0), tmp_path / "without")
    fork(gpus, without)
    folder = run_folder(changed(plan, "run", exit_iteration=5), tmp_path / "run")
    fork(gpus, folder)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    fork(gpus, folder)
    same = ("lm_loss", "grad_norm", "learning_rate")
    both = [[[step[name] for name in same] for step in steps(f)] for f in (folder, without)]
    assert both[0] == both[1]
    assert [at for at, _ in evaluations(folder)] == [4, 6]
