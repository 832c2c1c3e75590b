"""One plan predicted in full, as `trilane plan show` prints it."""

from dataclasses import asdict

from trilane.analysis.measure import mfu, rates
from trilane.analysis.run_config import config_of
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import BALANCED, predict
from trilane.planning.explain import explain
from trilane.utils.tables import Json, as_json


def plan_report(plan: Plan, calibration: Calibration | None = None) -> tuple[Json, str]:
    """A plan with its prediction and what limits it, as JSON that read_plan() takes for a plan, and
    as text.
    """
    why = explain(plan, calibration)
    p = predict(plan, calibration)
    shape = plan.shape
    config = config_of(plan)
    used = mfu(config, p.sec_per_it)
    tflops = {name: rate / 1e12 for name, rate in rates(config, p.sec_per_it).items()}
    values = {
        "id": plan.id,
        **plan.to_json(),
        **p.beside(),
        "parameters": shape.parameters,
        "why": why,
        "tflops": tflops,
        "mfu": as_json(used),
    }
    machine = f"{config.gpus} GPUs ({plan.cluster.gpu.name}) of {plan.cluster.name}"
    lines = [
        f"{plan.label}  id {plan.id}  engine {plan.engine}",
        f"model     {shape.parameters / 1e9:.4g} B parameters: {shape.summary()}",
        f"machine   {machine}, {plan.topology.gbs} sequences an iteration",
    ]
    if shape.experts:
        active = f"{shape.active_parameters / 1e9:.4g} B parameters"
        lines.append(f"experts   a token meets {active}. {BALANCED}")
    if plan.layer:
        rule = "seconds, memory and rate are those of megatron-core's layer"
        lines.append(f"layer     {plan.layer}; {rule}")
    lines += [f"- {reason}" for reason in why]
    for name, seconds in sorted(vars(p.time).items(), key=lambda part: -part[1]):
        share = seconds / p.sec_per_it
        if not seconds and name == "expert_parallel":
            continue
        lines.append(f"  {name.replace('_', ' '):16} {seconds:9.3f} s {share:4.0%}")
    words = [f"{value:.4g} TFLOPs {name}" for name, value in tflops.items()]
    lines.append(f"rate      {', '.join(words)}, MFU {used:.1%}")
    if p.host_memory_bytes:
        lines.append(f"host      {p.host_memory_bytes / 2**30:.1f} GiB")
    for number, stage in enumerate(p.stages):
        parts = [f"{name} {size / 2**30:.2f}" for name, size in asdict(stage).items() if size]
        lines.append(f"  stage {number}: {stage.total / 2**30:.1f} GiB: {', '.join(parts)}")
    return values, "\n".join(lines)
