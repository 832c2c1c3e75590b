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
    trace: Trace | None = None,
) -> tuple[dict[str, Any], str]:
    """A plan with its prediction and what limits it, as JSON that read_plan() takes for a plan, and
    as text.

    With what was traced.
    """
    why = explain(plan, calibration)
    p = why.prediction
    shape = plan.shape
    topology = plan.topology
    gpu = plan.cluster.gpu
    config = config_of(plan)
    used = utilization(config, p.sec_per_it)
    tflops = {name: rate / 1e12 for name, rate in rates(config, p.sec_per_it).items()}
    values = {
        "id": plan.id,
        **plan.to_json(),
        **p.beside(),
        "parameters": shape.parameters,
        "why": why.to_json(),
        "tflops": tflops,
        "mfu": used.get("mfu"),
        "hfu": used.get("hfu"),
        "traced": trace.to_json() if trace else None,
    }
    lines = [
        f"{plan.label}  id {plan.id}  engine {plan.engine}",
        f"model     {shape.parameters / 1e9:.4g} B parameters: {shape.summary()}",
    ]
    if plan.layer:
        rule = "seconds, memory and rate are those of megatron-core's layer"
        lines.append(f"layer     {plan.layer}; {rule}")
    machine = f"{topology.gpus} GPUs ({gpu.name}) of {plan.cluster.name}"
    lines.append(f"machine   {machine}, {topology.gbs} sequences an iteration")
    interval = f"({p.sec_lo:.3f} to {p.sec_hi:.3f})"
    lines.append(f"seconds   {p.sec_per_it:.3f} an iteration {interval}")
    for name, share in why.shares.items():
        bar = "#" * round(40 * share)
        text = f"{'':10}{name:16} {share * p.sec_per_it:9.3f} {share:4.0%} {bar}"
        lines.append(text.rstrip())
    words = [f"{value:.4g} TFLOPs {name}" for name, value in tflops.items()]
    words += [f"{name.upper()} {value:.1%}" for name, value in used.items()]
    lines.append(f"rate      {', '.join(words)}")
    memory = f"{p.memory_bytes / 2**30:.1f} GiB of {gpu.memory_bytes / 2**30:.1f}"
    if p.host_memory_bytes:
        memory += f", {p.host_memory_bytes / 2**30:.1f} GiB of the host"
    lines.append(f"memory    {memory}, P(OOM) {p.oom_probability:.2f}")
    for number, stage in enumerate(p.stages):
        parts = _gib(asdict(stage))
        lines.append(f"  stage {number}: {stage.total / 2**30:.1f} GiB: {parts}")
    if trace:
        lines += _traced(trace, p.stages)
    head = "why"
    for reason in why.sentences:
        for line in wrap(reason, 110, subsequent_indent="  "):
            lines.append(f"{head:10}{line}")
            head = ""
    return values, "\n".join(lines)


def _traced(trace: Trace, stages: Sequence[StageMemory]) -> list[str]:
    """The tensors that the real engine held without a GPU, and how much is predicted of the parts
    that are tensors.
    """
    ran = f"{len(trace.stages)} of {len(stages)} stages ran on tensors without memory"
    lines = [f"traced    {ran}; left out: context, fragmentation, NCCL's and cuBLAS's buffers"]
    for traced in trace.stages:
        peak = f"{traced.peak_bytes / 2**30:.1f} GiB ({traced.peak_at})"
        names = (*TENSORS, "temporary", "buffers")
        parts = _gib({name: getattr(traced, f"{name}_bytes") for name in names})
        stage = stages[traced.stage]
        tensors = sum(getattr(stage, name) for name in (*TENSORS, "working")) / 2**30
        lines.append(
            f"  stage {traced.stage}: {peak}, {traced.operations:,} kernels: {parts}"
            f"; predicted {tensors:.1f} without buffers"
        )
    return lines


def _gib(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size)
