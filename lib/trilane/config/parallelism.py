"""Topology: how a training run is spread over GPUs, and the rules of its own, of the model and of
the cluster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trilane.config.cluster import PRECISIONS, Cluster
from trilane.config.model import ModelShape
from trilane.config.options import changed, check, option
from trilane.utils.tables import Record

# GPUs along an axis, sequences of a batch; with the largest shape, products stay below 2^63
LARGEST = 1 << 20


@dataclass(frozen=True)
class Rule:
    """What a topology must obey. `holds` takes anything with a Topology's fields, also with arrays
    as mbs and gbs.

    field   the field to blame
    text    the rule, the same for every topology: searches count what they refuse by it
    holds   true (or an array) where the rule holds; it gets the topology, and the shape or cluster
    of_sizes  true where tp, pp and dp alone decide: one look refuses everything else
    """

    field: str
    text: str
    holds: Callable[..., Any]
    of_sizes: bool = False

    @property
    def name(self) -> str:
        """The rule with the field that it is about."""
        return f"{self.field}: {self.text}"

    def message(self, topology: Any) -> str:
        """`field=value: the rule` of one topology that breaks it."""
        return f"{self.field}={getattr(topology, self.field)}: {self.text}"


def first_broken(rules: Sequence[Rule], *subjects: Any) -> str | None:
    """The message of the first rule that one topology breaks, or None."""
    for rule in rules:
        if not rule.holds(*subjects):
            return rule.message(subjects[0])
    return None


def _size(help: str, minimum: int = 1, **facts: Any) -> Any:
    return option(minimum, help, minimum=minimum, maximum=LARGEST, **facts)


def _words(help: str, choices: tuple[str, ...], **facts: Any) -> Any:
    return option(choices[0], help, choices=choices, **facts)


RECOMPUTE = ("none", "selective", "full", "operators", "block")
PARTITION = ("uniform", "type:transformer|embedding")
OFFLOAD = ("none", "optimizer", "full")


@dataclass(frozen=True, kw_only=True)
class Topology(Record):
    """The run uses tp x cp x pp x dp GPUs; microbatches of `mbs` sequences, `gbs` sequences an
    iteration.

    Ranks run tp fastest, then cp, dp, pp. The ranks of a cp group hand keys and values on in a
    ring, and their gradients are summed with those of the replicas. Raises ValueError for what no
    model could make right; what depends on the shape is in invalid_reason().
    """

    tp: int = _size(
        "tensor-parallel size: GPUs that share each layer", megatron="tensor-model-parallel-size"
    )
    pp: int = _size("pipeline stages", megatron="pipeline-model-parallel-size")
    dp: int = _size("data-parallel size: replicas of the model")
    mbs: int = _size("sequences of a microbatch, per replica", megatron="micro-batch-size")
    gbs: int = _size("sequences of an iteration, over all replicas", megatron="global-batch-size")
    cp: int = _size(
        "context-parallel size: GPUs that share each sequence",
        label="cp{}",
        megatron="context-parallel-size",
    )
    zero: int = option(
        0,
        "ZeRO stage; 1: distributed optimizer",
        minimum=0,
        maximum=3,
        label="zero{}",
        search=range(4),
    )
    recompute: str = _words(
        "activations computed again: attention's core, whole layers, all but every second matmul"
        " and attention (operators: torchtitan's), or the first layers of each stage (block)",
        RECOMPUTE,
        label="{}",
        search=("none", "selective", "full", "block"),
    )
    recompute_layers: int = _size(
        "layers of each stage that `block` recomputes", 0, label="{}", search=()
    )
    interleaving: int = _size(
        "model chunks of a pipeline stage",
        label="vp{}",
        megatron="num-virtual-stages-per-pipeline-rank",
        search=(),
    )
    sequence_parallel: bool = option(
        False,
        "cut norms and dropouts over tp, too",
        label="sp",
        megatron="sequence-parallel",
        search=(False, True),
    )
    partition: str = _words(
        "type: embedding and head count as layers of a stage",
        PARTITION,
        label="embed",
        search=PARTITION,
    )
    first_stage_layers: int = _size(
        "layers of the first stage; 0: as the others",
        0,
        label="first{}",
        megatron="decoder-first-pipeline-num-layers",
    )
    last_stage_layers: int = _size(
        "layers of the last stage; 0: as the others",
        0,
        label="last{}",
        megatron="decoder-last-pipeline-num-layers",
    )
    offload: str = _words(
        "what stays in host memory; full: all, with ZeRO-3",
        OFFLOAD,
        label="offload{}",
        search=("none",),
    )
    # DeepSpeed's cpu_checkpointing with partition_activations
    offload_checkpoints: bool = option(
        False,
        "keep the inputs of recomputed layers in host memory",
        label="hostinputs",
        search=(False,),
    )
    precision: str = _words(
        "of weights and matrix products; in fp8 products alone, all else as in bf16", PRECISIONS
    )
    fp32_gradients: bool = option(
        False, "sum 16-bit gradients in fp32; engine megatron always does"
    )
    attention: str = _words(
        "fused: a flash kernel; scores: s x s scores are written to memory", ("fused", "scores")
    )
    adam: str = _words(
        "fused (apex), or torch, whose temporary is as large as its states",
        ("fused", "torch"),
        label="torchadam",
    )
    # library: DeepSpeed's 5e8 values
    buckets: str = _words(
        "ZeRO's buckets, fitted to a layer or not", ("layer", "library"), label="librarybuckets"
    )
    overlap_grad_reduce: bool = option(
        False,
        "sum gradients during the backward pass",
        label="overlapgrads",
        search=(False, True),
        megatron="overlap-grad-reduce",
    )
    overlap_param_gather: bool = option(
        False,
        "gather weights during the forward pass",
        label="overlapparams",
        search=(False, True),
        megatron="overlap-param-gather",
    )
    # Megatron-LM's --tp-comm-overlap, which needs Transformer Engine
    overlap_tp: bool = option(
        False, "hide tensor-parallel messages under matmuls", label="overlaptp", search=(False,)
    )
    # HSDP, MiCS; Megatron-LM has their number, --num-distributed-optimizer-instances
    shards: int = _size(
        "ranks that share states out, replicas between them; 0: all",
        0,
        label="shards{}",
        search=(0,),
    )

    def __post_init__(self) -> None:
        check(self)
        if reason := first_broken(TOPOLOGY_RULES, self):
            raise ValueError(reason)

    @property
    def gpus(self) -> int:
        """GPUs (processes) of the run: tp x cp x pp x dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration and replica: gbs / (mbs x dp), DeepSpeed's gradient
        accumulation steps.
        """
        return self.gbs // (self.mbs * self.dp)

    @property
    def label(self) -> str:
        """A short name such as `tp2-pp2-dp1-mbs4`, which names every choice but those with a
        default of the cluster.

        Precision, attention and fp32 gradients are named by engines.label_of(), which knows the
        cluster. Labels are for people: nothing parses them.
        """
        words = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"mbs{self.mbs}"]
        words += [
            LABELS[name].format(value) for name, value in changed(self).items() if name in LABELS
        ]
        return "-".join(words)


# How a label names a value that is not the default.
LABELS = {f.name: f.metadata["label"] for f in fields(Topology) if "label" in f.metadata}
# The words of each field that has a choice of some.
CHOICES = {f.name: f.metadata["choices"] for f in fields(Topology) if "choices" in f.metadata}


def invalid_reason(
    shape: ModelShape, topology: Topology, cluster: Cluster | None = None
) -> str | None:
    """Why `shape` cannot run on `topology` (on `cluster`, where given), as `field=value: the rule`;
    or None.
    """
    reason = first_broken(SHAPE_RULES, topology, shape)
    if not reason and cluster:
        reason = first_broken(CLUSTER_RULES, topology, cluster)
    return reason


def _shares_layers(t: Any, shape: ModelShape) -> bool:
    """Whether the model chunks of the stages without a number of layers by name share the others
    evenly.
    """
    named = [n for n in (t.first_stage_layers, t.last_stage_layers) if n]
    units = shape.num_layers + (0 if t.partition == "uniform" else 2)
    chunks = (t.pp - len(named)) * t.interleaving
    layers = units - sum(named)
    if chunks:
        return layers % chunks == 0 < layers
    return layers == 0


def _tp_divides(size: str) -> Rule:
    """The rule that tp must divide that size of the shape."""
    return Rule(
        "tp",
        f"must divide {size}",
        lambda t, s: getattr(s, size) % t.tp == 0,
        of_sizes=True,
    )


def _spans_nodes(tp: int, cluster: Cluster) -> bool:
    """Whether a tensor-parallel group fills whole nodes whose network is at least half as fast as
    their bus.

    Such a group has the network to itself. On a slower one it waits for it most of the time: nine
    tenths of it with TP 16 on V100 nodes with one 100 Gb/s card (Oneflow-Inc/DLPerf,
    Megatron-LM/README.md).
    """
    is_fast = 2 * cluster.network_bytes_per_s >= cluster.node_bytes_per_s
    return is_fast and tp % cluster.gpus_per_node == 0


# What no topology can be, whatever the model and the machine.
TOPOLOGY_RULES = (
    Rule(
        "gbs",
        "must be a multiple of mbs x dp",
        lambda t: t.gbs % (t.mbs * t.dp) == 0,
    ),
    Rule("sequence_parallel", "needs tp > 1", lambda t: t.tp > 1 or not t.sequence_parallel),
    Rule("offload", "needs ZeRO stage 1 or more", lambda t: t.zero > 0 or t.offload == "none"),
    Rule(
        "offload",
        "parameters can be offloaded by ZeRO-3 only",
        lambda t: t.zero == 3 or t.offload != "full",
    ),
    Rule(
        "offload_checkpoints",
        "needs recompute full",
        lambda t: t.recompute == "full" or not t.offload_checkpoints,
    ),
    Rule("interleaving", "needs pp > 1", lambda t: t.pp > 1 or t.interleaving == 1),
    Rule("first_stage_layers", "needs pp > 1", lambda t: t.pp > 1 or not t.first_stage_layers),
    Rule("last_stage_layers", "needs pp > 1", lambda t: t.pp > 1 or not t.last_stage_layers),
    Rule(
        "partition",
        "contradicts a number of layers for the first or the last stage",
        lambda t: t.partition == "uniform" or not (t.first_stage_layers or t.last_stage_layers),
    ),
    Rule(
        "overlap_param_gather",
        "needs ZeRO stage 1 and overlap_grad_reduce",
        lambda t: (t.zero == 1 and t.overlap_grad_reduce) or not t.overlap_param_gather,
    ),
    Rule(
        "overlap_tp", "needs sequence_parallel", lambda t: t.sequence_parallel or not t.overlap_tp
    ),
    Rule(
        "recompute_layers",
        "needs recompute block, and block at least 1",
        lambda t: (t.recompute == "block") == (t.recompute_layers > 0),
    ),
    Rule("shards", "needs ZeRO stage 1 or more", lambda t: t.zero > 0 or not t.shards),
    Rule(
        "shards",
        "must divide dp x cp",
        lambda t: not t.shards or t.dp * t.cp % t.shards == 0,
    ),
)

# What a model asks of a topology.
SHAPE_RULES = (
    _tp_divides("num_attention_heads"),
    _tp_divides("vocab_size"),
    _tp_divides("hidden_size"),
    _tp_divides("ffn"),
    Rule(
        "tp",
        "must divide the heads of keys and values, or be a multiple of them",
        lambda t, s: s.kv_heads % t.tp == 0 or t.tp % s.kv_heads == 0,
        of_sizes=True,
    ),
    Rule(
        "tp",
        "must divide the channels of queries, keys and values",
        lambda t, s: (s.hidden_size + 2 * s.kv_heads * s.head_dim) % t.tp == 0,
        of_sizes=True,
    ),
    Rule(
        "cp",
        "must divide seq_length into two halves a rank",
        lambda t, s: t.cp == 1 or s.seq_length % (2 * t.cp) == 0,
    ),
    Rule(
        "tp",
        "must divide seq_length where sequences are parallel",
        lambda t, s: not t.sequence_parallel or s.seq_length % t.tp == 0,
    ),
    Rule(
        "pp",
        "stages (times interleaving) must share the layers evenly",
        _shares_layers,
    ),
    Rule(
        "interleaving",
        "must divide a number of layers for the first or the last stage",
        lambda t, s: (
            not (t.first_stage_layers % t.interleaving or t.last_stage_layers % t.interleaving)
        ),
    ),
    Rule(
        "recompute_layers",
        "must not exceed num_layers",
        lambda t, s: t.recompute_layers <= s.num_layers,
    ),
    Rule(
        "gbs",
        "interleaving needs microbatches % pp == 0",
        lambda t, s: t.interleaving == 1 or t.microbatches % t.pp == 0,
    ),
)

# What a cluster asks of a topology; a plan may break them, where somebody measures what that costs.
CLUSTER_RULES = (
    Rule(
        "gpus",
        "must not exceed the cluster",
        lambda t, c: t.gpus <= c.max_gpus,
        of_sizes=True,
    ),
    Rule(
        "tp",
        "a tensor-parallel group must stay inside a node",
        lambda t, c: (
            c.gpus_per_node % t.tp == 0 or t.gpus <= c.gpus_per_node or _spans_nodes(t.tp, c)
        ),
        of_sizes=True,
    ),
)
