"""Bytes per GPU of every pipeline stage, by part, and how likely it is that they do not fit."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.training import Dropout
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import (
    BLOCK,
    FP8,
    FP32,
    FULL,
    NONE,
    OPERATORS,
    SELECTIVE,
    Columns,
    Number,
    Parts,
)
from trilane.utils.frozen import frozen
from trilane.utils.tables import T
from trilane.utils.validation import from_mapping, shipped_json


@frozen
class MemoryConstants:
    """What no formula gives, fitted to 115 rows of the BigScience documents. Other software:
    data/stacks.json.

    optimizer     bytes per owned parameter: fp32 master, two moments and gradient (16), temporaries
                  of the step
    accumulated   bytes per held parameter that fp32 accumulation adds (4, and its flattened 16-bit
                  copies)
    unfused       share of layers whose norms and gates are several kernels each, and keep what is
                  between
    gates         share of layers whose gates alone are
    scores        bytes kept of each score that attention writes: softmax's result 2, dropout's mask
                  1 and its result 2
    masks         bytes that dropout's masks take of each value that a layer adds to its input: 1
                  each of 2
    repeats       1 where keys and values that heads share are repeated for each head
    drops         share of hidden values that dropout drops, where the embedding's mask counts
    handed        1 where the outputs that a stage has sent stay, and a copy of what it has received
    ends          1 where what embedding and head keep counts among activations
    whole         1 where ranks that share a sequence keep keys and values of all of it
                  (engine/model/context.py)
    checkpoint    bytes kept over bytes needed for a layer's recomputed input
    working       recomputed activations of the layer at work, over Korthikanti's formula
    gathered      bytes per parameter of the largest unit that ZeRO-3 gathers: weights, and its
                  gradients
    logit         bytes per logit of a microbatch: half precision, the fp32 copy, its softmax and
                  gradient
    base_bytes    communication buffers and cuBLAS workspaces
    slack         share by which the caching allocator holds more than is needed while the card is
                  empty
    spread        standard deviation of ln(measured / predicted)
    """

    optimizer: float = 17.1
    accumulated: float = 4.88
    unfused: float = 0.0
    gates: float = 0.0
    scores: float = 5.0
    masks: float = 2.0
    repeats: float = 0.0
    drops: float = 0.0
    handed: float = 0.0
    ends: float = 0.0
    whole: float = 0.0
    checkpoint: float = 1.31
    working: float = 0.86
    gathered: float = 4.0
    logit: float = 10.6
    base_bytes: float = 1.63e9
    slack: float = 0.154
    spread: float = 0.04


DEFAULT = MemoryConstants()
NO_DROPOUT = Dropout()


@functools.cache  # a search predicts hundreds of plans
def memory_of(stack: str) -> MemoryConstants:
    """The shipped constants of a software stack's memory; the documents' where it has none of its
    own.

    An unknown one has 16 bytes a parameter (Rajbhandari et al. 2020), 2 more of an fp32 sum, and
    FSDP's spread.
    """
    unknown = {"memory": {"optimizer": 12.0, "accumulated": 2.0, "checkpoint": 1.0, "spread": 0.15}}
    held = shipped_json("stacks")["stacks"].get(stack, unknown).get("memory", {})
    return from_mapping(MemoryConstants, held, "memory")


def engine_memory(
    engine: str, cluster: Cluster, dropout: Dropout = NO_DROPOUT, zero: int = 0
) -> MemoryConstants:
    """What an engine here keeps, nothing fitted: traces of it hold the same
    (benchmarks/trace_check.py).

    Megatron's own keeps whole fp32 gradients and no other: 2 + 4 + 12 bytes (megatron-core's
    distributed optimizer), as ZeRO-2 and 3 in their shares; DeepSpeed's BF16_Optimizer at stage 1
    those of 16 bits, too. Below compute capability
    8.0, and under ZeRO-3, gates are several kernels. No kernel before 8.0 reads shared keys once.
    """
    old = cluster.gpu.compute_capability < (8, 0)
    hf = engine == "hf-zero3"
    several = not hf and (old or zero == 3)
    # a compiled kernel draws the masks again
    has_masks = dropout.hidden > 0 and (hf or several)
    return dataclasses.replace(
        DEFAULT,
        optimizer=12.0,
        accumulated=2.0 if engine == "megatron" or zero > 1 else 4.0,
        unfused=float(hf),
        gates=float(several),
        repeats=float(old),
        handed=float(engine == "deepspeed-3d"),
        whole=float(engine == "megatron"),
        masks=2.0 * has_masks,
        drops=dropout.hidden,
        scores=DEFAULT.scores if dropout.attention else 2.0,
        ends=1.0,
        checkpoint=1.0,
        working=1.0,
    )


def memory_for(
    calibration: Calibration, engine: str, cluster: Cluster, dropout: Dropout = NO_DROPOUT
) -> MemoryConstants:
    """Those of the stack that constants of time are named after; else of the documents, or of the
    rows' programs.
    """
    is_named = calibration.name in shipped_json("stacks")["stacks"]
    if is_named or not engine:
        constants = memory_of(calibration.name if is_named else calibration.stack)
    elif engine == "deepspeed-3d":
        constants = DEFAULT  # fitted to this program, that of the documents
    else:
        # twice the documents' spread, as nobody measured memory on a card
        constants = engine_memory(engine, cluster, dropout)
        constants = dataclasses.replace(constants, spread=DEFAULT.spread * 2)
        if engine != "megatron":
            # DeepSpeed's step has temporaries, which the documents' constants count
            states = {"optimizer": DEFAULT.optimizer, "accumulated": DEFAULT.accumulated}
            constants = dataclasses.replace(constants, **states)
    if engine == "megatron":
        return dataclasses.replace(constants, optimizer=12.0, accumulated=2.0)
    if engine == "hf-zero3":
        return dataclasses.replace(constants, unfused=1.0)
    return constants


@frozen
class StageMemory(Parts):
    """What one GPU of a pipeline stage holds at its peak, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    fragmentation: float
    context: float

    @property
    def reserved(self) -> float:
        """What torch calls reserved: all but what the driver and the kernels take."""
        return self.total - self.context

    @property
    def allocated(self) -> float:
        """What torch calls allocated, and NCCL's buffers."""
        return self.reserved - self.fragmentation


def activation_bytes_per_layer(columns: Columns, constants: MemoryConstants = DEFAULT) -> Number:
    """Bytes one GPU keeps for the backward pass, per layer and microbatch, at 2 bytes a value.

    s seq, b mbs, h hidden, a heads, t tp, k channels of keys, f of the MLP, q of queries, where
    they are not h:

        none        s b h (10 + 24/t + 5 a s / (h t))   sequence parallel: 34/t for 10 + 24/t
        selective   the 5 a s term dropped, as where a fused kernel has no scores
        full        2 s b h                             sequence parallel: 2 s b h / t
        operators   2 s b (h + (2 q + k + f)/t)         sequence parallel: 3 h / t first; a gate: h
        block       the mean of full and none

    Korthikanti et al. 2022, arXiv:2205.05198, table 2. Of the 24: queries, keys and values 6, the
    core's output 2, the MLP's hidden channels before and after the activation 4 each of 4 h; a gate
    keeps one more of them. fp8 (and fp4, which holds less): inputs of linear layers in 8 bits, the
    core's output beside them (Transformer Engine, module/linear.py). unfused, with a gate as in
    transformers' Llama: fp32 copies in two RMSNorms (8, less masks of dropout), its product. Scores
    that an engine here writes need all keys; transformers' Llama and BLOOM keep their softmax in
    fp32, too. Dropout masks are 2 of the 10. Norms of queries and keys keep their inputs, 2 (q + k)
    / t. selective: queries that share keys are a copy beside
    all channels (megatron-core). whole: keys and values of cp parts, and the output of two chunks
    joined; Transformer Engine has a ring. operators: the layer's input, attention's output and
    every second matmul's, of q, k, v, o, in, gate, out; with sequence parallelism what was
    reduced, too
    (torchtitan 2025, `_op_sac_save_list` of its llama3). Experts keep a copy of each token that
    they got, and of it the channels of an MLP, a gate of shared ones what they gave; routing is
    balanced.
    """
    x = columns
    c = constants
    h = x.hidden
    sbh = x.tokens * h
    fp8 = 1 * (x.precision >= FP8)
    is_selective = x.recompute == SELECTIVE
    cut = np.where(x.sequence_parallel == 1, x.tp, 1)
    single = c.unfused * x.gated
    norms = 8 * single + c.masks * (1 - single)
    has_gate = (x.experts > 0) * x.shared_gate
    gate = 2 + 2 * (c.unfused + c.gates)
    has_all = c.repeats + c.ends * ((x.precision == FP32) | (x.attention == 1))
    queries = x.query_hidden
    keys = np.where(has_all, queries, x.kv_hidden)
    is_ring = (fp8 > 0) | (x.overlap_tp == 1) | is_selective
    shares = (x.cp > 1) * c.whole * np.where(is_ring, 0, 1)
    normed = (2 + 4 * c.unfused) * x.qk_layernorm * (queries + x.kv_hidden) / h
    attention = (4 + 2 * shares + fp8) * queries / h + 4 * keys / h * (1 + shares * (x.cp - 1))
    inner = 4 - fp8 + gate * x.gated
    # megatron-core's experts keep both factors of a gate of several kernels, and their product
    more = 2 * c.gates * (x.experts > 0)
    shared = attention + normed + (inner + more) * x.mlp / h
    is_copied = is_selective * (x.kv_heads < x.heads) * (1 - x.qk_layernorm)
    shared = shared + 2 * is_copied * queries / h
    stores = ((x.recompute == NONE) | (x.recompute == BLOCK)) * x.attention
    each = c.scores + 4 * c.unfused * np.maximum(x.gated, x.alibi)
    scores = stores * each * x.heads * x.seq * x.tokens / x.tp
    sent = (x.experts > 0) * x.copies * (2 * h * x.etp + (inner + 2 * more) * x.expert_ffn)
    whole = 8 - 2 * fp8 + norms + 2 * has_gate
    every = sbh * (whole / cut + shared / x.tp) + scores + sent
    saved = 2 * queries / h + x.kv_hidden / h + x.mlp / h
    some = (1 + 2 * (cut > 1)) / cut + saved / x.tp + x.gated
    every = np.where(x.recompute == OPERATORS, 2 * sbh * some, every)
    return (every * (1 - x.recomputed) + 2 * sbh / cut * x.recomputed) * x.value_bytes / 2


def end_bytes(columns: Columns, stage: Number, constants: MemoryConstants) -> Number:
    """Bytes that a microbatch keeps outside of layers, but for the logits, which are in
    working_bytes().

    The norm of the embedding and the last one keep their inputs, the head its own, the embedding's
    dropout a mask of bytes, and DeepSpeed's pipeline what a stage has sent, which megatron-core
    deallocates, and a copy of what it got.
    """
    x = columns
    c = constants
    first = 1 * (stage == 0)
    last = 1 * (stage == x.pp - 1)
    values = first * x.embedding_layernorm + (2 + 2 * c.unfused * x.gated) * last
    values = values + c.handed * (2 - first - last)
    kept = values * x.value_bytes + first * (c.drops > 0)
    return kept * x.tokens * x.hidden / np.where(x.sequence_parallel == 1, x.tp, 1)


def in_flight(columns: Columns, stage: Number) -> Number:
    """Microbatches whose activations a stage holds: min(m, p - i) in 1F1B.

    Interleaved ones warm up with 2 (p - i - 1) + (v - 1) p chunks (megatron-core's schedules.py,
    get_pp_rank_microbatches), on the first stage 1 + (p - 1) / (p v) as much: Korthikanti et al.
    2022, section 4.2.3.
    """
    x = columns
    v = x.interleaving
    chunks = 2 * (x.pp - stage - 1) + (v - 1) * x.pp + 1
    return np.minimum(x.microbatches, np.where(v > 1, chunks / v, x.pp - stage))


def stage_layers_at(columns: Columns, stage: Number) -> Number:
    """Transformer layers of stage `stage`."""
    first, middle, last = columns.stage_layers
    inner = np.where(stage == columns.pp - 1, last, middle)
    return np.where(stage == 0, first, inner)


def layer_kinds(columns: Columns, of_layer: Callable[[Columns], T]) -> tuple[T, T]:
    """What a layer with experts has, and one without; the same where all layers are alike."""
    own = of_layer(columns)
    if not np.any(columns.first_dense):
        return own, own
    return own, of_layer(columns.dense())


def over_layers(columns: Columns, stage: Number, kinds: tuple[Number, Number]) -> Number:
    """The sum over the layers of the stage of what each kind has; dense ones stand in front, also
    of the chunks of an interleaved stage.
    """
    x = columns
    own, dense = kinds
    layers = stage_layers_at(x, stage)
    if not np.any(x.first_dense):
        return layers * own
    first, middle, _ = x.stage_layers
    before = (stage > 0) * (first + (stage - 1) * middle)
    front = np.clip(x.first_dense - before, 0, layers)
    return front * dense + (layers - front) * own


def expert_parameters(columns: Columns, stage: Number) -> Number:
    """Parameters of the experts that one GPU of the stage holds."""
    return over_layers(columns, stage, layer_kinds(columns, lambda x: x.expert_parameters))


def stage_parameters(columns: Columns, stage: Number) -> Number:
    """Parameters one GPU of the stage holds, but for experts: a tied embedding stands on the first
    and the last stage.
    """
    x = columns
    embedding = x.embedding_parameters
    norm = 2 * x.hidden * x.embedding_layernorm  # BLOOM's of the embedding
    at_start = embedding + (x.positions * x.hidden + norm)
    at_end = x.norm_values + embedding * np.where(x.pp == 1, x.untied, 1)
    layers = over_layers(x, stage, layer_kinds(x, lambda x: x.layer_parameters))
    return layers + (stage == 0) * at_start + (stage == x.pp - 1) * at_end


def model_states(
    columns: Columns, stage: Number, constants: MemoryConstants
) -> tuple[Number, Number, Number]:
    """Bytes of weights, gradients and optimizer of one GPU, before any offload; those of experts
    are divided by the ranks that hold the same.
    """
    x = columns
    plain = _states(x, stage_parameters(x, stage), constants)
    if not np.any(x.experts):
        return plain
    experts = _states(x.expert_group(), expert_parameters(x, stage), constants)
    weights, gradients, optimizer = (a + b for a, b in zip(plain, experts, strict=True))
    return weights, gradients, optimizer


def _states(
    columns: Columns, parameters: Number, constants: MemoryConstants
) -> tuple[Number, Number, Number]:
    """Bytes of weights, gradients and optimizer of so many parameters.

    Per parameter: 16-bit 2 + 2 + optimizer (2 + 2 + 14 without ZeRO), fp32 4 + 4 + 8. ZeRO stage 1
    divides the optimizer by dp, 2 the gradients too, 3 the weights too: Rajbhandari et al. 2020,
    arXiv:1910.02054, section 3.
    """
    x = columns
    c = constants
    is_wide = x.precision == FP32
    # FSDP inside a pipeline has weights and gradients whole between microbatches (torchtitan:
    # reshard_after_forward)
    alone = x.pp == 1
    weights = x.value_bytes * parameters / np.where((x.zero >= 3) & alone, x.sharded, 1)
    summed = x.value_bytes + np.where(is_wide, 0, c.accumulated * x.fp32_gradients)
    gradients = summed * parameters / np.where((x.zero >= 2) & alone, x.sharded, 1)
    # without ZeRO 14: fp32 master, two moments and two more bytes for an fp32 gradient, 18 with
    # weights and gradients (BigScience chronicles, '104B topology / memory usage')
    states = np.where(x.zero == 0, min(14.0, c.optimizer), c.optimizer)
    # torch's Adam makes its denominator, fp32, for the whole flat share at once: 4 bytes. The
    # chronicles' prequel prints 61 and 47 GB with it (first node, others), 51 and 44 with apex's
    # fused kernel.
    states = np.where(is_wide, 8, states) + 4 * x.adam
    return weights, gradients, states * parameters / np.where(x.zero >= 1, x.sharded, 1)


def kept_bytes(columns: Columns, stage: Number, constants: MemoryConstants) -> Number:
    """Bytes of a microbatch that a GPU keeps of the layers of a stage. Of inputs that are kept in
    host memory it has those that came from another stage, too: schedules hold them, DeepSpeed's
    the copy that end_bytes() counts.
    """
    x = columns
    here = over_layers(x, stage, layer_kinds(x, lambda x: activation_bytes_per_layer(x, constants)))
    received = (x.interleaving - (stage == 0)) * (1 - constants.handed) * x.input_bytes
    return np.where(x.offload_checkpoints, received, here)


def working_bytes(columns: Columns, stage: Number, constants: MemoryConstants) -> Number:
    """The most that is alive for a moment only: one layer's recomputed activations, or the logits
    with their loss.

    They do not meet: the loss is done before the first layer is recomputed.
    """
    x = columns
    c = constants
    layer = activation_bytes_per_layer(x.changed(recompute=NONE), c)
    again = layer * c.working * (x.recompute > SELECTIVE)
    logits = (stage == x.pp - 1) * c.logit * x.tokens * x.vocab / x.tp
    return np.maximum(again, logits)


def stage_memory(
    columns: Columns, stage: Number, cluster: Cluster, constants: MemoryConstants = DEFAULT
) -> StageMemory:
    """Peak memory of one GPU of stage `stage` (0 is the first), a number or an array a part.

    ZeRO-3 gathers two layers, or an embedding, at a time. Offload moves the optimizer, and with
    "full" the weights. Left out: the first stage's embedding and dropout activations; NCCL's
    buffers, which grow with the peers; what a stage has sent: the engine megatron deallocates it,
    as Megatron-LM does; DeepSpeed's pipeline keeps 2 s b h each.
    """
    x = columns
    c = constants
    is_cpu = cluster.gpu.kind == "cpu"
    weights, gradients, optimizer = model_states(x, stage, c)
    unit = np.maximum(x.layer_parameters + x.expert_parameters, x.embedding_parameters)
    gathered = ((x.zero == 3) & (x.pp == 1)) * c.gathered * unit * x.value_bytes / 2
    kept = kept_bytes(x, stage, c)
    if not is_cpu:
        kept = kept * np.where(x.recompute == FULL, c.checkpoint, 1)
    kept = kept + c.ends * end_bytes(x, stage, c)
    # ALiBi's mask, which the engine keeps for all layers (engine/model/gpt.py); a flash kernel of
    # another stack makes it on the way
    has_mask = x.alibi * np.maximum(c.ends, x.attention)
    buffers = has_mask * x.value_bytes * x.heads / x.tp * x.seq**2
    if not is_cpu:
        # reduce and all-gather buckets of 16-bit values, the first one doubled to overlap
        # (DeepSpeed's configuration page)
        has_buckets = (x.pp == 1) & (x.replicas > 1) & (x.zero > 0)
        buffers = c.base_bytes + has_buckets * (3 * 2.0 * x.bucket_values) + buffers
    parts = {
        "weights": weights * (x.offload != 2) + gathered,
        "gradients": gradients,
        "optimizer": optimizer * (x.offload == 0),
        "activations": in_flight(x, stage) * kept,
        "working": working_bytes(x, stage, c),
        "buffers": buffers,
        "context": cluster.gpu.context_bytes,
    }
    needed = sum(parts.values())
    free = 0.0
    if not is_cpu:
        free = np.sqrt(np.maximum(1 - needed / cluster.gpu.memory_bytes, 0))
    return StageMemory(**parts, fragmentation=c.slack * free * needed)


def host_bytes(columns: Columns, stage: Number, constants: MemoryConstants = DEFAULT) -> Number:
    """CPU memory of one GPU's offload: optimizer, weights ("full"), inputs of recomputed
    layers.
    """
    x = columns
    weights, _, optimizer = model_states(x, stage, constants)
    inputs = stage_layers_at(x, stage) * x.input_bytes * in_flight(x, stage)
    away = (x.offload > 0) * optimizer + (x.offload == 2) * weights
    return away + x.offload_checkpoints * inputs


def memory_bytes(
    columns: Columns, cluster: Cluster, constants: MemoryConstants = DEFAULT
) -> Number:
    """Bytes of the fullest stage."""
    stages = [stage_memory(columns, i, cluster, constants) for i in extreme_stages(columns)]
    return functools.reduce(np.maximum, [stage.total for stage in stages])


def extreme_stages(columns: Columns) -> list[Number]:
    """The first, the second (no embedding, less in flight) and the last pipeline stage (logits): no
    other takes more, but those at which dense layers end.
    """
    x = columns
    last = x.pp - 1
    stages = [0, np.minimum(1, last), last]
    if np.any(x.first_dense):
        first, middle, _ = x.stage_layers
        behind = 1 + np.ceil(np.maximum(x.first_dense - first, 0) / np.maximum(middle, 1))
        stages += [np.minimum(behind, last), np.minimum(behind - 1, last)]
    return stages


def memory_per_stage(
    columns: Columns, cluster: Cluster, constants: MemoryConstants = DEFAULT
) -> list[StageMemory]:
    """Peak memory of one GPU of each pipeline stage, first to last."""
    parts = vars(stage_memory(columns, np.arange(columns.pp), cluster, constants))
    sizes = [np.broadcast_to(part, columns.pp).tolist() for part in parts.values()]
    return [
        StageMemory(**dict(zip(parts, stage, strict=True))) for stage in zip(*sizes, strict=True)
    ]


def oom_probability(bytes_: Number, cluster: Cluster, spread: float = DEFAULT.spread) -> Number:
    """Probability that a predicted need passes the card: normal in ln(bytes).

    The normal distribution by a logistic curve, 1 / (1 + exp(-1.5976 z - 0.07056 z^3)), right to
    1.4e-4: Bowling et al. 2009, Journal of Industrial Engineering and Management 2(1).
    """
    z = np.clip(np.log(bytes_ / cluster.gpu.memory_bytes) / spread, -8, 8)
    return 1 / (1 + np.exp(-1.5976 * z - 0.07056 * z**3))
