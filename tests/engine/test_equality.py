"""Every topology trains the same model: each loss is that of a plain torch GPT in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plans import small_plan

pytestmark = pytest.mark.slow


TOPOLOGIES = {
    "one process": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "PP4": {"pp": 4},
    "DP2": {"dp": 2},
    "DP2 mbs 1": {"dp": 2, "mbs": 1},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "TP2 PP2 DP2": {"tp": 2, "pp": 2, "dp": 2},
    "TP2 sequence parallel": {"tp": 2, "sequence_parallel": True},
    "PP2 interleaved": {"pp": 2, "interleaving": 2},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "DP2 distributed optimizer": {"dp": 2, "zero": 1},
    "TP2 PP2 DP2 distributed optimizer": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "PP2 embedding and head as layers": {"pp": 2, "partition": "type:transformer|embedding"},
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_every_loss_is_that_of_one_process(topology: dict, train: Callable, truth: list, data: Path) -> None:
    """20 iterations, fp32, gloo: losses within 1e-5, and gradient norms, which the clipping hangs on, within 1e-4."""
    steps = train(small_plan(data, **topology))
    assert [s["lm_loss"] for s in steps] == pytest.approx([loss for loss, _ in truth], abs=1e-5, rel=0)
    assert [s["grad_norm"] for s in steps] == pytest.approx([norm for _, norm in truth], rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32(precision: str, train: Callable, truth: list, data: Path) -> None:
    """8 and 11 bits of mantissa, fp32 masters: losses within 5e-3 and 1e-3 over 6 iterations, none skipped."""
    steps = train(small_plan(data, iters=6, tp=2, precision=precision))
    assert not any(s["skipped"] for s in steps)
    tolerance = {"bf16": 5e-3, "fp16": 1e-3}[precision]
    assert [s["lm_loss"] for s in steps] == pytest.approx([loss for loss, _ in truth[:6]], abs=tolerance, rel=0)
