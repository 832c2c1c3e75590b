"""PlanReport: one plan predicted in full, as `trilane plan show` prints it."""

from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from trilane.analysis.flops import rates, utilization
from trilane.analysis.run_config import config_of
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.planning.explain import Explanation, explain


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan with its prediction and `why`: what limits it, and what a change would bring.

    Where `tokens` are given also the days that they take, nothing going wrong; with measured `seconds` their rates too.
    """

    plan: Plan
    why: Explanation
    tokens: float | None = None
    seconds: float | None = None

    def rates(self, seconds: float) -> dict[str, Any]:
        """`tflops` by each definition of analysis.flops, `mfu` and `hfu` of an iteration of so many seconds."""
        config = config_of(self.plan)
        share = utilization(config, seconds)
        tflops = {name: rate / 1e12 for name, rate in rates(config, seconds).items()}
        return {"tflops": tflops, "mfu": share.get("mfu"), "hfu": share.get("hfu")}

    def to_json(self) -> dict[str, Any]:
        """The plan as plan.json has it, with its id, its prediction and the rest; read_plan() reads it back."""
        plan, p, measured = self.plan, self.why.prediction, None
        iterations = None if self.tokens is None else self.tokens / plan.topology.gbs / plan.shape.seq_length
        days = None if iterations is None else iterations * p.sec_per_it / 86400
        if self.seconds is not None:
            measured = {"seconds": self.seconds, "ratio": self.seconds / p.sec_per_it, **self.rates(self.seconds)}
        head = {"id": plan.id, **plan.to_json(), **p.beside(), "parameters": plan.shape.parameters}
        return {**head, **self.rates(p.sec_per_it), "days": days, "measured": measured, "why": self.why.to_json()}

    def as_text(self) -> str:
        """The report, a line for each fact, and a row for each pipeline stage."""
        plan, p, s, found = self.plan, self.why.prediction, self.plan.shape, self.to_json()
        gpu, kind = plan.cluster.gpu, f"; {s.kind}" if s.kind else ""
        lines = [
            f"{plan.label}  id {plan.id}  engine {plan.engine}",
            f"model     {s.num_layers} x {s.hidden_size}, {s.parameters / 1e9:.4g} B parameters{kind}",
            f"machine   {plan.topology.gpus} GPUs ({gpu.name}) of {plan.cluster.name}, "
            f"{plan.topology.gbs} sequences an iteration",
            f"seconds   {p.sec_per_it:.3f} an iteration ({p.sec_lo:.3f} to {p.sec_hi:.3f})",
        ]
        for name, share in self.why.shares.items():
            bar = "#" * round(40 * share)
            lines.append(f"{'':10}{name:16} {share * p.sec_per_it:9.3f} {share:4.0%} {bar}".rstrip())
        memory = f"{p.memory_bytes / 2**30:.1f} GiB of {gpu.memory_bytes / 2**30:.1f}, P(OOM) {p.oom_probability:.2f}"
        lines += [f"rate      {_rates_text(found)}", f"memory    {memory}"]
        if p.host_memory_bytes:
            lines.append(f"          {p.host_memory_bytes / 2**30:.1f} GiB of host memory per GPU")
        for number, stage in enumerate(p.stages):
            parts = ", ".join(f"{k} {v / 2**30:.2f}" for k, v in asdict(stage).items() if v)
            lines.append(f"  stage {number}: {stage.total / 2**30:.1f} GiB: {parts}")
        first, *rest = (line for text in self.why.as_lines() for line in wrap(text, 110, subsequent_indent="  "))
        lines += [f"why       {first}", *(f"{'':10}{line}" for line in rest)]
        if (days := found["days"]) is not None:
            hours = days * 24 * plan.topology.gpus
            lines.append(f"tokens    {self.tokens:g}: {days:.1f} days of work, {hours:,.0f} GPU-hours")
        if m := found["measured"]:
            lines.append(f"measured  {m['seconds']:g} s, {m['ratio']:.3f} of the prediction")
            lines.append(f"          {_rates_text(m)}")
        return "\n".join(lines)


def plan_report(
    plan: Plan, calibration: Calibration | None = None, tokens: float | None = None, seconds: float | None = None
) -> PlanReport:
    """The report of a plan; with the days of `tokens`, and the rates of an iteration that took `seconds`."""
    return PlanReport(plan=plan, why=explain(plan, calibration), tokens=tokens, seconds=seconds)


def _rates_text(found: dict[str, Any]) -> str:
    shares = [f"{name.upper()} {found[name]:.1%}" for name in ("mfu", "hfu") if found[name] is not None]
    return ", ".join([f"{rate:.4g} TFLOPs {name}" for name, rate in found["tflops"].items()] + shares)
