"""Topology: how one training run is spread over GPUs, and which combinations exist at all."""

from dataclasses import dataclass

from trilane.checks import require, require_integer, require_known
from trilane.hardware import PRECISIONS
from trilane.shape import ModelShape

RECOMPUTE = ("none", "selective", "full")
PARTITIONS = ("uniform", "type:transformer|embedding")
OFFLOADS = ("none", "optimizer", "full")
ATTENTIONS = ("fused", "scores")
ADAMS = ("fused", "torch")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """tp x pp x dp GPUs; microbatches of `mbs` sequences, `gbs` sequences an iteration.

    `zero` is the ZeRO stage (1 in the `megatron` engine: its distributed optimizer). `interleaving` is the number of
    model chunks per pipeline stage. `partition` "type:transformer|embedding" counts embedding and head as layers.
    `attention` "scores" writes the s x s scores to memory, as Megatron did until 2022; "fused" is a flash kernel.
    `adam` "torch" is torch.optim.Adam, which needs a temporary as large as its states' share; "fused" is apex's kernel.
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


def refusal(shape: ModelShape, topology: Topology) -> str | None:
    """Why `shape` cannot run on `topology` at all, as `field=value: the rule`; None where it can."""
    t = topology
    pipeline_layers = shape.num_layers + (0 if t.partition == "uniform" else 2)
    chunks = t.pp * t.interleaving
    rules = [
        (
            shape.num_attention_heads % t.tp == 0,
            "tp",
            t.tp,
            f"must divide num_attention_heads={shape.num_attention_heads}",
        ),
        (shape.vocab_size % t.tp == 0, "tp", t.tp, f"must divide vocab_size={shape.vocab_size} (pad the vocabulary)"),
        (shape.hidden_size % t.tp == 0, "tp", t.tp, f"must divide hidden_size={shape.hidden_size}"),
        (
            pipeline_layers % chunks == 0,
            "pp",
            t.pp,
            f"pp x interleaving = {chunks} must divide the {pipeline_layers} layers",
        ),
        (
            not t.sequence_parallel or shape.seq_length % t.tp == 0,
            "tp",
            t.tp,
            f"must divide seq_length={shape.seq_length}",
        ),
        (
            t.interleaving == 1 or t.microbatches % t.pp == 0,
            "gbs",
            t.gbs,
            f"interleaving needs microbatches % pp={t.pp} == 0",
        ),
    ]
    return next((f"{field}={value}: {rule}" for ok, field, value, rule in rules if not ok), None)
