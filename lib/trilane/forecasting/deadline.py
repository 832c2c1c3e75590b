"""From a deadline to a size: the largest shapes that a number of GPUs trains on given tokens within so many days."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trilane.config.engines import default_precision
from trilane.config.model import ModelShape
from trilane.forecasting.forecast import Record, forecast
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.size_request import MOST, SizeRequest
from trilane.planning.sizing import (
    Proposal,
    Proposals,
    proposals_json,
    size_text,
    support_lines,
    survey,
    why_none,
)
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require, require_positive

COUNTED = (
    "Days are those of 'plan calendar' without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)
Found = tuple[Proposal, Record]  # a shape on its best topology, and what in_time() says of its training


@dataclass(frozen=True, kw_only=True)
class SizesInTime(Table):
    """The largest shapes that end in time, the largest first; `reason` is what the next larger ones lack.

    `request` is that of the largest: its `parameters` are no target of the user. Without rows nothing ends in time.
    """

    limit: float
    request: SizeRequest
    rows: tuple[Found, ...]
    reason: str

    def proposals(self) -> Proposals:
        """The shapes as those of a target size, that of the largest; ValueError where nothing ends in time."""
        require(bool(self.rows), "days", f"{self.limit:g}", self.reason)
        return Proposals(request=self.request, rows=tuple(proposal for proposal, _ in self.rows))

    def to_frame(self) -> DataFrame:
        """A row a shape: size, topology, days and GPU-hours of half of the runs, tokens a parameter."""
        heads, rows = ("layers × hidden", "B", "plan", "days (90 %)", "GPU-hours", "tokens a parameter"), []
        for p, d in self.rows[:12]:
            days, each = f"{d['days_50']:.1f} ({d['days_90']:.1f})", f"{d['tokens_per_parameter']:.3g}, {d['verdict']}"
            size = f"{p.shape.num_layers} × {p.shape.hidden_size}", round(p.shape.parameters / 1e9, 2)
            rows.append((*size, p.plan.label, days, f"{d['gpu_hours_50']:,.0f}", each))
        return Columns.of_rows(heads, rows).to_frame()

    def summary(self) -> Text:
        """The largest size, why none is larger, and what its days count."""
        most = size_text(self.rows[0][0].shape.parameters) if self.rows else "nothing"
        end = f"within {self.limit:g} days with 90 % probability; {self.reason}. {COUNTED}"
        return Text.of("At most **{} parameters** end {}" if self.rows else "{} ends {}", most, end)

    def to_json(self, top: int = 12) -> Record:
        """The request, the shapes, what their days count, and why none is larger."""
        values = proposals_json(self.request, [], len(self.rows))
        del values["request"]["parameters"]
        values["candidates"] = [{**p.to_json(self.rows[0][0]), **dated} for p, dated in self.rows[:top]]
        return {**values, "days": self.limit, "probability": 0.9, "counted": COUNTED, "reason": self.reason}

    def as_text(self, top: int = 12) -> str:
        """What was asked, a line for each shape, and why none is larger."""
        r, lines = self.request, list[str]()
        for p, d in self.rows[:top]:
            days = "{days_50:7.1f} d (90 %: {days_90:.1f}) {gpu_hours_50:10,.0f} GPU-h".format(**d)
            lines.append(f"{p.shape.num_layers:4} x {p.shape.hidden_size:5} {size_text(p.shape.parameters):>8} {days}")
            lines[-1] += f" {p.prediction.memory_bytes / 2**30:5.1f} GiB  {p.plan.label}; {d['verdict']}"
            lines += [f"{'':10}{note}" for note in (p.shape.kind, *p.notes) if note]
        asked = f"{r.gpus} GPUs of {r.cluster.name}, {r.tokens / 1e9:g} B tokens, {r.gbs} sequences an iteration."
        head = f"within {self.limit:g} days with 90 % probability: {asked}"
        return "\n".join([head, COUNTED, *lines, *support_lines([p for p, _ in self.rows]), self.reason])


def sizes_within(days: float, **asked: Any) -> SizesInTime:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are SizeRequest's other fields.

        sizes_within(60, cluster=load_cluster("jz-a100-80g"), gpus=384, vocabulary=250880).summary()

    A bisection over sizes looks at one shape of each; then all widths and even depths near the size that it found are
    examined, as they differ in what they reach.
    """
    require_positive("days", days)
    require(days <= 36500, "days", f"{days:g}", "must be at most 36500")
    request = SizeRequest(parameters=MOST, **asked)
    one = next(one for h in range(64, 4096, 64) if (one := request.layer(h)))
    # the least size of which there is any shape: one layer of the smallest width
    least = 1.001 * (one.embedding_parameters * (1 if one.tied_embeddings else 2) + one.layer_weights)
    seen = _looked(request, least, days)
    ended = {p.shape: (p, dated) for p, dated in seen if _ends(p, dated, days)}
    largest = max((shape.parameters for shape in ended), default=least)
    # shapes of at least 0.9 of the largest are listed: our choice
    rows = [d for d in ended.values() if d[0].shape.parameters >= 0.9 * largest]
    rows = sorted(rows, key=lambda d: -d[0].shape.parameters)
    last = replace(request, parameters=largest)
    if not seen:
        reason = why_none(last, survey(last, last.shapes()[:1])[1])
    elif not rows:
        p, dated = min(seen, key=lambda d: d[0].shape.parameters)
        size, took = size_text(p.shape.parameters), f"{dated['days_90']:.3g} days for nine runs of ten"
        reason = f"the smallest shape ({size} parameters) takes {took}"
    elif largest > 0.9 * MOST:
        reason = f"sizes above {MOST:g} parameters are not looked at"
    else:
        slow = rows[0][1]["days_90"] > 0.9 * days
        reason = "larger shapes take longer" if slow else "larger shapes may run out of memory"
    return SizesInTime(limit=days, request=last, rows=tuple(rows), reason=reason)


def _looked(request: SizeRequest, low: float, days: float) -> list[Found]:
    """The shapes that were looked at, from the least size `low` to the largest that ends in time."""
    r, seen = request, list[Found]()

    def reached(shapes: Sequence[ModelShape]) -> float:
        """The most that would take just the days, if days were as parameters; 0 where none fits the memory."""
        found = [(p, d) for p in survey(r, shapes)[0] if (d := in_time(p, r))]
        seen.extend(found)
        most = [p.shape.parameters * days / d["days_90"] for p, d in found if not p.prediction.is_risky]
        return max(most, default=0.0)

    def sized(size: float, tolerance: float = 1e-9) -> list[ModelShape]:
        return replace(r, parameters=size, tolerance=tolerance).shapes()

    def smooth(size: float) -> list[ModelShape]:
        """Shapes of about that size, with depths that many pipelines divide, alone or with embedding and head."""
        steps = [(s, 8 if s.num_layers >= 32 else 4 if s.num_layers >= 8 else 1) for s in sized(size)]
        depths = [(s, round(s.num_layers / n) * n, 2 * (n > 1)) for s, n in steps]
        return [replace(s, num_layers=n - ends) for s, n, two in depths for ends in dict.fromkeys((0, two))]

    if reached(sized(low)[:1]) < low:
        return seen
    # twice what takes the days at the card's peak, 6 FLOPs a parameter and token: an embedding computes nothing
    peak = r.cluster.gpu.flops_per_s(r.choices.get("precision") or default_precision(r.cluster)) * r.gpus
    high = max(min(MOST, 2 * peak * days * 86400 / 6 / r.tokens), 1.01 * low)
    guess, crowded = high / 4, False  # half of the peak
    while high > 1.02 * low:
        # the size that would take just the days; the middle, where memory is the limit
        size = (low * high) ** 0.5 if crowded else min(max(guess, 1.01 * low), high / 1.01)
        shapes = smooth(size)
        outwards = sorted(shapes, key=lambda s: abs(shapes.index(s) - len(shapes) // 2))[:6]  # from the middle width
        guess = next((most for s in outwards if (most := reached([s]))), 0.0)
        crowded |= not guess
        low, high = (size, high) if guess >= size else (low, size)
    most = min(reached(smooth(low)) or low, high / 0.9, MOST)
    for _ in range(5):  # windows of two tolerances, ever smaller sizes
        near = [s for s in sized(most / (1 + r.tolerance), r.tolerance) if s.num_layers % 2 == 0 or s.num_layers < 8]
        known, before = {p.shape for p, _ in seen}, len(seen)
        reached([shape for shape in near if shape not in known])
        if any(_ends(p, dated, days) for p, dated in seen[before:]):
            break
        most *= (1 - r.tolerance) / (1 + r.tolerance)
    return seen


def _ends(proposal: Proposal, dated: Record, days: float) -> bool:
    return dated["days_90"] <= days and not proposal.prediction.is_risky


def in_time(proposal: Proposal, request: SizeRequest) -> Record:
    """Days and GPU-hours that half and nine of ten simulated runs keep, and the optimal model of the same compute.

    20 tokens a parameter: Hoffmann et al. 2022, arXiv:2203.15556; compute is as parameters x tokens. Left out:
    attention's s x s part. Empty where interruptions leave no progress.
    """
    try:
        made = forecast(proposal.plan, tokens=request.tokens, calibration=request.calibration)
    except ValueError:
        return {}
    parameters = proposal.shape.parameters
    each, best = proposal.tokens / parameters, (parameters * proposal.tokens / TOKENS_PER_PARAMETER) ** 0.5
    ratio, verdict = each / TOKENS_PER_PARAMETER, "compute-optimal"
    if not 1 / 1.25 <= ratio <= 1.25:  # what is still called optimal: our choice
        verdict = "fewer tokens than optimal" if ratio < 1 else "more tokens than optimal"
    return {
        **{"days_50": made.days(0.5), "days_90": made.days(0.9)},
        **{"gpu_hours_50": made.gpu_hours(0.5), "gpu_hours_90": made.gpu_hours(0.9)},
        **{"tokens_per_parameter": each, "verdict": verdict},
        "compute_optimal": {"params": best, "tokens": TOKENS_PER_PARAMETER * best},
    }
