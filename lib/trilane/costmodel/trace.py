"""Trace: what the real engine's ranks held, computed and sent when they ran without a GPU, on
tensors without memory.

`trilane measure plan PLAN --trace` writes one (engine/trace/); what a prediction must equal is read
from it here.
"""

import json
from pathlib import Path

from trilane.config.plan import Plan, locate_plan
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import from_mapping, read_json


@frozen
class Collective(Record):
    """The collectives of one kind in one group, of one rank in one iteration; a send and a receive
    count as one each.

    kind    all-reduce, all-gather, reduce-scatter, broadcast, all-to-all, send, receive
    group   the axes along which its ranks differ: tp, cp, dp (with cp), pp or joined as in
            tp-dp-pp. Groups of one rank are left out
    bytes   of all `count`: the whole tensor, so that of what is gathered or scattered all parts
    """

    kind: str
    group: str
    count: int
    bytes: float


@frozen
class Pass(Record):
    """One pass as it ran: forward or backward of a microbatch and model chunk (both from 0), or the
    optimizer's step.
    """

    kind: str
    microbatch: int
    chunk: int


@frozen
class TracedStage(Record):
    """One rank of a pipeline stage (its first, of the first replica) over one iteration of all
    microbatches.

    peak_bytes, peak_at     the most alive at once, and in which pass; the kinds
                            below are of then
    activations_bytes       what forward passes left for their backward passes, of all microbatches
                            in flight
    activations_each_bytes  of one microbatch, once its forward pass is done
    buffers_bytes           alive between iterations, and neither weights, gradients nor optimizer:
                            communication
    temporary_bytes         the rest: what the pass at the peak works with, recomputed activations
                            as well
    flops                   of matrix products and attention, which counts whole (not causal), as in
                            costmodel.layers
    operations              kernels: operations that are not views
    """

    stage: int
    rank: int
    layers: int
    peak_bytes: float
    peak_at: str
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    activations_each_bytes: float
    buffers_bytes: float
    temporary_bytes: float
    flops: float
    operations: int
    collectives: tuple[Collective, ...]
    schedule: tuple[Pass, ...] = ()


@frozen
class Trace(Record):
    """The stages of the plan of this id that ran: the first, the last, and between one for each
    count of layers.

    microbatches, traced_microbatches   of an iteration, and as many as ran: the rest repeats
    """

    plan: str
    engine: str
    gpus: int
    microbatches: int
    traced_microbatches: int
    stages: tuple[TracedStage, ...]


def trace_file(plan: Plan, plan_path: Path | str) -> Path:
    """Where the trace of a plan lies: beside its file and named after its id, as a file may hold
    many plans.
    """
    file, _ = locate_plan(plan_path)
    return file.with_name(f"trace-{plan.id}.json")


def trace_of(plan: Plan, plan_path: Path | str) -> Trace | None:
    """The trace of this very plan (its id) beside its file, or in the study above a run's folder;
    None without one.
    """
    file = trace_file(plan, plan_path).absolute()
    for folder in file.parents[:3]:
        if (folder / file.name).exists():
            return from_mapping(Trace, read_json(folder / file.name, "trace"), "trace")
    return None


def trace_text(trace: Trace) -> str:
    """The trace as JSON, which trace_of() reads back."""
    return json.dumps(trace.to_json(), indent=1) + "\n"
