"""Setup: what ran, as far as a log's launch arguments or the plan beside it tell: shape, parallelism, batch, card."""

from dataclasses import dataclass

from trilane.config import cluster
from trilane.config.cluster import Gpu, card_words
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.logs.run import RunLog

# how Megatron before 2022, DeepSpeed and the Trainer say it
FULL = ("checkpoint_activations", "deepspeed_activation_checkpointing", "gradient_checkpointing")


ON = ("swiglu", "multi_latent_attention")  # True where the model is no plain GPT


NO_EXPERTS = ("None", "False", "0", "1")  # Megatron-DeepSpeed prints [1]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What ran. Where nobody tells: no shape, no card, 0 for a number, "" for a precision.

    gpus, gbs          GPUs of the run and sequences an iteration
    seq_length         tokens of a sequence, known also where the shape is not
    recompute          "none", "selective" or "full"
    peak_flops_per_s   the card's matmul rate in the run's precision, of data sheets (data/clusters); 0 unknown
    note               why there is no shape, where the log tells a model that is no plain GPT
    """

    shape: ModelShape | None = None
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
    peak_flops_per_s: float = 0.0
    note: str = ""

    @property
    def microbatches(self) -> float:
        """Microbatches per iteration and replica; 0 where unknown."""
        return self.gbs / (self.mbs * self.dp) if self.mbs else 0


def setup_of(log: RunLog, plan: Plan | None = None, gpu: Gpu | None = None) -> RunConfig:
    """The setup of a run: its plan's where there is one, else what its log tells, on `gpu` where that is known."""
    return _planned(plan) if plan else _told(log, gpu or card(log))


def _planned(plan: Plan) -> RunConfig:
    t, gpu = plan.topology, plan.cluster.gpu
    # a process on a CPU machine has its share of the cores, so a peak of the card says nothing
    peak = gpu.flops_per_s(t.precision) if gpu.kind == "cuda" else 0.0
    return RunConfig(
        shape=plan.shape,
        gpus=t.gpus,
        tp=t.tp,
        pp=t.pp,
        dp=t.dp,
        mbs=t.mbs,
        gbs=t.gbs,
        seq_length=plan.shape.seq_length,
        recompute=t.recompute,
        interleaving=t.interleaving,
        precision=t.precision,
        card=gpu.name,
        peak_flops_per_s=peak,
    )


def _told(log: RunLog, gpu: Gpu | None) -> RunConfig:
    tp, pp = _tp(log), _whole(log, "pipeline_model_parallel_size") or 1
    # DeepSpeed's own dump counts replicas, so it tells the GPUs only where there is nothing but replicas
    gpus = _whole(log, "world_size") or (_whole(log, "deepspeed.world_size") if tp * pp == 1 else 0)
    dp = _whole(log, "data_parallel_size") or max(1, gpus // (tp * pp))
    per_stage, layers = _whole(log, "num_layers_per_virtual_pipeline_stage"), _whole(log, "num_layers")
    precision = next((name for name in ("bf16", "fp16") if log.arguments.get(name) is True), "")
    peak = getattr(gpu, f"{precision or 'fp16'}_flops_per_s") if gpu else 0.0
    other = _no_plain_gpt(log)
    return RunConfig(
        shape=None if other else _shape(log),
        note=f"no TFLOPs by shape: {other} is no plain GPT" if other else "",
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=_whole(log, "micro_batch_size") or _whole(log, "deepspeed.train_micro_batch_size_per_gpu"),
        gbs=_batch(log, gpus // (tp * pp)),
        seq_length=_whole(log, "seq_length") or _whole(log, "encoder_seq_length"),
        recompute=_recompute(log),
        interleaving=max(1, layers // (pp * per_stage)) if per_stage and layers else 1,
        precision=precision,
        card=gpu.name if gpu else "",
        peak_flops_per_s=peak,
    )


def card(log: RunLog) -> Gpu | None:
    """The catalogue's card that nvidia-smi shows in the log; None where it shows none, or one that is not there."""
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
        vocab = padded_vocab_size(tokens, _tp(log), _whole(log, "make_vocab_size_divisible_by") or 128)
    if not vocab or not all(sizes.values()):
        return None
    L, h, a, s = sizes.values()
    try:
        return ModelShape(num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=s, vocab_size=vocab)
    except ValueError:
        return None


def _no_plain_gpt(log: RunLog) -> str:
    """The argument, name=value, that makes it another model than our FLOPs count; "" where none does.

    Gated MLPs, experts, grouped queries (Megatron prints 1 group where it uses none), an MLP that is not 4 h wide.
    """
    told = log.arguments
    found = [name for name in ON if told.get(name) is True]
    if str(told.get("num_experts")).strip("[]") not in NO_EXPERTS:
        found.append("num_experts")
    groups, heads = _whole(log, "num_query_groups"), _whole(log, "num_attention_heads")
    if told.get("group_query_attention") is not False and groups and heads and groups != heads:
        found.append("num_query_groups")
    if _whole(log, "ffn_hidden_size") not in (0, 4 * _whole(log, "hidden_size")):
        found.append("ffn_hidden_size")
    return ", ".join(f"{name}={told[name]}" for name in found)


def _tp(log: RunLog) -> int:
    return _whole(log, "tensor_model_parallel_size") or _whole(log, "model_parallel_size") or 1


def _batch(log: RunLog, replicas: int) -> float:
    if "global_batch_size" in log.iterations and len(log.iterations):
        sizes = log.iterations["global_batch_size"].dropna()
        if len(sizes):
            return float(sizes.iloc[-1])
    batch = _whole(log, "global_batch_size") or _whole(log, "deepspeed.train_batch_size")
    if not batch and replicas:  # versions of 2020 name only what a replica takes
        batch = _whole(log, "batch_size") * max(1, replicas)
    return float(batch)


def _recompute(log: RunLog) -> str:
    said = log.arguments.get("recompute_granularity")
    if said in ("full", "selective"):
        return str(said)
    return "full" if any(log.arguments.get(name) is True for name in FULL) else "none"


def _whole(log: RunLog, name: str) -> int:
    value = log.arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
