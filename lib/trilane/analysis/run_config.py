"""RunConfig: what ran, from the plan or else the log's launch arguments: shape, parallelism, batch, card."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trilane.config import cluster
from trilane.config.cluster import Gpu, card_words
from trilane.config.model import GATED, ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.logs.run import RunLog

# full recomputation, as Megatron before 2022, DeepSpeed and the Trainer call it
FULL = ("checkpoint_activations", "deepspeed_activation_checkpointing", "gradient_checkpointing")
# Set where the model is no dense decoder with attention over the whole sequence
OTHER = (
    *("num_experts", "multi_latent_attention", "window_size", "mtp_num_layers", "hybrid_override_pattern"),
    *("heterogeneous_layers_config_path", "experimental_attention_variant", "linear_attention_freq", "quick_geglu"),
)
OFF = ("None", "False", "0", "1", "")  # Megatron-DeepSpeed prints [1] for no experts
# A word of a log for each way of a shape: Megatron's, its forks' (PositionEmbeddingType.alibi) and GPT-NeoX's.
POSITIONS = {"absolute": "learned", "learned_absolute": "learned", "learned": "learned", "rope": "rotary"}
POSITIONS |= {"rotary": "rotary", "alibi": "alibi", "none": "none"}
NORMS = {"LayerNorm": "layernorm", "layernorm": "layernorm", "RMSNorm": "rmsnorm", "rmsnorm": "rmsnorm"}

# Names of one argument, the most reliable first: Megatron, Megatron of 2020, DeepSpeed, the Trainer, a typed table.
TP = ("tensor_model_parallel_size", "model_parallel_size", "tp")
PP = ("pipeline_model_parallel_size", "pp")
MBS = ("micro_batch_size", "deepspeed.train_micro_batch_size_per_gpu", "per_device_train_batch_size", "mbs")
GBS = ("global_batch_size", "deepspeed.train_batch_size", "total_train_batch_size", "gbs")
SAME = ("tp", "pp", "dp", "mbs", "gbs", "recompute", "interleaving", "precision")  # in Topology and RunConfig
LAYERS, HIDDEN = ("num_layers", "layers", "n_layer"), ("hidden_size", "hidden", "n_embd")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What ran. Where unknown: no shape, 0 for a number, "" for card and precision, one for a degree of parallelism.

    parameters         all of them; may be known without the shape
    gpus, gbs          GPUs of the run, and sequences per iteration
    seq_length         tokens of a sequence; may be known without the shape
    recompute          "none", "selective" or "full"
    card_bytes         the card's memory; 0 unknown
    peak_flops_per_s   the card's matmul rate in the run's precision, of data sheets (data/clusters); 0 unknown
    note               why there is no shape, where the log shows a model that is no dense decoder
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

    @property
    def microbatches(self) -> float:
        """Microbatches per iteration and replica; 0 where unknown."""
        return self.gbs / (self.mbs * self.dp) if self.mbs else 0


def run_config(log: RunLog, plan: Plan | None = None, gpu: Gpu | None = None) -> RunConfig:
    """The configuration of a run: its plan's where there is one, else by its log, on `gpu` where that is known.

    `gbs` is the full batch size, also of a run that is still ramping up.
    """
    return config_of(plan) if plan else _of_log(log, gpu or card(log))


def of_window(config: RunConfig, log: RunLog, counts: np.ndarray) -> RunConfig:
    """The configuration with the batch size and the sequence length of the rows that `counts` marks."""
    sizes = {}
    for name in ("global_batch_size", "seq_length"):
        values = log.iterations[name].to_numpy(float)[counts] if name in log.iterations else np.empty(0)
        sizes[name] = float(np.median(values)) if len(values) else 0.0
    if sizes["global_batch_size"] > 0:
        config = replace(config, gbs=sizes["global_batch_size"])
    if (length := int(sizes["seq_length"] if sizes["seq_length"] > 0 else 0)) and length != config.seq_length:
        shape = replace(config.shape, seq_length=length) if config.shape else None
        config = replace(config, seq_length=length, shape=shape)
    return config


def config_of(plan: Plan) -> RunConfig:
    """The configuration that a plan describes."""
    t, gpu = plan.topology, plan.cluster.gpu
    # a process on a CPU machine has a share of the cores, for which the card's peak means nothing
    peak = gpu.flops_per_s(t.precision) if gpu.kind == "cuda" else 0.0
    return RunConfig(
        shape=plan.shape,
        parameters=plan.shape.parameters,
        gpus=t.gpus,
        seq_length=plan.shape.seq_length,
        **{name: getattr(t, name) for name in SAME},
        card=gpu.name,
        card_bytes=gpu.memory_bytes,
        peak_flops_per_s=peak,
    )


def _of_log(log: RunLog, gpu: Gpu | None) -> RunConfig:
    tp, pp = _whole(log, *TP) or 1, _whole(log, *PP) or 1
    # DeepSpeed's own dump counts replicas, which are the GPUs only where there is no other parallelism
    gpus = _whole(log, "world_size", "gpus") or (_whole(log, "deepspeed.world_size") if tp * pp == 1 else 0)
    cp = _whole(log, "context_parallel_size") or 1
    dp = _whole(log, "data_parallel_size", "dp") or max(1, gpus // (tp * cp * pp))
    per_stage, layers = _whole(log, "num_layers_per_virtual_pipeline_stage"), _whole(log, "num_layers")
    precision = next((name for name in ("bf16", "fp16") if log.arguments.get(name) is True), "")
    if {log.arguments.get("fp8"), log.arguments.get("fp8_format")} & {"hybrid", "e4m3"}:
        precision = "fp8"
    peak = getattr(gpu, f"{precision or 'fp16'}_flops_per_s") if gpu else 0.0
    other = _not_dense(log)
    shape = None if other else _shape(log)
    return RunConfig(
        shape=shape,
        parameters=shape.parameters if shape else 0 if other else _parameters(log),
        note=f"no TFLOPs by shape: {other} is no dense decoder's" if other else "",
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=_whole(log, *MBS),
        gbs=_batch(log, gpus // (tp * pp)),
        seq_length=_whole(log, "seq_length", "encoder_seq_length"),
        recompute=_recompute(log),
        interleaving=max(1, layers // (pp * per_stage)) if per_stage and layers else 1,
        precision=precision,
        card=gpu.name if gpu else "",
        card_bytes=gpu.memory_bytes if gpu else 0.0,
        peak_flops_per_s=peak,
    )


def card(log: RunLog) -> Gpu | None:
    """The catalogue's card that nvidia-smi shows in the log; None where it shows none, or an unknown one."""
    if not log.devices:
        return None
    device = log.devices[0]
    known = [cluster.cluster(name).gpu for name in cluster.catalogue()]
    fitting = [g for g in known if card_words(device.name.replace(".", "")) - {"PCIE"} <= card_words(g.name)]
    size = device.total_bytes if device.total_bytes == device.total_bytes else math.inf  # a list without the memory
    return min(fitting, key=lambda g: (abs(g.memory_bytes - size), -g.memory_bytes), default=None)


def _shape(log: RunLog) -> ModelShape | None:
    """The model's shape, None where an argument is missing or they do not fit together."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    sizes: dict[str, Any] = {name: _whole(log, name) for name in names}
    vocab = _whole(log, "padded_vocab_size")
    if not vocab and (tokens := _whole(log, "vocab_size")):
        vocab = padded_vocab_size(tokens, _whole(log, *TP) or 1, _whole(log, "make_vocab_size_divisible_by") or 128)
    if not vocab or not all(sizes.values()):
        return None
    try:
        return ModelShape(vocab_size=vocab, **sizes, **_kind(log))
    except ValueError:
        return None


def _kind(log: RunLog) -> dict[str, Any]:
    """The fields of a ModelShape that may be unlike GPT-2's; GPT-2's where the log has no such argument.

    A dump has the names of arguments as the program holds them (add_bias_linear), a trace as they are given
    (disable_bias_linear). Megatron prints one query group where it uses none.
    """
    given = log.arguments
    no_bias = given.get("add_bias_linear") is False or given.get("disable_bias_linear") is True
    rotary = given.get("use_rotary_position_embeddings") is True
    position = str(given.get("position_embedding_type") or given.get("pos_emb") or "learned").rpartition(".")[2]
    gate = given.get("glu_activation")
    activation = gate if gate in GATED else "squared-relu" if given.get("squared_relu") is True else "gelu"
    groups = given.get("group_query_attention")
    return {
        "activation": "swiglu" if given.get("swiglu") is True else activation,
        "ffn_hidden_size": _whole(log, "ffn_hidden_size") or (4 * _whole(log, "hidden_size") if gate else None),
        "num_key_value_heads": (_whole(log, "num_query_groups") if groups is True else 0)
        or _whole(log, "num_key_value_heads", "num_kv_heads")
        or None,
        "normalization": NORMS.get(str(given.get("normalization") or given.get("norm")), "layernorm"),
        "positions": "rotary" if rotary else POSITIONS.get(position, "learned"),
        "biases": "all" if not no_bias else "qkv" if given.get("add_qkv_bias") is True else "none",
        "tied_embeddings": not any(
            given.get(n) is True for n in ("untie_embeddings_and_output_weights", "no_weight_tying")
        ),
        "embedding_layernorm": given.get("embed_layernorm") is True,
    }


def _not_dense(log: RunLog) -> str:
    """The arguments, name=value, of a model that a shape cannot describe; "" where there are none."""
    given = log.arguments
    found = [name for name in OTHER if str(given.get(name)).strip("[]()") not in OFF]
    wide, heads = _whole(log, "kv_channels"), _whole(log, "num_attention_heads")
    if wide and heads and wide * heads != _whole(log, "hidden_size"):
        found.append("kv_channels")
    return ", ".join(f"{name}={given[name]}" for name in found)


def _parameters(log: RunLog) -> float:
    """As ModelShape.parameters counts them, without the number of heads; else the size of a typed table, in 1e9."""
    L, h = _whole(log, *LAYERS), _whole(log, *HIDDEN)
    s, V = _whole(log, "seq_length", "seq", "n_positions"), _whole(log, "padded_vocab_size", "vocab_size")
    if L and h and s and V:
        return L * (12 * h * h + 13 * h) + (V + s + 2) * h
    size = log.arguments.get("size")
    return size * 1e9 if isinstance(size, int | float) and size > 0 else 0


def _batch(log: RunLog, replicas: int) -> float:
    """The full global batch: the argument where the log reaches or names it, else the largest printed."""
    printed = log.iterations["global_batch_size"].max() if "global_batch_size" in log.iterations else math.nan
    batch = max(_whole(log, *GBS), 0 if math.isnan(printed) else printed)
    if not batch and replicas:  # versions of 2020 print only the batch of a replica
        batch = _whole(log, "batch_size") * max(1, replicas)
    return float(batch)


def _recompute(log: RunLog) -> str:
    granularity = log.arguments.get("recompute_granularity")
    if granularity in ("full", "selective"):
        return str(granularity)
    return "full" if any(log.arguments.get(name) is True for name in FULL) else "none"


def _whole(log: RunLog, *names: str) -> int:
    """The first argument of these names that is a whole number above zero; 0 where there is none."""
    values = (log.arguments.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)
