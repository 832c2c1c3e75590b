"""RunConfig: what ran, from the plan or else the log's launch arguments: shape, parallelism, batch,
card.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trilane.config import cluster
from trilane.config.cluster import Gpu, card_words
from trilane.config.model import GATED, ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.logs.run import RunLog
from trilane.utils.validation import shipped_json

# Names of one argument, the most reliable first: Megatron's, those of 2020, DeepSpeed's, the
# Trainer's, a typed table's; words of Megatron, its forks (PositionEmbeddingType.alibi) and
# GPT-NeoX for one way of a shape; arguments of models that are no dense decoder with attention over
# the whole sequence.
NAMES: dict[str, Any] = shipped_json("log_arguments")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What ran. Where unknown: no shape, 0 for a number, "" for card and precision, one for a
    degree of parallelism.

    `parameters` and `seq_length` may be known without the shape; `gbs` is sequences per iteration;
    `peak_flops_per_s` the card's matmul rate in the run's precision, of data sheets
    (data/clusters); `note` why there is no shape, where the log shows a model that is no dense
    decoder.
    """

    shape: ModelShape | None = None
    parameters: float = 0
    gpus: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 1
    mbs: int = 0
    gbs: float = 0
    seq_length: int = 0
    recompute: str = "none"
    interleaving: int = 1
    precision: str = ""
    card: str = ""
    card_bytes: float = 0.0
    peak_flops_per_s: float = 0.0
    note: str = ""


def run_config(log: RunLog, plan: Plan | None = None, gpu: Gpu | None = None) -> RunConfig:
    """The configuration of a run, its full batch size also where it still ramps up: its plan's
    where there is one, else by its log, on `gpu` where that is known.
    """
    return config_of(plan) if plan else _of_log(log, gpu or card(log))


def of_window(config: RunConfig, log: RunLog, counts: np.ndarray) -> RunConfig:
    """The configuration with the batch size and the sequence length of the rows that `counts`
    marks.
    """
    columns = (log.column(name) for name in ("global_batch_size", "seq_length"))
    batch, length = (
        float(np.median(x[counts])) if len(x) and counts.any() else 0.0 for x in columns
    )
    shape, tokens = config.shape, int(length) if length >= 1 else config.seq_length
    shape = replace(shape, seq_length=tokens) if shape and tokens != config.seq_length else shape
    return replace(config, gbs=batch if batch > 0 else config.gbs, seq_length=tokens, shape=shape)


def config_of(plan: Plan) -> RunConfig:
    """The configuration that a plan describes."""
    t, gpu, same = (
        plan.topology,
        plan.cluster.gpu,
        ("tp", "pp", "dp", "mbs", "gbs", "recompute", "interleaving"),
    )
    # a process on a CPU machine has a share of the cores, for which the card's peak means nothing
    peak = gpu.flops_per_s(t.precision) if gpu.kind == "cuda" else 0.0
    return RunConfig(
        shape=plan.shape,
        parameters=plan.shape.parameters,
        gpus=t.gpus,
        seq_length=plan.shape.seq_length,
        **{name: getattr(t, name) for name in (*same, "precision")},
        card=gpu.name,
        card_bytes=gpu.memory_bytes,
        peak_flops_per_s=peak,
    )


def _of_log(log: RunLog, gpu: Gpu | None) -> RunConfig:
    given = log.arguments
    tp, pp = _whole(log, *NAMES["tp"]) or 1, _whole(log, *NAMES["pp"]) or 1
    # DeepSpeed's own dump counts replicas, which are the GPUs only where there is no other
    # parallelism
    gpus = _whole(log, "world_size", "gpus") or (
        _whole(log, "deepspeed.world_size") if tp * pp == 1 else 0
    )
    cp, per_stage = (
        _whole(log, "context_parallel_size") or 1,
        _whole(log, "num_layers_per_virtual_pipeline_stage"),
    )
    precision = next((name for name in ("bf16", "fp16") if given.get(name) is True), "")
    precision = (
        "fp8" if {given.get("fp8"), given.get("fp8_format")} & {"hybrid", "e4m3"} else precision
    )
    other = _not_dense(log)
    shape, granularity = None if other else _shape(log), given.get("recompute_granularity")
    full = any(given.get(name) is True for name in NAMES["full_recompute"])
    return RunConfig(
        shape=shape,
        parameters=shape.parameters if shape else 0 if other else _parameters(log),
        note=f"no TFLOPs by shape: {other} is no dense decoder's" if other else "",
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=_whole(log, "data_parallel_size", "dp") or max(1, gpus // (tp * cp * pp)),
        mbs=_whole(log, *NAMES["mbs"]),
        gbs=_batch(log, gpus // (tp * pp)),
        seq_length=_whole(log, "seq_length", "encoder_seq_length"),
        recompute=str(granularity)
        if granularity in ("full", "selective")
        else "full"
        if full
        else "none",
        interleaving=max(1, _whole(log, "num_layers") // (pp * per_stage)) if per_stage else 1,
        precision=precision,
        card=gpu.name if gpu else "",
        card_bytes=gpu.memory_bytes if gpu else 0.0,
        peak_flops_per_s=getattr(gpu, f"{precision or 'fp16'}_flops_per_s") if gpu else 0.0,
    )


def card(log: RunLog) -> Gpu | None:
    """The catalogue's card that nvidia-smi shows in the log; None where it shows none, or an
    unknown one.
    """
    if not log.devices:
        return None
    device, known = log.devices[0], [cluster.cluster(name).gpu for name in cluster.catalogue()]
    fitting = [
        g
        for g in known
        if card_words(device.name.replace(".", "")) - {"PCIE"} <= card_words(g.name)
    ]
    size = (
        device.total_bytes if device.total_bytes == device.total_bytes else math.inf
    )  # a list without the memory
    return min(fitting, key=lambda g: (abs(g.memory_bytes - size), -g.memory_bytes), default=None)


def _shape(log: RunLog) -> ModelShape | None:
    """The model's shape, None where an argument is missing or they do not fit together; GPT-2's
    kind by default.

    A dump has the names of arguments as the program holds them (add_bias_linear), a trace as they
    are given (disable_bias_linear). Megatron prints one query group where it uses none.
    """
    given, names = log.arguments, ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    sizes: dict[str, Any] = {name: _whole(log, name) for name in names}
    of, tokens = _whole(log, "make_vocab_size_divisible_by") or 128, _whole(log, "vocab_size")
    padded = padded_vocab_size(tokens, _whole(log, *NAMES["tp"]) or 1, of) if tokens else 0
    vocab, gate = _whole(log, "padded_vocab_size") or padded, given.get("glu_activation")
    if not vocab or not all(sizes.values()):
        return None

    def on(*names: str) -> bool:
        return any(given.get(name) is True for name in names)

    position = str(
        given.get("position_embedding_type") or given.get("pos_emb") or "learned"
    ).rpartition(".")[2]
    no_bias = given.get("add_bias_linear") is False or on("disable_bias_linear")
    activation = gate if gate in GATED else "squared-relu" if on("squared_relu") else "gelu"
    groups = _whole(log, "num_query_groups") if on("group_query_attention") else 0
    try:
        return ModelShape(
            vocab_size=vocab,
            **sizes,
            activation="swiglu" if on("swiglu") else activation,
            ffn_hidden_size=_whole(log, "ffn_hidden_size")
            or (4 * sizes["hidden_size"] if gate else None),
            num_key_value_heads=groups
            or _whole(log, "num_key_value_heads", "num_kv_heads")
            or None,
            normalization=NAMES["norms"].get(
                str(given.get("normalization") or given.get("norm")), "layernorm"
            ),
            positions=NAMES["positions"].get(
                "rope" if on("use_rotary_position_embeddings") else position, "learned"
            ),
            biases="all" if not no_bias else "qkv" if on("add_qkv_bias") else "none",
            tied_embeddings=not on(*NAMES["untied"]),
            embedding_layernorm=on("embed_layernorm"),
        )
    except ValueError:
        return None


def _not_dense(log: RunLog) -> str:
    """The arguments, name=value, of a model that a shape cannot describe; "" where there are none."""
    given, off = (
        log.arguments,
        ("None", "False", "0", "1", ""),
    )  # Megatron-DeepSpeed prints [1] for no experts
    found = [name for name in NAMES["not_dense"] if str(given.get(name)).strip("[]()") not in off]
    wide = _whole(log, "kv_channels") * _whole(log, "num_attention_heads")
    found += ["kv_channels"] if wide and wide != _whole(log, "hidden_size") else []
    return ", ".join(f"{name}={given[name]}" for name in found)


def _parameters(log: RunLog) -> float:
    """As ModelShape.parameters counts them, without the number of heads; else the size of a typed
    table, in 1e9.
    """
    L, h, s = (_whole(log, *NAMES[name]) for name in ("layers", "hidden", "sequence"))
    V, size = _whole(log, "padded_vocab_size", "vocab_size"), log.arguments.get("size")
    if L and h and s and V:
        return L * (12 * h * h + 13 * h) + (V + s + 2) * h
    return size * 1e9 if isinstance(size, int | float) and size > 0 else 0


def _batch(log: RunLog, replicas: int) -> float:
    """The full global batch: the argument where the log reaches or names it, else the largest
    printed.
    """
    printed = np.nan_to_num(log.column("global_batch_size"))
    batch = max(_whole(log, *NAMES["gbs"]), printed.max(initial=0))
    # versions of 2020 print only the batch of a replica
    return float(batch or (_whole(log, "batch_size") * max(1, replicas) if replicas else 0))


def _whole(log: RunLog, *names: str) -> int:
    """The first argument of these names that is a whole number above zero; 0 where there is none."""
    values = (log.arguments.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)
