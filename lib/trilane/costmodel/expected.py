"""What the formulas expect one stage of a plan to hold, compute and send in an iteration, and a
trace beside that.

The tracer runs the real engine (engine/trace); here is arithmetic alone. Left out: the number of
buckets whose reduction overlaps (NaN), offload, and layers of one's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from trilane.config.engines import has_bf16_optimizer
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import Columns, columns_of
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
from trilane.costmodel.trace import Trace
from trilane.utils.tables import Record

Message = tuple[str, str, float, float]  # kind, group, count, bytes of each


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """One number of a stage: traced, and predicted by the formulas."""

    stage: int
    quantity: str
    traced: float
    predicted: float

    @property
    def difference(self) -> float:
        """(predicted - traced) / traced; infinite where one of the two is 0."""
        if self.traced == self.predicted:
            return 0.0
        return self.predicted / self.traced - 1 if self.traced and self.predicted else float("inf")


def compare(plan: Plan, trace: Trace) -> tuple[Difference, ...]:
    """Each number of the stages that were traced beside its prediction: `compare(plan,
    trace_of(plan, "plan.json"))`.

    Bytes of a kind of memory (activations: of one microbatch, and how many are in flight), FLOPs,
    and count and bytes of the collectives of each kind and group; NaN is unknown.
    """
    found = []
    for s in trace.stages:
        traced = {
            "weights": s.weights_bytes,
            "gradients": s.gradients_bytes,
            "optimizer": s.optimizer_bytes,
        }
        traced |= {"activations": s.activations_each_bytes, "flops": s.flops}
        held = accumulate((p.kind == "forward") - (p.kind == "backward") for p in s.schedule)
        traced["in flight"] = max(held, default=0) / len({p.chunk for p in s.schedule} or "1")
        for c in s.collectives:
            traced |= {
                f"{c.kind} {c.group} count": float(c.count),
                f"{c.kind} {c.group} bytes": c.bytes,
            }
        predicted = expected(plan, s.stage)
        for quantity in dict.fromkeys([*traced, *predicted]):
            pair = {"traced": traced.get(quantity, 0.0), "predicted": predicted.get(quantity, 0.0)}
            found.append(Difference(stage=s.stage, quantity=quantity, **pair))
    return tuple(found)


def expected(plan: Plan, stage: int) -> dict[str, float]:
    """The numbers of compare() by quantity: "weights", ... in bytes, "flops", "all-reduce tp
    count", "... bytes".
    """
    x = columns_of(plan.shape, plan.topology, plan.engine)
    constants = engine_memory(plan.engine, plan.cluster, plan.dropout, plan.topology.zero)
    weights, gradients, optimizer = model_states(replace(x, adam=0), stage, constants)
    found = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    if plan.engine != "megatron" and not has_bf16_optimizer(plan.topology):
        found["gradients"] = np.nan
    found["activations"], found["in flight"] = (
        microbatch_bytes(x, stage, constants),
        in_flight(x, stage),
    )
    found["flops"] = stage_flops(x, stage, constants)
    sent = _by_group(messages(plan, x, stage, constants), plan.topology)
    return {name: float(value) for name, value in (found | sent).items()}


def microbatch_bytes(x: Columns, stage: int, constants: MemoryConstants) -> float:
    """Activations of one microbatch when its backward pass begins; on the last stage with its
    logits.

    The compiled loss keeps them in their own precision, any other an fp32 softmax
    (engine/model/fused.py).
    """
    wide = constants.gates + constants.unfused
    each = 4 + constants.handed * x.value_bytes if wide else x.value_bytes
    logits = (stage == x.pp - 1) * x.tokens * x.vocab / x.tp * each
    layers = stage_layers_at(x, stage) * activation_bytes_per_layer(x, constants)
    ids = (
        (stage == 0) * x.tokens * (8 + 9 * (x.tp > 1))
    )  # int64; of a part of the vocabulary a copy and a mask, too
    return float(layers + end_bytes(x, stage, constants) + logits + ids)


def stage_flops(x: Columns, stage: int, constants: MemoryConstants) -> float:
    """FLOPs of a stage: ModelShape.flops_per_iteration() of its part of layers and head, and what
    is computed again.

    transformers' layers end their recomputation with the last input that is kept: without the MLP's
    second product.
    """
    layers, linear = stage_layers_at(x, stage), 2 * x.tokens * x.layer_weights
    seen = np.where(
        np.greater(x.cp, 1), (2 * x.cp + 1) / (4 * x.cp), 1
    )  # keys of two chunks up to their ends
    core = 4 * x.tokens * x.seq * seen * x.hidden / x.tp
    left = constants.unfused * 2 * x.tokens * x.hidden * x.ffn / x.tp
    again = x.recomputed * (linear - left + core) + np.equal(x.recompute, 1) * core
    head = (stage == x.pp - 1) * 6 * x.tokens * x.embedding_parameters
    return float(x.microbatches * (layers * (3 * (linear + core) + again) + head))


def messages(plan: Plan, x: Columns, stage: int, constants: MemoryConstants) -> Iterator[Message]:
    """What a rank of the stage sends in an iteration, as megatron-core 0.16.1 and DeepSpeed 0.19.8
    do.
    """
    m = x.microbatches
    for kind, group, count, size in _of_microbatch(plan, x, stage, bool(constants.gates)):
        yield kind, group, m * count, size
    ends = int(stage == 0) + int(stage == x.pp - 1)
    hidden = x.tokens * x.hidden * x.value_bytes / (x.tp if x.sequence_parallel else 1)
    if x.pp > 1:
        for kind in ("send", "receive"):
            yield kind, "pp", m * (2 * x.interleaving - ends), hidden
    yield from _of_iteration(plan, x, stage)


def _of_microbatch(plan: Plan, x: Columns, stage: int, unfused: bool) -> Iterator[Message]:
    """Tensor parallelism: Narayanan et al. 2021, section 3.2; of sequences: Korthikanti et al.
    2022, section 4.2.2.

    Of a gathered input a rank keeps its part, and gathers it again for the gradient of the weights.
    """
    hidden, layers, again = (
        x.tokens * x.hidden * x.value_bytes,
        stage_layers_at(x, stage),
        x.recomputed,
    )
    first, last = stage == 0, stage == x.pp - 1
    learned = plan.shape.positions == "learned" or plan.engine == "deepspeed-3d"
    if x.sequence_parallel:
        yield "all-gather", "tp", layers * (6 + 2 * again) + first + 2 * last, hidden
        yield (
            "reduce-scatter",
            "tp",
            layers * (4 + 2 * again) + last + (first and not learned),
            hidden,
        )
        yield (
            "all-reduce",
            "tp",
            first and learned,
            hidden,
        )  # positions are added before the sequence is cut
    else:
        yield "all-reduce", "tp", layers * (4 + 2 * again) + first + last, hidden
    if x.cp > 1:  # keys and values, and their gradients
        size = x.tokens * x.cp * x.kv_hidden / x.tp * x.value_bytes
        yield "all-gather", "cp", 2 * layers * (1 + again + np.equal(x.recompute, 1)), size
        yield "reduce-scatter", "cp", 2 * layers, size
    if last and unfused:
        yield "all-reduce", "tp", 3, 4 * x.tokens
    elif last:
        yield (
            "all-reduce",
            "tp",
            2,
            6 * x.tokens,
        )  # the largest logit; sum and label's logit together


def _of_iteration(plan: Plan, x: Columns, stage: int) -> Iterator[Message]:
    """Sums of gradients, gathered weights, and the numbers that all ranks must agree on: norm,
    loss, overflow.
    """
    first, last, layers = stage == 0, stage == x.pp - 1, stage_layers_at(x, stage)
    deepspeed, wide = plan.engine != "megatron", 4.0  # megatron-core sums gradients in fp32
    whole = (
        2 * layers * x.hidden * np.equal(x.biases, 2)
    )  # biases of row-parallel matrices, which ranks hold whole
    whole = (
        whole + (2 * layers + last) * x.norm_values + first * 2 * x.hidden * x.embedding_layernorm
    )
    if x.sequence_parallel and deepspeed:  # a hook sums each as soon as it exists
        count = np.ceil(whole / x.hidden)
        yield "all-reduce", "tp", x.microbatches * count, x.value_bytes * whole / count
    elif x.sequence_parallel:
        yield "all-reduce", "tp", 1.0, wide * whole
    tied = plan.shape.tied_embeddings and x.pp > 1 and (first or last)
    size = x.value_bytes + (wide - x.value_bytes) * np.maximum(x.fp32_gradients, not deepspeed)
    yield "all-reduce", "embedding", float(tied), size * x.embedding_parameters
    yield "all-reduce", "dp", float(last), 4.0
    yield from (_of_deepspeed if deepspeed else _of_megatron)(plan, x, stage, tied)


def _of_megatron(plan: Plan, x: Columns, stage: int, tied: bool) -> Iterator[Message]:
    wide, parameters = 4.0, stage_parameters(x, stage)
    # the distributed optimizer keeps a shared embedding apart; the first stage sums its buckets
    # while it computes
    buckets = (
        np.nan
        if plan.topology.overlap_grad_reduce and not stage
        else x.interleaving + tied * (x.zero > 0)
    )
    each = parameters / (1 if np.isnan(buckets) else buckets)
    if x.zero:
        yield "reduce-scatter", "dp", buckets, wide * each
        yield "all-gather", "dp", buckets, x.value_bytes * each
    else:
        yield "all-reduce", "dp", buckets, wide * each
    yield (
        "all-reduce",
        "tp-dp-pp" if x.zero else "tp-pp",
        1.0 + (plan.topology.precision == "fp16"),
        4.0,
    )


def _of_deepspeed(plan: Plan, x: Columns, stage: int, tied: bool) -> Iterator[Message]:
    """Stage 1 in bf16 (BF16_Optimizer): 16-bit gradients summed at once, weights gathered for each
    of two groups.

    Stages 2 and 3 reduce the gradients of every microbatch; how many buckets they take is left out
    (no number).
    """
    weights, summed = x.value_bytes * stage_parameters(x, stage), has_bf16_optimizer(plan.topology)
    yield "all-reduce", "tp-pp", 1.0, 4.0
    scaled = (
        plan.topology.precision == "fp16"
    )  # ZeRO-3 looks for an overflow in fp16 alone, stages 1 and 2 always
    yield "all-reduce", "tp-pp", 0.0 if summed else 1.0 + scaled if x.zero == 3 else 2.0, 2.5
    yield "all-reduce", "dp", 2.0 * (x.zero == 3), 8.0
    yield "all-reduce", "dp", float(scaled and x.zero == 3), 1.0
    if x.pp > 1:
        yield "broadcast", "pp", 1.0, 8.0
    if x.zero == 1:
        # of two groups, together up to 500,000,000 values (deepspeed/runtime/engine.py,
        # MEMORY_OPT_ALLREDUCE_SIZE)
        buckets = 1.0 + (weights > 5e8 * x.value_bytes)
        yield (
            "all-reduce",
            "dp",
            buckets if summed else np.nan,
            weights / (buckets if summed else 1),
        )
    else:
        yield (
            "reduce-scatter" if x.zero == 3 else "all-reduce",
            "dp",
            np.nan,
            x.microbatches * weights,
        )
    yield (
        "all-gather",
        "dp",
        np.nan if x.zero == 3 else 2.0,
        weights * (x.microbatches if x.zero == 3 else 0.5),
    )


def _by_group(sent: Iterator[Message], t: Topology) -> dict[str, float]:
    """Count and bytes by kind and group, whose name keeps the axes of more than one rank; none of
    one rank alone.
    """
    found, ranks = (
        dict[str, float](),
        {"tp": t.tp, "cp": t.cp, "dp": t.dp * t.cp, "pp": t.pp, "embedding": 2},
    )
    for kind, group, count, size in sent:
        axes = (
            "cp" if axis == "dp" and t.dp == 1 else axis
            for axis in group.split("-")
            if ranks[axis] > 1
        )
        if count and (name := "-".join(axes)):
            for what, value in (
                ("count", count),
                ("bytes", size if np.isnan(count) else count * size),
            ):
                key = f"{kind} {name} {what}"
                found[key] = found.get(key, 0.0) + float(value)
    return found
