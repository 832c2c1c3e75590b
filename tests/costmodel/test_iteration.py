"""Seconds of an iteration: which ring leaves the node, what is paid once and what for each
microbatch.
"""

from dataclasses import replace

import numpy as np
import pytest

from trilane.config.cluster import Cluster, cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import shipped
from trilane.costmodel.columns import Setting, columns_of
from trilane.costmodel.constants import Constants
from trilane.costmodel.iteration import (
    IterationTime,
    data_parallel_seconds,
    iteration_time,
)

A100 = cluster("jz-a100-80g")  # nodes of 8
SLOW_NETWORK = replace(A100, network_bytes_per_s=A100.network_bytes_per_s / 10)
K = shipped.default(A100)
NOW = replace(A100, latency_s=0.0)  # bytes alone take time
SHAPE = parse_shape("24,2048,16,2048,50304")
BF16 = {"precision": "bf16"}


def seconds(machine: Cluster = A100, constants: Constants = K, **topology: object) -> IterationTime:
    x = columns_of(SHAPE, Topology(**{**BF16, **topology}))
    return iteration_time(x, machine, constants)


def test_two_stages_are_alike_whichever_end_has_a_number():
    first, last = {"first_stage_layers": 15}, {"last_stage_layers": 9}
    plan = {"pp": 2, "dp": 8, "gbs": 16, "recompute": "block", "recompute_layers": 3}
    times = [seconds(**plan, **ends).total for ends in (first, last, first | last)]
    assert times[0] == times[1] == times[2]


@pytest.mark.parametrize(
    ("sizes", "leaves"),
    [
        ((1, 1, 8), False),
        ((4, 1, 2), False),
        ((2, 4, 4), False),
        ((4, 1, 4), True),
        ((1, 1, 9), True),
    ],
)
def test_a_data_parallel_ring_that_fills_the_node_stays_inside(
    sizes: tuple[int, int, int], leaves: bool
):
    """Ranks run tp fastest, then dp (megatron/core/parallel_state.py): tp dp of them lie side by
    side.
    """
    tp, pp, dp = sizes
    plan = {"tp": tp, "pp": pp, "dp": dp, "gbs": dp * pp}
    fast, slow = (seconds(machine, **plan).data_parallel for machine in (A100, SLOW_NETWORK))
    assert (slow > 2 * fast) is leaves and (leaves or slow == fast)


def test_inputs_in_host_memory_go_over_pcie_there_and_back():
    """An iteration of 4 microbatches of a sequence: 24 layers, 2 bytes a value."""
    here, away = (seconds(gbs=4, recompute="full", offload_checkpoints=b) for b in (False, True))
    moved = 2 * 4 * 24 * SHAPE.seq_length * 2048 * 2 / (A100.pcie_bytes_per_s * K.p2p)
    assert away.total - here.total == pytest.approx(moved * K.pace)


@pytest.mark.parametrize(("tp", "pp", "leaves"), [(2, 4, False), (1, 8, False), (2, 8, True)])
def test_a_pipeline_that_fills_the_node_sends_over_its_bus(tp: int, pp: int, leaves: bool):
    fast, slow = (
        seconds(machine, tp=tp, pp=pp, gbs=16).pipeline_p2p for machine in (A100, SLOW_NETWORK)
    )
    assert (slow > 1.5 * fast) is leaves and (leaves or slow == fast)


@pytest.mark.parametrize(
    ("topology", "volume"),
    [
        ({"zero": 0}, 4),  # reduce-scatter and all-gather of 16-bit gradients
        ({"zero": 1}, 6),  # and the weights are gathered
        ({"zero": 1, "fp32_gradients": True}, 10),
        ({"zero": 2}, 3 * 4 + 2),  # the gradients of each of three microbatches
        ({"zero": 3}, 3 * 3 * 2),  # and the weights, forward and backward; scattered gradients
        ({"zero": 3, "recompute": "full"}, 3 * 4 * 2),
    ],
    ids=str,
)
def test_zero_moves_the_bytes_of_its_paper(topology: dict, volume: float):
    """Rajbhandari et al. 2020, arXiv:1910.02054, section 7: bytes a parameter; full recomputation
    gathers again. Of them (d - 1) / d leave each of d replicas: Patarasuk and Yuan 2009 (JPDC 69).
    """
    rate = A100.node_bytes_per_s * K.node
    for dp in (1, 2, 4, 8):
        x = columns_of(SHAPE, Topology(**BF16, dp=dp, gbs=3 * dp, **topology))
        assert float(data_parallel_seconds(1e9, Setting(x, NOW, K))) == pytest.approx(
            (dp - 1) / dp * 1e9 * volume / rate
        )


@pytest.mark.parametrize(("nodes", "share"), [(2, 1 / 2), (4, 3 / 4), (16, 15 / 16)])
def test_trees_reduce_what_a_node_lacks_rings_gather_everything_and_both_slow_down_with_the_nodes(
    nodes, share
):
    """Lucie-7B on Jean Zay, ZeRO-1 without tensor parallelism: 4.1 s on 2 nodes, 6.2 to 6.4 s on 4,
    8 and 16.
    """
    rate = K.network * A100.ring_bytes_per_s / (1 + K.distance * np.log2(nodes))
    for zero, volume in ((0, share * 4), (1, share * 4 + (1 - 1 / 8 / nodes) * 2)):
        x = columns_of(SHAPE, Topology(**BF16, dp=8 * nodes, gbs=8 * nodes, zero=zero))
        assert float(data_parallel_seconds(1e9, Setting(x, NOW, K))) == pytest.approx(
            volume * 1e9 / rate
        )


@pytest.mark.parametrize(
    "topology", [{}, {"recompute": "full"}, {"overlap_grad_reduce": True}, {"mbs": 2}], ids=str
)
def test_sharding_more_is_never_faster_and_a_microbatch_twice_as_large_takes_at_most_twice_as_long(
    topology,
):
    """In one place: the time of an iteration of as many microbatches, far from a full card."""
    of = [seconds(**{**topology, "dp": 64, "gbs": 512, "zero": zero}).total for zero in (1, 2, 3)]
    assert of == sorted(of)
    for mbs in (1, 2, 4, 8):
        once, twice = (seconds(dp=64, mbs=m, gbs=m * 64 * 4, zero=1).total for m in (mbs, 2 * mbs))
        assert twice <= 2 * once
