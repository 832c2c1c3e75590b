"""A plan: its learning rate and its id."""

from argparse import Namespace
from dataclasses import replace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from support import REPOSITORY

from trilane.config.plan import read_plan
from trilane.config.training import DECAY_STYLES, WSD_DECAY_STYLES, Optimizer


@pytest.mark.parametrize("end", WSD_DECAY_STYLES)
@pytest.mark.parametrize("style", DECAY_STYLES)
def test_the_rate_is_that_of_megatrons_scheduler(style: str, end: str):
    """Warm-up over 100 samples, decay to 1100, by WSD from 800 on."""
    o = Optimizer(warmup_samples=100, decay_style=style, wsd_decay_style=end, wsd_decay_samples=300)
    rates = (Namespace(param_groups=[]), 0.0, o.lr, o.min_lr, 100, 1100, style)
    theirs = OptimizerParamScheduler(*rates, 0, 0, 1, "constant", True, False, 300, end)
    for samples in range(1, 1200):
        theirs.num_steps = samples
        assert o.learning_rate(samples, 1100) == pytest.approx(theirs.get_lr({}), rel=1e-12)


def test_the_id_of_a_plan_is_of_what_changes_its_prediction():
    plan = read_plan(REPOSITORY / "docs/plan-176b.json")
    run = replace(plan.run, seed=1)
    same = replace(plan, label="x", run=run, shape=replace(plan.shape, norm_epsilon=1e-6))
    other = replace(plan, topology=replace(plan.topology, recompute="none"))
    assert same.id == plan.id != other.id
