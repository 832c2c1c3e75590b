"""Seconds per iteration and its parts, for one plan or for arrays of them."""

import functools
from typing import NamedTuple

import numpy as np

from trilane.config.cluster import Cluster
from trilane.costmodel.columns import (
    Columns,
    Number,
    Parts,
    Setting,
    memory_seconds,
    slowdown,
)
from trilane.costmodel.constants import Constants
from trilane.costmodel.layers import LayerTime, embedding_seconds, head_seconds, layer_time
from trilane.costmodel.memory import extreme_stages, layer_kinds, memory_bytes, over_layers
from trilane.utils.frozen import frozen


@frozen
class IterationTime(Parts):
    """Where the seconds of one iteration go.

    `expert_parallel` is the exchange of tokens between experts. `elementwise` includes kernels'
    waits for their launch, and what layers copy to the host and back; `optimizer` what an offloaded
    one moves over PCIe.
    """

    matmul: float
    attention: float
    elementwise: float
    tensor_parallel: float
    expert_parallel: float
    pipeline_p2p: float
    bubble: float
    data_parallel: float
    optimizer: float


class Ring(NamedTuple):
    """A group of ranks that reduce or gather together: seconds per byte of every rank, and seconds
    of each call.

    NCCL reduces along trees, where n nodes send 2 (n-1)/n of the bytes, and gathers along rings,
    whose d ranks hand (d-1)/d on over every link. A ring's latency grows by each of its hops, a
    tree's by its depth: NCCL's tuning model (src/graph/tuning.cc, where a hop over NVLink takes
    about 0.7 of one between nodes).
    """

    reduce: Number
    gather: Number
    reduce_s: Number
    gather_s: Number


def ring(ranks: Number, stride: Number, setting: Setting) -> Ring:
    """The group of `ranks` ranks that stand `stride` apart (ranks run tp fastest, then cp, dp, pp).

    It leaves the node when stride x ranks passes the node's GPUs; min(stride, GPUs of a node) such
    groups share its network, and none draws more than a link of its own where the cluster has a
    rate for one (`ring_bytes_per_s`). With every doubling of nodes paths meet more often:
    `distance` is lost.
    """
    _, cluster, c = setting
    node = cluster.domain
    near = np.minimum(stride, node)
    nodes = np.ceil(ranks * near / node)
    bus = np.minimum(ranks, np.maximum(node // near, 1))  # ranks of the group in one node
    share = cluster.domain_bytes_per_s / near
    inside = cluster.node_bytes_per_s * c.node
    link = np.minimum(share, cluster.ring_bytes_per_s or share)
    outside = np.minimum(link * c.network, inside) / (1 + c.distance * np.log2(nodes))
    hop = cluster.latency_s
    slow = slowdown(setting)
    within = (bus - 1) / bus / inside
    leaves = nodes > 1
    return Ring(
        reduce=2 * np.maximum((nodes - 1) / nodes / outside, within) * slow,
        gather=np.maximum(leaves * (ranks - 1) / ranks / outside, within) * slow,
        reduce_s=2 * hop * (np.log2(nodes) + 0.7 * (bus - 1)),
        gather_s=hop * (leaves * (nodes - 1) + 0.7 * (ranks - nodes)),
    )


def data_parallel_seconds(
    parameters: Number,
    setting: Setting,
    compute: Number = 0.0,
) -> Number:
    """Reducing gradients and, with ZeRO, gathering weights, in an iteration; a call for each layer
    of a stage.

    ZeRO-2 reduces the gradients of every microbatch, and ZeRO-3 gathers the weights in each of its
    forward and backward passes, too: Rajbhandari et al. 2020, arXiv:1910.02054, section 7; inside a
    pipeline both stay whole between microbatches (see memory.model_states). Gradients are
    scattered, half of the traffic of an all-reduce, by ZeRO-3 and where `reduce_scatter` says so.
    Hybrid sharding scatters and gathers among its `shards` ranks, and reduces a shard between its
    groups (Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). What overlaps (in ZeRO-3 both or
    neither) hides under `compute`, the seconds of a microbatch, as often as it is sent, all but the
    share `exposed`. ZeRO-2 and 3 never take less than a ZeRO-1 that overlaps everything.
    """
    x, _, c = setting
    is_zero3 = x.zero == 3
    is_sharded = x.zero > 0
    near = ring(x.sharded, x.tp, setting)
    groups = x.replicas / x.sharded
    far = ring(groups, x.tp * x.sharded, setting)
    width = np.maximum(x.value_bytes, 4 * x.fp32_gradients)
    # a bucket of Megatron-LM has 40 million parameters
    calls = np.minimum(x.most_layers, parameters / 40e6) + 1
    gather = is_sharded * (parameters * x.value_bytes * near.gather + calls * near.gather_s)
    scatter = parameters * width * near.gather + calls * near.gather_s
    between = (groups > 1) * (parameters / x.sharded * width * far.reduce + calls * far.reduce_s)
    whole = parameters * width * near.reduce + calls * near.reduce_s
    first = whole + is_sharded * c.reduce_scatter * (scatter - whole) + between  # ZeRO-1 reduces
    times = np.where((x.pp == 1) & (x.zero > 1), x.microbatches, 1)
    reduces = np.where(is_zero3, scatter + between, first) * times
    gathers = gather * np.where((x.pp == 1) & is_zero3, (2 + x.recomputed) * times, 1)
    overlaps = np.where(is_zero3, x.overlap_grad_reduce, x.overlap_param_gather)
    # the chunks of an interleaved stage have their last pass one after the other
    turns = 1 + x.pp * (1 - 1 / x.interleaving)
    compute = compute * turns
    hides = x.overlap_grad_reduce * reduces + overlaps * gathers
    seconds = reduces + gathers - np.minimum((1 - c.exposed) * hides, times * compute)
    least = first + gather - np.minimum((1 - c.exposed) * (first + gather), compute)
    return np.where(is_zero3, np.maximum(seconds, least), seconds)


def p2p_seconds(setting: Setting) -> Number:
    """Exposed seconds per microbatch of handing activations on and their gradients back, on one
    stage.

    Each of t ranks sends its 1/t, and the node bus gathers the rest (DeepSpeed's partitioned
    activations, Megatron's scatter-gather: Narayanan et al. 2021, section 4.1). The GPUs of a node
    whose neighbour stage is on another node, tp dp of them at most, share its network. Without
    scatter-gather (`whole_p2p`) every rank sends everything. Interleaving sends v times, while
    other chunks compute.
    """
    x, cluster, c = setting
    node = cluster.domain
    sent = 2 * x.tokens * x.hidden * x.value_bytes
    network = cluster.domain_bytes_per_s * c.p2p / np.minimum(x.tp * x.replicas, node)
    bus = cluster.node_bytes_per_s * c.node
    rate = np.where(x.gpus > node, np.minimum(network, bus), bus)
    parts = sent / x.tp / rate + sent * (x.tp - 1) / x.tp / bus
    moved = (1 - c.whole_p2p) * parts + c.whole_p2p * sent / rate
    each = moved + c.handoff_s + 2 * cluster.latency_s
    hidden = c.overlap * (x.interleaving > 1)
    return np.where(x.pp > 1, x.interleaving * each, 0.0) * slowdown(setting) * (1 - hidden)


def _owned(parameters: Number, columns: Columns) -> Number:
    """Parameters whose optimizer states a GPU has."""
    return parameters / np.where(columns.zero > 0, columns.sharded, 1)


def optimizer_seconds(parameters: Number, setting: Setting) -> Number:
    """Adam on the GPU, by bytes moved."""
    x = setting.columns
    here = x.offload == 0
    # bytes per parameter that a GPU owns: fp32 master, two moments, gradient read; the first three
    # and the 16-bit weight written; and per parameter that it holds: clipping's norm, the copy back
    moved = here * 30.0 * _owned(parameters, x) + 6.0 * parameters
    return memory_seconds(moved, setting)


def offload_seconds(parameters: Number, setting: Setting) -> Number:
    """Gradients out, weights in over PCIe, Adam on the host; with full offload each GPU also
    fetches its shard of the weights for every gather. Shared by the GPUs of a node. Ren et al.
    2021, arXiv:2101.06840; Rajbhandari et al. 2021, arXiv:2104.07857.
    """
    x, cluster, c = setting
    owned = _owned(parameters, x)
    pcie = cluster.pcie_bytes_per_s * c.p2p
    # Adam on the host reads and writes 28 bytes a parameter from DDR memory, about 100 GB/s a node
    # (Ren, section 5)
    step = owned * (2 * x.value_bytes / pcie + 28.0 * cluster.gpus_per_node / 100e9)
    fetch = x.microbatches * (2 + x.recomputed) * owned * x.value_bytes / pcie
    return (x.offload > 0) * step + (x.offload == 2) * fetch


def pressure(setting: Setting) -> Number:
    """Factor on the time of a run that leaves the caching allocator no free memory; 1 below 76 % of
    the card.

    Only where gradients live in transient half-precision buffers; an optimizer that keeps all in
    place has none.
    """
    x, cluster, c = setting
    if cluster.gpu.kind == "cpu" or np.all(x.fp32_gradients):
        return 1.0
    filled = memory_bytes(x, cluster) / cluster.gpu.memory_bytes
    # PyTorch, 'CUDA semantics, memory management': a failed cudaMalloc frees all cached blocks and
    # synchronizes
    start = 0.758
    full = 0.96
    ramp = np.clip((filled - start) / (full - start), 0, 1)
    transient = (1 - x.fp32_gradients) * (x.replicas > 1)
    return 1 + c.pressure * ramp * transient


def stage_seconds(
    columns: Columns, stage: Number, layers: tuple[Number, Number], head: Number, embedding: Number
) -> Number:
    """Seconds per microbatch of stage `stage`, of those of each kind of layer, the head and the
    embedding.
    """
    ends = (stage == 0) * embedding + (stage == columns.pp - 1) * head
    return over_layers(columns, stage, layers) + ends


def _layer_times(setting: Setting) -> tuple[LayerTime, LayerTime]:
    """Of a layer with experts, and of one without."""
    return layer_kinds(setting.columns, lambda x: layer_time(setting._replace(columns=x)))


def _step_seconds(parameters: Number, setting: Setting, compute: Number) -> tuple[Number, Number]:
    """Seconds of what follows the passes: gradients and weights sent, the optimizer."""
    optimizer = optimizer_seconds(parameters, setting) + offload_seconds(parameters, setting)
    return data_parallel_seconds(parameters, setting, compute), optimizer


def iteration_columns(columns: Columns, cluster: Cluster, constants: Constants) -> IterationTime:
    """Predicted time of one iteration for every row; the parts are numbers or arrays as `columns`
    are.

    1F1B: m microbatches at the pace of the slowest stage, and once through all other stages to fill
    and drain the pipeline, v times less with interleaving. Narayanan et al. 2021, section 2.2, with
    unequal stages.
    """
    x = columns
    c = constants
    setting = Setting(x, cluster, c)
    m = x.microbatches
    layer, front = _layer_times(setting)
    own = layer.total
    dense = front.total
    head = head_seconds(setting)
    embedding = embedding_seconds(setting)
    stages = [stage_seconds(x, i, (own, dense), head, embedding) for i in extreme_stages(x)]
    slowest = functools.reduce(np.maximum, stages)
    whole = (x.layers - x.first_dense) * own + x.first_dense * dense + head + embedding
    p2p = p2p_seconds(setting)
    layers = x.most_layers
    parameters = layers * x.layer_parameters + x.embedding_parameters
    factor = pressure(setting) * c.pace
    # layers' worth of time that the microbatches take on the slowest stage
    share = m * factor * (slowest / own)
    bubble = (whole - slowest + (x.pp - 1) * p2p) / x.interleaving
    step = functools.partial(_step_seconds, compute=slowest)
    data_parallel, optimizer = step(parameters, setting)
    if np.any(x.experts):
        held = (layers - (x.pp == 1) * x.first_dense) * x.expert_parameters
        sums, steps = step(held, setting._replace(columns=x.expert_group()))
        data_parallel = data_parallel + sums
        optimizer = optimizer + steps
    if cluster.gpu.kind == "cpu":  # processes that share cores compute while others wait
        steady = m * slowest
        bubble = np.maximum((steady + bubble) / slowdown(setting) - steady, 0)
        # what it starts beside the layers, 10 ms on one core, as much as 14 layers do
        optimizer = optimizer + 14 * c.launch_s * slowdown(setting)
    return IterationTime(
        matmul=share * layer.matmul,
        attention=share * layer.attention,
        elementwise=share * (layer.elementwise + layer.overhead),
        tensor_parallel=share * layer.tensor_parallel,
        expert_parallel=share * layer.expert_parallel,
        pipeline_p2p=m * p2p * factor,
        bubble=np.where(x.pp == 1, 0.0, bubble) * factor,
        data_parallel=data_parallel * factor,
        optimizer=optimizer * factor,
    )


def iteration_time(columns: Columns, cluster: Cluster, constants: Constants) -> IterationTime:
    """Predicted seconds of one iteration of one plan, by part."""
    parts = iteration_columns(columns, cluster, constants)
    return IterationTime(**{name: float(part) for name, part in vars(parts).items()})


def seconds_per_stage(columns: Columns, cluster: Cluster, constants: Constants) -> list[float]:
    """Predicted seconds that one microbatch, forward and backward, takes on each pipeline stage,
    first to last.
    """
    setting = Setting(columns, cluster, constants)
    own, dense = _layer_times(setting)
    kinds = (own.total, dense.total)
    head = head_seconds(setting)
    embedding = embedding_seconds(setting)
    return stage_seconds(columns, np.arange(columns.pp), kinds, head, embedding).tolist()
