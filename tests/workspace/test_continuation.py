"""Which plans may continue from a checkpoint, and what is said where the run's length
has changed.
"""

from dataclasses import replace

import pytest
from support import small_plan

from trilane.workspace.checkpoints import FOLDER, name_of, write_manifest
from trilane.workspace.continuation import (
    identity,
    require_continuable,
    require_same,
    since,
)


def manifest(plan, iteration, consumed=None):
    """Of a checkpoint of the plan after that iteration."""
    consumed = (
        plan.run.ramp.consumed(iteration, plan.topology.gbs) if consumed is None else consumed
    )
    return {"identity": identity(plan), "iteration": iteration, "consumed_samples": consumed}


def refusal(held, plan) -> str:
    try:
        require_same("x", held, plan)
    except ValueError as error:
        return str(error)
    return ""


def run(plan, **fields):
    return replace(plan, run=replace(plan.run, **fields))


@pytest.mark.parametrize(
    ("iteration", "consumed", "message"),
    [
        (4, 16, ""),  # all is trained: there is nothing left to do
        (5, 20, "train_iters=4: the checkpoint x has 5 iterations already"),
        (
            3,
            11,
            "gbs=4: the checkpoint x has seen 11 samples in 3 iterations, this plan would have 12",
        ),
    ],
)
def test_a_checkpoint_of_the_same_samples_and_no_more_iterations_is_taken(
    iteration, consumed, message
):
    plan = small_plan(train_iters=4)
    assert refusal(manifest(plan, iteration, consumed), plan) == message


def test_a_checkpoint_of_another_model_or_seed_is_refused_by_name():
    plan = small_plan(train_iters=4)
    others = (
        ("seed=7", run(plan, seed=7)),
        ("shape.num_layers=4", replace(plan, shape=replace(plan.shape, num_layers=4))),
        (
            "shape.normalization=rmsnorm",
            replace(plan, shape=replace(plan.shape, normalization="rmsnorm")),
        ),
        ("data.split=9,1", replace(plan, data=replace(plan.data, split="9,1"))),
    )
    for name, other in others:
        with pytest.raises(ValueError, match=f"^{name}: the checkpoint x was trained with "):
            require_same("x", manifest(plan, 2), other)


def test_a_resume_says_what_changed_since_the_checkpoint_and_a_link_of_a_chain_nothing():
    plan = small_plan(train_iters=4)
    held = manifest(plan, 3)
    assert since(held, run(plan, exit_iteration=4, save_interval=2)) == []
    optimizer = replace(plan.optimizer, lr=6e-4)
    other = replace(plan, optimizer=optimizer, topology=replace(plan.topology, gbs=8))
    assert sorted(since(held, run(other, train_iters=8))) == [
        "length: 16 -> 64",
        "optimizer.lr: 0.001 -> 0.0006",
        "topology.gbs: 4 -> 8",
    ]


@pytest.mark.parametrize(
    ("done", "then", "now", "message"),
    [
        (4, "3-4", "3-6", ""),  # up to the checkpoint it is the same
        (4, "", "4-6", "skip=4-6: the checkpoint x has skipped nothing"),
        (5, "2-3", "", "skip=: the checkpoint x has skipped [(2, 3)]"),
    ],
)
def test_a_skip_is_added_before_its_iterations_and_never_after(done, then, now, message):
    plan = small_plan(train_iters=9)
    held = manifest(run(plan, skip=then), done)
    assert refusal(held, run(plan, skip=now)) == message


def test_a_run_that_cannot_continue_is_refused_before_any_process_starts(tmp_path):
    plan = small_plan(train_iters=4)
    folder = tmp_path / FOLDER / name_of(4)
    folder.mkdir(parents=True)
    write_manifest(
        folder, {**manifest(plan, 4), "files": {}, "tensors": {}, "scalars": {"step": 4}}
    )
    require_continuable(tmp_path, run(plan, train_iters=9))
    shorter = run(plan, train_iters=3, load=str(tmp_path))
    with pytest.raises(ValueError, match=r"^train_iters=3: the checkpoint iter_0000004 has 4 "):
        require_continuable(tmp_path / "new", shorter)
