"""Shapes with the forecasts of their training: which end by a deadline, as a table, as text and as JSON."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trilane.forecasting.forecast import Forecast
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.proposals import Proposal, Proposals, heads_text, proposals_json, size_text, support_lines
from trilane.planning.size_request import SizeRequest
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require

PROBABILITY = 0.9  # of ending in time
OPTIMAL = 1.25  # called compute-optimal: at most this factor from Hoffmann's tokens per parameter; our choice
COUNTED = (
    "Days are those of 'plan calendar' without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)


@dataclass(frozen=True, kw_only=True)
class ShapeForecast:
    """A shape on its best topology, and the forecast of its training."""

    proposal: Proposal
    forecast: Forecast

    @property
    def parameters(self) -> float:
        return self.proposal.shape.parameters

    @cached_property
    def days(self) -> tuple[float, float]:
        """Days that half of the simulated runs keep, and nine of ten."""
        return self.forecast.days(0.5), self.forecast.days(PROBABILITY)

    @cached_property
    def gpu_hours(self) -> tuple[float, float]:
        """GPU-hours that half of the simulated runs keep, and nine of ten."""
        return self.forecast.gpu_hours(0.5), self.forecast.gpu_hours(PROBABILITY)

    @property
    def tokens_per_parameter(self) -> float:
        return self.proposal.tokens / self.parameters

    @property
    def optimum(self) -> tuple[float, float]:
        """Parameters and tokens of a compute-optimal model of the same compute, which is as parameters x tokens.

        20 tokens a parameter: Hoffmann et al. 2022, arXiv:2203.15556. Left out: attention's s x s part.
        """
        parameters = (self.parameters * self.proposal.tokens / TOKENS_PER_PARAMETER) ** 0.5
        return parameters, TOKENS_PER_PARAMETER * parameters

    @property
    def verdict(self) -> str:
        """Whether it is compute-optimal, in words."""
        ratio = self.tokens_per_parameter / TOKENS_PER_PARAMETER
        if 1 / OPTIMAL <= ratio <= OPTIMAL:
            return "compute-optimal"
        return "fewer tokens than optimal" if ratio < 1 else "more tokens than optimal"

    def to_json(self, best: Proposal) -> dict[str, Any]:
        """The proposal with its days and GPU-hours, and the compute-optimal model beside it."""
        parameters, tokens = self.optimum
        values = self.proposal.to_json(best) | {"days_50": self.days[0], "days_90": self.days[1]}
        values |= {"gpu_hours_50": self.gpu_hours[0], "gpu_hours_90": self.gpu_hours[1]}
        values |= {"tokens_per_parameter": self.tokens_per_parameter, "verdict": self.verdict}
        return values | {"compute_optimal": {"params": parameters, "tokens": tokens}}


@dataclass(frozen=True, kw_only=True)
class ShapeForecasts(Table):
    """The largest shapes that end in time, the largest first; `reason` is what the next larger ones lack.

    `request` is that of the last look at sizes: its `parameters` are no target of the user. Without rows nothing ends
    in time.
    """

    days: float
    request: SizeRequest
    rows: tuple[ShapeForecast, ...]
    reason: str

    @property
    def best(self) -> ShapeForecast:
        """The largest; ValueError where nothing ends in time."""
        require(bool(self.rows), "days", f"{self.days:g}", self.reason)
        return self.rows[0]

    def proposals(self) -> Proposals:
        """The shapes as those of a target size, that of the largest; ValueError where nothing ends in time."""
        others = tuple(d.proposal for d in self.rows[1:])
        return Proposals(request=self.request, rows=(self.best.proposal, *others))

    def to_frame(self) -> DataFrame:
        """A row a shape: size, topology, days of half and of nine of ten runs, GPU-hours of half, tokens a parameter.

        The last column has the parameters and tokens that are compute-optimal for as much compute.
        """
        top = self.rows[:12]
        columns: dict[str, Any] = {
            "layers × hidden": [f"{d.proposal.shape.num_layers} × {d.proposal.shape.hidden_size}" for d in top],
            "B": [round(d.parameters / 1e9, 2) for d in top],
            "plan": [d.proposal.plan.label for d in top],
            "days (90 %)": ["{:.1f} ({:.1f})".format(*d.days) for d in top],
            "GPU-hours": [f"{d.gpu_hours[0]:,.0f}" for d in top],
            "tokens a parameter": [f"{d.tokens_per_parameter:.3g}, {d.verdict}" for d in top],
            "optimum": ["{} on {}".format(*map(size_text, d.optimum)) for d in top],
        }
        return Columns(columns).to_frame()

    def summary(self) -> Text:
        """The largest shape in a sentence, and what its days count."""
        if not self.rows:
            return Text.of("Nothing ends within {:g} days with 90 % probability: {}.", self.days, self.reason)
        best, r = self.best, self.request
        return Text.of(
            "Within {:g} days, {:.4g} billion tokens on {} GPUs of {}: at most **{} parameters** ({} × {}), "
            "{:.1f} days at the median and {:.1f} for nine runs of ten; {}. {}",
            *(self.days, r.tokens / 1e9, r.gpus, r.cluster.name, size_text(best.parameters)),
            *(best.proposal.shape.num_layers, best.proposal.shape.hidden_size, *best.days, self.reason, COUNTED),
        )

    def to_json(self, top: int = 12) -> dict[str, Any]:
        """The request, the shapes, what their days count, and why none is larger."""
        proposals = [d.proposal for d in self.rows[:top]]
        values = proposals_json(self.request, proposals, len(self.rows))
        del values["request"]["parameters"]
        values["candidates"] = [d.to_json(proposals[0]) for d in self.rows[:top]]
        return {**values, "days": self.days, "probability": PROBABILITY, "counted": COUNTED, "reason": self.reason}

    def as_text(self, top: int = 12) -> str:
        """A line for each shape, one with what is compute-optimal beside it, and why none is larger."""
        r = self.request
        lines = [
            f"within {self.days:g} days with 90 % probability: {r.vocab_size} rows of embedding, {r.gpus} GPUs of",
            f"{r.cluster.name}, {r.tokens / 1e9:g} B tokens, {r.gbs} sequences an iteration.",
            COUNTED,
        ]
        for d in self.rows[:top]:
            p, s = d.proposal, d.proposal.shape
            lines.append(
                f"{s.num_layers:4} x {s.hidden_size:5} a{heads_text(s):<4}{size_text(d.parameters):>8} "
                f"{d.days[0]:6.1f} d (90 %: {d.days[1]:.1f}) "
                f"{d.gpu_hours[0]:10,.0f} GPU-h (90 %: {d.gpu_hours[1]:,.0f}) "
                f"{p.prediction.memory_bytes / 2**30:5.1f} GiB  {p.plan.label}"
            )
            optimum = "{} on {} tokens".format(*map(size_text, d.optimum))
            lines.append(
                f"{'':10}{d.tokens_per_parameter:.3g} tokens a parameter: {d.verdict} (Hoffmann et al. 2022: "
                f"{TOKENS_PER_PARAMETER:g}; this compute: {optimum})"
            )
            lines += [f"{'':10}{note}" for note in (s.kind, *p.notes) if note]
        return "\n".join([*lines, *support_lines([d.proposal for d in self.rows]), self.reason])
