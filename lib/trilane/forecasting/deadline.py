"""From a deadline to a size: the largest shapes that a number of GPUs trains on given tokens within so many days."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trilane.config.engines import default_precision
from trilane.config.model import ModelShape
from trilane.forecasting.forecast import Forecast, forecast
from trilane.forecasting.request import TOKENS_PER_PARAMETER, forecast_request
from trilane.planning.proposals import Proposal, Proposals, heads_words, predicted_only, proposals_json, size_words
from trilane.planning.size_request import MOST, SizeRequest
from trilane.planning.sizing import survey, why_none
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require, require_positive

PROBABILITY = 0.9  # of ending in time
NEAR = 0.02  # the bisection ends where a size that ends in time is this near to one that does not
SMOOTH = ((32, 8), (8, 4), (0, 1))  # from so many layers on, the depths that are tried first are multiples of this
LOOKS = 5  # at sizes, ever smaller ones, until some shape ends in time
LISTED = 0.9  # shapes of at least this share of the largest are listed: our choice
ROUNDS = 12  # of the bisection at most; five are usual
OPTIMAL = 1.25  # called compute-optimal: at most this factor from Hoffmann's tokens per parameter; our choice
MOST_DAYS = 36500.0
COUNTED = (
    "Days are those of `plan calendar` without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)


@dataclass(frozen=True, kw_only=True)
class DatedShape:
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
class DatedShapes(Table):
    """The largest shapes that end in time, the largest first; `reason` says what the next larger ones lack.

    `request` is that of the last look at sizes: its `parameters` are no target of the user. Without rows nothing ends
    in time.
    """

    days: float
    request: SizeRequest
    rows: tuple[DatedShape, ...]
    reason: str

    @property
    def best(self) -> DatedShape:
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
            "optimum": ["{} on {}".format(*map(size_words, d.optimum)) for d in top],
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
            *(self.days, r.tokens / 1e9, r.gpus, r.cluster.name, size_words(best.parameters)),
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
                f"{s.num_layers:4} x {s.hidden_size:5} a{heads_words(s):<4}{size_words(d.parameters):>8} "
                f"{d.days[0]:6.1f} d (90 %: {d.days[1]:.1f}) "
                f"{d.gpu_hours[0]:10,.0f} GPU-h (90 %: {d.gpu_hours[1]:,.0f}) "
                f"{p.prediction.memory_bytes / 2**30:5.1f} GiB  {p.plan.label}"
            )
            optimum = "{} on {} tokens".format(*map(size_words, d.optimum))
            lines.append(
                f"{'':10}{d.tokens_per_parameter:.3g} tokens a parameter: {d.verdict} (Hoffmann et al. 2022: "
                f"{TOKENS_PER_PARAMETER:g}; this compute: {optimum})"
            )
            lines += [f"{'':10}{note}" for note in (s.kind, *p.notes) if note]
        return "\n".join([*lines, *predicted_only([d.proposal for d in self.rows]), self.reason])


def sizes_within(days: float, **asked: Any) -> DatedShapes:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are SizeRequest's other fields.

    A bisection over sizes looks at one shape of each; then the shapes near the size that it found are examined, as
    widths and depths differ in what they reach.
    """
    require_positive("days", days)
    require(days <= MOST_DAYS, "days", f"{days:g}", f"must be at most {MOST_DAYS:g}")
    request = SizeRequest(parameters=MOST, **asked)
    low, high = _smallest(request), _largest(request, days)
    seen, reached, too_large = _bisected(request, low, max(low, high), days)
    if reached:
        seen += _examined(request, reached, too_large, days)
    found = {d.proposal.shape: d for d in seen if _ends(d, days)}
    largest = max((d.parameters for d in found.values()), default=low)
    rows = sorted((d for d in found.values() if d.parameters >= LISTED * largest), key=lambda d: -d.parameters)
    last = dataclasses.replace(request, parameters=largest)
    return DatedShapes(days=days, request=last, rows=tuple(rows), reason=_reason(last, rows, seen, days))


def _ends(dated: DatedShape, days: float) -> bool:
    return dated.days[1] <= days and not dated.proposal.prediction.is_risky


def _reached(dated: DatedShape, days: float) -> float:
    """The size that would take just the days allowed, if days were as parameters."""
    return dated.parameters * days / dated.days[1]


def _smallest(request: SizeRequest) -> float:
    """The least parameters, to 1 %, at which the vocabulary leaves any for layers."""
    low, high = 1.0, request.parameters
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        try:
            high = dataclasses.replace(request, parameters=middle).parameters
        except ValueError:
            low = middle
    return high


def _largest(request: SizeRequest, days: float) -> float:
    """Twice the parameters that take the days at the card's peak, 6 FLOPs a parameter and token: too many.

    Twice, as an input embedding of its own computes nothing.
    """
    precision = request.choices.get("precision") or default_precision(request.cluster)
    peak = request.cluster.gpu.flops_per_s(precision) * request.gpus
    return min(MOST, 2 * peak * days * 86400 / 6 / request.tokens)


def _bisected(request: SizeRequest, low: float, high: float, days: float) -> tuple[list[DatedShape], float, float]:
    """One shape of each size looked at, the smallest of all first; the largest size that ends in time, and the least
    that does not.

    The next size is the one that would take just the days; the middle, where memory is the limit.
    """
    seen = _dated(request, _sized(request, low)[:1])
    if not seen or not _ends(seen[0], days):
        return seen, 0.0, low
    guess, crowded = high / 4, False  # half of the peak
    for _ in range(ROUNDS):
        if high < (1 + NEAR) * low:
            break
        size = min(max(guess, (1 + NEAR / 2) * low), high / (1 + NEAR / 2)) if not crowded else (low * high) ** 0.5
        found = _first_safe(request, _smooth(_sized(request, size)))
        seen += found
        guess, crowded = _reached(found[0], days) if found else 0.0, crowded or not found
        low, high = (size, high) if guess >= size else (low, size)
    return seen, low, high


def _first_safe(request: SizeRequest, shapes: Sequence[ModelShape]) -> list[DatedShape]:
    """The first of six shapes that fits the memory, from the middle width outwards; none where none fits."""
    middle = len(shapes) // 2
    for place in sorted(range(len(shapes)), key=lambda i: abs(i - middle))[:6]:
        found = _dated(request, [shapes[place]])
        if found and not found[0].proposal.prediction.is_risky:
            return found
    return []


def _examined(request: SizeRequest, reached: float, too_large: float, days: float) -> list[DatedShape]:
    """Smooth shapes of each width near the size reached, then all below what the best of them reaches.

    Where none of these ends in time, the next below: each look is two tolerances wide. Odd depths are left out, which
    few pipelines divide.
    """
    seen = _dated(request, _smooth(_sized(request, reached)))
    most = max((_reached(d, days) for d in seen if not d.proposal.prediction.is_risky), default=reached)
    most = min(most, too_large / LISTED, MOST)
    for _ in range(LOOKS):
        near = _sized(request, most / (1 + request.tolerance), request.tolerance)
        known = {d.proposal.shape for d in seen}
        found = _dated(request, [s for s in near if s not in known and (s.num_layers % 2 == 0 or s.num_layers < 8)])
        seen += found
        if any(_ends(d, days) for d in found):
            break
        most *= (1 - request.tolerance) / (1 + request.tolerance)
    return seen


def _sized(request: SizeRequest, size: float, tolerance: float = 1e-9) -> list[ModelShape]:
    """The request's shapes at another size: within the tolerance, or the one depth of each width that is nearest."""
    return dataclasses.replace(request, parameters=size, tolerance=tolerance).shapes()


def _smooth(shapes: Sequence[ModelShape]) -> list[ModelShape]:
    """The shapes with the nearest depths that many pipelines divide, alone or with embedding and head as layers."""
    found = []
    for shape in shapes:
        step = next(step for least, step in SMOOTH if shape.num_layers >= least)
        depth = round(shape.num_layers / step) * step
        depths = (depth, depth - 2) if step > 1 else (depth,)
        found += [dataclasses.replace(shape, num_layers=depth) for depth in depths]
    return found


def _dated(request: SizeRequest, shapes: Sequence[ModelShape]) -> list[DatedShape]:
    """The shapes that some topology can run, with their forecasts."""
    return [d for p in survey(request, shapes)[0] if (d := _forecast(p, request))]


def _forecast(proposal: Proposal, request: SizeRequest) -> DatedShape | None:
    """The proposal with its forecast; None where interruptions leave no progress."""
    try:
        asked = forecast_request(proposal.plan, tokens=request.tokens, calibration=request.calibration)
        return DatedShape(proposal=proposal, forecast=forecast(asked))
    except ValueError:
        return None


def _reason(request: SizeRequest, rows: Sequence[DatedShape], seen: Sequence[DatedShape], days: float) -> str:
    """Why no shape is larger than `rows`, which have the request's size at most, or why there is none at all."""
    if not seen:
        return why_none(request, survey(request, request.shapes()[:1])[1])
    if not rows:
        least = min(seen, key=lambda d: d.parameters)
        took = f"{least.days[1]:.3g} days for nine runs of ten"
        return f"the smallest shape ({size_words(least.parameters)} parameters) takes {took}"
    if request.parameters > LISTED * MOST:
        return f"sizes above {MOST:g} parameters are not looked at"
    if rows[0].days[1] > LISTED * days:
        return "larger shapes take longer"
    larger = dataclasses.replace(request, parameters=request.parameters / LISTED)
    proposals, refused = survey(larger, [s for s in _smooth(larger.shapes()) if s.parameters > request.parameters])
    if not proposals:
        return f"of {size_words(larger.parameters)} parameters {why_none(larger, refused)}"
    if all(p.prediction.is_risky for p in proposals):
        return f"every shape of {size_words(larger.parameters)} parameters may run out of memory"
    return "larger shapes take longer, or may run out of memory"
