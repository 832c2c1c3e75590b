"""It learns: text becomes predictable. The report of the demo study holds this for Python's own library."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plans import small_plan

pytestmark = pytest.mark.slow


def test_mock_text_can_be_learnt(train: Callable, data: Path) -> None:
    """The first loss is about ln 512 = 6.2."""
    steps = train(small_plan(data, iters=40, source="mock"))
    assert steps[0]["lm_loss"] == pytest.approx(6.2, abs=0.3)
    assert steps[0]["lm_loss"] - steps[-1]["lm_loss"] > 1.5
    assert steps[-1]["consumed_samples"] == 320
