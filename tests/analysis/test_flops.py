"""Definitions of FLOPs, told apart by what each counts."""

from dataclasses import replace

import pytest

from trilane.analysis.measure import rates
from trilane.analysis.run_config import RunConfig
from trilane.config.model import parse_shape

SHAPE = parse_shape("24,2048,16,2048,50304")


def test_six_flops_a_parameter_and_token_and_eight_with_full_recomputation():
    """Narayanan et al. 2021: F = 6 T P and 8 T P, for matrices; attention and logits are on top."""
    tokens = 8 * 2048
    matrices = 24 * 12 * 2048**2
    attention = 24 * 12 * 2048 * 2048  # 4 s h a layer and token forward, three times that in all
    logits = 6 * 50304 * 2048
    config = RunConfig(shape=SHAPE, gpus=1, gbs=8)
    plain = rates(config, 1.0)
    full = rates(replace(config, recompute="full"), 1.0)
    assert plain["narayanan"] == pytest.approx(tokens * (6 * matrices + attention + logits))
    assert full["narayanan"] == pytest.approx(tokens * (8 * matrices + attention * 4 / 3 + logits))
    causal = tokens * (6 * matrices + attention / 2 + logits)
    assert full["megatron_causal"] == pytest.approx(causal)
