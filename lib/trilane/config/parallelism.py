"""Topology: how one training run is spread over GPUs, and which combinations exist at all."""

from dataclasses import dataclass

from trilane.config.cluster import PRECISIONS, Cluster
from trilane.config.model import ModelShape
from trilane.config.topology_rules import CLUSTER_RULES, SHAPE_RULES, TOPOLOGY_RULES, first_broken
from trilane.utils.validation import require_integer, require_known

RECOMPUTE = ("none", "selective", "full")
PARTITIONS = ("uniform", "type:transformer|embedding")
OFFLOADS = ("none", "optimizer", "full")
ATTENTIONS = ("fused", "scores")
LARGEST = 1 << 20  # GPUs along an axis, sequences of a batch; with model.LARGEST, products stay below 2^63
CHOICES = {"recompute": RECOMPUTE, "partition": PARTITIONS, "offload": OFFLOADS, "precision": PRECISIONS}
CHOICES |= {"attention": ATTENTIONS, "adam": ("fused", "torch"), "buckets": ("layer", "library")}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """tp x cp x pp x dp GPUs; microbatches of `mbs` sequences, `gbs` sequences an iteration.

    `cp` ranks share each sequence and hand keys and values on in a ring (context parallelism; ranks run tp fastest,
    then cp, dp, pp); their gradients are summed with those of the replicas.
    `zero` is the ZeRO stage (1 in the `megatron` engine: its distributed optimizer). `interleaving` is the number of
    model chunks per pipeline stage. `partition` "type:transformer|embedding" counts embedding and head as layers.
    `first_stage_layers` and `last_stage_layers` give those pipeline stages a number of their own (0: as the others).
    `overlap_grad_reduce` sums gradients over replicas while the backward pass still runs, `overlap_param_gather`
    gathers the distributed optimizer's weights while the forward pass runs: Megatron's names; DeepSpeed decides itself.
    `attention` "scores" writes the s x s scores to memory, as Megatron did until 2022; "fused" is a flash kernel.
    `adam` "torch" is torch.optim.Adam, which needs a temporary as large as its states' share; "fused" is apex's kernel.
    `fp32_gradients` sums 16-bit gradients in fp32, as DeepSpeed's BF16_Optimizer does; engine `megatron` always does.
    `buckets` of ZeRO: "layer" fits them to the hidden size, "library" leaves them at DeepSpeed's 5e8 values.
    Raises ValueError for what no model could make right; what depends on the shape is in invalid_reason().
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
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "mbs", "gbs", "interleaving", "cp"):
            require_integer(name, getattr(self, name), 1, LARGEST)
        for name in ("zero", "first_stage_layers", "last_stage_layers"):
            require_integer(name, getattr(self, name), 0, LARGEST)
        for name, known in CHOICES.items():
            require_known(name, getattr(self, name), known)
        if reason := first_broken(TOPOLOGY_RULES, self):
            raise ValueError(reason)

    @property
    def gpus(self) -> int:
        """GPUs (processes) of the run: tp x cp x pp x dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration and replica: gbs / (mbs x dp), DeepSpeed's gradient accumulation steps."""
        return self.gbs // (self.mbs * self.dp)

    @property
    def label(self) -> str:
        """A short name such as `tp2-pp2-dp1-mbs4`, which names every choice but those with a default of the cluster.

        Precision, attention and fp32 gradients are named by engines.label_of(), which knows the cluster. Labels are for
        people: nothing parses them.
        """
        words = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"mbs{self.mbs}"]
        named = {
            f"cp{self.cp}": self.cp > 1,
            f"zero{self.zero}": self.zero > 0,
            self.recompute: self.recompute != "none",
            f"vp{self.interleaving}": self.interleaving > 1,
            "sp": self.sequence_parallel,
            "embed": self.partition != "uniform",
            f"first{self.first_stage_layers}": self.first_stage_layers > 0,
            f"last{self.last_stage_layers}": self.last_stage_layers > 0,
            f"offload{self.offload}": self.offload != "none",
            "torchadam": self.adam == "torch",
            "librarybuckets": self.buckets == "library",
            "overlapgrads": self.overlap_grad_reduce,
            "overlapparams": self.overlap_param_gather,
        }
        return "-".join([*words, *(word for word, chosen in named.items() if chosen)])


def invalid_reason(shape: ModelShape, topology: Topology, cluster: Cluster | None = None) -> str | None:
    """Why `shape` cannot run on `topology` (on `cluster`, where given), as `field=value: the rule`; or None."""
    reason = first_broken(SHAPE_RULES, topology, shape)
    return reason or (first_broken(CLUSTER_RULES, topology, cluster) if cluster else None)
