"""The arguments of Megatron-LM and of BigScience's Megatron-DeepSpeed that run a plan in the original programs.

Names and meanings: Megatron-LM core_v0.16.1 (megatron/training/arguments.py) and bigscience-workshop/Megatron-DeepSpeed
8387ae17 (megatron/arguments.py). Lengths are given in samples, which both require for a ramp-up of the batch.
"""

import shlex
from collections.abc import Mapping, Sequence

from trilane.config.engines import unsupported_reason
from trilane.config.plan import Plan
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

Arguments = dict[str, list[str]]  # name without leading dashes -> values; empty for a switch


def megatron_args(plan: Plan, flavour: str = LM, prefixes: Sequence[str] = ()) -> Arguments:
    """The arguments for the plan, without the launcher's. Raises ValueError for what the program cannot do.

    `prefixes` of the prepared .bin/.idx pairs, one per source; the sources themselves by default. The model is that of
    our engines: exact GELU (their fused kernel has the tanh form), initial standard deviation 0.02.
    """
    require_known("flavour", flavour, ENGINE_OF)
    if reason := unsupported_reason(ENGINE_OF[flavour], plan.shape, plan.topology):
        raise ValueError(reason)
    own = _megatron_lm(plan) if flavour == LM else _megatron_deepspeed(plan)
    switches = ["fp16"] * (plan.topology.precision == "fp16") + ["bf16"] * (plan.topology.precision == "bf16")
    switches += ["no-bias-gelu-fusion"]
    return {**_shape(plan), **_batch(plan), **_optimizer(plan), **_data(plan, prefixes), **own, **_switches(switches)}


def megatron_text(arguments: Arguments) -> str:
    """The arguments for bash, one per line."""
    return " \\\n".join(shlex.join([f"--{name}", *values]) for name, values in arguments.items())


def _shape(plan: Plan) -> Arguments:
    s, t = plan.shape, plan.topology
    values = {"num-layers": s.num_layers, "hidden-size": s.hidden_size, "num-attention-heads": s.num_attention_heads}
    values |= {"seq-length": s.seq_length, "max-position-embeddings": s.seq_length}
    return _options({**values, "tensor-model-parallel-size": t.tp, "pipeline-model-parallel-size": t.pp})


def _batch(plan: Plan) -> Arguments:
    t, ramp = plan.topology, plan.run.ramp
    given = _options({"micro-batch-size": t.mbs, "global-batch-size": t.gbs, "train-samples": plan.samples})
    if ramp.samples:
        given["rampup-batch-size"] = [str(ramp.start), str(ramp.increment), str(ramp.samples)]
    return {**given, **_options({"log-interval": plan.run.log_interval, "seed": plan.run.seed})}


def _optimizer(plan: Plan) -> Arguments:
    """Dropout is always given, since its default is 0.1."""
    o = plan.optimizer
    values: dict[str, object] = {"lr": o.lr, "min-lr": o.min_lr, "lr-decay-style": "cosine"}
    values |= {"lr-decay-samples": o.decay_samples} if o.decay_samples else {}
    values |= {"lr-warmup-samples": o.warmup_samples, "weight-decay": o.weight_decay, "clip-grad": o.clip_grad}
    values |= {"adam-beta1": o.adam_beta1, "adam-beta2": o.adam_beta2, "adam-eps": o.adam_eps}
    values |= {"attention-dropout": plan.dropout.attention, "hidden-dropout": plan.dropout.hidden}
    values |= {"initial-loss-scale": INITIAL_LOSS_SCALE} if plan.topology.precision == "fp16" else {}
    return _options(values)


def _data(plan: Plan, prefixes: Sequence[str]) -> Arguments:
    """All samples are for training, as in our engines."""
    blend = plan.data.blend
    sources = list(prefixes) or [part.source for part in blend] or [plan.data.source]
    require(len(sources) == max(1, len(blend)), "prefixes", len(sources), f"the plan has {max(1, len(blend))} sources")
    pairs = [(repr(float(part.weight)), source) for part, source in zip(blend, sources, strict=False)]
    weighted = [word for pair in pairs for word in pair]
    return {"data-path": weighted or sources, **_options({"split": "100,0,0", "eval-iters": 0, "eval-interval": 1000})}


def _megatron_lm(plan: Plan) -> Arguments:
    """Gradients are accumulated in fp32, as in our engine; with bf16 this is Megatron-LM's default."""
    s, t = plan.shape, plan.topology
    require(not s.embedding_layernorm, "embedding_layernorm", True, "Megatron-LM has no LayerNorm of the embedding")
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
