"""One rank of a plan's real engine in a fake world: built, warmed up, and traced over
iterations.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.trace import Collective, TracedStage
from trilane_engine.backends.base import Engine, Microbatch, build
from trilane_engine.patches import fake_tensor
from trilane_engine.trace import world as fake
from trilane_engine.trace.recorder import ACTIVATIONS, STATES, TEMPORARY, Recorder


def trace_rank(plan: Plan, stage: int, layers: int) -> TracedStage:
    """The first rank of a stage, which has so many layers, over an iteration of all microbatches.

    Two iterations are counted, of few microbatches and of as many as fill the pipeline: what is
    theirs is linear in microbatches, so that the rest follows. An iteration before them makes the
    optimizer's states.
    """
    # alone, before other threads: the fork has lost torch's pool, and two that renew it abort
    torch.set_num_threads(1)
    t = plan.topology
    rank = stage * t.gpus // t.pp
    few, many = traced_microbatches(plan)
    recorder = Recorder(functools.cache(functools.partial(group_name, t)))
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), recorder, _refused(plan):
        engine = build(plan, fake.join(plan, rank, recorder))
        recorder.watch(engine.modules)
        _step(engine, plan, few)
        _assign(engine, recorder)
        recorder.begin()
        _step(engine, plan, few)
        before = recorder.totals
        recorder.begin()
        _step(engine, plan, many)
    more = (t.microbatches - many) / max(many - few, 1)
    totals = {
        name: value + more * (value - before[name]) for name, value in recorder.totals.items()
    }
    return _stage(recorder, totals, stage=stage, rank=rank, layers=layers)


@contextlib.contextmanager
def _refused(plan: Plan) -> Iterator[None]:
    """An operation that has no shape without values, such as one of an own layer, as one line."""
    try:
        yield
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    ) as error:
        if plan.layer:
            name = f"layer={plan.layer.name}"
        else:
            name = f"engine={plan.engine}"
        raise ValueError(f"{name}: {error.func} needs values, and a trace has none") from None


def traced_microbatches(plan: Plan) -> tuple[int, int]:
    """Microbatches of the two iterations: one, and one more than the pipeline is deep; of its
    multiples with chunks.
    """
    t = plan.topology
    few = 1
    many = t.pp + 1
    if t.interleaving > 1:
        few = t.pp
        many = 2 * t.pp
    return min(few, t.microbatches), min(many, t.microbatches)


def group_name(t: Topology, ranks: tuple[int, ...]) -> str:
    """The axes along which ranks differ, such as "tp-pp"; `dp` is with cp. They run tp fastest,
    then cp, dp, pp.
    """
    places = np.unravel_index(ranks, (t.pp, t.dp, t.cp, t.tp))
    pp, dp, cp, tp = [len(set(place)) > 1 for place in places]
    spans = {"tp": tp, "cp": cp and not dp, "dp": dp, "pp": pp}
    return "-".join(axis for axis, differs in spans.items() if differs)


def _step(engine: Engine, plan: Plan, count: int) -> None:
    size = (plan.topology.mbs, plan.shape.seq_length)
    microbatches = []
    for _ in range(count):
        tokens = torch.zeros(size, dtype=torch.long)
        microbatches.append(Microbatch(tokens=tokens, labels=torch.zeros_like(tokens)))
    engine.step(microbatches, plan.optimizer.lr)


def _assign(engine: Engine, recorder: Recorder) -> None:
    """What the engine holds between iterations, by what it is for."""
    outer: Any = engine._optimizer
    for chained in getattr(outer, "chained_optimizers", [outer]):
        inner = getattr(chained, "optimizer", chained)
        # the keys of its state, too: ZeRO-3's fp32 weights stand in no group between steps
        recorder.assign("optimizer", list(inner.state.items()), inner.param_groups)
    # DeepSpeed's flat sums and shares of gradients
    recorder.assign("gradients", [held for name, held in vars(outer).items() if "grad" in name])
    for parameter in (parameter for module in engine.modules for parameter in module.parameters()):
        recorder.assign("gradients", parameter.grad, getattr(parameter, "main_grad", None))
        recorder.assign("weights", parameter, getattr(parameter, "ds_tensor", None))


def _stage(recorder: Recorder, totals: dict[Any, float], **given: Any) -> TracedStage:
    held: Any = recorder.held()
    flops = totals.pop("flops")
    operations = totals.pop("operations")
    groups = []
    for kind, group in sorted({(kind, group) for kind, group, _ in totals}):
        count = round(totals[kind, group, "count"])
        size = totals[kind, group, "bytes"]
        groups.append(Collective(kind=kind, group=group, count=count, bytes=size))
    of_first = [size for (microbatch, _), size in recorder.each.items() if microbatch == 0]
    return TracedStage(
        **given,
        **{f"{kind}_bytes": held[kind] for kind in (*STATES, ACTIVATIONS, TEMPORARY)},
        peak_bytes=recorder.peak,
        peak_at=recorder.peak_at,
        activations_each_bytes=sum(of_first),
        flops=flops,
        operations=round(operations),
        collectives=tuple(groups),
        schedule=tuple(recorder.schedule),
    )
