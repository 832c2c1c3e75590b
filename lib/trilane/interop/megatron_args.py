"""The arguments of Megatron-LM and of BigScience's Megatron-DeepSpeed that run a plan in the original programs.

Names and meanings: Megatron-LM core_v0.16.1 (megatron/training/arguments.py) and bigscience-workshop/Megatron-DeepSpeed
8387ae17 (megatron/arguments.py). Lengths are given in samples, which both require for a ramp-up of the batch.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trilane.config.engines import unsupported_reason
from trilane.config.model import GATED, ModelShape
from trilane.config.plan import Plan
from trilane.config.training import Optimizer
from trilane.interop.shell_args import Given
from trilane.utils.validation import require, require_known

LM, DEEPSPEED = "megatron-lm", "megatron-deepspeed"
ENGINE_OF = {LM: "megatron", DEEPSPEED: "deepspeed-3d"}
INITIAL_LOSS_SCALE = "65536"  # that of our engines; their default 2^32 skips the first iterations
BYTES = "256"  # ids of our tokenizer "bytes"; the end of a document is the next id, as in NullTokenizer

RECOMPUTE: dict[str, dict[str, object]] = {
    "none": {},
    "selective": {"recompute-granularity": "selective", "recompute-modules": "core_attn"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}

PROGRAM = {LM: "Megatron-LM", DEEPSPEED: "Megatron-DeepSpeed"}
# What each program has of a shape's fields, and its words for it.
ACTIVATION: dict[str, dict[str, list[str]]] = {
    LM: {"gelu": [], "gelu-tanh": [], "squared-relu": ["squared-relu"], "swiglu": ["swiglu"]},
    DEEPSPEED: {"gelu": [], "gelu-tanh": []} | {gate: ["glu-activation", gate] for gate in GATED},
}
NORM = {LM: {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}, DEEPSPEED: {"layernorm": "LayerNorm"}}
POSITION = {
    LM: {"learned": "learned_absolute", "rotary": "rope", "none": "none"},
    DEEPSPEED: {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"},
}
BIAS: dict[str, dict[str, list[str]]] = {
    LM: {"all": [], "qkv": ["disable-bias-linear", "add-qkv-bias"], "none": ["disable-bias-linear"]},
    DEEPSPEED: {"all": []},
}
EPSILON = {LM: "norm-epsilon", DEEPSPEED: "layernorm-epsilon"}
EPSILONS = [name.replace("-", "_") for name in EPSILON.values()]

Arguments = dict[str, list[str]]  # name without leading dashes -> values; empty for a switch


def megatron_args(plan: Plan, flavour: str = LM, prefixes: Sequence[str] = ()) -> Arguments:
    """The arguments for the plan, without the launcher's. Raises ValueError for what the program cannot do.

    `prefixes` of the prepared .bin/.idx pairs, one per source; the sources themselves by default. The model is that of
    our engines: exact GELU unless it is gelu-tanh, the form of their fused kernel.
    """
    require_known("flavour", flavour, ENGINE_OF)
    if reason := unsupported_reason(ENGINE_OF[flavour], plan.shape, plan.topology):
        raise ValueError(reason)
    own = _megatron_lm(plan) if flavour == LM else _megatron_deepspeed(plan)
    # in fp8 weights, gradients and all but the matmuls stay in bf16
    switches = {"fp16": ["fp16"], "bf16": ["bf16"], "fp8": ["bf16"]}.get(plan.topology.precision, [])
    switches += ["no-bias-gelu-fusion"] * (plan.shape.activation != "gelu-tanh")
    shape = {**_shape(plan), **_kind(plan.shape, flavour)}
    return {**shape, **_batch(plan), **_optimizer(plan), **_data(plan, prefixes), **own, **_switches(switches)}


def megatron_text(arguments: Arguments) -> str:
    """The arguments for bash, one per line."""
    return " \\\n".join(shlex.join([f"--{name}", *values]) for name, values in arguments.items())


def _shape(plan: Plan) -> Arguments:
    s, t = plan.shape, plan.topology
    values = {"num-layers": s.num_layers, "hidden-size": s.hidden_size, "num-attention-heads": s.num_attention_heads}
    values |= {"seq-length": s.seq_length, "max-position-embeddings": s.seq_length}
    return _options({**values, "tensor-model-parallel-size": t.tp, "pipeline-model-parallel-size": t.pp})


def _kind(s: ModelShape, flavour: str) -> Arguments:
    """What is not as in GPT-2; ValueError for what the program has no argument for."""
    tables: dict[str, Mapping[str, Mapping[str, object]]]
    tables = {"activation": ACTIVATION, "normalization": NORM, "positions": POSITION, "biases": BIAS}
    for field, table in tables.items():
        value, known = getattr(s, field), table[flavour]
        require(value in known, field, value, f"{PROGRAM[flavour]} has {', '.join(known)}")
    shared, normed = s.num_key_value_heads is not None, s.embedding_layernorm
    require(flavour == LM or not shared, "num_key_value_heads", s.kv_heads, "Megatron-DeepSpeed has one for each head")
    require(flavour != LM or not normed, "embedding_layernorm", True, "Megatron-LM has no LayerNorm of the embedding")
    found: Arguments = _switches(BIAS[flavour][s.biases])
    if word := ACTIVATION[flavour][s.activation]:
        found[word[0]] = word[1:]
    values: dict[str, object] = {"ffn-hidden-size": s.ffn} if s.ffn != 4 * s.hidden_size else {}
    values |= {"normalization": NORM[flavour][s.normalization]} if s.normalization != "layernorm" else {}
    values |= {"position-embedding-type": POSITION[flavour][s.positions]} if s.positions != "learned" else {}
    values |= {"num-query-groups": s.kv_heads} if shared else {}
    values |= {EPSILON[flavour]: s.norm_epsilon} if s.norm_epsilon != ModelShape.norm_epsilon else {}
    if s.positions == "rotary" and s.rotary_base != ModelShape.rotary_base:
        is_whole = flavour == LM and s.rotary_base.is_integer()
        require(is_whole, "rotary_base", s.rotary_base, "Megatron-LM has whole numbers, Megatron-DeepSpeed 10000 alone")
        values |= {"rotary-base": int(s.rotary_base)}
    return {**found, **_switches(["group-query-attention"] * shared), **_options(values)}


def read_kind(given: Given) -> dict[str, Any]:
    """The fields of a ModelShape that may be unlike GPT-2's. ValueError for a word that a shape does not have.

    Both programs' names are read, and those of Microsoft's fork of Megatron-DeepSpeed (its Llama scripts). With
    --swiglu an MLP without --ffn-hidden-size has 8/3 h, with --glu-activation it has 4 h (their arguments.py).
    """
    norms = {word.lower(): word for word in NORM[LM]}
    positions = {word: field for table in POSITION.values() for field, word in table.items()}
    norm = given.get("normalization", str, "LayerNorm")
    position = given.get("position_embedding_type", str, "learned_absolute")
    gate = given.get("glu_activation", str, "gelu")
    require_known("--normalization", norm.lower(), norms)
    require_known("--position-embedding-type", position, positions)
    turned = given.has("use_rotary_position_embeddings")
    rule = f"contradicts --position-embedding-type {position}: a model has one kind of positions"
    require(not turned or positions[position] not in ("alibi", "none"), "--use-rotary-position-embeddings", "yes", rule)
    require(gate in ("gelu", *GATED), "--glu-activation", gate, f"a plan has {', '.join(GATED)}")
    exact = given.has("no_bias_gelu_fusion") or given.has("disable_bias_linear")  # their fused kernel has the tanh form
    plain = gate if exact or gate != "gelu" else "gelu-tanh"
    activation = next((kind for kind in ("swiglu", "squared-relu") if given.has(kind.replace("-", "_"))), plain)
    no_bias, qkv = given.has("disable_bias_linear"), given.has("add_qkv_bias")
    usual = 0 if activation != gate else 4 * given.get("hidden_size", int)
    groups = given.get("num_query_groups", int, 1) if given.has("group_query_attention") else 0
    return {
        "activation": activation,
        "normalization": norm.lower(),
        "positions": "rotary" if turned else positions[position],
        "biases": "all" if not no_bias else "qkv" if qkv else "none",
        "ffn_hidden_size": given.get("ffn_hidden_size", int, usual) or None,
        "num_key_value_heads": (groups or given.get("num_key_value_heads", int, 0)) or None,
        "tied_embeddings": not given.has("untie_embeddings_and_output_weights"),
        "embedding_layernorm": given.has("embed_layernorm"),
        "norm_epsilon": next((given.get(n, float) for n in EPSILONS if given.has(n)), ModelShape.norm_epsilon),
        "rotary_base": given.get("rotary_base", float, ModelShape.rotary_base),
    }


def _batch(plan: Plan) -> Arguments:
    t, ramp = plan.topology, plan.run.ramp
    given = _options({"micro-batch-size": t.mbs, "global-batch-size": t.gbs, "train-samples": plan.samples})
    if ramp.samples:
        given["rampup-batch-size"] = [str(ramp.start), str(ramp.increment), str(ramp.samples)]
    skipped = [str(number) for first, last in plan.run.skipped for number in range(first, last + 1)]
    given |= {"iterations-to-skip": skipped} if skipped else {}
    return {**given, **_options({"log-interval": plan.run.log_interval, "seed": plan.run.seed})}


def _optimizer(plan: Plan) -> Arguments:
    """Dropout is always given, since its default is 0.1."""
    o = plan.optimizer
    require(not o.lr_changes, "lr_changes", len(o.lr_changes), "both programs have one schedule for the whole run")
    require(o.z_loss == 0, "z_loss", o.z_loss, "Megatron-LM and Megatron-DeepSpeed have none")
    values: dict[str, object] = {"lr": o.lr, "min-lr": o.min_lr, "lr-decay-style": "cosine"}
    values |= {"lr-decay-samples": o.decay_samples} if o.decay_samples else {}
    values |= {"lr-warmup-samples": o.warmup_samples, "weight-decay": o.weight_decay, "clip-grad": o.clip_grad}
    values |= {"adam-beta1": o.adam_beta1, "adam-beta2": o.adam_beta2, "adam-eps": o.adam_eps}
    values |= {"init-method-std": o.init_std} if o.init_std != Optimizer.init_std else {}
    values |= {"attention-dropout": plan.dropout.attention, "hidden-dropout": plan.dropout.hidden}
    values |= {"initial-loss-scale": INITIAL_LOSS_SCALE} if plan.topology.precision == "fp16" else {}
    return _options(values)


def _data(plan: Plan, prefixes: Sequence[str]) -> Arguments:
    """Without a split all documents are for training, as in our engines."""
    blend = plan.data.blend
    sources = list(prefixes) or [part.source for part in blend] or [plan.data.source]
    require(len(sources) == max(1, len(blend)), "prefixes", len(sources), f"the plan has {max(1, len(blend))} sources")
    pairs = [(repr(float(part.weight)), source) for part, source in zip(blend, sources, strict=False)]
    weighted = [word for pair in pairs for word in pair]
    values: dict[str, object] = {"split": plan.data.split or "100,0,0"}
    values |= {"eval-iters": plan.run.eval_iters, "eval-interval": plan.run.eval_interval or 1000}
    return {"data-path": weighted or sources, **_options(values)}


def _megatron_lm(plan: Plan) -> Arguments:
    """Gradients are accumulated in fp32, as in our engine; with bf16 this is Megatron-LM's default."""
    s, t = plan.shape, plan.topology
    switches = ["sequence-parallel"] * t.sequence_parallel + ["use-distributed-optimizer"] * (t.zero == 1)
    switches += ["overlap-grad-reduce"] * t.overlap_grad_reduce + ["overlap-param-gather"] * t.overlap_param_gather
    switches += ["untie-embeddings-and-output-weights"] * (not s.tied_embeddings)
    switches += ["accumulate-allreduce-grads-in-fp32"] * (t.precision != "fp32")
    if t.partition != "uniform":
        switches += ["account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"]
    values: dict[str, object] = {"padded-vocab-size": s.vocab_size}
    values |= {"num-virtual-stages-per-pipeline-rank": t.interleaving} if t.interleaving > 1 else {}
    values |= {"decoder-first-pipeline-num-layers": t.first_stage_layers} if t.first_stage_layers else {}
    values |= {"decoder-last-pipeline-num-layers": t.last_stage_layers} if t.last_stage_layers else {}
    values |= {"context-parallel-size": t.cp} if t.cp > 1 else {}
    values |= {"fp8-format": "hybrid"} if t.precision == "fp8" else {}
    values |= {"timing-log-level": 2} if plan.run.timers else {}
    values |= {"tensorboard-dir": "tensorboard"} if plan.run.tensorboard else {}
    coder: dict[str, object] = {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": plan.data.tokenizer}
    if plan.data.tokenizer == "bytes":
        coder = {"tokenizer-type": "NullTokenizer", "vocab-size": BYTES}
    return {**_options({**values, **RECOMPUTE[t.recompute], **coder}), **_switches(switches)}


def _megatron_deepspeed(plan: Plan) -> Arguments:
    """Batch, ZeRO stage and precision are repeated in ds_config.json, made by deepspeed_config."""
    s, t, coder = plan.shape, plan.topology, plan.data.tokenizer
    require(not t.sequence_parallel, "sequence_parallel", True, "Megatron-DeepSpeed has none")
    require(not plan.run.skip, "skip", plan.run.skip, "Megatron-DeepSpeed's ranges were not compared with a plan's")
    require(t.cp == 1, "cp", t.cp, "Megatron-DeepSpeed has no context parallelism")
    require(t.precision != "fp8", "precision", "fp8", "Megatron-DeepSpeed has fp16 and bf16")
    require(s.tied_embeddings, "tied_embeddings", False, "Megatron-DeepSpeed always ties them")
    rule = "Megatron-DeepSpeed has no byte tokenizer; name a folder with a Hugging Face tokenizer"
    require(coder != "bytes", "data.tokenizer", coder, rule)
    switches = ["deepspeed"] + ["embed-layernorm"] * s.embedding_layernorm + ["cpu-optimizer"] * (t.offload != "none")
    if t.recompute == "full":
        switches += ["checkpoint-activations", "deepspeed-activation-checkpointing"]
    values: dict[str, object] = {"deepspeed_config": "ds_config.json", "zero-stage": t.zero}
    values |= {"pp-partition-method": t.partition} if t.partition != "uniform" else {}
    values |= {"make-vocab-size-divisible-by": 1, "pad-vocab-size-to": s.vocab_size}
    values |= {"tokenizer-type": "PretrainedFromHF", "tokenizer-name-or-path": coder}
    values |= {"tensorboard-dir": "tensorboard"} if plan.run.tensorboard else {}
    return {**_switches(switches), **_options(values)}


def _options(values: Mapping[str, object]) -> Arguments:
    return {name: [str(value)] for name, value in values.items()}


def _switches(switches: Sequence[str]) -> Arguments:
    return {name: [] for name in switches}
