"""Seconds of one layer: published byte and FLOP counts over rates that are typed in."""

from dataclasses import replace

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel.columns import Columns, Setting, columns_of
from trilane.costmodel.constants import Constants
from trilane.costmodel.layers import (
    all_reduce_seconds,
    attention_seconds,
    flash_seconds,
    layer_time,
)

A100 = cluster("jz-a100-80g")
SHAPE = parse_shape("24,2048,16,2048,50304")
NO_WAITS = Constants(node=1.0, network=1.0, skew_s=0.0, handoff_s=0.0)
IDEAL = replace(
    A100, node_bytes_per_s=100e9, network_bytes_per_s=80e9, latency_s=0.0, pair_bytes_per_s=None
)


def columns(**topology: object) -> Columns:
    return columns_of(SHAPE, Topology(**{"precision": "bf16", **topology}))


@pytest.mark.parametrize(("tp", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_an_all_reduce_moves_as_often_its_bytes_as_nccl_tests_count(tp: int, factor: float):
    """NVIDIA, nccl-tests' doc/PERFORMANCE.md: the bus carries 2 (n - 1) / n of the bytes; 2 x 2048
    x 2048 bf16 here.
    """
    x = columns(tp=tp, mbs=2, gbs=2)
    assert float(all_reduce_seconds(Setting(x, IDEAL, NO_WAITS))) == pytest.approx(
        factor * 2 * 2048 * 2048 * 2 / 100e9
    )


def test_a_layer_has_four_all_reduces_and_six_where_it_is_recomputed():
    """Narayanan et al. 2021, arXiv:2104.04473, section 3.2: two forward, two backward, and the
    forward once more.
    """
    one = float(all_reduce_seconds(Setting(columns(tp=8), A100, NO_WAITS)))
    for recompute, count in (("none", 4), ("selective", 4), ("full", 6), ("operators", 5)):
        setting = Setting(columns(tp=8, recompute=recompute), A100, NO_WAITS)
        found = layer_time(setting).tensor_parallel
        assert float(found) == pytest.approx(count * one)


def test_a_flash_kernel_does_half_of_the_products_and_two_and_a_half_times_as_much_backward() -> (
    None
):
    """Dao 2023, arXiv:2307.08691, section 4: 4 s^2 d a FLOPs forward, halved by the causal mask;
    backward x 2.5. Triton's kernel, which ALiBi needed, takes 1.4 times as long forward, 2 backward.

    16 heads of 128 on 2048 tokens, at half of the A100's 312 TFLOP/s, of which 2048 / (2048 + 350)
    are left.
    """
    forward, backward = attention_seconds(Setting(columns(), A100, NO_WAITS))
    assert (
        float(forward)
        == pytest.approx(2 * 2048**2 * 128 * 16 / (0.5 * 312e12) * 2398 / 2048)
        == float(flash_seconds(Setting(columns(), A100, NO_WAITS)))
    )
    assert float(backward) == pytest.approx(2.5 * float(forward))
    slow, _ = attention_seconds(Setting(columns().changed(alibi=1), A100, NO_WAITS))
    assert slow / forward == pytest.approx((1.4 + 2 * 2.5) / 3.5, rel=0.02)
