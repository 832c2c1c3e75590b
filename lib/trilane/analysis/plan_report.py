"""One plan predicted in full, as `trilane plan show` prints it."""

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from trilane.analysis.measure import rates, utilization
from trilane.analysis.run_config import config_of
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.memory import StageMemory
from trilane.costmodel.trace import Trace
from trilane.planning.explain import explain

TENSORS = ("weights", "gradients", "optimizer", "activations")


def plan_report(
    plan: Plan,
    calibration: Calibration | None = None,
    tokens: float | None = None,
    seconds: float | None = None,
    trace: Trace | None = None,
) -> tuple[dict[str, Any], str]:
    """A plan with its prediction and what limits it, as JSON that read_plan() takes for a plan, and
    as text.

    With the days of `tokens`, nothing going wrong, the rates of an iteration that took `seconds`,
    and what was traced.
    """
    why, s, t, gpu = explain(plan, calibration), plan.shape, plan.topology, plan.cluster.gpu
    p, card = why.prediction, gpu.memory_bytes / 2**30
    found = {
        "id": plan.id,
        **plan.to_json(),
        **p.beside(),
        "parameters": s.parameters,
        "why": why.to_json(),
    }
    predicted, rate = _rates(plan, p.sec_per_it)
    found |= {**predicted, "days": None, "measured": None}
    lines = [
        f"{plan.label}  id {plan.id}  engine {plan.engine}",
        f"model     {s.num_layers} x {s.hidden_size}, {s.parameters / 1e9:.4g} B parameters {s.kind}".rstrip(),
        f"machine   {t.gpus} GPUs ({gpu.name}) of {plan.cluster.name}, {t.gbs} sequences an iteration",
        f"seconds   {p.sec_per_it:.3f} an iteration ({p.sec_lo:.3f} to {p.sec_hi:.3f})",
    ]
    if plan.layer:
        lines.insert(
            2,
            f"layer     {plan.layer}; seconds, memory and rate are those of megatron-core's layer",
        )
    for name, part in why.shares.items():
        lines.append(
            f"{'':10}{name:16} {part * p.sec_per_it:9.3f} {part:4.0%} {'#' * round(40 * part)}".rstrip()
        )
    host = f", {p.host_memory_bytes / 2**30:.1f} GiB of the host" if p.host_memory_bytes else ""
    memory = f"{p.memory_bytes / 2**30:.1f} GiB of {card:.1f}{host}"
    lines += [f"rate      {rate}", f"memory    {memory}, P(OOM) {p.oom_probability:.2f}"]
    for number, stage in enumerate(p.stages):
        parts = ", ".join(f"{k} {v / 2**30:.2f}" for k, v in asdict(stage).items() if v)
        lines.append(f"  stage {number}: {stage.total / 2**30:.1f} GiB: {parts}")
    found["traced"] = trace.to_json() if trace else None
    lines += _traced(trace, p.stages) if trace else []
    reasons = [line for text in why.as_lines() for line in wrap(text, 110, subsequent_indent="  ")]
    lines += [f"{'' if number else 'why':10}{line}" for number, line in enumerate(reasons)]
    if tokens is not None:
        found["days"] = days = tokens / t.gbs / s.seq_length * p.sec_per_it / 86400
        lines.append(
            f"tokens    {tokens:g}: {days:.1f} days of work, {days * 24 * t.gpus:,.0f} GPU-hours"
        )
    if seconds is not None:
        ratio, (measured, rate) = seconds / p.sec_per_it, _rates(plan, seconds)
        found["measured"] = {"seconds": seconds, "ratio": ratio, **measured}
        lines.append(f"measured  {seconds:g} s, {ratio:.3f} of the prediction; {rate}")
    return found, "\n".join(lines)


def _traced(trace: Trace, stages: Sequence[StageMemory]) -> list[str]:
    """The tensors that the real engine held without a GPU, and how much is predicted of the parts
    that are tensors.
    """
    said = f"{len(trace.stages)} of {len(stages)} stages ran on tensors without memory"
    lines = [f"traced    {said}; left out: context, fragmentation, NCCL's and cuBLAS's buffers"]
    for s in trace.stages:
        peak = f"{s.peak_bytes / 2**30:.1f} GiB in the {s.peak_at}, {s.operations:,} kernels"
        held = {name: getattr(s, f"{name}_bytes") for name in (*TENSORS, "temporary", "buffers")}
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in held.items() if size)
        tensors = sum(getattr(stages[s.stage], name) for name in (*TENSORS, "working")) / 2**30
        lines.append(f"  stage {s.stage}: {peak}: {parts}")
        lines[-1] += f"; predicted {tensors:.1f} without buffers"
    return lines


def _rates(plan: Plan, seconds: float) -> tuple[dict[str, Any], str]:
    """`tflops` by each definition of analysis.flops, `mfu` and `hfu` of an iteration of so many
    seconds; as text.
    """
    config = config_of(plan)
    share, tflops = (
        utilization(config, seconds),
        {n: rate / 1e12 for n, rate in rates(config, seconds).items()},
    )
    words = [f"{rate:.4g} TFLOPs {name}" for name, rate in tflops.items()]
    words += [f"{name.upper()} {value:.1%}" for name, value in share.items()]
    return {"tflops": tflops, "mfu": share.get("mfu"), "hfu": share.get("hfu")}, ", ".join(words)
