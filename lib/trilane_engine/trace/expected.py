"""What the formulas expect one stage of a plan to hold, compute and send in an iteration, and a
trace beside that.

The tracer runs the real engine (engine/trace); here is arithmetic alone. Left out: the number of
buckets whose reduction overlaps (NaN), offload, and layers of one's own.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from trilane.config.engines import has_bf16_optimizer
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import SELECTIVE, Columns, Number, columns_of
from trilane.costmodel.memory import (
    MemoryConstants,
    activation_bytes_per_layer,
    end_bytes,
    engine_memory,
    in_flight,
    model_states,
    stage_layers_at,
    stage_parameters,
)
from trilane.costmodel.trace import Trace, TracedStage

Message = tuple[str, str, float, float]  # kind, group, count, bytes of each
WIDE = 4.0  # bytes in which megatron-core sums gradients


def compare(plan: Plan, trace: Trace) -> list[dict[str, Any]]:
    """Each number of the stages that were traced beside its prediction, as `stage`, `quantity`,
    `traced` and `predicted`: `compare(plan, trace_of(plan, "plan.json"))`.

    Bytes of a kind of memory (activations: of one microbatch, and how many are in flight), FLOPs,
    and count and bytes of the collectives of each kind and group; NaN is unknown.
    """
    differences = []
    for stage in trace.stages:
        pair = {"traced": traced(stage), "predicted": expected(plan, stage.stage)}
        for quantity in dict.fromkeys([*pair["traced"], *pair["predicted"]]):
            numbers = {side: values.get(quantity, 0.0) for side, values in pair.items()}
            differences.append({"stage": stage.stage, "quantity": quantity, **numbers})
    return differences


def traced(stage: TracedStage) -> dict[str, float]:
    """The numbers of a traced stage by the quantities of expected()."""
    held = [{"forward": 1, "backward": -1}.get(step.kind, 0) for step in stage.schedule]
    most_held = max(itertools.accumulate(held, initial=0))
    chunks = max(len({step.chunk for step in stage.schedule}), 1)
    numbers = {
        "weights": stage.weights_bytes,
        "gradients": stage.gradients_bytes,
        "optimizer": stage.optimizer_bytes,
        "activations": stage.activations_each_bytes,
        "flops": stage.flops,
        "in flight": most_held / chunks,
    }
    for c in stage.collectives:
        numbers[f"{c.kind} {c.group} count"] = c.count
        numbers[f"{c.kind} {c.group} bytes"] = c.bytes
    return numbers


def expected(plan: Plan, stage: int) -> dict[str, float]:
    """The numbers of compare() by quantity: "weights", ... in bytes, "flops", "all-reduce tp
    count", "... bytes".
    """
    x = columns_of(plan.shape, plan.topology, plan.engine)
    constants = engine_memory(plan.engine, plan.cluster, plan.dropout, plan.topology.zero)
    weights, gradients, optimizer = model_states(x.changed(adam=0), stage, constants)
    if plan.engine != "megatron" and not has_bf16_optimizer(plan.topology):
        gradients = np.nan
    numbers = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": microbatch_bytes(x, stage, constants),
        "in flight": in_flight(x, stage),
        "flops": stage_flops(x, stage, constants),
    }
    numbers |= _by_group(messages(plan, x, stage, constants), plan.topology)
    return {name: float(value) for name, value in numbers.items()}


def microbatch_bytes(x: Columns, stage: int, constants: MemoryConstants) -> Number:
    """Activations of one microbatch when its backward pass begins; on the last stage with its
    logits.

    The compiled loss keeps them in their own precision, any other an fp32 softmax
    (engine/model/fused.py).
    """
    each = x.value_bytes
    if constants.gates or constants.unfused:
        each = 4 + constants.handed * x.value_bytes
    logits = (stage == x.pp - 1) * x.tokens * x.vocab / x.tp * each
    layers = stage_layers_at(x, stage) * activation_bytes_per_layer(x, constants)
    # int64; of a part of the vocabulary a copy and a mask, too
    ids = (stage == 0) * x.tokens * (8 + 9 * (x.tp > 1))
    return layers + end_bytes(x, stage, constants) + logits + ids


def stage_flops(x: Columns, stage: int, constants: MemoryConstants) -> Number:
    """FLOPs of a stage: ModelShape.flops_per_iteration() of its part of layers and head, and what
    is computed again.

    transformers' layers end their recomputation with the last input that is kept: without the MLP's
    second product.
    """
    layers = stage_layers_at(x, stage)
    linear = 2 * x.tokens * x.layer_weights
    core = 4 * x.tokens * x.seq * x.hidden / x.tp
    if x.cp > 1:
        core *= (2 * x.cp + 1) / (4 * x.cp)  # keys of two chunks up to their ends
    left = constants.unfused * 2 * x.tokens * x.hidden * x.ffn / x.tp
    again = x.recomputed * (linear - left + core) + (x.recompute == SELECTIVE) * core
    head = (stage == x.pp - 1) * 6 * x.tokens * x.embedding_parameters
    return x.microbatches * (layers * (3 * (linear + core) + again) + head)


def messages(plan: Plan, x: Columns, stage: int, constants: MemoryConstants) -> Iterator[Message]:
    """What a rank of the stage sends in an iteration, as megatron-core 0.16.1 and DeepSpeed 0.19.8
    do.
    """
    m = x.microbatches
    for kind, group, count, size in _of_microbatch(plan, x, stage, bool(constants.gates)):
        yield kind, group, m * count, size
    if x.pp > 1:
        ends = int(stage == 0) + int(stage == x.pp - 1)
        hidden = x.tokens * x.hidden * x.value_bytes / (x.tp if x.sequence_parallel else 1)
        for kind in ("send", "receive"):
            yield kind, "pp", m * (2 * x.interleaving - ends), hidden
    yield from _of_iteration(plan, x, stage)


def _of_microbatch(plan: Plan, x: Columns, stage: int, unfused: bool) -> Iterator[Message]:
    """Tensor parallelism: Narayanan et al. 2021, section 3.2; of sequences: Korthikanti et al.
    2022, section 4.2.2.

    Of a gathered input a rank keeps its part, and gathers it again for the gradient of the weights.
    """
    hidden = x.tokens * x.hidden * x.value_bytes
    layers = stage_layers_at(x, stage)
    again = x.recomputed
    first = stage == 0
    last = stage == x.pp - 1
    if x.sequence_parallel:
        # learned positions are added before the sequence is cut
        learned = plan.shape.positions == "learned" or plan.engine == "deepspeed-3d"
        yield "all-gather", "tp", layers * (6 + 2 * again) + first + 2 * last, hidden
        scattered = layers * (4 + 2 * again) + last + (first and not learned)
        yield "reduce-scatter", "tp", scattered, hidden
        yield "all-reduce", "tp", first and learned, hidden
    else:
        yield "all-reduce", "tp", layers * (4 + 2 * again) + first + last, hidden
    if x.cp > 1:  # keys and values, and their gradients
        size = x.tokens * x.cp * x.kv_hidden / x.tp * x.value_bytes
        yield "all-gather", "cp", 2 * layers * (1 + again + (x.recompute == SELECTIVE)), size
        yield "reduce-scatter", "cp", 2 * layers, size
    if last and unfused:
        yield "all-reduce", "tp", 3, 4 * x.tokens
    elif last:  # the largest logit; sum and label's logit together
        yield "all-reduce", "tp", 2, 6 * x.tokens


def _of_iteration(plan: Plan, x: Columns, stage: int) -> Iterator[Message]:
    """Sums of gradients, gathered weights, and the numbers that all ranks must agree on: norm,
    loss, overflow.
    """
    first = stage == 0
    last = stage == x.pp - 1
    layers = stage_layers_at(x, stage)
    is_deepspeed = plan.engine != "megatron"
    if x.sequence_parallel:
        # what ranks hold whole: norms, and biases of row-parallel matrices
        whole = 2 * layers * x.hidden * (x.biases == 2) + (2 * layers + last) * x.norm_values
        whole = whole + first * 2 * x.hidden * x.embedding_layernorm
        if is_deepspeed:  # a hook sums each as soon as it exists
            count = np.ceil(whole / x.hidden)
            yield "all-reduce", "tp", x.microbatches * count, x.value_bytes * whole / count
        else:
            yield "all-reduce", "tp", 1.0, WIDE * whole
    is_tied = plan.shape.tied_embeddings and x.pp > 1 and (first or last)
    if is_deepspeed and not x.fp32_gradients:
        size = x.value_bytes
    else:
        size = WIDE
    yield "all-reduce", "embedding", float(is_tied), size * x.embedding_parameters
    yield "all-reduce", "dp", float(last), 4.0
    if is_deepspeed:
        yield from _of_deepspeed(plan, x, stage)
    else:
        yield from _of_megatron(plan, x, stage, is_tied)


def _of_megatron(plan: Plan, x: Columns, stage: int, is_tied: bool) -> Iterator[Message]:
    parameters = stage_parameters(x, stage)
    # the distributed optimizer keeps a shared embedding apart; the first stage sums its buckets
    # while it computes
    buckets = x.interleaving + is_tied * (x.zero > 0)
    each = parameters / buckets
    if plan.topology.overlap_grad_reduce and not stage:
        buckets = np.nan
        each = parameters
    if x.zero:
        yield "reduce-scatter", "dp", buckets, WIDE * each
        yield "all-gather", "dp", buckets, x.value_bytes * each
    else:
        yield "all-reduce", "dp", buckets, WIDE * each
    ranks = "tp-dp-pp" if x.zero else "tp-pp"
    yield "all-reduce", ranks, 1.0 + (plan.topology.precision == "fp16"), 4.0


def _of_deepspeed(plan: Plan, x: Columns, stage: int) -> Iterator[Message]:
    """Stage 1 in bf16 (BF16_Optimizer): 16-bit gradients summed at once, weights gathered for each
    of two groups.

    Stages 2 and 3 reduce the gradients of every microbatch; how many buckets they take is left out
    (no number).
    """
    weights = x.value_bytes * stage_parameters(x, stage)
    is_scaled = plan.topology.precision == "fp16"
    is_zero3 = x.zero == 3
    is_summed = has_bf16_optimizer(plan.topology)
    yield "all-reduce", "tp-pp", 1.0, 4.0
    if not is_summed:
        # ZeRO-3 looks for an overflow in fp16 alone, stages 1 and 2 always
        yield "all-reduce", "tp-pp", 1.0 + is_scaled if is_zero3 else 2.0, 2.5
    if x.pp > 1:
        yield "broadcast", "pp", 1.0, 8.0
    if is_zero3:
        yield "all-reduce", "dp", 2.0, 8.0
        yield "all-reduce", "dp", float(is_scaled), 1.0
        yield "reduce-scatter", "dp", np.nan, x.microbatches * weights
        yield "all-gather", "dp", np.nan, x.microbatches * weights
        return
    if is_summed:
        # of two groups, together up to 500,000,000 values (deepspeed/runtime/engine.py,
        # MEMORY_OPT_ALLREDUCE_SIZE)
        buckets = 1.0 + (weights > 5e8 * x.value_bytes)
        yield "all-reduce", "dp", buckets, weights / buckets
    else:
        times = 1 if x.zero == 1 else x.microbatches
        yield "all-reduce", "dp", np.nan, times * weights
    yield "all-gather", "dp", 2.0, weights * 0.5


def _by_group(sent: Iterator[Message], t: Topology) -> dict[str, float]:
    """Count and bytes by kind and group, whose name keeps the axes of more than one rank; none of
    one rank alone.
    """
    ranks = {"tp": t.tp, "cp": t.cp, "dp": t.dp * t.cp, "pp": t.pp, "embedding": 2}
    totals = dict[str, float]()
    for kind, group, count, size in sent:
        axes = [axis for axis in group.split("-") if ranks[axis] > 1]
        if t.dp == 1:
            axes = ["cp" if axis == "dp" else axis for axis in axes]
        if not count or not axes:
            continue
        name = f"{kind} {'-'.join(axes)}"
        total = size if np.isnan(count) else count * size
        totals[f"{name} count"] = totals.get(f"{name} count", 0.0) + float(count)
        totals[f"{name} bytes"] = totals.get(f"{name} bytes", 0.0) + float(total)
    return totals
