"""Memory: published bytes, laws, and the measured rows."""

import numpy as np
import pytest

from trilane.config.cluster import Cluster, cluster
from trilane.config.model import ModelShape, parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import (
    DEFAULT,
    StageMemory,
    activation_bytes_per_layer,
    in_flight,
    memory_bytes,
    memory_per_stage,
    oom_probability,
    stage_parameters,
)

A100 = cluster("jz-a100-80g")
GIB = 2**30
SHAPE = parse_shape("72,14336,64,2048,250880")

# Korthikanti et al. 2022, arXiv:2205.05198, figure 1: 22B, 175B, 530B, 1T; GiB of states, of activations without
# recomputation, and with selective recomputation and sequence parallelism
FIGURE_1 = [
    ((48, 6144, 64, 4, 1, 1), 45.5625, 59.25, 9.5625),
    ((96, 12288, 96, 1, 8, 3), 45.5625, 66.84375, 12.3515625),
    ((105, 20480, 128, 1, 35, 3), 31.640625, 114.0234375, 23.076171875),
    ((128, 25600, 160, 1, 64, 1), 32.958984375, 131.25, 26.5625),
]


@pytest.mark.parametrize(("model", "states", "none", "selective"), FIGURE_1, ids=["22B", "175B", "530B", "1T"])
def test_states_and_activations_are_those_of_korthikantis_figure_1(model, states, none, selective):
    layers, hidden, heads, mbs, pp, v = model
    shape = ModelShape(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048, vocab_size=51200
    )
    assert 18 * 12 * layers * hidden**2 / 8 / pp / GIB == states
    for recompute, sp, expected in (("none", False, none), ("selective", True, selective)):
        topology = Topology(
            tp=8,
            pp=pp,
            mbs=mbs,
            gbs=mbs * 4 * pp,
            interleaving=v,
            recompute=recompute,
            sequence_parallel=sp,
            precision="bf16",
            attention="scores",
        )
        x = columns_of(shape, topology)
        kept = layers / pp * in_flight(x, 0) * activation_bytes_per_layer(x)
        assert float(kept) / GIB == pytest.approx(expected, rel=1e-12)


def test_zero_shards_optimizer_then_gradients_then_weights():
    """Rajbhandari et al. 2020, arXiv:1910.02054, figure 1; ZeRO-3 holds two gathered layers beside its shard."""
    shape = parse_shape("24,2048,16,1024,50304")
    stages = [memory_per_stage(shape, Topology(dp=8, gbs=8, zero=zero, precision="bf16"), A100)[0] for zero in range(4)]
    assert stages[0].optimizer / 14 * DEFAULT.optimizer == pytest.approx(stages[1].optimizer * 8)
    assert stages[2].gradients == stages[1].gradients / 8
    gathered = 2 * 2 * columns_of(shape, Topology()).layer_parameters
    assert stages[3].weights == pytest.approx(stages[2].weights / 8 + gathered)


def test_a_stage_holds_as_many_microbatches_as_stand_before_the_end_of_the_pipeline():
    """1F1B: min(m, p - i)."""
    x = columns_of(SHAPE, Topology(pp=4, gbs=3))
    assert [float(in_flight(x, i)) for i in range(4)] == [3, 3, 2, 1]


def test_parameters_of_all_ranks_are_those_of_the_model_and_its_replicas():
    """Whole model = layers + embedding, counted once where tensor parallelism cuts, tp times where it replicates."""
    h, tp, pp = SHAPE.hidden_size, 8, 12
    x = columns_of(SHAPE, Topology(tp=tp, pp=pp, gbs=pp))
    total = tp * float(sum(stage_parameters(x, i) for i in range(pp)))
    replicated = (tp - 1) * (SHAPE.num_layers * 6 * h + SHAPE.seq_length * h + 2 * h)
    assert total == SHAPE.parameters + replicated + SHAPE.embedding_parameters  # the tied head's copy


def test_doubt_grows_from_never_to_always_around_the_size_of_the_card():
    capacity = A100.gpu.memory_bytes
    p = oom_probability(np.array([0.7, 0.97, 1.0, 1.03, 1.4]) * capacity, A100)
    assert p[0] < 1e-6 and p[2] == 0.5 and p[4] > 1 - 1e-6
    assert p[1] == pytest.approx(1 - p[3], abs=0.01)


GPT = parse_shape("24,2048,16,2048,50304")


def total(shape: ModelShape = GPT, machine: Cluster = A100, engine: str = "", **topology: object) -> list[StageMemory]:
    return memory_per_stage(shape, Topology(**{"precision": "bf16", **topology}), machine, engine=engine)


def test_a_stage_in_the_middle_may_be_the_fullest() -> None:
    """Few logits and a thin first stage: the second holds more layers, and more microbatches than those behind it."""
    shape, topology = parse_shape("24,2048,16,2048,512"), {"pp": 4, "gbs": 8, "first_stage_layers": 3}
    sizes = [stage.total for stage in total(shape, **topology)]
    assert sizes.index(max(sizes)) == 1
    x = columns_of(shape, Topology(precision="bf16", **topology))
    assert float(memory_bytes(x, A100)) == pytest.approx(max(sizes))


def test_zeros_buckets_are_those_of_its_engine_without_a_pipeline_and_with_replicas() -> None:
    """6 bytes for each of 12 h^2 values; DeepSpeed's pipeline engine reduces gradients itself."""
    base = DEFAULT.base_bytes
    for topology, bytes_ in (
        ({"zero": 1, "dp": 4, "gbs": 4}, 6 * 12 * 2048**2),
        ({"zero": 1, "dp": 4, "gbs": 4, "buckets": "library"}, 6 * 500e6),
        ({"zero": 1, "dp": 4, "gbs": 4, "pp": 2}, 0),
        ({"zero": 0, "dp": 4, "gbs": 4}, 0),
        ({"zero": 1, "dp": 1}, 0),
    ):
        assert [stage.buffers for stage in total(**topology)] == pytest.approx([base + bytes_] * topology.get("pp", 1))


@pytest.mark.parametrize(
    ("topology", "engine", "each"),
    [
        ({"precision": "fp32"}, "", (4, 4, 8)),
        ({"precision": "fp32"}, "megatron", (4, 4, 8)),
        ({}, "megatron", (2, 4, 12)),
        ({"zero": 1, "dp": 4, "gbs": 4}, "megatron", (2, 4, 3)),
        ({}, "", (2, 2, 14)),
        ({"precision": "fp16"}, "", (2, 2, 14)),
        ({"zero": 1, "dp": 4, "gbs": 4}, "", (2, 2, 17.4 / 4)),
    ],
)
def test_the_states_of_a_parameter_take_the_published_bytes(topology: dict, engine: str, each: tuple) -> None:
    """16 in fp32, 18 in mixed precision; megatron-core's guide to its distributed optimizer: 6 + 12 / dp in bf16."""
    stage = total(engine=engine, **topology)[0]
    found = (stage.weights, stage.gradients, stage.optimizer)
    assert found == pytest.approx([b * GPT.parameters for b in each])
