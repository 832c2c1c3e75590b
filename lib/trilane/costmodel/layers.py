"""LayerTime: seconds that one GPU spends on one layer of one microbatch, forward, backward and
recomputed.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trilane.costmodel.columns import (
    ALLGATHER,
    DEEPEP,
    FP8,
    OPERATORS,
    SELECTIVE,
    Number,
    Parts,
    Setting,
    linear_flops_per_s,
    matmul_flops_per_s,
    memory_seconds,
    slowdown,
)
from trilane.costmodel.constants import Constants


@dataclass(frozen=True)
class LayerTime(Parts):
    """Seconds of one layer and microbatch on one GPU."""

    matmul: Number
    attention: Number
    elementwise: Number
    tensor_parallel: Number
    expert_parallel: Number
    overhead: Number


def matmul_seconds(
    m: Number,
    n: Number,
    k: Number,
    setting: Setting,
    batch: Number = 1.0,
    rate: Number = None,
) -> Number:
    """Seconds of `batch` products (m x k)(k x n) at `matmul` of the peak `rate`, by default that of
    attention.
    """
    _, cluster, c = setting
    if rate is None:
        rate = matmul_flops_per_s(setting)
    peak = rate * c.matmul
    if cluster.gpu.kind == "cpu":
        return 2 * m * n * k * batch / peak
    return tiled_flops(m, n, k, cluster.gpu.num_sms, c, batch) / peak


def tiled_flops(
    m: Number, n: Number, k: Number, sms: int, c: Constants, batch: Number = 1.0
) -> Number:
    """FLOPs in whole tiles and waves of `batch` products (m x k)(k x n): the best of three tile
    shapes, waves of one tile per SM.

        (w + q (ceil(w) - w)) 2 tile (k + k0) SMs      w = tiles / SMs

    q quantization, k0 prologue. Tile and wave quantization: NVIDIA, 'Matrix multiplication
    background'. Left out: which kernel cuBLAS picks; two tiles per SM; operands that fall out of
    the L2 cache.
    """
    best = np.inf
    # cuBLAS's half-precision kernels and their relative rate: NVIDIA's user guide, section on tile
    # sizes (256 x 128 is the most efficient, 128 x 128 reads more operands per FLOP)
    for tile_m, tile_n, relative in ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9)):
        waves = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch / sms
        lost = waves + c.quantization * (np.ceil(waves) - waves)
        best = np.minimum(best, lost * (2 * tile_m * tile_n * sms / relative))
    return best * (k + c.prologue)


def linear_seconds(setting: Setting) -> tuple[Number, Number]:
    """Forward and backward seconds of the four weight matmuls of a layer: QKV, projection, MLP in,
    MLP out.
    """
    seconds = functools.partial(matmul_seconds, setting=setting, rate=linear_flops_per_s(setting))
    m = setting.columns.tokens
    forward = 0.0
    backward = 0.0
    for n, k in setting.columns.matrices:
        forward = forward + seconds(m, n, k)
        backward = backward + seconds(m, k, n) + seconds(k, n, m)
    return forward, backward


def attention_seconds(setting: Setting) -> tuple[Number, Number]:
    """Forward and backward seconds of the attention core of a layer.

    Scores stored: QK^T and AV, with 6.5 passes over the s x s half-precision scores forward (QK^T
    writes, softmax reads and writes, dropout reads, writes and keeps a byte mask, AV reads) and 9.5
    backward. Where head_dim % 8 != 0 the products leave the tensor cores for fp32 units. Fused: see
    flash_seconds. Left out: batches that leave SMs idle.
    """
    x, cluster, c = setting
    gpu = cluster.gpu
    s = x.seq
    d = x.head_dim
    batch = x.mbs * x.heads / x.tp
    q = s / x.cp  # queries of this rank
    product = matmul_seconds(q, s, d, setting, batch)
    product = product + matmul_seconds(q, d, s, setting, batch)
    if gpu.kind == "cpu":
        fused = 2 * product  # torch's kernel reaches half of a matmul's rate, measured on one core
    else:
        # SIMT kernels, which take unaligned operands, have 64-wide tiles; `misaligned` is quoted at
        # 32 heads in flight
        wide = np.ceil(d / 64) * 64
        crowd = (batch / 32) ** c.crowding
        slow = 2 * q * s * (d + wide) * batch * crowd / (gpu.fp32_flops_per_s * c.misaligned)
        product = np.where(d % 8 == 0, product, slow)
        fused = flash_seconds(setting)
    one_pass = memory_seconds(x.value_bytes * q * s * batch, setting)
    stored = x.attention == 1
    forward = np.where(stored, product + 6.5 * one_pass, fused)
    backward = np.where(stored, 2 * product + 9.5 * one_pass, 2.5 * fused)
    shown = (1 - c.overlap * x.overlap_tp) * gather_seconds(setting)
    return forward + shown, backward + 2 * shown


def gather_seconds(setting: Setting) -> Number:
    """Seconds in which the ranks that share a sequence gather the keys and values of a layer.

    The engine here and torchtitan gather before they multiply, and scatter the gradients; a ring
    (Liu et al. 2023, arXiv:2310.01889; Transformer Engine's) sends as much, and hides a part. Left
    out: the imbalance of a causal mask.
    """
    x, cluster, c = setting
    node = cluster.domain
    sent = (x.cp - 1) * 2 * x.tokens * x.kv_hidden / x.tp * x.value_bytes
    inside = cluster.node_bytes_per_s * c.node
    network = cluster.domain_bytes_per_s / np.minimum(x.tp, node) * c.network
    outside = np.minimum(inside, network)
    return sent / np.where(x.tp * x.cp > node, outside, inside)


def flash_seconds(setting: Setting) -> Number:
    """Forward seconds of a flash kernel: half of 4 s^2 d FLOPs a head, the causal half, at `flash`
    of the peak. Backward counts 2.5 times the FLOPs.

    ALiBi is for other kernels: Triton's, at its time 1.3 to 1.5 times as slow forward and twice
    backward (Dao 2023, arXiv:2307.08691, section 4.1), and torch's for masks, which computes the
    other half, too. Left out: flash attention's own slopes, from version 2.4 on.
    """
    x, _, c = setting
    d = np.ceil(x.head_dim / 8) * 8
    flops = 0.5 * 4 * x.seq**2 / x.cp * d * x.mbs * x.heads / x.tp
    slow = 1 + 0.8 * x.alibi
    return slow * flops / (c.flash * flash_reach(x.seq, d) * matmul_flops_per_s(setting))


def flash_reach(seq: Number, head_dim: Number) -> Number:
    """Rate of a flash kernel over that of long sequences with heads of 128: of these 512 tokens
    have 0.47 to 0.58, 2048 0.85 to 0.9, and heads of 64 have 0.72 to 0.89, by three kernels (Shah
    et al. 2024, arXiv:2407.08608, figure 5).
    """
    return seq / (seq + 350) * np.minimum(head_dim / 128, 1) ** 0.3


def elementwise_seconds(setting: Setting) -> tuple[Number, Number]:
    """Forward and backward seconds of norms, residuals, dropout, GELU and biases, by bytes moved.

    Forward, in bytes per token and channel at 2 bytes a value: two norms 8, two residuals with
    dropout 14, and, over t, 4 of each channel of the MLP (16 with 4 h; a gate reads another 2) and
    4 of queries, keys and values for bias and layout (12), another 4 for norms of queries and keys.
    Backward moves half as much again.
    Sequence parallelism divides all by t.
    """
    x, _, c = setting
    heads = x.query_hidden + 2 * x.kv_hidden + x.qk_layernorm * (x.query_hidden + x.kv_hidden)
    cut = (4 + 2 * x.gated) * x.mlp / x.hidden + 4 * (heads / x.hidden)
    moved = np.where(x.sequence_parallel == 1, 22 / x.tp, 22) + cut / x.tp
    bytes_ = c.passes * moved * x.value_bytes / 2 * x.tokens * x.hidden
    forward = memory_seconds(bytes_, setting)
    outputs = sum(n for n, _ in x.matrices)
    inputs = sum(k for _, k in x.matrices)
    # fp8 and fp4 read and write what they cast
    cast = (x.precision >= FP8) * memory_seconds(4 * x.tokens, setting)
    return forward + cast * inputs, 1.5 * forward + cast * outputs


# tokens of an expert at which a grouped product reaches half of what a large one does, by the
# rates of SimuMax's B200 (docs/b200 of MooreThreads/SimuMax): .20 of the peak at 256 tokens, .46
# above 1,000
GROUPED = 350
# host time of a layer with experts over that of a dense one: the dispatcher's many small kernels,
# and its waits for counts; by the least median error of public rows (benchmarks/mixtures.py)
ROUTED = 10


class ExpertTime(NamedTuple):
    """Seconds of the experts of one layer, forward and backward, and of one exchange of tokens."""

    matmul: Number
    matmul_back: Number
    elementwise: Number
    exchange: Number


def expert_seconds(setting: Setting) -> ExpertTime:
    """The experts of a layer: as many products at once as a GPU has experts, each of the tokens
    that it gets; routing is balanced, as benchmarks force it to be (learned, the worst rank has
    1.3 to 2 times as many). Copies are made, sorted, weighed and summed: 10 passes over them.
    """
    x, cluster, _ = setting
    held = x.experts / x.ep
    tokens = x.copies * x.etp
    each = tokens / held
    share = each / (each + GROUPED) if cluster.gpu.kind != "cpu" else 1.0
    seconds = functools.partial(
        matmul_seconds, setting=setting, batch=held, rate=linear_flops_per_s(setting) * share
    )
    forward = 0.0
    backward = 0.0
    for n, k in x.expert_matrices:
        forward = forward + seconds(each, n, k)
        backward = backward + seconds(each, k, n) + seconds(k, n, each)
    inside = (4 + 2 * x.gated) * x.expert_ffn / x.etp
    passes = tokens * (10 * x.hidden + inside) * x.value_bytes / 2
    return ExpertTime(forward, backward, memory_seconds(passes, setting), exchange_seconds(setting))


def exchange_seconds(setting: Setting) -> Number:
    """Seconds in which the copies of tokens reach the ranks of their experts, or come back.

    What stays in the NVLink domain goes over its bus, the rest over the share that a GPU has of the
    network. deepep and hybridep send one copy of a token to each node, not to each expert: of n
    nodes n (1 - (1 - 1/n)^k) have some of k experts. allgather sends all tokens to all ranks. Where
    several GPUs share an expert each needs the tokens of all.
    """
    x, cluster, c = setting
    domain = cluster.domain
    size = x.hidden * x.value_bytes
    span = x.ep * x.etp
    domains = np.maximum(span / domain, 1)
    away = 1 - 1 / domains
    is_single = x.dispatcher >= DEEPEP
    chosen = domains * (1 - away**x.top_k)
    gathers = x.dispatcher == ALLGATHER
    reach = np.where(is_single, chosen, x.top_k)
    each = np.where(gathers, span, reach) * x.tokens / x.tp * size
    outside = each * away / (cluster.domain_bytes_per_s / domain * c.network)
    near = np.where(gathers, (span / domains - 1) * x.tokens / x.tp, x.copies * (1 - 1 / x.ep))
    inside = (near * (1 - away * (gathers == 0)) + (x.etp - 1) * x.copies) * size
    inside = inside / (cluster.node_bytes_per_s * c.node)
    wait = (x.ep > 1) * (c.skew_s + (domains > 1) * span * cluster.latency_s)
    return (np.maximum(outside, inside) + wait) * slowdown(setting)


def accumulation_seconds(parameters: Number, setting: Setting) -> Number:
    """Adding one microbatch's weight gradients to the sum: 6 bytes a parameter, 10 where the sum is
    fp32.
    """
    x = setting.columns
    moved = np.where(x.fp32_gradients == 1, 10, 3 * x.value_bytes)
    return memory_seconds(parameters * moved, setting)


def all_reduce_seconds(setting: Setting) -> Number:
    """One tensor-parallel all-reduce of s b h values: 2 (t-1)/t of the bytes over the bus, and the
    wait for the last.

    The wait grows with the ring's steps, t - 1. A group that fills nodes has their whole network
    (NCCL enters and leaves each node once); where a run over several nodes must lay a group across
    two, two share a node's network. Left out: overlap with computation (Megatron of 2022 has none
    in forward).
    """
    x, cluster, c = setting
    t = x.tp
    node = cluster.domain
    bus = cluster.node_bytes_per_s
    inside = np.where(t == 2, cluster.pair_bytes_per_s or bus, bus) * c.node
    groups = np.where(t % node == 0, 1, 2)
    outside = np.minimum(inside, cluster.domain_bytes_per_s / groups * c.network)
    leaves = (node % t != 0) & (x.gpus > node)
    rate = np.where(leaves, outside, inside) / slowdown(setting)
    wait = (t - 1) / 7 * c.skew_s + (t - 1) * cluster.latency_s
    if cluster.gpu.kind == "cpu":  # where a process waits for its core at each of the two halves
        wait = wait * slowdown(setting) * (1 + x.sequence_parallel)
    return 2 * (t - 1) / t * x.tokens * x.hidden * x.value_bytes / rate + wait


def layer_time(setting: Setting) -> LayerTime:
    """One layer: forward, backward, and what is recomputed of the forward: all of it in the
    recomputed share of layers, the attention core (selective), or half the matmuls and all elements
    (operators, which keep what was reduced).

    Tensor parallelism costs two all-reduces forward, two backward and two more with full
    recomputation: Narayanan et al. 2021, arXiv:2104.04473, section 3.2. Sequence parallelism moves
    the same bytes (Korthikanti et al. 2022). While the GPU works the host launches ahead; where a
    layer needs the host longer than the GPU, the GPU waits for the rest.

    An input in host memory is copied there and back, each time 2 s b h / t bytes over a GPU's PCIe.
    Nothing hides: torch's save_on_cpu copies on the stream that computes.
    """
    x, cluster, c = setting
    whole = x.recomputed
    core = x.recompute == SELECTIVE
    operators = x.recompute == OPERATORS
    again = whole + operators
    linear, linear_back = linear_seconds(setting)
    attention, attention_back = attention_seconds(setting)
    elements, elements_back = elementwise_seconds(setting)
    exchange = 0.0
    if np.any(x.experts):
        experts = expert_seconds(setting)
        linear = linear + experts.matmul
        linear_back = linear_back + experts.matmul_back
        elements = elements + experts.elementwise
        elements_back = elements_back + 1.5 * experts.elementwise
        exchange = experts.exchange * (4 + 2 * whole)
    gradients = accumulation_seconds(x.layer_parameters + x.expert_parameters, setting)
    messages = (4 + 2 * whole + operators) * (1 - c.overlap * x.overlap_tp)
    # experts replace the half of them that is the MLP's
    messages = messages / (1 + (x.experts > 0))
    copied = 2 * x.offload_checkpoints * x.input_bytes / (cluster.pcie_bytes_per_s * c.p2p)
    parts = {
        "matmul": linear * (1 + whole + operators / 2) + linear_back,
        "attention": attention * (1 + whole + core) + attention_back,
        "elementwise": elements * (1 + again) + elements_back + gradients + copied,
        "tensor_parallel": all_reduce_seconds(setting) * messages,
        "expert_parallel": exchange,
    }
    # collectives and their hooks, of tensor parallelism or of ZeRO-3, are launched, too: a quarter
    # more each, guessed
    collectives = 1 + 0.25 * (x.tp > 1) + 0.25 * (x.zero == 3)
    launched = c.host_s * (3 + again) / 4 * collectives * np.where(x.experts > 0, ROUTED, 1)
    host = 0.0
    if cluster.gpu.kind != "cpu":
        host = np.maximum(launched - sum(parts.values()), 0)
    return LayerTime(**parts, overhead=c.launch_s * (3 + again) / 4 * slowdown(setting) + host)


def head_seconds(setting: Setting) -> Number:
    """The output layer of one microbatch: logits (never recomputed) and the loss on their fp32
    copy.

    About 45 bytes per logit: the cast, max, exponential, sum and the gradient, each a pass over
    fp32 or half precision.
    """
    x = setting.columns
    m = x.tokens
    h = x.hidden
    n = x.vocab / x.tp
    sizes = ((m, n, h), (m, h, n), (h, n, m))
    products = sum(matmul_seconds(*size, setting) for size in sizes)
    loss = memory_seconds(45 * m * n, setting)
    gradients = accumulation_seconds(x.embedding_parameters, setting)
    return products + loss + gradients + 2 * all_reduce_seconds(setting)


def embedding_seconds(setting: Setting) -> Number:
    """The input embedding of one microbatch: the lookup, and a dense gradient of the whole table
    (zeroed, added).
    """
    x = setting.columns
    table = accumulation_seconds(x.embedding_parameters, setting) * 4 / 3
    moved = 20 * x.tokens * x.hidden * x.value_bytes / 2
    return table + memory_seconds(moved, setting)
