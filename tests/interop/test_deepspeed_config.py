"""DeepSpeed's JSON has the settings of the plan, and what differs in a user's JSON is named."""

import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from recorded import compare

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import memory_per_stage
from trilane.interop.deepspeed_config import _flat, deepspeed_config, read_deepspeed

SMALL = parse_shape("4,128,4,128,384")


Z = "zero_optimization"


def plan(engine="deepspeed-zero", **topology):
    spread = Topology(**{"dp": 2, "mbs": 2, "gbs": 16, "zero": 1, **topology})
    return Plan(
        label="x", shape=SMALL, cluster=cluster("jz-a100-80g"), topology=spread, engine=engine
    )


BF16 = {"precision": "bf16"}
CHANGES = [
    {},
    {"zero": 2},
    {"zero": 3},
    {"offload": "optimizer"},
    {"zero": 3, "offload": "full"},
    {"precision": "fp16"},
]
CHANGES += [BF16, BF16 | {"fp32_gradients": True}, {"overlap_grad_reduce": True}, {"adam": "torch"}]
CHANGES += [
    {"zero": 3, "buckets": "library"},
    {"engine": "deepspeed-3d", "pp": 2},
    {"recompute": "full"},
]


def test_the_json_has_the_settings_of_the_plan():
    """DeepSpeed's configuration page; stage 3's buckets are those of Hugging Face's Trainer: h^2,
    0.9 h^2, 10 h.
    """
    found = {
        str(changes): _flat(deepspeed_config(plan(**changes), compiler=True), {})
        for changes in CHANGES
    }
    assert found["{'zero': 3}"]["zero_optimization.reduce_bucket_size"] == 128 * 128
    compare("deepspeed", found)


def test_without_a_compiler_no_optimizer_asks_for_one():
    with_one, without = (
        deepspeed_config(plan(offload="optimizer"), compiler=c) for c in (True, False)
    )
    assert "torch_adam" not in with_one["optimizer"]["params"]
    assert "zero_force_ds_cpu_optimizer" not in with_one
    assert without["optimizer"]["params"]["torch_adam"] is True
    assert without["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("buckets", ["layer", "library"])
def test_the_planner_counts_the_buckets_that_the_engine_asks_for(zero, buckets):
    """Three of 16-bit values: one to reduce, doubled to overlap, and one to gather; DeepSpeed's own
    hold 5e8.
    """
    made = plan(zero=zero, buckets=buckets, precision="bf16")
    asked = deepspeed_config(made, compiler=True)[Z].get("reduce_bucket_size", 500_000_000)
    held = [
        memory_per_stage(columns_of(made.shape, t), made.cluster)[0].buffers
        for t in (made.topology, Topology())
    ]
    assert held[0] - held[1] == 3 * 2 * asked


@pytest.mark.parametrize("changes", CHANGES[:9], ids=str)
def test_the_json_of_a_plan_is_read_as_it(tmp_path, capsys, changes):
    wanted = plan(**changes)
    file = wanted.save(tmp_path / "plan.json")
    written = tmp_path / "ds.json"
    written.write_text(json.dumps(deepspeed_config(wanted, compiler=True)))
    options = f"--shape {file} --cluster jz-a100-80g --gpus 2 --attention fused"
    assert main(f"plan show --deepspeed {written} {options} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["id"] == wanted.id
    assert main(f"convert deepspeed --read {written} {options}".split()) == 0
    written.write_text(capsys.readouterr().out)
    assert read_plan(written).id == wanted.id


def test_what_is_missing_is_as_in_deepspeed(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8}')
    chosen, optimizer, _ = read_deepspeed(file, 1, {})
    theirs = DeepSpeedConfig(str(file))
    assert chosen["mbs"] == theirs.train_micro_batch_size_per_gpu
    assert optimizer.clip_grad == theirs.gradient_clipping
