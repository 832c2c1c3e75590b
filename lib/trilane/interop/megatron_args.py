"""The arguments of Megatron-LM that run a plan in the original program.

Names and meanings: Megatron-LM core 0.16.1 to 0.19.2 (megatron/training/arguments.py). Lengths are
given in samples, as its ramp-up of the batch requires. Fields with an argument of their own name it
where they are declared; the program's words are in data/megatron_arguments.json.
"""

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from trilane.config.engines import unsupported_reason
from trilane.config.model import MIXTURE, ModelShape
from trilane.config.options import Rules, first_broken
from trilane.config.parallelism import SINGLE
from trilane.config.plan import Plan
from trilane.utils.validation import require, shipped_json

Arguments = dict[str, list[str]]  # name without leading dashes -> values; empty for a switch
# fields with its own defaults
USUAL = ("decay_samples", "wsd_decay_style", "wsd_decay_samples", "no_rope_freq", *MIXTURE)


def known_arguments() -> dict[str, Any]:
    """`words`: what Megatron-LM has of a field with a choice; `one_way`: what a plan has in one way
    only, `refused` what it does not have, but for the values of `off`; `ignored`: where and how
    often files are written, kernels, workers; `elsewhere`: also ignored, and unknown to core 0.17
    to 0.19, by the program that has it.

    `renamed`: names of DeepSpeed's launcher and of a log's block, `switched_off` those whose False
    is a switch; `launchers`: programs that a script may start, `variable`: what a shell's variable
    may be the value of.
    """
    return shipped_json("megatron_arguments")


def megatron_args(plan: Plan, prefixes: Sequence[str] = ()) -> Arguments:
    """The arguments for the plan, without the launcher's. Raises ValueError for what Megatron-LM
    cannot do.

    `prefixes` of the prepared .bin/.idx pairs, one per source; the sources themselves by default.
    The model is that of our engines: exact GELU unless it is gelu-tanh, the form of their fused
    kernel.

        print(megatron_text(megatron_args(read_plan("plan.json"))))
    """
    shape = plan.shape
    reason = unsupported_reason("megatron", shape, plan.topology)
    if reason := reason or first_broken(_rules(plan, shape), plan, shape, plan.topology):
        raise ValueError(reason)
    values: dict[str, Any] = {}  # True is a switch, False is left out
    for part in (shape, plan.topology, plan.run, plan.optimizer, plan.dropout):
        values |= _of_fields(part)
    values |= _words(plan) | _of_plan(plan) | _data(plan, prefixes)
    given: Arguments = {}
    for name, value in values.items():
        if value is True:
            given[name] = []
        elif isinstance(value, tuple | list):
            given[name] = [str(one) for one in value]
        elif value is not False:
            given[name] = [str(value)]
    return given


def megatron_text(arguments: Arguments) -> str:
    """The arguments for bash, one per line."""
    lines = [shlex.join([f"--{name}", *values]) for name, values in arguments.items()]
    return " \\\n".join(lines)


def _rules(plan: Plan, shape: ModelShape) -> Rules:
    yield not plan.layer, "layer", "Megatron-LM trains its own"
    yield not shape.qk_norm_whole, "qk_norm_whole", "Megatron-LM norms head by head"
    yield not shape.embedding_layernorm, "embedding_layernorm", "Megatron-LM has none"
    yield shape.rotary_base.is_integer(), "rotary_base", "Megatron-LM has whole numbers"
    yield not plan.topology.offload_checkpoints, "offload_checkpoints", "Megatron-LM has none"
    # its fused kernel alone has the tanh form, and validate_args() turns that off without biases
    is_able = shape.activation != "gelu-tanh" or shape.biases == "all"
    yield is_able, "activation", "Megatron-LM has it with biases=all alone"


def _of_fields(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that have an argument of their own; a default is given where
    programs' may differ.
    """
    given = {}
    for field in fields(part):
        name = field.metadata.get("megatron")
        value = getattr(part, field.name)
        # the label names what is not so by default
        is_named = "label" in field.metadata or field.name in USUAL
        if name and not (is_named and value == field.default):
            given[name] = value
    return given


def _words(plan: Plan) -> dict[str, Any]:
    """Megatron-LM's words for the fields with a choice; ValueError for what it does not have."""
    given: dict[str, Any] = {}
    for field, words in known_arguments()["words"].items():
        value = getattr(plan.shape, field, None) or getattr(plan.topology, field)
        require(value in words, field, value, f"Megatron-LM has {', '.join(words)}")
        given |= words[value]
    return given


def _of_plan(plan: Plan) -> dict[str, Any]:
    """What a plan has in another form. Gradients are accumulated in fp32, as in our engine; with
    bf16 this is Megatron-LM's default.
    """
    shape = plan.shape
    topology = plan.topology
    run = plan.run
    ramp = run.ramp
    values: dict[str, Any] = {
        "max-position-embeddings": shape.seq_length,
        "train-samples": plan.samples,
        "eval-interval": run.eval_interval or 1000,
        "no-bias-gelu-fusion": shape.activation != "gelu-tanh",
        "ffn-hidden-size": shape.ffn,
        "rotary-base": int(shape.rotary_base),
        "padded-vocab-size": shape.vocab_size,
        "kv-channels": shape.kv_channels or False,
        "untie-embeddings-and-output-weights": not shape.tied_embeddings,
        "use-distributed-optimizer": topology.zero == 1,
        "num-distributed-optimizer-instances": topology.shards > 0 and topology.instances,
        "accumulate-allreduce-grads-in-fp32": topology.precision != "fp32",
        "timing-log-level": 2 if run.timers else 0,
    }
    if ramp.samples:
        values["rampup-batch-size"] = (ramp.start, ramp.increment, ramp.samples)
    if run.skipped:
        values["iterations-to-skip"] = [
            number for first, last in run.skipped for number in range(first, last + 1)
        ]
    if topology.precision == "fp16":
        # that of our engines; its default 2^32 skips the first iterations
        values["initial-loss-scale"] = 65536
    if topology.recompute == "block":
        values["recompute-num-layers"] = topology.recompute_layers
    if shape.num_key_value_heads is not None:
        values["group-query-attention"] = True
        values["num-query-groups"] = shape.kv_heads
    if shape.experts:
        values |= _of_experts(plan)
    if plan.data.tokenizer == "bytes":
        values["tokenizer-type"] = "NullTokenizer"
        # ids of our tokenizer "bytes"; from core 0.18 on NullTokenizer ends a document by the last
        # of them, as we do, before by the next one, which no document has
        values["vocab-size"] = 257
    else:
        values["tokenizer-type"] = "HuggingFaceTokenizer"
        values["tokenizer-model"] = plan.data.tokenizer
    return values


def _of_experts(plan: Plan) -> dict[str, Any]:
    """What a mixture of experts has in another form; its defaults are tp GPUs an expert, two
    experts a token and a balancing loss.
    """
    shape = plan.shape
    topology = plan.topology
    values: dict[str, Any] = {
        "expert-tensor-parallel-size": topology.etp,
        "moe-shared-expert-intermediate-size": shape.shared_channels or False,
        "moe-router-load-balancing-type": "aux_loss" if shape.aux_loss else "none",
        "moe-router-dtype": "fp32",
        "moe-grouped-gemm": plan.cluster.gpu.compute_capability >= (8, 0),  # it refuses others
        "moe-token-dispatcher-type": topology.dispatcher,
    }
    if shape.first_dense:
        values["moe-layer-freq"] = f"([0]*{shape.first_dense}+[1]*{shape.expert_layers})"
    if topology.dispatcher in SINGLE:
        values["moe-token-dispatcher-type"] = "flex"
        values["moe-flex-dispatcher-backend"] = topology.dispatcher
    return values


def _data(plan: Plan, prefixes: Sequence[str]) -> dict[str, Any]:
    """Without a split all documents are for training, as in our engines."""
    path = list(prefixes) or [part.source for part in plan.data.parts]
    if plan.data.blend:
        weighted = zip(plan.data.blend, path, strict=True)
        path = [word for part, prefix in weighted for word in (repr(float(part.weight)), prefix)]
    return {"data-path": path, "split": [plan.data.split or "100,0,0"]}
