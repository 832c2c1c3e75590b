"""PlanReport: one plan predicted in full, as `trilane plan show` prints it."""

from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from trilane.analysis.flops import rates, utilization
from trilane.analysis.run_config import config_of
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import Prediction
from trilane.planning.explain import Explanation, explain

BAR = 40  # characters of a whole iteration


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, its prediction, and what follows from both.

    days      of `tokens`, nothing going wrong; None where no tokens are given
    tflops    1e12 FLOP/s per GPU by each definition of analysis.flops, at the predicted seconds
    measured  the same, with mfu and hfu, at measured seconds; None where none are given
    why       what limits the plan, and what a change would bring
    """

    plan: Plan
    why: Explanation
    tokens: float | None
    days: float | None
    tflops: dict[str, float]
    mfu: float | None
    hfu: float | None
    measured: dict[str, Any] | None

    @property
    def prediction(self) -> Prediction:
        return self.why.prediction

    def to_json(self) -> dict[str, Any]:
        """The plan as plan.json has it, with its id, its prediction and the rest; read_plan() reads it back."""
        head = {"id": self.plan.id, **self.plan.to_json(), **self.prediction.beside()}
        head |= {"parameters": self.plan.shape.parameters, "tflops": self.tflops, "mfu": self.mfu, "hfu": self.hfu}
        return {**head, "days": self.days, "measured": self.measured, "why": self.why.to_json()}

    def as_text(self) -> str:
        """The report, a line for each fact, and a row for each pipeline stage."""
        plan, p, s = self.plan, self.prediction, self.plan.shape
        gib = plan.cluster.gpu.memory_bytes / 2**30
        lines = [
            f"{plan.label}  id {plan.id}  engine {plan.engine}",
            f"model     {s.num_layers} x {s.hidden_size}, {s.parameters / 1e9:.4g} B parameters"
            + (f"; {s.kind}" if s.kind else ""),
            f"machine   {plan.topology.gpus} GPUs ({plan.cluster.gpu.name}) of {plan.cluster.name}, "
            f"{plan.topology.gbs} sequences an iteration",
            f"seconds   {p.sec_per_it:.3f} an iteration ({p.sec_lo:.3f} to {p.sec_hi:.3f})",
            *(f"{'':10}{part}" for part in time_bars(self.why.shares, p.sec_per_it)),
            f"rate      {rates_text(self.tflops, self.mfu, self.hfu)}",
            f"memory    {p.memory_bytes / 2**30:.1f} GiB of {gib:.1f}, P(OOM) {p.oom_probability:.2f}",
        ]
        if p.host_memory_bytes:
            lines.append(f"          {p.host_memory_bytes / 2**30:.1f} GiB of host memory per GPU")
        for number, stage in enumerate(p.stages):
            parts = ", ".join(f"{k} {v / 2**30:.2f}" for k, v in asdict(stage).items() if v)
            lines.append(f"  stage {number}: {stage.total / 2**30:.1f} GiB: {parts}")
        first, *rest = (line for text in self.why.as_lines() for line in wrap(text, 110, subsequent_indent="  "))
        lines += [f"why       {first}", *(f"{'':10}{line}" for line in rest)]
        if self.days is not None:
            hours = self.days * 24 * plan.topology.gpus
            lines.append(f"tokens    {self.tokens:g}: {self.days:.1f} days of work, {hours:,.0f} GPU-hours")
        if m := self.measured:
            lines.append(f"measured  {m['seconds']:g} s, {m['ratio']:.3f} of the prediction")
            lines.append(f"          {rates_text(m['tflops'], m['mfu'], m['hfu'])}")
        return "\n".join(lines)


def plan_report(
    plan: Plan, calibration: Calibration | None = None, tokens: float | None = None, seconds: float | None = None
) -> PlanReport:
    """The report of a plan; with the days of `tokens`, and the rates of an iteration that took `seconds`."""
    why = explain(plan, calibration)
    prediction = why.prediction
    sequences = plan.topology.gbs * plan.shape.seq_length
    days = None if tokens is None else tokens / sequences * prediction.sec_per_it / 86400
    own = rates_at(plan, prediction.sec_per_it)
    measured = None
    if seconds is not None:
        measured = {"seconds": seconds, "ratio": seconds / prediction.sec_per_it, **rates_at(plan, seconds)}
    return PlanReport(plan=plan, why=why, tokens=tokens, days=days, measured=measured, **own)


def time_bars(shares: dict[str, float], seconds: float) -> list[str]:
    """A line for each part of an iteration: its seconds, its share, and a bar as long as that share."""
    return [
        f"{name:16} {share * seconds:9.3f} {share:4.0%} {'#' * round(BAR * share)}".rstrip()
        for name, share in shares.items()
    ]


def rates_at(plan: Plan, seconds: float) -> dict[str, Any]:
    """`tflops` by definition, `mfu` and `hfu` of an iteration of so many seconds."""
    config = config_of(plan)
    share = utilization(config, seconds) if plan.cluster.gpu.kind == "cuda" else {}  # a CPU's rate is no peak
    tflops = {name: rate / 1e12 for name, rate in rates(config, seconds).items()}
    return {"tflops": tflops, "mfu": share.get("mfu"), "hfu": share.get("hfu")}


def rates_text(tflops: dict[str, float], mfu: float | None, hfu: float | None) -> str:
    """The rates in one line."""
    shares = [f"{name} {share:.1%}" for name, share in (("MFU", mfu), ("HFU", hfu)) if share is not None]
    return ", ".join([f"{rate:.4g} TFLOPs {name}" for name, rate in tflops.items()] + shares)
