"""A plan as the original's arguments, and back; what the originals call things is in their
megatron/arguments.py.
"""

import json
from dataclasses import replace

import pytest
from recorded import compare
from support import small_plan

from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import cluster
from trilane.config.layer import Layer
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Part, Run
from trilane.interop.megatron_args import megatron_args, megatron_text
from trilane.interop.megatron_parse import parse_plan
from trilane.interop.shell_args import read_arguments

SHAPE = ModelShape(
    num_layers=8, hidden_size=256, num_attention_heads=8, seq_length=128, vocab_size=50304
)
OPTIMIZER = Optimizer(
    lr=6e-5, min_lr=6e-6, warmup_samples=216, decay_samples=999, adam_beta2=0.95, clip_grad=0.5
)
BLENDED = Data(
    source="blend",
    tokenizer="/m/gpt2",
    blend=(Part(source="/d/a", weight=0.7), Part(source="/d/b c", weight=3)),
)
MACHINE, FP8 = cluster("jz-a100-80g"), cluster("dgx-h100")

TOPOLOGIES = [
    {},
    {"tp": 2, "pp": 2, "dp": 4, "mbs": 2, "gbs": 64, "zero": 1, "sequence_parallel": True},
    {"pp": 4, "gbs": 16, "interleaving": 2, "precision": "bf16", "fp32_gradients": True},
    {"pp": 5, "dp": 2, "gbs": 16, "partition": "type:transformer|embedding"},
    {"tp": 8, "recompute": "full", "precision": "fp16", "fp32_gradients": True},
    {"pp": 2, "gbs": 2, "recompute": "block", "recompute_layers": 3},
    {"dp": 2, "gbs": 4, "zero": 1, "overlap_grad_reduce": True, "overlap_param_gather": True},
    {"pp": 3, "gbs": 3, "first_stage_layers": 2, "last_stage_layers": 4},
    {"tp": 2, "cp": 4, "dp": 2, "gbs": 4, "precision": "fp8", "fp32_gradients": True},
]
RUNS = [
    Run(train_iters=70, log_interval=10, seed=7, timers=True, skip="20-29,31"),
    Run(
        train_iters=90, ramp=Ramp(start=8, increment=8, samples=100), eval_interval=30, eval_iters=4
    ),
]


def plan(topology: dict, **changes: object) -> Plan:
    given = {"label": "read", "shape": SHAPE, "topology": Topology(**topology)}
    given["cluster"] = FP8 if topology.get("precision") == "fp8" else MACHINE
    given |= {
        "engine": "megatron",
        "data": Data(source="/d/pair", tokenizer="/m/gpt2"),
        "optimizer": OPTIMIZER,
    }
    return Plan(**{**given, **changes})


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_plan_comes_back_from_its_arguments(topology: dict):
    plain = plan(topology)
    split = replace(BLENDED, split="949,50.5,1")
    ramped = plan({**topology, "gbs": 64}, run=RUNS[1], data=split)
    for original in (
        plain,
        replace(plain, run=RUNS[0], data=BLENDED, optimizer=Optimizer(init_std=0.006)),
        ramped,
    ):
        launcher = f"torchrun --nproc_per_node {original.topology.gpus} pretrain_gpt.py"
        text = f"{launcher} \\\n{megatron_text(megatron_args(original))}"
        found = parse_plan(read_arguments(text), cluster=original.cluster)
        assert found.plan == original
        assert (found.unknown, found.differs) == ((), ())


LLAMA = replace(
    SHAPE, num_key_value_heads=2, activation="swiglu", normalization="rmsnorm", positions="rotary"
)
LLAMA = replace(LLAMA, biases="none", tied_embeddings=False, ffn_hidden_size=896, no_rope_freq=4)
KINDS = [
    LLAMA,
    replace(
        LLAMA,
        kv_channels=64,
        ffn_hidden_size=None,
        biases="qkv",
        num_key_value_heads=1,
        qk_layernorm=True,
    ),
    replace(
        LLAMA, ffn_hidden_size=4 * 256
    ),  # what the program takes without a gate where nothing is given
    replace(SHAPE, tied_embeddings=False, ffn_hidden_size=512, positions="none"),
    replace(SHAPE, activation="squared-relu", positions="rotary"),
    replace(SHAPE, activation="gelu-tanh"),
]


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_every_kind_of_decoder_comes_back_from_its_arguments(shape: ModelShape):
    original = plan({}, shape=shape)
    found = parse_plan(
        read_arguments(megatron_text(megatron_args(original))), cluster=MACHINE, gpus=1
    )
    assert (found.plan, found.unknown, found.differs) == (original, (), ())


# of BigScience's Megatron-DeepSpeed 8387ae17 (megatron/arguments.py), and what they are in a plan
OF_THE_FORK = [
    (
        "--position-embedding-type alibi --embed-layernorm",
        {"positions": "alibi", "embedding_layernorm": True},
    ),
    (
        "--position-embedding-type rotary --glu-activation swiglu",
        {"positions": "rotary", "activation": "swiglu"},
    ),
    (
        "--glu-activation geglu --ffn-hidden-size 1024",
        {"activation": "geglu", "ffn_hidden_size": 1024},
    ),
    ("--checkpoint-activations --deepspeed-activation-checkpointing", {"recompute": "full"}),
    ("--cpu-optimizer", {"offload": "optimizer", "zero": 1}),
    ("--zero-stage 0 --bf16", {"zero": 1, "precision": "bf16", "fp32_gradients": True}),
]


@pytest.mark.parametrize(("words", "meant"), OF_THE_FORK)
def test_the_words_of_the_fork_are_read(words: str, meant: dict):
    text = megatron_text(megatron_args(plan({}))).replace("--no-bias-gelu-fusion", "")
    found = parse_plan(read_arguments(f"{text} --deepspeed {words}"), cluster=MACHINE, gpus=1)
    values = {**vars(found.plan.topology), **vars(found.plan.shape)}
    assert {name: values[name] for name in meant} == meant
    assert (found.plan.engine, found.unknown, found.differs) == ("deepspeed-3d", (), ())


def test_a_vocabulary_that_is_not_padded_is_padded_as_the_program_does():
    """50257 tokens on TP 4: 50688 rows, a multiple of 4 x 128."""
    text = megatron_text(megatron_args(plan({"tp": 4}))).replace(
        "--padded-vocab-size 50304", "--vocab-size 50257"
    )
    assert parse_plan(read_arguments(text), cluster=MACHINE, gpus=4).plan.shape.vocab_size == 50688
    bare = read_arguments(text.replace("--vocab-size 50257", ""))
    for given, rows in ((50257, 50688), (50304, 50304)):
        assert (
            parse_plan(bare, cluster=MACHINE, gpus=4, vocab_size=given).plan.shape.vocab_size
            == rows
        )


# of the form of BLOOM's, with its sizes: 384 GPUs, TP 4, PP 12, DP 8
COMMAND = """python -m torch.distributed.run --nproc_per_node 8 --nnodes 48 --rdzv_backend c10d pretrain_gpt.py \\
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 \\
    --pp-partition-method 'type:transformer|embedding' \\
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 \\
    --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 --micro-batch-size 2 \\
    --train-samples 220_000_000 --seq-length 2048 --max-position-embeddings 2048 \\
    --bf16 --init-method-std 0.0048 --glu-activation geglu \\
    --checkpoint-activations --tokenizer-type PretrainedFromHF --tokenizer-name-or-path /m/tok \\
    --pad-vocab-size-to=250880 --optimizer adam --adam-beta2 0.95 --lr 6.0e-5 --min-lr 6e-6 \\
    --lr-decay-style cosine --lr-warmup-samples 183_105 --weight-decay 1e-1 \\
    --deepspeed --deepspeed_config x.json --zero-stage 0 --save checkpoints
"""
BARE = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 --lr 1e-4 --bf16"
BARE += " --padded-vocab-size 50304 --train-iters 50 --split 9,1,0 --lr-warmup-fraction .1"


def test_a_command_line_is_read_and_what_a_plan_lacks_is_named():
    """And what programs take by default."""
    machine = replace(MACHINE, max_nodes=100)
    found = parse_plan(read_arguments(COMMAND), cluster=machine)
    assert (found.unknown, found.differs) == ((), ("data_path=missing: the plan has stdlib",))
    plans = {"script": found.plan}
    for name, words in (("bare", ""), ("fork", "\n--deepspeed")):
        plans[name] = parse_plan(read_arguments(BARE + words), cluster=machine, gpus=4).plan
    values = {name: plan.to_json() for name, plan in plans.items()}
    for plan in values.values():
        del plan["cluster"]
    compare("parsed", values)


GOOD = megatron_text(megatron_args(plan({"tp": 2, "pp": 2})))
CANNOT_BE_READ = [  # an argument of GOOD, what stands in its place, the message
    ("--lr 6e-05", "--lr fast", "--lr=fast: must be a number"),
    ("--seq-length 128", "", "--seq-length=missing: needs one value"),
    ("", "--data-path 'open", "arguments=unreadable: not a command line (No closing quotation)"),
    ("", "--seed $SEED", "arguments=$SEED: a script is not read"),
    ("", "\nsrun hostname", "arguments=srun hostname: a script is not read"),
    (GOOD, "pretrain_gpt.py", "arguments=pretrain_gpt.py: holds no --name"),
    ("", "--num-experts 8", "--num-experts=8: a plan has one MLP a layer, no experts"),
    ("", "--rampup-batch-size 16 x", "--rampup-batch-size=16 x: must be START INCREMENT SAMPLES"),
    (
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 0",
        "gpus=4: must be a multiple of tp x pp = 0",
    ),
    (
        "",
        "--use-rotary-position-embeddings --position-embedding-type alibi ",
        "--use-rotary-position-embeddings=yes: contradicts --position-embedding-type alibi: a model has one kind",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), CANNOT_BE_READ)
def test_what_cannot_be_read_is_one_line(old: str, new: str, message: str):
    text = GOOD.replace(old, new) if old else f"{GOOD} {new}"
    with pytest.raises(ValueError) as caught:
        parse_plan(read_arguments(text), cluster=MACHINE, gpus=4)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


CANNOT_BE_WRITTEN = [  # topology, what else differs, the message
    (
        {},
        {"shape": replace(LLAMA, activation="geglu")},
        "activation=geglu: Megatron-LM has gelu, gelu-tanh",
    ),
    (
        {},
        {"layer": Layer(name="mine.py:Own", source="")},
        "layer=mine.py:Own (e3b0c442): Megatron-LM trains its own",
    ),
]


@pytest.mark.parametrize(("topology", "changes", "message"), CANNOT_BE_WRITTEN)
def test_what_cannot_be_written_is_one_line(topology: dict, changes: dict, message: str):
    with pytest.raises(ValueError) as caught:
        megatron_args(plan(topology, **changes))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_the_command_goes_both_ways(tmp_path, capsys):
    path = tmp_path / "small.json"
    path.write_text(
        json.dumps(
            {**small_plan().to_json(), "data": Data(folder=str(tmp_path), source="mock").__dict__}
        )
    )
    assert main(["convert", "megatron", str(path), "--prepare"]) == 0
    text = capsys.readouterr().out
    assert f"--data-path {tmp_path}/mock-" in text and "--tokenizer-type NullTokenizer" in text
    (tmp_path / "job.txt").write_text("srun pretrain_gpt.py --moe 2 " + text)
    assert (
        main(
            [
                "convert",
                "megatron",
                "--read",
                str(tmp_path / "job.txt"),
                "--cluster",
                "jz-a100-80g",
                "--gpus",
                "1",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out)["shape"] == small_plan().to_json()["shape"]
    assert err.splitlines()[0] == "trilane: moe: unknown, not in the plan"
