"""DeepSpeed's JSON has the settings of the plan, and what differs in a user's JSON is named."""

import json
import subprocess
import sys

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.memory import memory_per_stage
from trilane.interop.deepspeed_config import contradictions, deepspeed_config, known_keys

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


SETTINGS = [
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


@pytest.mark.parametrize(("changes", "settings"), SETTINGS, ids=str)
def test_the_json_has_the_settings_of_the_plan(changes, settings):
    """DeepSpeed's configuration page; stage 3's buckets are those of Hugging Face's Trainer: h^2, 0.9 h^2, 10 h."""
    values = flat(deepspeed_config(plan(**changes), compiler=True))
    assert {name: values.get(name) for name in settings} == settings


@pytest.mark.parametrize("changes", [changes for changes, _ in SETTINGS], ids=str)
def test_what_was_written_contradicts_nothing(changes):
    made = plan(**changes)
    assert contradictions(deepspeed_config(made, compiler=False), made) == []


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


NO_KEY = "DeepSpeed has no such key"
BOTH = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
AWAY = {"offload_param": {"device": "cpu"}}
WRONG = [  # a user's values, how the plan differs, how a line begins
    ({"train_batch_size": 8}, {}, "train_batch_size=8: the plan has 16"),
    ({Z: {"stage": 2}}, {}, f"{Z}.stage=2: the plan has 1"),
    ({Z: {"stage": 1, **AWAY}}, {}, f"{Z}.offload_param.device='cpu': the plan has 'none'"),
    ({Z: {"offload_optimizer": {"device": "nvme"}}}, {}, f"{Z}.offload_optimizer.device='nvme': the plan has 'none'"),
    ({Z: {"stage": 1, "overlap_com": True}}, {}, f"{Z}.overlap_com=True: {NO_KEY}; did you mean overlap_comm?"),
    ({"gradient_cliping": 1.0}, {}, f"gradient_cliping=1.0: {NO_KEY}; did you mean gradient_clipping?"),
    ({"optimizer": {"type": "AdamW", "params": {"wd": 0}}}, {}, f"optimizer.params.wd=0: {NO_KEY}"),
    ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, {}, "optimizer.params.betas=[0.9, 0.999]: the plan has"),
    ({"gradient_clipping": 0.5}, {}, "gradient_clipping=0.5: the plan has 1.0"),
    (BOTH, {"precision": "bf16"}, "fp16.enabled=True: the plan has False"),
    ({"fp16": True}, {}, "fp16=True: must be a JSON object"),
    ({"bf16": {"enabled": "yes"}}, {}, "bf16.enabled='yes': the plan has False"),
    ({"train_batch_size": "16"}, {}, "train_batch_size='16': the plan has 16"),
]


@pytest.mark.parametrize(("values", "changes", "line"), WRONG, ids=str)
def test_a_users_contradiction_is_named_in_one_line(values, changes, line):
    found = contradictions({Z: {"stage": 1}, "gradient_clipping": 1.0, **values}, plan(**changes))
    assert any(one.startswith(line) for one in found) and not any("\n" in one for one in found)


def test_what_the_trainer_fills_in_contradicts_nothing_and_what_is_left_out_is_deepspeeds_default():
    values = {Z: {"stage": 1}, "train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    free = {"gradient_clipping": "auto", "data_types": {"grad_accum_dtype": "fp32"}}
    assert contradictions({**values, **free}, plan()) == []
    assert contradictions(values, plan()) == ["gradient_clipping=0.0: the plan has 1.0"]


@pytest.mark.slow
def test_the_table_of_keys_is_that_of_the_deepspeed_installed():
    """Its own models of the blocks that it checks. Another release may add some: then the table wants a look."""
    code = (
        "import json; from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Z\n"
        "from deepspeed.runtime.zero import offload_config as o; from deepspeed.runtime import precision_config as p\n"
        "named = {'zero_optimization': Z, 'zero_optimization.offload_param': o.DeepSpeedZeroOffloadParamConfig,"
        "'zero_optimization.offload_optimizer': o.DeepSpeedZeroOffloadOptimizerConfig,"
        "'fp16': p.DeepSpeedFP16Config, 'bf16': p.DeepSpeedBF16Config}\n"
        "print(json.dumps({k: sorted(f.alias or n for n, f in m.model_fields.items()) for k, m in named.items()}))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert {block: known_keys()[block] for block in theirs} == theirs


@pytest.fixture
def command(tmp_path, capsys):
    """The exit code and what is printed for a JSON, with a plan to hold it to or without."""

    def opened(values, *more, against=None):
        (tmp_path / "ds.json").write_text(values if isinstance(values, str) else json.dumps(values))
        if against:
            (tmp_path / "plan.json").write_text(json.dumps(against.to_json()))
            more = ("--plan", str(tmp_path / "plan.json"), *more)
        code = main(["convert", "deepspeed", str(tmp_path / "ds.json"), *more])
        out, err = capsys.readouterr()
        return code, out or err

    return opened


def test_the_command_renders_a_plan_and_reads_its_own_rendering_back(command):
    code, printed = command(plan().to_json())
    assert code == 0 and json.loads(printed) == deepspeed_config(plan(), compiler=True)
    assert command(printed, against=plan()) == (0, "no contradiction\n")
    code, printed = command(printed)
    assert code == 2 and printed.startswith("trilane: plan=missing: a DeepSpeed JSON is compared with a plan")


def test_the_command_names_each_contradiction_and_leaves_with_1(command):
    code, printed = command(
        {**deepspeed_config(plan(), compiler=True), "train_batch_size": 8}, "--json", against=plan()
    )
    assert code == 1
    assert json.loads(printed)["contradictions"][-1] == "train_batch_size=8: the plan has 16"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ("{", "trilane: file="),
        ("[]", "trilane: file="),
        (plan("megatron", dp=1, zero=0, gbs=2).to_json(), "trilane: engine=megatron: takes no DeepSpeed JSON"),
    ],
    ids=["no JSON", "no object", "no plan for DeepSpeed"],
)
def test_what_cannot_be_read_is_one_line_and_2(command, values, line):
    code, printed = command(values)
    assert code == 2 and printed.startswith(line) and printed.count("\n") == 1
