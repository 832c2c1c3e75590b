"""DeepSpeed's JSON says what the plan says, and a user's JSON that does not is told where."""

from dataclasses import replace

import pytest

from trilane.deepspeed_config import deepspeed_config
from trilane.deepspeed_read import contradictions, read_topology
from trilane.hardware import cluster
from trilane.memory import memory_per_stage
from trilane.plan import Plan
from trilane.shape import ModelShape
from trilane.topology import Topology

SMALL = ModelShape(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, vocab_size=384)


Z = "zero_optimization"


def plan(engine="deepspeed-zero", **topology):
    spread = Topology(**{"dp": 2, "mbs": 2, "gbs": 16, "zero": 1, **topology})
    return Plan(label="x", shape=SMALL, cluster=cluster("jz-a100-80g"), topology=spread, engine=engine)


def flat(values, prefix=""):
    pairs = {}
    for name, value in values.items():
        pairs |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return pairs


SAID = [
    ({}, {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}),
    ({}, {"gradient_clipping": 1.0, "wall_clock_breakdown": False, "zero_optimization.stage": 1}),
    ({"zero": 2}, {"zero_optimization.reduce_bucket_size": 12 * 128 * 128}),
    ({"zero": 3}, {"zero_optimization.reduce_bucket_size": 16384, "zero_optimization.stage": 3}),
    ({"zero": 3}, {"zero_optimization.stage3_param_persistence_threshold": 1280}),
    ({"zero": 3}, {"zero_optimization.stage3_prefetch_bucket_size": 14745}),
    ({"offload": "optimizer"}, {"zero_optimization.offload_optimizer.device": "cpu"}),
    ({"zero": 3, "offload": "full"}, {"zero_optimization.offload_param.device": "cpu"}),
    ({"precision": "bf16"}, {"bf16.enabled": True, "data_types.grad_accum_dtype": "bf16"}),
    ({"precision": "bf16", "fp32_gradients": True}, {"data_types.grad_accum_dtype": "fp32"}),
    ({"precision": "fp16"}, {"fp16.enabled": True, "fp16.initial_scale_power": 16, "fp16.loss_scale": 0}),
    ({"engine": "deepspeed-3d", "pp": 2}, {"pipeline.pipe_partitioned": False, "pipeline.grad_partitioned": False}),
]


@pytest.mark.parametrize(("changes", "said"), SAID, ids=str)
def test_the_json_says_what_the_plan_says(changes, said):
    """DeepSpeed's configuration page; stage 3's buckets are those of Hugging Face's Trainer: h^2, 0.9 h^2, 10 h."""
    values = flat(deepspeed_config(plan(**changes), compiler=True))
    assert {name: values.get(name) for name in said} == said


@pytest.mark.parametrize("changes", [changes for changes, _ in SAID], ids=str)
def test_what_was_written_is_read_back(changes):
    made = plan(**changes)
    values, t = deepspeed_config(made, compiler=False), made.topology
    assert contradictions(values, made) == []
    assert read_topology(values, tp=t.tp, pp=t.pp, dp=t.dp) == t


def test_without_a_compiler_no_optimizer_asks_for_one():
    with_one, without = (deepspeed_config(plan(offload="optimizer"), compiler=c) for c in (True, False))
    assert "torch_adam" not in with_one["optimizer"]["params"] and "zero_force_ds_cpu_optimizer" not in with_one
    assert without["optimizer"]["params"]["torch_adam"] is True and without["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("buckets", ["layer", "library"])
def test_the_planner_counts_the_buckets_that_the_engine_asks_for(zero, buckets):
    """Three of 16-bit values: one to reduce, doubled to overlap, and one to gather; DeepSpeed's own hold 5e8."""
    made = plan(zero=zero, buckets=buckets, precision="bf16")
    asked = deepspeed_config(made, compiler=True)[Z].get("reduce_bucket_size", 500_000_000)
    held = [memory_per_stage(made.shape, t, made.cluster)[0].buffers for t in (made.topology, Topology())]
    assert held[0] - held[1] == 3 * 2 * asked


def test_a_bucket_never_passes_deepspeeds_own_size():
    wide = replace(plan(), shape=replace(SMALL, hidden_size=8192))
    assert deepspeed_config(wide, compiler=True)["zero_optimization"]["reduce_bucket_size"] == 500_000_000


WRONG = [
    ({"train_batch_size": 8}, {}, ["train_batch_size=8: the plan has 16"]),
    (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        {},
        [
            "train_batch_size=16: must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp = 2 x 2",
            "gradient_accumulation_steps=2: the plan has 4",
        ],
    ),
    ({Z: {"stage": 2}}, {}, [f"{Z}.stage=2: the plan has 1"]),
    ({"gradient_clipping": 0.5}, {}, ["gradient_clipping=0.5: the plan has 1.0"]),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {"precision": "bf16"}, ["bf16.enabled=True: fp16 is"]),
    ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, {}, ["optimizer.params.betas=[0.9, 0.999]: the plan has"]),
    ({Z: {"stage": 4}}, {}, [f"{Z}.stage=4: ZeRO stages are 0, 1, 2 and 3"]),
    (
        {Z: {"stage": 2}},
        {"engine": "deepspeed-3d", "pp": 2},
        [f"{Z}.stage=2: ZeRO 2 and 3 cannot run with a pipeline (pp=2)"],
    ),
    (
        {Z: {"stage": 1, "offload_param": {"device": "cpu"}}},
        {},
        [f"{Z}.offload_param.device=cpu: needs ZeRO stage 3"],
    ),
    ({Z: {"offload_optimizer": {"device": "cpu"}}}, {}, [f"{Z}.offload_optimizer.device=cpu: needs ZeRO stage 1"]),
]


@pytest.mark.parametrize(("values", "changes", "lines"), WRONG, ids=str)
def test_a_users_contradiction_is_named_in_one_line(values, changes, lines):
    full = {Z: {"stage": 1}, "gradient_clipping": 1.0, **values}
    found = contradictions(full, plan(**changes))
    assert all("\n" not in line for line in found)
    assert [wanted for wanted in lines if not any(line.startswith(wanted) for line in found)] == []


def test_what_the_trainer_fills_in_contradicts_nothing():
    values = {Z: {"stage": 1}, "gradient_clipping": "auto", "train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    assert contradictions(values, plan()) == []


def test_what_a_json_leaves_out_is_deepspeeds_default():
    assert contradictions({Z: {"stage": 1}}, plan()) == ["gradient_clipping=0.0: the plan has 1.0"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({Z: {"stage": 3, "offload_param": {"device": "nvme"}}}, f"{Z}.offload_param.device=nvme: known: cpu, none"),
        ({"train_batch_size": 9}, "train_batch_size=9: must be"),
        ({"train_batch_size": "16"}, "train_batch_size=16: must be a whole number of at least 1"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled=True: fp16 is enabled too"),
    ],
    ids=str,
)
def test_a_json_that_means_no_topology_is_refused(values, line):
    with pytest.raises(ValueError) as caught:
        read_topology(values, dp=2)
    assert str(caught.value).startswith(line)
