"""Topology: how a training run is spread over GPUs, and the rules of its own, of the model and of
the cluster.
"""

from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from trilane.config.cluster import PRECISIONS, Cluster
from trilane.config.model import ModelShape
from trilane.config.options import Rules, changed, check, first_broken, option
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import require

# GPUs along an axis, sequences of a batch; with the largest shape, products stay below 2^63
LARGEST = 1 << 20


def _size(help: str, minimum: int = 1, **facts: Any) -> Any:
    return option(minimum, help, minimum=minimum, maximum=LARGEST, **facts)


def _words(help: str, choices: tuple[str, ...], **facts: Any) -> Any:
    return option(choices[0], help, choices=choices, **facts)


RECOMPUTE = ("none", "selective", "full", "operators", "block")
PARTITION = ("uniform", "type:transformer|embedding")
OFFLOAD = ("none", "optimizer", "full")
SINGLE = ("deepep", "hybridep")  # dispatchers that send a token once to each node
DISPATCHERS = ("alltoall", "allgather", *SINGLE)


@frozen
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
        maximum=3,
        label="zero{}",
    )
    recompute: str = _words(
        "activations computed again: attention's core, whole layers, all but every second matmul"
        " and attention (operators: torchtitan's), or the first layers of each stage (block)",
        RECOMPUTE,
        label="{}",
    )
    recompute_layers: int = _size("layers of each stage that `block` recomputes", 0, label="{}")
    interleaving: int = _size(
        "model chunks of a pipeline stage",
        label="vp{}",
        megatron="num-virtual-stages-per-pipeline-rank",
    )
    sequence_parallel: bool = option(
        False,
        "cut norms and dropouts over tp, too",
        label="sp",
        megatron="sequence-parallel",
    )
    partition: str = _words(
        "type: embedding and head count as layers of a stage",
        PARTITION,
        label="embed",
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
    )
    # DeepSpeed's cpu_checkpointing with partition_activations
    offload_checkpoints: bool = option(
        False,
        "keep the inputs of recomputed layers in host memory",
        label="hostinputs",
    )
    precision: str = _words(
        "of weights and matrix products; in fp8 and fp4 products alone, else as in bf16",
        PRECISIONS,
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
        megatron="overlap-grad-reduce",
    )
    overlap_param_gather: bool = option(
        False,
        "gather weights during the forward pass",
        label="overlapparams",
        megatron="overlap-param-gather",
    )
    # Megatron-LM's --tp-comm-overlap, which needs Transformer Engine
    overlap_tp: bool = option(
        False, "hide tensor-parallel messages under matmuls", label="overlaptp"
    )
    # HSDP, MiCS; Megatron-LM has their number, --num-distributed-optimizer-instances
    shards: int = _size(
        "ranks that share states out, replicas between them; 0: all",
        0,
        label="shards{}",
    )
    ep: int = _size(
        "expert-parallel size: GPUs that share the experts of a layer",
        label="ep{}",
        megatron="expert-model-parallel-size",
    )
    etp: int = _size(
        "GPUs that share each expert, as tp those that share a layer",
        label="etp{}",
        megatron="expert-tensor-parallel-size",
    )
    dispatcher: str = _words(
        "how tokens reach their experts: a copy for each of them, or (deepep, hybridep) one for "
        "each node",
        DISPATCHERS,
        label="{}",
    )

    def __post_init__(self) -> None:
        check(self)
        is_whole = self.gbs % (self.mbs * self.dp) == 0
        require(is_whole, "gbs", self.gbs, "must be a multiple of mbs x dp")

    def rules(self) -> Rules:
        """What no topology can be, whatever the model and the machine."""
        t = self
        yield (t.tp > 1) | (t.sequence_parallel == 0), "sequence_parallel", "needs tp > 1"
        yield (t.zero > 0) | (t.offload == "none"), "offload", "needs ZeRO stage 1 or more"
        rule = "parameters can be offloaded by ZeRO-3 only"
        yield (t.zero == 3) | (t.offload != "full"), "offload", rule
        is_full = t.recompute == "full"
        rule = "needs recompute full"
        yield is_full | (t.offload_checkpoints == 0), "offload_checkpoints", rule
        yield (t.pp > 1) | (t.interleaving == 1), "interleaving", "needs pp > 1"
        is_even = (t.first_stage_layers == 0) & (t.last_stage_layers == 0)
        rule = "must be above 1 with a number of layers for the first or the last stage"
        yield (t.pp > 1) | is_even, "pp", rule
        rule = "contradicts a number of layers for the first or the last stage"
        yield (t.partition == "uniform") | is_even, "partition", rule
        gathers = (t.zero == 1) & t.overlap_grad_reduce
        rule = "needs ZeRO stage 1 and overlap_grad_reduce"
        yield gathers | (t.overlap_param_gather == 0), "overlap_param_gather", rule
        rule = "needs sequence_parallel"
        yield t.sequence_parallel | (t.overlap_tp == 0), "overlap_tp", rule
        rule = "needs recompute block, and block at least 1"
        yield (t.recompute == "block") == (t.recompute_layers > 0), "recompute_layers", rule
        yield (t.zero > 0) | (t.shards == 0), "shards", "needs ZeRO stage 1 or more"
        divides = t.dp * t.cp % np.where(t.shards, t.shards, 1) == 0
        yield divides, "shards", "must divide dp x cp"
        is_whole = t.tp * t.cp * t.dp % (t.ep * t.etp) == 0
        yield is_whole, "ep", "ep x etp must divide tp x cp x dp"

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
    def instances(self) -> int:
        """Groups of ranks, each of which shares states out: dp x cp / shards, 1 without."""
        return self.dp * self.cp // self.shards if self.shards else 1

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
    of_cluster = cluster_rules(topology, cluster) if cluster else ()
    rules = chain(size_rules(topology, shape), shape_rules(topology, shape), of_cluster)
    return first_broken(rules, topology)


class HasTopology:
    """What has a topology has its sizes."""

    tp = property(attrgetter("topology.tp"))
    pp = property(attrgetter("topology.pp"))
    dp = property(attrgetter("topology.dp"))
    mbs = property(attrgetter("topology.mbs"))
    gbs = property(attrgetter("topology.gbs"))
    zero = property(attrgetter("topology.zero"))
    gpus = property(attrgetter("topology.gpus"))


def size_rules(t: Any, shape: ModelShape) -> Rules:
    """What a model asks of tp alone. Here and below `t` is anything with a Topology's fields; those
    that a search varies may be arrays, which is why rules combine them by & and |.
    """
    for size in ("num_attention_heads", "vocab_size", "hidden_size", "ffn"):
        yield getattr(shape, size) % t.tp == 0, "tp", f"must divide {size}"
    heads = shape.kv_heads
    rule = "must divide the heads of keys and values, or be a multiple of them"
    yield heads % t.tp == 0 or t.tp % heads == 0, "tp", rule
    yield (
        shape.qkv_channels % t.tp == 0,
        "tp",
        "must divide the channels of queries, keys and values",
    )


def shape_rules(t: Any, shape: ModelShape) -> Rules:
    """What else a model asks of a topology."""
    rule = "must divide seq_length into two halves a rank"
    yield t.cp == 1 or shape.seq_length % (2 * t.cp) == 0, "cp", rule
    rule = "must divide seq_length where sequences are parallel"
    yield (t.sequence_parallel == 0) | (shape.seq_length % t.tp == 0), "tp", rule
    first = t.first_stage_layers
    last = t.last_stage_layers
    # the model chunks of the stages without a number of layers by name share the others
    chunks = (t.pp - (first > 0) - (last > 0)) * t.interleaving
    layers = shape.num_layers + 2 * (t.partition != "uniform") - first - last
    shares = (layers >= 0) & (layers % np.maximum(chunks, 1) == 0)
    shares = shares & ((layers > 0) == (chunks > 0))
    yield shares, "pp", "stages (times interleaving) must share the layers evenly"
    rule = "must divide a number of layers for the first or the last stage"
    divides = (first % t.interleaving == 0) & (last % t.interleaving == 0)
    yield divides, "interleaving", rule
    rule = "must not exceed num_layers"
    yield t.recompute_layers <= shape.num_layers, "recompute_layers", rule
    experts = shape.experts
    yield experts or t.ep * t.etp == 1, "ep", "needs a model with experts"
    yield not experts or experts % t.ep == 0, "ep", f"must divide experts={experts}"
    rule = f"must divide expert_ffn={shape.expert_ffn}"
    yield not experts or shape.expert_ffn % t.etp == 0, "etp", rule
    rule = "needs a model with experts"
    yield experts or t.dispatcher == DISPATCHERS[0], "dispatcher", rule
    rule = "needs sequence_parallel where a model has experts"
    yield not experts or t.tp == 1 or t.sequence_parallel, "tp", rule
    rule = "interleaving needs microbatches % pp == 0"
    yield (t.interleaving == 1) | (t.microbatches % t.pp == 0), "gbs", rule


def cluster_rules(t: Any, cluster: Cluster) -> Rules:
    """What a cluster asks of a topology.

    A tensor-parallel group may fill whole nodes whose network is at least half as fast as their
    bus: it has the network to itself. On a slower one it waits for it most of the time: nine tenths
    of it with TP 16 on V100 nodes with one 100 Gb/s card (Oneflow-Inc/DLPerf,
    Megatron-LM/README.md). A plan may break this rule, where somebody measures what that costs.
    """
    yield t.gpus <= cluster.max_gpus, "gpus", "must not exceed the cluster"
    node = cluster.domain
    is_fast = 2 * cluster.domain_bytes_per_s >= cluster.node_bytes_per_s
    fits = node % t.tp == 0 or t.gpus <= node or (is_fast and t.tp % node == 0)
    yield fits, "tp", "a tensor-parallel group must stay inside a node"
    yield from dispatcher_rules(t, cluster)


def dispatcher_rules(t: Any, cluster: Cluster) -> Rules:
    """Which cards DeepEP has kernels for: deepseek-ai/DeepEP@0297fc80, README.md, and for Ampere
    its docs/legacy.md, inside a node alone by its maintainer (issues 149 and 234).
    """
    capability = cluster.gpu.compute_capability
    is_new = capability >= (9, 0) or (capability >= (8, 0) and t.ep * t.etp <= cluster.domain)
    rule = "needs compute capability 9.0, or 8.0 where ep x etp stay inside a node"
    yield t.dispatcher not in SINGLE or is_new, "dispatcher", rule
