"""One plan predicted in full, as `trilane plan show` prints it."""

from dataclasses import asdict
from textwrap import wrap
from typing import Any

from trilane.analysis.flops import rates, utilization
from trilane.analysis.run_config import config_of
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.planning.explain import Explanation, explain


def plan_report(
    plan: Plan, calibration: Calibration | None = None, tokens: float | None = None, seconds: float | None = None
) -> tuple[dict[str, Any], str]:
    """A plan with its prediction and what limits it, as JSON that read_plan() takes for a plan, and as text.

    With the days of `tokens`, nothing going wrong, and the rates of an iteration that took `seconds`.
    """
    why, measured, days = explain(plan, calibration), None, None
    predicted = why.prediction.sec_per_it
    if tokens is not None:
        days = tokens / plan.topology.gbs / plan.shape.seq_length * predicted / 86400
    if seconds is not None:
        measured = {"seconds": seconds, "ratio": seconds / predicted, **_rates(plan, seconds)}
    found = {"id": plan.id, **plan.to_json(), **why.prediction.beside(), "parameters": plan.shape.parameters}
    found |= {**_rates(plan, predicted), "days": days, "measured": measured, "why": why.to_json()}
    return found, "\n".join(_lines(plan, why, found, tokens))


def _rates(plan: Plan, seconds: float) -> dict[str, Any]:
    """`tflops` by each definition of analysis.flops, `mfu` and `hfu` of an iteration of so many seconds."""
    config = config_of(plan)
    share = utilization(config, seconds)
    tflops = {name: rate / 1e12 for name, rate in rates(config, seconds).items()}
    return {"tflops": tflops, "mfu": share.get("mfu"), "hfu": share.get("hfu")}


def _rates_text(found: dict[str, Any]) -> str:
    shares = [f"{name.upper()} {found[name]:.1%}" for name in ("mfu", "hfu") if found[name] is not None]
    return ", ".join([f"{rate:.4g} TFLOPs {name}" for name, rate in found["tflops"].items()] + shares)


def _lines(plan: Plan, why: Explanation, found: dict[str, Any], tokens: float | None) -> list[str]:
    p, s, t, gpu = why.prediction, plan.shape, plan.topology, plan.cluster.gpu
    lines = [
        f"{plan.label}  id {plan.id}  engine {plan.engine}",
        f"model     {s.num_layers} x {s.hidden_size}, {s.parameters / 1e9:.4g} B parameters {s.kind}".rstrip(),
        f"machine   {t.gpus} GPUs ({gpu.name}) of {plan.cluster.name}, {t.gbs} sequences an iteration",
        f"seconds   {p.sec_per_it:.3f} an iteration ({p.sec_lo:.3f} to {p.sec_hi:.3f})",
    ]
    for name, part in why.shares.items():
        lines.append(f"{'':10}{name:16} {part * p.sec_per_it:9.3f} {part:4.0%} {'#' * round(40 * part)}".rstrip())
    host = f", {p.host_memory_bytes / 2**30:.1f} GiB of the host" if p.host_memory_bytes else ""
    memory = f"{p.memory_bytes / 2**30:.1f} GiB of {gpu.memory_bytes / 2**30:.1f}{host}"
    lines += [f"rate      {_rates_text(found)}", f"memory    {memory}, P(OOM) {p.oom_probability:.2f}"]
    for number, stage in enumerate(p.stages):
        parts = ", ".join(f"{k} {v / 2**30:.2f}" for k, v in asdict(stage).items() if v)
        lines.append(f"  stage {number}: {stage.total / 2**30:.1f} GiB: {parts}")
    first, *rest = (line for text in why.as_lines() for line in wrap(text, 110, subsequent_indent="  "))
    lines += [f"why       {first}", *(f"{'':10}{line}" for line in rest)]
    if (days := found["days"]) is not None:
        lines.append(f"tokens    {tokens:g}: {days:.1f} days of work, {days * 24 * t.gpus:,.0f} GPU-hours")
    if m := found["measured"]:
        lines.append(f"measured  {m['seconds']:g} s, {m['ratio']:.3f} of the prediction; {_rates_text(m)}")
    return lines
