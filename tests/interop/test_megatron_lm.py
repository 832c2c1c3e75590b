"""Megatron-LM itself takes the arguments of 200 plans, and means what they have.

From megatron-core 0.17 on its wheel holds Megatron-LM's argument parser and validate_args()
(megatron/training/arguments.py). These tests were run on 0.17.1, 0.18.2 and 0.19.2.
"""

import argparse
import functools
import importlib
import random
import shlex
import sys
from argparse import Namespace
from importlib.util import find_spec
from typing import Any

import pytest

from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import PRECISIONS, cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import PARTITION, Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Optimizer, Part, Run
from trilane.interop.megatron_args import (
    known_arguments,
    megatron_args,
    megatron_text,
)
from trilane.interop.megatron_parse import Given, parse_plan
from trilane.interop.shell_args import read_arguments

HAS_IT = find_spec("megatron") and find_spec("megatron.training")
pytestmark = [
    pytest.mark.slow,  # megatron.training takes 9 s to import
    pytest.mark.skipif(not HAS_IT, reason="megatron-core has megatron.training from 0.17 on"),
]
COUNT = 200

WSD: dict[str, Any] = {"decay_style": "WSD", "wsd_decay_samples": 90}
LLAMA: dict[str, Any] = {"activation": "swiglu", "normalization": "rmsnorm", "biases": "none"}
LLAMA |= {"positions": "rotary", "tied_embeddings": False}
EXPERTS: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_ffn": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "its published GELU": {"activation": "gelu-tanh"},
    "squared ReLU": {"activation": "squared-relu", "positions": "rotary"},
    "no positions": {"positions": "none", "tied_embeddings": False, "ffn_hidden_size": 3072},
    "Llama": LLAMA,
    "shared keys": LLAMA | {"num_key_value_heads": 8, "ffn_hidden_size": 3584, "rotary_base": 5e5},
    "Qwen": LLAMA | {"biases": "qkv", "num_key_value_heads": 2, "norm_epsilon": 1e-6},
    "a gate of 4 h": LLAMA | {"ffn_hidden_size": 4096},
    "experts": LLAMA | EXPERTS,
    "dense layers in front": LLAMA
    | EXPERTS
    | {"first_dense": 2, "shared_experts": 1, "shared_ffn": 512, "ffn_hidden_size": 4096}
    | {"shared_gate": True, "aux_loss": 0.01, "router_pre_softmax": True},
}
SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "rotary_base",
    "sequence_parallel",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "seed",
    "log_interval",
    "eval_iters",
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)  # of plan and program
ANY: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 4, 4),
    "cp": (1, 2, 4),
    "interleaving": (1, 2, 3),
    "zero": (0, 1),
    "recompute": ("none", "selective", "full", "block"),
    "precision": PRECISIONS,
    "partition": PARTITION,
    "sequence_parallel": (False, True),
    "overlap_grad_reduce": (False, True),
}


def drawn(draw: random.Random, number: int) -> Plan:
    """A plan that `convert megatron` takes; ValueError where the parts do not fit together."""
    t = {name: draw.choice(values) for name, values in ANY.items()}
    t |= {"dp": draw.choice((1, 2, 4)), "mbs": draw.choice((1, 2))}
    t["gbs"] = t["mbs"] * t["dp"] * t["pp"] * draw.choice((2, 4))
    t["interleaving"] = t["interleaving"] if t["pp"] > 1 else 1
    t["partition"] = t["partition"] if t["pp"] > 1 else "uniform"
    t["sequence_parallel"] = t["sequence_parallel"] and t["tp"] > 1
    t["fp32_gradients"] = t["precision"] != "fp32"
    t["overlap_param_gather"] = t["overlap_grad_reduce"] and t["zero"] == 1
    chunks = t["pp"] * t["interleaving"]
    layers = chunks * draw.choice((4, 6))
    t["recompute_layers"] = 2 if t["recompute"] == "block" else 0
    if t["partition"] != "uniform":
        layers -= 2
    elif t["pp"] == 4:
        t["first_stage_layers"] = t["last_stage_layers"] = t["interleaving"]
        layers = layers // 2 + 2 * t["interleaving"]
    kind = draw.choice([*SHAPES])
    if "experts" in SHAPES[kind]:
        t["sequence_parallel"] = t["tp"] > 1
        t["ep"] = draw.choice((1, 2))
        t["etp"] = draw.choice((1, t["tp"]))
        t["dispatcher"] = draw.choice(("alltoall", "allgather"))
    run = Run(
        train_iters=400,
        seed=number,
        ramp=draw.choice((Ramp(), Ramp(start=t["gbs"] // 2, increment=t["gbs"] // 2, samples=999))),
        skip=draw.choice(("", "20-29,31")),
        timers=draw.choice((False, True)),
        **draw.choice(({}, {"eval_interval": 50, "eval_iters": 4})),
    )
    blend = (Part(source="/d/a", weight=0.7), Part(source="/d/b c", weight=3))
    own = ({"source": "/d/pair", "tokenizer": "/m/gpt2"}, {"source": "blend", "blend": blend})
    hidden = draw.choice((0.0, 0.1))
    shape = ModelShape(
        num_layers=layers,
        hidden_size=1024,
        num_attention_heads=16,
        seq_length=draw.choice((1024, 4096)),
        vocab_size=draw.choice((51200, 32768)),
        **SHAPES[kind],
    )
    return Plan(
        label="read",
        engine="megatron",
        shape=shape,
        cluster=cluster("dgx-h100" if t["precision"] == "fp8" else "jz-a100-80g"),
        topology=Topology(**t),
        data=Data(**draw.choice(own), split="949,50.5,1" if run.eval_interval else ""),
        optimizer=draw.choice(
            (Optimizer(), Optimizer(warmup_samples=80, decay_samples=999, **WSD))
        ),
        dropout=Dropout(hidden=hidden, attention=hidden / 2),
        run=run,
    )


@functools.cache
def plans() -> list[Plan]:
    draw, found = random.Random(39), list[Plan]()
    while len(found) < COUNT:
        try:
            found.append(drawn(draw, len(found)))
        except ValueError:
            continue  # does not fit together: another one
    return found


class Program:
    """Megatron-LM's parser, checks and formulas. What is not its own, since there is no GPU:

    - the compute capability, which it asks torch.cuda for, is that of the plan's card;
    - its parser is made once, not for each plan (0.3 s);
    - --no-rope-fusion, since the kernel and a check for it are Transformer Engine's.
    """

    def __init__(self) -> None:
        self.arguments = importlib.import_module("megatron.training.arguments")
        self.memory = importlib.import_module("megatron.training.theoretical_memory_usage")
        self.training = importlib.import_module("megatron.training.training")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        self.parser = self.arguments.add_megatron_arguments(parser)
        options = [option for action in self.parser._actions for option in action.option_strings]
        self.names = {option.lstrip("-").replace("-", "_") for option in options}

    def take(self, text: str, gpus: int, card: tuple[int, ...] = (8, 0)) -> Namespace:
        """Its arguments, checked and completed, as it understands the text for bash."""
        words = shlex.split(text.replace("\\\n", " "))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            patch.setenv("WORLD_SIZE", str(gpus))
            patch.setattr(sys, "argv", ["pretrain_gpt.py", *words, "--no-rope-fusion"])
            patch.setattr(self.arguments, "get_device_arch_version", lambda: card[0])
            patch.setattr("torch.cuda.get_device_capability", lambda: card)
            patch.setattr(self.arguments, "add_megatron_arguments", lambda _: self.parser)
            return self.arguments.validate_args(self.arguments.parse_args())


@pytest.fixture(scope="module")
def program() -> Program:
    return Program()


@pytest.fixture(scope="module")
def taken(program: Program) -> list[tuple[Plan, Namespace]]:
    found = []
    for plan in plans():
        card = plan.cluster.gpu.compute_capability
        text = megatron_text(megatron_args(plan))
        found.append((plan, program.take(text, plan.topology.gpus, card)))
    return found


def meaning(plan: Plan) -> dict[str, Any]:
    """What the plan is among the arguments that Megatron-LM has checked and completed."""
    import torch

    s, t, o, r = plan.shape, plan.topology, plan.optimizer, plan.run
    types = {"fp32": torch.float32, "fp16": torch.float16}
    positions = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
    given = vars(s) | vars(t) | vars(o) | vars(r)
    return {
        **{name: given[name] for name in SAME},
        "max_position_embeddings": s.seq_length,
        "padded_vocab_size": s.vocab_size,
        "ffn_hidden_size": s.ffn,
        "kv_channels": s.head_dim,
        "group_query_attention": s.num_key_value_heads is not None,
        "num_query_groups": s.num_key_value_heads or 1,
        "swiglu": s.activation == "swiglu",
        "squared_relu": s.activation == "squared-relu",
        **({"bias_gelu_fusion": s.activation == "gelu-tanh"} if "gelu" in s.activation else {}),
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[s.normalization],
        "layernorm_epsilon": s.norm_epsilon,
        "position_embedding_type": positions[s.positions],
        "rotary_percent": 1.0,
        "add_bias_linear": s.biases == "all",
        "add_qkv_bias": s.biases != "none",
        "untie_embeddings_and_output_weights": not s.tied_embeddings,
        "tensor_model_parallel_size": t.tp,
        "pipeline_model_parallel_size": t.pp,
        "context_parallel_size": t.cp,
        "data_parallel_size": t.dp,
        "virtual_pipeline_model_parallel_size": t.interleaving if t.interleaving > 1 else None,
        "use_distributed_optimizer": t.zero == 1,
        "decoder_first_pipeline_num_layers": t.first_stage_layers or None,
        "decoder_last_pipeline_num_layers": t.last_stage_layers or None,
        "account_for_embedding_in_pipeline_split": t.partition != "uniform",
        "account_for_loss_in_pipeline_split": t.partition != "uniform",
        "params_dtype": types.get(t.precision, torch.bfloat16),
        "fp8": "hybrid" if t.precision == "fp8" else None,
        "accumulate_allreduce_grads_in_fp32": t.fp32_gradients,
        "recompute_granularity": {"none": None, "block": "full"}.get(t.recompute, t.recompute),
        "recompute_method": {"full": "uniform", "block": "block"}.get(t.recompute),
        "recompute_num_layers": {"full": 1, "block": t.recompute_layers}.get(t.recompute),
        "micro_batch_size": t.mbs,
        "global_batch_size": t.gbs,
        "train_samples": plan.samples,
        "rampup_batch_size": [*vars(r.ramp).values()] if r.ramp.samples else None,
        "iterations_to_skip": [n for first, last in r.skipped for n in range(first, last + 1)],
        "timing_log_level": 2 if r.timers else 0,
        "eval_interval": r.eval_interval or 1000,
        "split": plan.data.split or "100,0,0",
        "optimizer": "adam",
        "lr_warmup_samples": o.warmup_samples,
        "lr_decay_samples": o.decay_samples or None,
        "lr_decay_style": o.decay_style,
        "lr_wsd_decay_style": o.wsd_decay_style,
        "lr_wsd_decay_samples": o.wsd_decay_samples or None,
        "init_method_std": o.init_std,
        "hidden_dropout": plan.dropout.hidden,
        "attention_dropout": plan.dropout.attention,
    }


def meaning_of_experts(plan: Plan) -> dict[str, Any]:
    """What is of a mixture of experts."""
    s, t = plan.shape, plan.topology
    layers = [0] * s.first_dense + [1] * s.expert_layers
    return {
        "num_experts": s.experts,
        "moe_router_topk": s.top_k,
        "moe_ffn_hidden_size": s.expert_ffn,
        "moe_shared_expert_intermediate_size": s.shared_channels or None,
        "moe_shared_expert_gate": s.shared_gate,
        "moe_layer_freq": layers if s.first_dense else 1,
        "moe_router_pre_softmax": s.router_pre_softmax,
        "moe_router_load_balancing_type": "aux_loss" if s.aux_loss else "none",
        "moe_aux_loss_coeff": s.aux_loss,
        "moe_token_dispatcher_type": t.dispatcher,
        "expert_model_parallel_size": t.ep,
        "expert_tensor_parallel_size": t.etp,
    }


def misunderstood(args: Namespace, plan: Plan) -> dict[str, tuple[Any, Any]]:
    """What of the plan is something else among the arguments: the program's value, the plan's."""
    given = vars(args) | {"split": args.split.replace(" ", "")}
    wanted = meaning(plan)
    if plan.shape.experts:
        wanted |= meaning_of_experts(plan)
    pairs = {name: (given[name], value) for name, value in wanted.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def test_megatron_lm_takes_every_plan_and_means_what_the_plan_has(taken: list):
    assert len(taken) == COUNT
    for plan, args in taken:
        assert misunderstood(args, plan) == {}


def test_the_block_in_its_log_is_the_plan(taken: list, program: Program, capsys):
    for plan, args in taken:
        program.arguments._print_args("arguments", args)
        read = parse_plan(read_arguments(capsys.readouterr().out), cluster=plan.cluster)
        assert (read.plan, read.differs) == (plan, ())


BARE = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --lr 1e-4"
BARE += " --max-position-embeddings 128 --padded-vocab-size 51200 --train-samples 800"
# 1000 was its default; from 0.16 on a run without it ends in get_train_valid_test_num_samples()
BARE += " --micro-batch-size 2 --data-path /d/pair --eval-interval 1000"
BESIDE = [
    "",
    "--bf16",
    "--fp16",
    "--swiglu",
    "--disable-bias-linear --add-qkv-bias",
    "--use-rotary-position-embeddings --global-batch-size 8",
    "--recompute-activations",
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
]


@pytest.mark.parametrize("words", BESIDE)
def test_what_is_not_given_is_read_as_megatron_lm_takes_it(words: str, program: Program):
    text = f"{BARE} {words}"
    read = parse_plan(read_arguments(text), cluster=cluster("jz-a100-80g"), gpus=4).plan
    assert misunderstood(program.take(text, 4), read) == {}


# What is read though no Megatron-LM of today has it: a Megatron-DeepSpeed does.
READ_OF_OTHERS = {
    "cpu_optimizer",
    "deepspeed",
    "embed_layernorm",
    "glu_activation",
    "layernorm_epsilon",
    "lr_decay_tokens",
    "lr_warmup_tokens",
    "lr_wsd_decay_tokens",
    "num_key_value_heads",
    "pad_vocab_size_to",
    "pp_partition_method",
    "tokenizer_name_or_path",
    "zero_stage",
}


def test_the_names_in_our_tables_are_megatron_lms(
    program: Program,
    monkeypatch,
):
    """But for those that are listed as another program's."""
    tables = known_arguments()
    elsewhere = set[str]().union(*tables["elsewhere"].values())
    listed = {*tables["one_way"], *tables["refused"], *tables["ignored"]}
    assert listed - program.names <= elsewhere
    assert not elsewhere & program.names
    read = set[str]()
    has = Given.has

    def recorded(given: Given, name: str) -> bool:
        read.add(name)
        return has(given, name)

    monkeypatch.setattr(Given, "has", recorded)
    unpadded = BARE.replace("--padded-vocab-size", "--vocab-size")
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    for words in (f"{unpadded} {block}", f"{BARE} --deepspeed --bf16"):
        parse_plan(read_arguments(words), cluster=cluster("jz-a100-80g"), gpus=4)
    assert read - program.names - elsewhere == READ_OF_OTHERS
