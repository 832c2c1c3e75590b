"""A plan: its learning rate and its id."""

import dataclasses

import pytest
from support import REPOSITORY

from trilane.config.plan import read_plan
from trilane.config.training import Optimizer


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        (50, 0.5),
        (100, 1.0),
        (600, 0.55),
        (1100, 0.1),
    ],
)
def test_the_rate_is_that_of_megatrons_cosine(samples: int, rate: float):
    """Warm-up over 100 samples to 1, cosine to 0.1 at 1100: the mean at 600, and cos 45 degrees
    between.
    """
    optimizer = Optimizer(lr=1.0, min_lr=0.1, warmup_samples=100, decay_samples=1100)
    assert optimizer.learning_rate(samples, 9999) == pytest.approx(rate, rel=1e-6)


def test_the_id_of_a_plan_is_of_what_changes_its_prediction():
    plan = read_plan(REPOSITORY / "docs/plan-176b.json")
    replaced = dataclasses.replace
    same = replaced(
        plan,
        label="x",
        run=replaced(plan.run, seed=1),
        shape=replaced(plan.shape, norm_epsilon=1e-6),
    )
    other = replaced(plan, topology=replaced(plan.topology, recompute="none"))
    assert same.id == plan.id != other.id
