"""What the formulas expect one stage of a plan to hold and compute in an iteration, and a trace
beside that.

The tracer runs the real engine (engine/trace); here is arithmetic alone. Left out: collectives,
offload, and layers of one's own.
"""

import itertools
from typing import Any

import numpy as np

from trilane.config.engines import has_bf16_optimizer
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
)
from trilane.costmodel.trace import Trace, TracedStage


def compare(plan: Plan, trace: Trace) -> list[dict[str, Any]]:
    """Each number of the stages that were traced beside its prediction, as `stage`, `quantity`,
    `traced` and `predicted`: `compare(plan, trace_of(plan, "plan.json"))`.

    Bytes of a kind of memory (activations: of one microbatch, and how many are in flight), FLOPs,
    and count and bytes of the collectives of each kind and group, whose prediction is NaN, unknown.
    """
    differences = []
    for stage in trace.stages:
        predicted = expected(plan, stage.stage)
        for quantity, number in traced(stage).items():
            row = {"stage": stage.stage, "quantity": quantity, "traced": number}
            row["predicted"] = predicted.get(quantity, np.nan)
            differences.append(row)
    return differences


def traced(stage: TracedStage) -> dict[str, float]:
    """The numbers of a traced stage by quantity: those of expected(), then "all-reduce tp count",
    "... bytes".
    """
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
    """The numbers of compare() by quantity: "weights", ... in bytes, "flops"."""
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
