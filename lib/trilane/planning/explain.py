"""One plan: what limits its time and memory, how sure that is; changed by hand."""

from pathlib import Path
from typing import Any

from trilane.config.parallelism import invalid_reason
from trilane.config.plan import Plan, read_plan
from trilane.config.training import Run
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, predict
from trilane.planning.search_result import Candidate
from trilane.utils.numbers import with_bounds
from trilane.utils.tables import Lines
from trilane.utils.validation import require


def explain(plan: Plan | Path | str, calibration: Calibration | str | None = None) -> Lines:
    """What decides the seconds and the memory of a plan, how sure that is, and what measurements
    support it, in sentences.

        explain(search(shape, cluster, gpus=384, gbs=2048)[0].plan)
    """
    rule = "predict([a, b]) compares them"
    require(not isinstance(calibration, Plan), "explain", "two plans", rule)
    plan = read_plan(plan)
    p = predict(plan, calibration=calibration)
    parts = vars(p.time)
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
    shares = [f"{name.replace('_', ' ')} {parts[name] / p.time.total:.0%}" for name in largest]
    sending = ("tensor_parallel", "expert_parallel", "pipeline_p2p", "data_parallel")
    sent = sum(parts[name] for name in sending) / p.time.total
    stage = max(p.stages, key=lambda stage: stage.total)
    kinds = vars(stage)
    kind = max(kinds, key=kinds.__getitem__)
    card = plan.cluster.gpu.memory_bytes / 2**30
    where = f"stage {p.stages.index(stage)} of {len(p.stages)}"
    most = f"most of it {kind} ({kinds[kind] / stage.total:.0%})"
    seconds = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)
    return Lines(
        [
            f"Time: {', '.join(shares)} of an iteration; all communication takes {sent:.0%}.",
            f"Memory: {stage.total / 2**30:.1f} of {card:.1f} GiB on {where}, {most}.",
            f"How sure: 9 of 10 such runs take {seconds} s; P(OOM) {p.oom_probability:.2f}.",
            f"Support: {p.support.words}.",
        ]
    )


def varied(base: Plan, calibration: Calibration | None, **changes: Any) -> Candidate:
    """The plan with other fields of its topology, or by another engine, without a ramp of the
    batch, predicted.

    Raises ValueError with the rule by which a search refuses it.
    """
    # the sizes of a ramp need not be multiples of the new mbs x dp
    plan = base.replace(run=Run(), **changes)
    if plan.id == base.id:
        plan = base
    elif reason := invalid_reason(plan.shape, plan.topology, plan.cluster):
        raise ValueError(reason)
    found = Candidate(plan=plan, calibration=calibration)
    p = found.prediction
    rule = f"must fit the card, which has {plan.cluster.gpu.memory_bytes / 2**30:.3g} GiB"
    needed = f"{p.memory_bytes / 2**30:.3g} GiB"
    require(p.oom_probability <= IMPOSSIBLE, "memory", needed, rule)
    return found
