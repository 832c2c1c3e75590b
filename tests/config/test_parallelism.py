"""What a model and a cluster ask of a topology: each rule at its edge."""

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology, invalid_reason

A100 = cluster("jz-a100-80g")  # 52 nodes of 8
SHAPE = parse_shape("24,2048,16,2048,50304")
EMBED = "type:transformer|embedding"
# the whole cluster; 26 layers of 2 stages; layers that the first and the last stage leave
EDGES = [
    ({"dp": 416, "gbs": 416}, ""),
    ({"dp": 417, "gbs": 417}, "gpus=417: must not exceed the cluster"),
    ({"pp": 4, "interleaving": 2, "gbs": 8}, ""),
    (
        {"pp": 4, "interleaving": 2, "gbs": 5},
        "gbs=5: interleaving needs microbatches % pp == 0",
    ),
    ({"pp": 2, "partition": EMBED}, ""),
    ({"dispatcher": "allgather"}, "dispatcher=allgather: needs a model with experts"),
    ({"pp": 4, "first_stage_layers": 6, "last_stage_layers": 6}, ""),
]


@pytest.mark.parametrize(("choices", "reason"), EDGES, ids=str)
def test_a_rule_refuses_what_breaks_it_and_nothing_next_to_it(choices: dict, reason: str):
    assert (invalid_reason(SHAPE, Topology(**choices), A100) or "") == reason


@pytest.mark.parametrize(
    ("name", "tp", "allowed"),
    [("dgx-h100", 16, True), ("dgx-h100", 12, False), ("jz-h100", 8, False)],
)
def test_a_tensor_parallel_group_may_fill_nodes_where_the_network_is_half_as_fast_as_the_bus(
    name, tp, allowed
):
    """dgx-h100: 400 GB/s a node against 450 a GPU; jz-h100, nodes of 4: 200 against 450."""
    shape = parse_shape("24,3072,48,2048,61440")
    assert (invalid_reason(shape, Topology(tp=tp, dp=4, gbs=4), cluster(name)) is None) is allowed
