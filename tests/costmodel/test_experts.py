"""Mixtures of experts: published sizes, bytes that torch traced, laws, and what is refused."""

from dataclasses import replace

import pandas as pd
import pytest

from trilane.config.cluster import cluster
from trilane.config.engines import require_trainable
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import memory_bytes, memory_per_stage
from trilane.costmodel.predict import Prediction, predict
from trilane.planning.search import search

GIB = 2**30
MIXTRAL = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    seq_length=4096,
    vocab_size=32000,
    activation="swiglu",
    normalization="rmsnorm",
    positions="rotary",
    biases="none",
    tied_embeddings=False,
    experts=8,
    top_k=2,
    expert_ffn=14336,
)
QWEN3 = replace(
    MIXTRAL,
    num_layers=48,
    hidden_size=2048,
    num_key_value_heads=4,
    kv_channels=128,
    qk_layernorm=True,
    vocab_size=151936,
    experts=128,
    top_k=8,
    expert_ffn=768,
)


def predicted(shape: ModelShape = MIXTRAL, **topology: object) -> Prediction:
    given = {"dp": 8, "pp": 4, "zero": 1, "gbs": 64, "mbs": 1, "ep": 8}
    given |= {"precision": "bf16", "fp32_gradients": True, **topology}
    machine = cluster("jz-h100")
    plan = Plan(label="m", shape=shape, cluster=machine, topology=Topology(**given))  # type: ignore[arg-type]
    return predict(plan)


def test_all_and_active_parameters_are_the_published_ones():
    """Of the models' cards: 46.7 B and 12.9 B; 30.5 B and 3.3 B."""
    assert (MIXTRAL.parameters, QWEN3.parameters) == (46_702_792_704, 30_532_122_624)
    assert round(MIXTRAL.active_parameters / 1e9, 1) == 12.9
    assert round(QWEN3.active_parameters / 1e9, 1) == 3.4


def test_the_bytes_of_a_stage_are_those_that_torch_traced():
    """Mixtral-8x7B on 32 GPUs, megatron-core's layers on fake tensors: 57.6 GiB without buffers."""
    first = predicted().stages[0]
    states = (first.weights, first.gradients, first.optimizer)
    assert [round(part / GIB, 2) for part in states] == [3.49, 6.99, 16.40]
    assert first.activations / GIB == pytest.approx(29.30, rel=0.02)


def test_dense_layers_in_front_are_those_of_a_dense_model():
    front = replace(MIXTRAL, first_dense=8)
    dense = replace(MIXTRAL, experts=0, top_k=0, expert_ffn=0)
    eighth = (dense.parameters - MIXTRAL.parameters) * 8 // 32
    assert front.parameters - MIXTRAL.parameters == eighth
    first, second = predicted(front).stages[:2]
    assert first.weights == predicted(dense, ep=1).stages[0].weights
    assert second.weights == predicted().stages[1].weights
    seconds = predicted(front).stage_seconds
    assert seconds[0] < seconds[1] == predicted().stage_seconds[1]


def test_experts_apart_are_less_memory_and_more_messages():
    alone, apart = predicted(ep=1, recompute="full"), predicted(ep=4, recompute="full")
    assert alone.time.expert_parallel < apart.time.expert_parallel
    assert alone.stages[0].weights > 3 * apart.stages[0].weights
    shared = replace(MIXTRAL, shared_experts=2, shared_ffn=1024)
    assert predicted(shared).time.matmul > predicted().time.matmul


def test_over_nodes_one_copy_of_a_token_is_sent_for_all_experts_of_a_node():
    """Nodes of four GPUs: ep 16 is four of them."""
    times = [
        predicted(QWEN3, ep=16, dp=16, pp=2, dispatcher=name).time.expert_parallel
        for name in ("deepep", "alltoall", "allgather")
    ]
    assert times == sorted(times) and times[1] > 1.5 * times[0]


def test_few_tokens_an_expert_multiply_slowly():
    few, many = (predicted(QWEN3, mbs=mbs, gbs=256).time.matmul for mbs in (1, 8))
    assert few > 1.1 * many


def test_the_interval_is_wider_than_that_of_a_dense_plan():
    dense = replace(MIXTRAL, experts=0, top_k=0, expert_ffn=0, num_layers=16)
    widths = [p.sec_hi / p.sec_lo for p in (predicted(), predicted(dense, ep=1))]
    assert widths[0] > 1.1 * widths[1]


def test_the_search_finds_how_many_gpus_share_the_experts():
    found = search(MIXTRAL, "jz-h100", gpus=32, gbs=256, top=1)
    free = found[0].prediction.sec_per_it
    for ep in (1, 2, 4, 8):
        pinned = search(MIXTRAL, "jz-h100", gpus=32, gbs=256, top=1, ep=ep)
        assert not len(pinned) or pinned[0].prediction.sec_per_it >= free
    assert found[0].topology.ep > 1
    assert "ep" in found[0].label


BAD = [  # the shape's fields, the topology's, the message
    ({"top_k": 9}, {}, "top_k=9: must be 1 to experts=8"),
    ({"expert_ffn": 0}, {}, "expert_ffn=0: must be above zero"),
    ({"experts": 0}, {}, "top_k=2: needs experts"),
    (
        {"shared_experts": 1},
        {},
        "shared_ffn=0: must be above zero exactly where shared_experts=1 is",
    ),
    ({"first_dense": 32}, {}, "first_dense=32: must be below num_layers=32"),
    ({}, {"ep": 3, "dp": 9, "gbs": 72}, "ep=3: must divide experts=8"),
    ({}, {"ep": 8, "etp": 2}, "ep=8: ep x etp must divide tp x cp x dp"),
    ({}, {"tp": 2}, "tp=2: needs sequence_parallel where a model has experts"),
]


@pytest.mark.parametrize(("shape", "topology", "message"), BAD, ids=lambda value: str(value)[:20])
def test_what_cannot_be_is_one_line(shape: dict, topology: dict, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        predicted(replace(MIXTRAL, **shape), **topology)


def test_rows_of_mixtures_are_read_and_what_is_not_predicted_is_named():
    row = {"cluster": "dgx-h100", "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4}
    row |= {"head_dim": 128, "seq": 4096, "vocab_size": 151936, "experts": 128, "top_k": 8}
    row |= {"expert_ffn": 768, "tp": 1, "pp": 1, "dp": 16, "ep": 16, "mbs": 1, "gbs": 1024}
    row |= {"dispatcher": "nccl-alltoall", "mla": 0}
    frame = predict(pd.DataFrame([row, row | {"mla": 1}, row | {"ep": 3}]))
    assert frame["predicted_sec_per_it"].notna().tolist() == [True, False, False]
    reasons = ["", "mla=1: latent attention is not predicted", "ep=3: ep x etp must divide"]
    for reason, wanted in zip(frame["reason"], reasons, strict=True):
        assert reason.startswith(wanted)


def test_the_slowest_and_the_fullest_stage_may_stand_where_dense_layers_end():
    shape = replace(MIXTRAL, num_layers=24, first_dense=8, hidden_size=1024, expert_ffn=4096)
    ends = {"first_stage_layers": 2, "last_stage_layers": 2, "pp": 6, "recompute": "none"}
    p = predicted(shape, **ends)
    slowest = max(p.stage_seconds)
    assert p.sec_per_it > 7 * slowest + sum(p.stage_seconds)
    columns = columns_of(shape, Topology(dp=8, zero=1, gbs=64, ep=8, precision="bf16", **ends))
    held = memory_per_stage(columns, cluster("jz-h100"))
    assert memory_bytes(columns, cluster("jz-h100")) == max(stage.total for stage in held)


def test_olmoe_is_planned_and_not_trained():
    shape = replace(QWEN3, num_layers=16, experts=64, expert_ffn=1024, qk_norm_whole=True)
    assert predicted(shape).sec_per_it > 0
    plan = Plan(label="o", shape=shape, cluster=cluster("jz-h100"), topology=Topology())
    with pytest.raises(ValueError, match=r"^qk_norm_whole=yes: is OLMoE's"):
        require_trainable(plan)
