"""The arguments of Megatron-LM that run a plan in the original program.

Names and meanings: Megatron-LM core 0.16.1 to 0.19.2 (megatron/training/arguments.py). Lengths are
given in samples, as its ramp-up of the batch requires. Fields with an argument of their own name it
where they are declared; the program's words are in data/megatron_arguments.json.
"""

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from trilane.config.engines import unsupported_reason
from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.utils.validation import DATA, read_json, require

Arguments = dict[str, list[str]]  # name without leading dashes -> values; empty for a switch


@functools.cache
def known_arguments() -> dict[str, Any]:
    """`words`: what Megatron-LM has of a field with a choice; `one_way`: what a plan has in one way
    only, `refused` what it does not have; `ignored`: where and how often files are written,
    kernels, workers; `elsewhere`: also ignored, and unknown to core 0.17 to 0.19, by the program
    that has it.
    """
    return read_json(DATA / "megatron_arguments.json", "arguments")


def megatron_args(plan: Plan, prefixes: Sequence[str] = ()) -> Arguments:
    """The arguments for the plan, without the launcher's. Raises ValueError for what Megatron-LM
    cannot do.

    `prefixes` of the prepared .bin/.idx pairs, one per source; the sources themselves by default.
    The model is that of our engines: exact GELU unless it is gelu-tanh, the form of their fused
    kernel.

        print(megatron_text(megatron_args(read_plan("plan.json"))))
    """
    if reason := unsupported_reason("megatron", plan.shape, plan.topology):
        raise ValueError(reason)
    s, o = plan.shape, plan.optimizer
    require(not plan.layer, "layer", plan.layer, "Megatron-LM trains its own")
    require(
        not s.embedding_layernorm,
        "embedding_layernorm",
        True,
        "Megatron-LM has no LayerNorm of the embedding",
    )
    require(
        s.rotary_base.is_integer(), "rotary_base", s.rotary_base, "Megatron-LM has whole numbers"
    )
    # its fused kernel alone has the tanh form, and validate_args() turns that off without biases
    is_able = s.activation != "gelu-tanh" or s.biases == "all"
    require(is_able, "activation", s.activation, "Megatron-LM has it with biases=all alone")
    given: Arguments = {}
    for part in (s, plan.topology, plan.run, o, plan.dropout):
        given |= _own(part)
    return {**given, **_words(plan), **_beside(plan), **_data(plan, prefixes)}


def megatron_environment(plan: Plan) -> dict[str, str]:
    """What Megatron-LM must find: one variable, with TP or CP on cards before Blackwell.

    validate_args() of core 0.16.1 to 0.19.2 (not with FSDP or overlapped experts: no plan has
    them).
    """
    is_shared = plan.topology.tp > 1 or plan.topology.cp > 1
    is_old = plan.cluster.gpu.compute_capability < (10, 0)
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_shared and is_old else {}


def megatron_text(arguments: Arguments, environment: Mapping[str, str] = {}) -> str:
    """The arguments for bash, one per line; above them what megatron_environment() has."""
    lines = [shlex.join([f"--{name}", *values]) for name, values in arguments.items()]
    exports = [f"export {name}={value}\n" for name, value in environment.items()]
    return "".join(exports) + " \\\n".join(lines)


def _own(part: Any) -> Arguments:
    """The fields of a dataclass that have an argument of their own; a default is given where
    programs' may differ.
    """
    found: Arguments = {}
    for f in fields(part):
        value, name = getattr(part, f.name), f.metadata.get("megatron")
        # the label names what is not so by default
        is_usual = value == f.default and (
            "label" in f.metadata or f.name in ("decay_samples", "init_std")
        )
        if name and not is_usual:
            found[name] = [] if value is True else [str(value)]
    return found


def _words(plan: Plan) -> Arguments:
    """Megatron-LM's words for the fields with a choice; ValueError for what it has no argument for."""
    found: Arguments = {}
    for field, words in known_arguments()["words"].items():
        value = getattr(plan.shape, field, None) or getattr(plan.topology, field)
        require(value in words, field, value, f"Megatron-LM has {', '.join(words)}")
        for argument in filter(None, words[value].split("--")):
            name, *values = argument.split()
            found[name] = values
    return found


def _beside(plan: Plan) -> Arguments:
    """What a plan has in another form. Gradients are accumulated in fp32, as in our engine; with
    bf16 this is Megatron-LM's default.
    """
    s, t, run, ramp, coder = plan.shape, plan.topology, plan.run, plan.run.ramp, plan.data.tokenizer
    shared, is_bytes = s.num_key_value_heads is not None, coder == "bytes"
    skipped = [str(number) for first, last in run.skipped for number in range(first, last + 1)]
    given: Arguments = {
        "rampup-batch-size": [str(ramp.start), str(ramp.increment), str(ramp.samples)]
    }
    given = {
        **(given if ramp.samples else {}),
        **({"iterations-to-skip": skipped} if skipped else {}),
    }
    values = {
        "max-position-embeddings": s.seq_length,
        "train-samples": plan.samples,
        "lr-decay-style": "cosine",
        "eval-interval": run.eval_interval or 1000,
        # that of our engines; its default 2^32 skips the first iterations
        "initial-loss-scale": 65536 if t.precision == "fp16" else None,
        "no-bias-gelu-fusion": s.activation != "gelu-tanh",
        # with --swiglu its default is not 4 h
        "ffn-hidden-size": s.ffn if s.is_gated or s.ffn != 4 * s.hidden_size else None,
        "norm-epsilon": s.norm_epsilon if s.norm_epsilon != ModelShape.norm_epsilon else None,
        "use-distributed-optimizer": t.zero == 1,
        **({"recompute-num-layers": t.recompute_layers} if t.recompute == "block" else {}),
        "untie-embeddings-and-output-weights": not s.tied_embeddings,
        "accumulate-allreduce-grads-in-fp32": t.precision != "fp32",
        "group-query-attention": shared,
        "num-query-groups": s.kv_heads if shared else None,
        "rotary-base": int(s.rotary_base) if s.rotary_base != ModelShape.rotary_base else None,
        "padded-vocab-size": s.vocab_size,
        "timing-log-level": 2 if run.timers else None,
        "tokenizer-type": "NullTokenizer" if is_bytes else "HuggingFaceTokenizer",
        "tokenizer-model": None if is_bytes else coder,
        # ids of our tokenizer "bytes"; from core 0.18 on NullTokenizer ends a document by the last
        # of them, as we do, before by the next one, which no document has
        "vocab-size": 257 if is_bytes else None,
    }
    # True is a switch
    found = {
        name: value for name, value in values.items() if value is not None and value is not False
    }
    return given | {name: [] if value is True else [str(value)] for name, value in found.items()}


def _data(plan: Plan, prefixes: Sequence[str]) -> Arguments:
    """Without a split all documents are for training, as in our engines."""
    blend = plan.data.blend
    sources = list(prefixes) or [part.source for part in blend] or [plan.data.source]
    require(
        len(sources) == max(1, len(blend)),
        "prefixes",
        len(sources),
        f"the plan has {max(1, len(blend))} sources",
    )
    weights = [repr(float(part.weight)) for part in blend]
    weighted = [word for pair in zip(weights, sources, strict=False) for word in pair]
    return {"data-path": weighted or sources, "split": [plan.data.split or "100,0,0"]}
