"""One rank of a plan's real engine in a fake world: built, warmed up, and traced over iterations."""

import contextlib
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from trilane.config.plan import Plan
from trilane.costmodel.memory import stage_layers
from trilane.costmodel.trace import Collective, TracedStage
from trilane.engine.backends.base import Engine, Microbatch, build
from trilane.engine.trace import world as fake
from trilane.engine.trace.recorder import ACTIVATIONS, RECEIVED, TEMPORARY, Recorder


class Totals(NamedTuple):
    """What one iteration computed and sent; `sent`: (kind, group) -> count and bytes."""

    flops: float
    operations: int
    sent: dict[tuple[str, str], tuple[int, float]]


def trace_rank(plan: Plan, stage: int) -> tuple[TracedStage, float]:
    """The first rank of a stage over an iteration of all microbatches, and the bytes that this process took for it.

    Two iterations are counted, of few microbatches and of as many as fill the pipeline: what is theirs is linear in
    microbatches, so that the rest follows. An iteration before them makes the optimizer's states.
    """
    t = plan.topology
    rank = stage * t.gpus // t.pp
    recorder = Recorder(group_names(plan, rank))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, _refused(plan):
        engine = build(plan, fake.join(plan, rank, recorder))
        recorder.watch(engine.modules)
        few, many = traced_microbatches(plan)
        _step(engine, plan, few)
        _assign(engine, recorder)
        recorder.begin()
        _step(engine, plan, few)
        before = Totals(recorder.flops, recorder.operations, recorder.sent)
        recorder.begin()
        _step(engine, plan, many)
    after = Totals(recorder.flops, recorder.operations, recorder.sent)
    totals = _all(before, after, few, many, t.microbatches)
    layers = stage_layers(plan.shape, t)[stage]
    taken = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _stage(recorder, totals, stage=stage, rank=rank, layers=layers), taken


@contextlib.contextmanager
def _refused(plan: Plan) -> Iterator[None]:
    """An operation that has no shape without values, such as one of an own layer, as one line."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        field, value = ("layer", plan.layer.name) if plan.layer else ("engine", plan.engine)
        raise ValueError(f"{field}={value}: {error.func} needs values, and a trace has none") from None


def traced_microbatches(plan: Plan) -> tuple[int, int]:
    """Microbatches of the two iterations: one, and one more than the pipeline is deep; of its multiples with chunks."""
    t = plan.topology
    unit = t.pp if t.interleaving > 1 else 1
    return min(unit, t.microbatches), min(2 * unit if unit > 1 else t.pp + 1, t.microbatches)


def group_names(plan: Plan, rank: int) -> dict[tuple[int, ...], str]:
    """Ranks of a group -> its name, for the groups of `rank`: megatron-core and DeepSpeed order them alike."""
    t = plan.topology
    replicas = t.dp * t.cp  # ranks run tp fastest, then cp, dp, pp
    each, shared = t.tp * replicas, t.tp * t.cp
    stage, replica, part = rank // each, rank // t.tp % replicas, rank % t.tp
    ends = tuple(dict.fromkeys([part + replica * t.tp, part + replica * t.tp + (t.pp - 1) * each]))
    named = {
        "world": tuple(range(t.gpus)),
        "tp-pp": tuple(p * each + replica * t.tp + i for p in range(t.pp) for i in range(t.tp)),
        "tp-dp": tuple(range(stage * each, (stage + 1) * each)),
        "embedding": ends,
        "pp": tuple(range(part + replica * t.tp, t.gpus, each)),
        "cp": tuple(range(rank - rank % shared + part, rank - rank % shared + shared, t.tp)),
        "dp": tuple(range(stage * each + part, (stage + 1) * each, t.tp)),
        "tp": tuple(range(rank - part, rank - part + t.tp)),
    }
    return {ranks: name for name, ranks in named.items()}


def _step(engine: Engine, plan: Plan, count: int) -> None:
    shape = (plan.topology.mbs, plan.shape.seq_length)
    tokens = [torch.zeros(shape, dtype=torch.long) for _ in range(2 * count)]
    microbatches = [Microbatch(tokens=tokens[2 * i], labels=tokens[2 * i + 1]) for i in range(count)]
    engine.step(microbatches, plan.optimizer.lr)


def _assign(engine: Engine, recorder: Recorder) -> None:
    """What the engine holds between iterations, by what it is for."""
    parameters = [parameter for module in engine.modules for parameter in module.parameters()]
    outer: Any = engine._optimizer
    for chained in getattr(outer, "chained_optimizers", [outer]):
        inner = getattr(chained, "optimizer", chained)
        # the keys of its state, too: ZeRO-3's fp32 weights stand in no group between steps
        recorder.assign("optimizer", tree_leaves((list(inner.state.items()), inner.param_groups)))
    # DeepSpeed's flat sums and shares of gradients
    recorder.assign("gradients", tree_leaves([held for name, held in vars(outer).items() if "grad" in name]))
    for parameter in parameters:
        recorder.assign("gradients", [parameter.grad, getattr(parameter, "main_grad", None)])
        recorder.assign("weights", [parameter, getattr(parameter, "ds_tensor", None)])


def _all(before: Totals, after: Totals, few: int, many: int, microbatches: int) -> Totals:
    """Of all microbatches, from the totals of iterations of few and of many."""
    more = (microbatches - many) / (many - few) if many > few else 0.0

    def scaled(first: float, second: float) -> float:
        return second + more * (second - first)

    sent = {}
    for entry, (count, size) in after.sent.items():
        first = before.sent.get(entry, (0, 0.0))
        sent[entry] = round(scaled(first[0], count)), scaled(first[1], size)
    operations = round(scaled(before.operations, after.operations))
    return Totals(scaled(before.flops, after.flops), operations, sent)


def _stage(recorder: Recorder, totals: Totals, **given: Any) -> TracedStage:
    held = recorder.at_peak
    first = Counter[int]()
    for (microbatch, _), size in recorder.each.items():
        first[microbatch] += size
    groups = [
        Collective(kind=kind, group=group, count=count, bytes=size)
        for (kind, group), (count, size) in sorted(totals.sent.items())
    ]
    return TracedStage(
        **given,
        derived=False,
        peak_bytes=recorder.peak,
        peak_at=recorder.peak_at,
        weights_bytes=held["weights"],
        gradients_bytes=held["gradients"],
        optimizer_bytes=held["optimizer"],
        buffers_bytes=held["buffers"],
        activations_bytes=held[ACTIVATIONS],
        activations_each_bytes=first[0],
        temporary_bytes=held[TEMPORARY] + held[RECEIVED],
        cpu_only_bytes=held["cpu_only"],
        flops=totals.flops,
        operations=totals.operations,
        collectives=tuple(groups),
        schedule=tuple(recorder.schedule),
    )
