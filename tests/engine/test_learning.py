"""It learns: real text becomes predictable, and each parameter decays or not as the rule says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import small_plan

from trilane.config.model import ModelShape
from trilane.config.plan import Optimizer

pytestmark = pytest.mark.slow


def test_the_loss_on_pythons_own_library_falls_by_more_than_a_nat_and_a_half(train: Callable, data: Path) -> None:
    """Bytes, GPT of 4 x 128, 50 iterations of 8 x 128 tokens; the first loss is about ln 512 = 6.2."""
    shape = ModelShape(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, vocab_size=512)
    plan = small_plan(data, iters=50, dp=2)
    steps = train(replace(plan, shape=shape, optimizer=Optimizer(lr=2e-3, min_lr=2e-4, warmup_samples=40)))
    assert steps[0]["lm_loss"] == pytest.approx(6.2, abs=0.3)
    assert steps[0]["lm_loss"] - steps[-1]["lm_loss"] > 1.5
    assert steps[-1]["consumed_samples"] == 400


def test_mock_text_can_be_learnt(train: Callable, data: Path) -> None:
    steps = train(small_plan(data, iters=40, source="mock", dp=2))
    assert steps[0]["lm_loss"] - steps[-1]["lm_loss"] > 1.5
