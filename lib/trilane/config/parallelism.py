"""Topology: how one training run is spread over GPUs, and which combinations exist at all."""

from dataclasses import dataclass

from trilane.config import cluster as hardware
from trilane.config.cluster import PRECISIONS
from trilane.config.model import ModelShape
from trilane.utils.validation import require, require_integer, require_known

RECOMPUTE = ("none", "selective", "full")


PARTITIONS = ("uniform", "type:transformer|embedding")


OFFLOADS = ("none", "optimizer", "full")


ATTENTIONS = ("fused", "scores")


ADAMS = ("fused", "torch")


BUCKETS = ("layer", "library")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """tp x pp x dp GPUs; microbatches of `mbs` sequences, `gbs` sequences an iteration.

    `zero` is the ZeRO stage (1 in the `megatron` engine: its distributed optimizer). `interleaving` is the number of
    model chunks per pipeline stage. `partition` "type:transformer|embedding" counts embedding and head as layers.
    `first_stage_layers` and `last_stage_layers` give those pipeline stages a number of their own (0: as the others).
    `overlap_grad_reduce` sums gradients over replicas while the backward pass still runs, `overlap_param_gather`
    gathers the distributed optimizer's weights while the forward pass runs: Megatron's names; DeepSpeed decides itself.
    `attention` "scores" writes the s x s scores to memory, as Megatron did until 2022; "fused" is a flash kernel.
    `adam` "torch" is torch.optim.Adam, which needs a temporary as large as its states' share; "fused" is apex's kernel.
    `fp32_gradients` keeps fp32 sums beside 16-bit gradients, as DeepSpeed's BF16_Optimizer; the `megatron` engine sums
    in fp32 anyway, within its 18 bytes a parameter, and wants it off: on, the planner counts 4.9 bytes too many.
    `buckets` of ZeRO: "layer" fits them to the hidden size, "library" leaves them at DeepSpeed's 5e8 values.
    Raises ValueError for what no model could make right; what depends on the shape is in refusal().
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    mbs: int = 1
    gbs: int = 1
    zero: int = 0
    recompute: str = "none"
    interleaving: int = 1
    partition: str = "uniform"
    sequence_parallel: bool = False
    offload: str = "none"
    precision: str = "fp32"
    fp32_gradients: bool = False
    attention: str = "fused"
    adam: str = "fused"
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    buckets: str = "layer"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "mbs", "gbs", "interleaving"):
            require_integer(name, getattr(self, name), 1)
        require_integer("zero", self.zero, 0)
        require(self.zero <= 3, "zero", self.zero, "ZeRO stages are 0, 1, 2 and 3")
        require_known("recompute", self.recompute, RECOMPUTE)
        require_known("partition", self.partition, PARTITIONS)
        require_known("offload", self.offload, OFFLOADS)
        require_known("precision", self.precision, PRECISIONS)
        require_known("attention", self.attention, ATTENTIONS)
        require_known("adam", self.adam, ADAMS)
        require_known("buckets", self.buckets, BUCKETS)
        rule = f"must be a multiple of mbs x dp = {self.mbs} x {self.dp}"
        require(self.gbs % (self.mbs * self.dp) == 0, "gbs", self.gbs, rule)
        require(self.tp > 1 or not self.sequence_parallel, "sequence_parallel", True, "needs tp > 1")
        require(
            self.pp == 1 or self.zero < 2, "zero", self.zero, f"ZeRO 2 and 3 cannot run with a pipeline (pp={self.pp})"
        )
        require(self.zero > 0 or self.offload == "none", "offload", self.offload, "needs ZeRO stage 1 or more")
        require(
            self.zero == 3 or self.offload != "full", "offload", "full", "parameters can be offloaded by ZeRO-3 only"
        )
        require(self.pp > 1 or self.interleaving == 1, "interleaving", self.interleaving, "needs pp > 1")
        for name in ("first_stage_layers", "last_stage_layers"):
            layers = getattr(self, name)
            require_integer(name, layers, 0)
            require(layers == 0 or self.pp > 1, name, layers, "needs pp > 1")
            require(layers == 0 or self.partition == "uniform", name, layers, f"contradicts partition={self.partition}")
        gathers = self.zero == 1 and self.overlap_grad_reduce
        rule = "needs ZeRO stage 1 and overlap_grad_reduce"
        require(gathers or not self.overlap_param_gather, "overlap_param_gather", True, rule)

    @property
    def gpus(self) -> int:
        """GPUs (processes) of the run: tp x pp x dp."""
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration and replica: gbs / (mbs x dp), DeepSpeed's gradient accumulation steps."""
        return self.gbs // (self.mbs * self.dp)

    @property
    def label(self) -> str:
        """A short name for eyes, such as `tp2-pp2-dp1-mbs4`; nothing parses it back."""
        extras = [f"zero{self.zero}"] * (self.zero > 0) + [self.recompute] * (self.recompute != "none")
        extras += [f"vp{self.interleaving}"] * (self.interleaving > 1) + ["sp"] * self.sequence_parallel
        return "-".join([f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"mbs{self.mbs}", *extras])


def invalid_reason(shape: ModelShape, topology: Topology) -> str | None:
    """Why `shape` cannot run on `topology` at all, as `field=value: the rule`; None where it can."""
    t, heads, microbatches = topology, shape.num_attention_heads, topology.microbatches
    rules = [
        (heads % t.tp == 0, "tp", t.tp, f"must divide num_attention_heads={heads}"),
        (shape.vocab_size % t.tp == 0, "tp", t.tp, f"must divide vocab_size={shape.vocab_size} (pad the vocabulary)"),
        (shape.hidden_size % t.tp == 0, "tp", t.tp, f"must divide hidden_size={shape.hidden_size}"),
        *_stage_rules(shape, t),
        (
            not t.sequence_parallel or shape.seq_length % t.tp == 0,
            "tp",
            t.tp,
            f"must divide seq_length={shape.seq_length}",
        ),
        (
            t.interleaving == 1 or microbatches % t.pp == 0,
            "gbs",
            t.gbs,
            f"interleaving needs microbatches % pp={t.pp} == 0",
        ),
    ]
    return next((f"{field}={value}: {rule}" for ok, field, value, rule in rules if not ok), None)


def _stage_rules(shape: ModelShape, t: Topology) -> list[tuple[bool, str, object, str]]:
    """What the layers ask of the stages, with or without a number of their own for the first and the last."""
    L, v = shape.num_layers, t.interleaving
    named = {n: getattr(t, n) for n in ("first_stage_layers", "last_stage_layers") if getattr(t, n)}
    if not named:
        units, chunks = L + (0 if t.partition == "uniform" else 2), t.pp * v
        return [(units % chunks == 0, "pp", t.pp, f"pp x interleaving = {chunks} must divide the {units} layers")]
    others, left = t.pp - len(named), L - sum(named.values())
    even = left > 0 and left % others == 0 if others else left == 0
    field, value = next(iter(named.items()))
    rule = f"leaves {left} of {L} layers to {others} other stages, which must share them evenly"
    own = [(n % v == 0, name, n, f"must be a multiple of interleaving={v}") for name, n in named.items()]
    shared = left // others if others else 0
    return [
        (even, field, value, rule),
        *own,
        (shared % v == 0, field, value, f"leaves {shared} layers to a stage: no multiple of interleaving={v}"),
    ]


def usual_precision(cluster: hardware.Cluster) -> str:
    """bf16 where the card has it, else fp16, and fp32 on a CPU."""
    if cluster.gpu.kind == "cpu":
        return "fp32"
    return "bf16" if cluster.gpu.bf16_flops_per_s else "fp16"
