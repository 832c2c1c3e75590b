"""RunConfig: what ran, from the plan or else the log's launch arguments: shape, parallelism, batch, card."""

import math
from dataclasses import dataclass

from trilane.config import cluster
from trilane.config.cluster import Gpu, card_words
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.logs.run import RunLog

# full recomputation, as Megatron before 2022, DeepSpeed and the Trainer call it
FULL = ("checkpoint_activations", "deepspeed_activation_checkpointing", "gradient_checkpointing")
ON = ("swiglu", "multi_latent_attention")  # True where the model is no plain GPT
NO_EXPERTS = ("None", "False", "0", "1")  # Megatron-DeepSpeed prints [1]

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
    note               why there is no shape, where the log shows a model that is not a plain GPT
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
    dp = _whole(log, "data_parallel_size", "dp") or max(1, gpus // (tp * pp))
    per_stage, layers = _whole(log, "num_layers_per_virtual_pipeline_stage"), _whole(log, "num_layers")
    precision = next((name for name in ("bf16", "fp16") if log.arguments.get(name) is True), "")
    peak = getattr(gpu, f"{precision or 'fp16'}_flops_per_s") if gpu else 0.0
    other = _no_plain_gpt(log)
    shape = None if other else _shape(log)
    return RunConfig(
        shape=shape,
        parameters=shape.parameters if shape else 0 if other else _parameters(log),
        note=f"no TFLOPs by shape: {other} is no plain GPT" if other else "",
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
    return min(fitting, key=lambda g: abs(g.memory_bytes - device.total_bytes), default=None)


def _shape(log: RunLog) -> ModelShape | None:
    """The model's shape, None where an argument is missing or they do not fit together."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    sizes = {name: _whole(log, name) for name in names}
    vocab = _whole(log, "padded_vocab_size")
    if not vocab and (tokens := _whole(log, "vocab_size")):
        vocab = padded_vocab_size(tokens, _whole(log, *TP) or 1, _whole(log, "make_vocab_size_divisible_by") or 128)
    if not vocab or not all(sizes.values()):
        return None
    L, h, a, s = sizes.values()
    try:
        return ModelShape(num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=s, vocab_size=vocab)
    except ValueError:
        return None


def _no_plain_gpt(log: RunLog) -> str:
    """The arguments, name=value, of a model whose FLOPs our formula does not count; "" where there are none.

    Gated MLPs, experts, grouped queries (Megatron prints 1 group where it uses none), an MLP that is not 4 h wide.
    """
    given = log.arguments
    found = [name for name in ON if given.get(name) is True]
    if str(given.get("num_experts")).strip("[]") not in NO_EXPERTS:
        found.append("num_experts")
    groups, heads = _whole(log, "num_query_groups"), _whole(log, "num_attention_heads")
    if given.get("group_query_attention") is not False and groups and heads and groups != heads:
        found.append("num_query_groups")
    if _whole(log, "ffn_hidden_size") not in (0, 4 * _whole(log, "hidden_size")):
        found.append("ffn_hidden_size")
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
