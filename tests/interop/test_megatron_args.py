"""A plan as the original's arguments, and back; what the originals call things is in their
megatron/arguments.py.
"""

import json
import subprocess
from dataclasses import replace
from re import escape
from typing import Any

import pytest
from recorded import compare
from support import small_plan

from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import cluster
from trilane.config.layer import Layer
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan
from trilane.config.training import Data, Optimizer, Part, Run
from trilane.interop.megatron_args import megatron_args, megatron_text
from trilane.interop.megatron_parse import ParsedPlan, parse_plan
from trilane.interop.shell_args import read_arguments

SHAPE = parse_shape("8,256,8,128,50304")
OPTIMIZER = Optimizer(
    lr=6e-5, min_lr=6e-6, warmup_samples=216, decay_samples=999, adam_beta2=0.95, clip_grad=0.5
)
WSD = {"decay_style": "WSD", "wsd_decay_style": "minus_sqrt", "wsd_decay_samples": 99}
BLENDED = Data(
    source="blend",
    tokenizer="/m/gpt2",
    blend=(Part(source="/d/a", weight=0.7), Part(source="/d/b c", weight=3)),
)
MACHINE, FP8 = cluster("jz-a100-80g"), cluster("dgx-h100")

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TOPOLOGIES = [
    {},
    {"tp": 2, "pp": 2, "dp": 4, "mbs": 2, "gbs": 64, "zero": 1, "sequence_parallel": True},
    {"pp": 4, "gbs": 16, "interleaving": 2, "precision": "bf16", "fp32_gradients": True},
    {"pp": 5, "dp": 2, "gbs": 16, "partition": "type:transformer|embedding"},
    {"tp": 8, "recompute": "full", "precision": "fp16", "fp32_gradients": True},
    {"pp": 2, "gbs": 2, "recompute": "block", "recompute_layers": 3},
    {"dp": 4, "gbs": 4, "zero": 1, "shards": 2, **OVERLAPS},
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
    given = {
        "label": "read",
        "shape": SHAPE,
        "cluster": FP8 if topology.get("precision") == "fp8" else MACHINE,
        "topology": Topology(**topology),
        "data": Data(source="/d/pair", tokenizer="/m/gpt2"),
        "optimizer": OPTIMIZER,
    }
    return Plan(**{**given, **changes})


def read(text: str, gpus: int = 0, **given: Any) -> ParsedPlan:
    return parse_plan(read_arguments(text), **{"cluster": MACHINE, "gpus": gpus, **given})


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
EXPERTS = replace(LLAMA, no_rope_freq=0, ffn_hidden_size=None, experts=8, top_k=2, expert_ffn=96)
WITH_EXPERTS = [
    plan({"dp": 4, "gbs": 4, "ep": 4}, shape=EXPERTS),
    plan(
        {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1, "dispatcher": "deepep"},
        shape=replace(EXPERTS, first_dense=2, shared_experts=1, shared_ffn=64, shared_gate=True),
    ),
    plan(
        {"tp": 2, "sequence_parallel": True, "etp": 2, "dispatcher": "allgather"},
        shape=replace(EXPERTS, router_pre_softmax=True, router_scaling=2.5, aux_loss=0.01),
    ),
]
PLANS = (
    WITH_EXPERTS
    + [plan(topology) for topology in TOPOLOGIES]
    + [plan({}, shape=shape) for shape in KINDS]
)


@pytest.mark.parametrize("plain", PLANS)
def test_a_plan_comes_back_from_its_arguments(plain: Plan):
    grown = replace(plain.topology, gbs=64)
    split = replace(BLENDED, split="949,50.5,1")
    for original in (
        plain,
        replace(plain, run=RUNS[0], data=BLENDED, optimizer=Optimizer(init_std=0.006, **WSD)),
        replace(plain, topology=grown, run=RUNS[1], data=split),
    ):
        launcher = f"torchrun --nproc_per_node {original.topology.gpus} pretrain_gpt.py"
        text = f"{launcher} \\\n{megatron_text(megatron_args(original))}"
        found = read(text, cluster=original.cluster)
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
    found = read(f"{text} --deepspeed {words}", 1)
    values = {**vars(found.plan.topology), **vars(found.plan.shape)}
    assert {name: values[name] for name in meant} == meant
    assert (found.plan.engine, found.unknown, found.differs) == ("deepspeed-3d", (), ())


def test_a_vocabulary_that_is_not_padded_is_padded_as_the_program_does():
    """Megatron-LM prints 50688 for 50257 tokens on TP 4: a multiple of 4 x 128."""
    text = megatron_text(megatron_args(plan({"tp": 4}))).replace(
        "--padded-vocab-size 50304", "--vocab-size 50257"
    )
    assert read(text, 4).plan.shape.vocab_size == 50688
    bare = text.replace("--vocab-size 50257", "")
    for given, rows in ((50257, 50688), (50304, 50304)):
        assert read(bare, 4, vocab_size=given).plan.shape.vocab_size == rows


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
OF_TOKENS = "--lr-decay-style WSD --lr-decay-tokens 25_600 --lr-wsd-decay-iters 5"
BARE += " --padded-vocab-size 50304 --train-iters 50 --split 9,1,0 --lr-warmup-fraction .1"


def test_a_command_line_is_read_and_what_a_plan_lacks_is_named():
    """And what programs take by default."""
    machine = replace(MACHINE, max_nodes=100)
    found = read(COMMAND, cluster=machine)
    assert (found.unknown, found.differs) == ((), ("data_path=missing: the plan has stdlib",))
    plans = {"script": found, "bare": read(BARE, 4)}
    plans["fork"] = read(f"{BARE}\n--deepspeed {OF_TOKENS}", 4)
    values = {name: parsed.plan.to_json() for name, parsed in plans.items()}
    for value in values.values():
        del value["cluster"]
    compare("parsed", values)


# of the forms of public scripts: += of a string, an array that no command has, and BLOOM's command
# of exported variables, which a shell below srun replaces
SCRIPT = rf"""
SIZE=$(python3 -c "print(8)")
ARGS="{BARE} --data-path p"
ARGS+=" --tensor-model-parallel-size 2"
LONG_ARGS=(--context-parallel-size 8)
torchrun --nproc_per_node 8 pretrain_gpt.py $ARGS
export LAUNCHER="torchrun --nproc_per_node 4" CMD="pretrain_gpt.py --recompute-activations $ARGS"
srun --label bash -c '$LAUNCHER --node_rank $SLURM_NODEID $CMD' 2>&1 | tee log
"""


def test_each_launch_of_a_script_that_bash_runs_is_a_plan(tmp_path, capsys):
    stubs = f"{tmp_path}/stubs"
    assert main(["convert", "megatron", "--stubs", stubs]) == 0
    (tmp_path / "job.sh").write_text(SCRIPT)
    run = capsys.readouterr().out.replace("SCRIPT", f"{tmp_path}/job.sh")
    subprocess.run(run, shell=True, check=True, cwd=tmp_path)
    main(f"convert megatron --cluster h200 --read {stubs}".split())
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["label"] for plan in plans] == ["launch-0002", "launch-0003"]
    assert [plan["topology"]["dp"] for plan in plans] == [4, 2]
    assert [plan["topology"]["recompute"] for plan in plans] == ["none", "selective"]


LAYERS = ["([0]*2+[1]*6)", "([0]*1+[0]+[1]*6)", "[0,0,1,1,1,1,1,1]", "0 0 1 1 1 1 1 1"]


@pytest.mark.parametrize("layers", LAYERS)
def test_dense_layers_in_front_have_many_forms(layers: str):
    words = f"--num-experts 4 --swiglu --disable-bias-linear --moe-layer-freq {layers}"
    shape = read(f"deepspeed --num_gpus 4 {BARE} {words}".replace(layers, f"'{layers}'")).plan.shape
    assert (shape.first_dense, shape.expert_ffn, shape.top_k) == (2, shape.ffn, 2)


def test_a_dense_plan_is_read_back_and_ranks_for_experts_need_some(tmp_path):
    plain = read(f"deepspeed --num_gpus 4 {BARE}").plan
    assert read_plan(plain.save(tmp_path / "plan.json")) == plain
    for words in ("--expert-model-parallel-size 2", "--global-batch-size 0"):
        with pytest.raises(ValueError, match=r"^(ep=2: needs a model with experts|gbs=0: )"):
            read(f"deepspeed --num_gpus 4 {BARE} {words}")


FORMS = [  # more words, the source of the data
    ("--data-path 1.0 p --num-experts 1", "p"),
    ("--data-path $(python3 mix.py a) --master_port $PORT", "stdlib"),
    ("--data-path a b c", "stdlib"),
]


@pytest.mark.parametrize(("words", "source"), FORMS)
def test_data_of_any_form_keeps_no_topology_from_being_read(words: str, source: str):
    text = f"deepspeed --num_nodes 2 --num_gpus 4 {BARE} {words}"
    assert parse_plan(read_arguments(text), cluster=MACHINE).plan.data.source == source


# of the form of its _print_args(), with srun's label in front
BLOCK = """
0: ------------------------ arguments ------------------------
0:   add_bias_linear ................................. False
0:   bf16 ............................................ True
0:   data_path ....................................... ['0.5', 'a', '1', 'b c']
0:   hidden_size ..................................... 256
0:   lr .............................................. 0.0001
0:   micro_batch_size ................................ 2
0:   num_attention_heads ............................. 8
0:   num_layers ...................................... 8
0:   padded_vocab_size ............................... None
0:   pipeline_model_parallel_layout .................. Et*5|tttL
0:   pipeline_model_parallel_size .................... 2
0:   seq_length ...................................... 128
0:   sequence_parallel ............................... False
0:   train_iters ..................................... 50
0:   world_size ...................................... 8
0: -------------------- end of arguments ---------------------
0:  > padded vocab (size: 500) with 12 dummy tokens (new size: 512)
"""


def test_a_block_of_a_log_is_a_plan():
    plan = parse_plan(read_arguments(BLOCK), cluster=MACHINE).plan
    assert (plan.topology.gpus, plan.shape.biases, plan.shape.vocab_size) == (8, "none", 512)
    assert [part.source for part in plan.data.blend] == ["a", "b c"]
    assert (plan.topology.dp, plan.topology.first_stage_layers) == (4, 5)


GOOD = megatron_text(megatron_args(plan({"tp": 2, "pp": 2})))
INSTANCES = "--num-distributed-optimizer-instances"
CANNOT_BE_READ = [  # an argument of GOOD, what stands in its place, the message
    ("--lr 6e-05", "--lr fast", "--lr=fast: must be a number"),
    ("--seq-length 128", "", "--seq-length=missing: needs one value"),
    ("", "--data-path 'open", "arguments=unreadable: not a command line (No closing quotation)"),
    ("", "--seed $SEED", "arguments=$SEED: a script is not read"),
    ("", "\nsrun hostname", "arguments=srun hostname: of a script that names srun: a script"),
    (GOOD, "pretrain_gpt.py", "arguments=pretrain_gpt.py: holds no --name"),
    (GOOD, BLOCK * 2, "arguments=2 blocks: must be one"),
    (GOOD, BLOCK[:800], "arguments=1 blocks: must be one"),
    ("", "--use-megatron-fsdp", "--use-megatron-fsdp=yes: a plan shards"),
    ("", f"{INSTANCES} 3", f"{INSTANCES}=3: must divide dp x cp = 1"),
    ("", "--num-experts 8 --moe-layer-freq 2", "--moe-layer-freq=2: a plan has dense layers in"),
    ("", "--rampup-batch-size 16 x", "ramp=16,x: must be whole numbers above zero"),
    (
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 0",
        "gpus=4: must be a multiple of tp x cp x pp = 0",
    ),
    (
        "",
        "--use-rotary-position-embeddings --position-embedding-type alibi ",
        "--use-rotary-position-embeddings=yes: contradicts --position-embedding-type alibi: a model has one kind",
    ),
]


def one_line(message: str) -> Any:
    return pytest.raises(ValueError, match=rf"^{escape(message)}.*\Z")


@pytest.mark.parametrize(("old", "new", "message"), CANNOT_BE_READ)
def test_what_cannot_be_read_is_one_line(old: str, new: str, message: str):
    text = GOOD.replace(old, new) if old else f"{GOOD} {new}"
    with one_line(message):
        read(text, 4)


LAYOUTS = {
    "Ettt|t*5": "must be E, t of",
    "Et*5||tttL": "must be E, t of",
    "Ettt|t*5mL": "a plan predicts",
    "Et|tL": "has 2 layers, not 8",
    "Et*8L": "has 1 stages, which pp=2 must",
    "Et|(tt|)*2,tttL": "a plan has stages alike",
    "(t*9999)*9999": "must have at most",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_no_plan_has_is_one_line(layout: str):
    with one_line(f"pipeline_model_parallel_layout={layout}: {LAYOUTS[layout]}"):
        read(f"{GOOD} --pipeline-model-parallel-layout '{layout}'", 4)


CANNOT_BE_WRITTEN = [  # what differs, the message
    (
        {"shape": replace(LLAMA, activation="geglu")},
        "activation=geglu: Megatron-LM has gelu, gelu-tanh",
    ),
    (
        {"layer": Layer(name="mine.py:Own", source="")},
        "layer=mine.py:Own (e3b0c442): Megatron-LM trains its own",
    ),
    (
        {"topology": {"recompute": "full", "offload_checkpoints": True}},
        "offload_checkpoints=True: Megatron-LM has none",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CANNOT_BE_WRITTEN)
def test_what_cannot_be_written_is_one_line(changes: dict, message: str):
    with one_line(message):
        megatron_args(plan(**{"topology": {}, **changes}))


def test_the_command_goes_both_ways(tmp_path, capsys):
    path = tmp_path / "small.json"
    replace(small_plan(), data=Data(folder=str(tmp_path), source="mock")).save(path)
    assert main(["convert", "megatron", str(path), "--prepare"]) == 0
    text = capsys.readouterr().out
    assert f"--data-path {tmp_path}/mock-" in text and "--tokenizer-type NullTokenizer" in text
    (tmp_path / "job.txt").write_text("srun pretrain_gpt.py --moe 2 " + text)
    words = f"convert megatron --read {tmp_path}/job.txt --cluster jz-a100-80g --gpus 1"
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["shape"] == small_plan().to_json()["shape"]
    assert err.splitlines()[0] == "trilane: unknown, not in the plan: moe"
