"""Seconds per iteration and its parts."""

from dataclasses import dataclass, fields

from trilane.calibration import Calibration
from trilane.hardware import Cluster
from trilane.memory import stage_layers, stage_parameters
from trilane.shape import ModelShape
from trilane.topology import Topology

# torch operations that one layer starts, forward and backward: counted in the engine's layer (norms, matmuls, biases,
# attention, GELU, residuals and their gradients)
OPERATIONS_PER_LAYER = 90


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """Where the seconds of one iteration go."""

    matmul: float
    overhead: float
    tensor_parallel: float
    pipeline_p2p: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the parts, in seconds."""
        return sum(getattr(self, f.name) for f in fields(self))


def matmul_flops_per_s(cluster: Cluster, topology: Topology) -> float:
    """Peak rate of one process. On a CPU machine the processes of a run share the cores."""
    rate = cluster.gpu.flops_per_s(topology.precision)
    if cluster.gpu.kind == "cpu":
        return rate * max(1, cluster.cores_per_node // topology.gpus) / slowdown(cluster, topology)
    return rate


def slowdown(cluster: Cluster, topology: Topology) -> float:
    """How many processes of a CPU machine wait for one core; 1 on GPUs."""
    return max(1.0, topology.gpus / cluster.cores_per_node) if cluster.gpu.kind == "cpu" else 1.0


def bytes_per_s(cluster: Cluster, gpus: int, stride: int) -> float:
    """Rate per GPU of a ring over `gpus` GPUs, `stride` apart: the bus inside a node, else a share of the network."""
    if (gpus - 1) * stride < cluster.gpus_per_node:
        return cluster.node_bytes_per_s
    rings_per_node = min(stride, cluster.gpus_per_node)
    return cluster.network_bytes_per_s / rings_per_node


def all_reduce_seconds(bytes_: float, gpus: int, rate: float, latency_s: float) -> float:
    """A ring all-reduce: 2 (n-1)/n of the bytes over each link, and 2 (n-1) steps of latency."""
    return 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * bytes_ / rate + 2 * (gpus - 1) * latency_s


def iteration_time(shape: ModelShape, topology: Topology, cluster: Cluster, calibration: Calibration) -> IterationTime:
    """Predicted seconds of one iteration, 1F1B: m microbatches at the pace of the slowest stage, p - 1 more to fill it.

    Bubble (p-1)/(v m) of the ideal time: Narayanan et al. 2021, arXiv:2104.04473. Tensor parallel: two all-reduces of
    s b h per layer in each of forward, backward and recomputed forward (the same). Left out: overlap of communication
    with computation, tile and wave quantization, memory-bound operations.
    """
    t, c, k = topology, cluster, calibration
    m, width = t.microbatches, 4 if t.precision == "fp32" else 2
    passes = 4 if t.recompute == "full" else 3
    slowest = max(stage_layers(shape, t))
    h, s = shape.hidden_size, shape.seq_length
    layer_flops = 2 * passes * t.mbs * s * (12 * h * h + 2 * s * h) / t.tp
    head_flops = 6 * t.mbs * s * h * shape.vocab_size / t.tp
    matmul = k.matmul * (slowest * layer_flops + head_flops) / matmul_flops_per_s(c, t)
    overhead = k.overhead * slowest * OPERATIONS_PER_LAYER * passes / 3 * c.launch_overhead_s * slowdown(c, t)
    activation_bytes = width * t.mbs * s * h
    reduce = all_reduce_seconds(activation_bytes, t.tp, bytes_per_s(c, t.tp, 1), c.latency_s)
    tensor_parallel = k.communication * slowdown(c, t) * slowest * 2 * (passes - 1) * reduce
    p2p = k.communication * slowdown(c, t) * (activation_bytes / bytes_per_s(c, t.pp, t.gpus // t.pp) + c.latency_s)
    p2p = 0.0 if t.pp == 1 else 2 * t.interleaving * p2p
    parameters = max(stage_parameters(shape, t))
    gradient_bytes = parameters * (4 if t.precision == "fp32" or t.fp32_gradients else 2)
    data_parallel = (
        k.communication
        * slowdown(c, t)
        * all_reduce_seconds(gradient_bytes, t.dp, bytes_per_s(c, t.dp, t.tp), c.latency_s)
    )
    optimizer = k.overhead * 28 * parameters / (t.dp if t.zero else 1) / c.gpu.memory_bytes_per_s * slowdown(c, t)
    step = matmul + overhead + tensor_parallel + p2p
    return IterationTime(
        matmul=m * matmul,
        overhead=m * overhead,
        tensor_parallel=m * tensor_parallel,
        pipeline_p2p=m * p2p,
        bubble=(t.pp - 1) / t.interleaving * step,
        data_parallel=data_parallel,
        optimizer=optimizer,
    )
