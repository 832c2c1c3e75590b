"""From a deadline to a size: the largest shapes that a number of GPUs trains on given tokens within so many days."""

import math
from dataclasses import dataclass, replace
from typing import Any

from trilane.config.engines import default_precision
from trilane.forecasting.forecast import Record, forecast
from trilane.planning.size_request import MOST, SizeRequest
from trilane.planning.sizing import Proposal, Proposals, size_text, support_lines, survey
from trilane.utils.tables import DataFrame, Table, Text, frame_of
from trilane.utils.validation import require, require_positive

COUNTED = (
    "Days are those of 'plan calendar' without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)
MOST_ROWS = 12  # shapes that are listed
Dated = tuple[Proposal, Record]  # a shape on its best topology, and what dated() computes of its training


@dataclass(frozen=True, kw_only=True)
class SizesInTime(Table):
    """The largest shapes that end in time, the largest first; `reason` is what the next larger ones lack.

    `request` is that of the largest: its `parameters` are no target of the user. Without rows nothing ends in time.
    """

    limit: float
    request: SizeRequest
    rows: tuple[Dated, ...]
    reason: str

    def proposals(self) -> Proposals:
        """The shapes as those of a target size, that of the largest; ValueError where nothing ends in time."""
        require(bool(self.rows), "days", f"{self.limit:g}", self.reason)
        return Proposals(request=self.request, rows=tuple(proposal for proposal, _ in self.rows))

    def to_frame(self) -> DataFrame:
        """A row a shape: size, topology, memory, days and GPU-hours of half of the runs, tokens a parameter."""
        columns: dict[str, Any] = {
            "layers × hidden": lambda row: row[0].size,
            "parameters": lambda row: size_text(row[0].shape.parameters),
            "plan": lambda row: row[0].plan.label,
            "GiB": lambda row: f"{row[0].prediction.memory_bytes / 2**30:.1f}",
            "days (90 %)": lambda row: "{days_50:.1f} ({days_90:.1f})".format(**row[1]),
            "GPU-hours": lambda row: f"{row[1]['gpu_hours_50']:,.0f}",
            "tokens a parameter": lambda row: f"{row[1]['tokens_per_parameter']:.3g}",
        }
        return frame_of(self.rows, columns)

    def summary(self) -> Text:
        """The largest size, why none is larger, and what its days count."""
        most = size_text(self.rows[0][0].shape.parameters) if self.rows else "nothing"
        end = f"within {self.limit:g} days with 90 % probability; {self.reason}. {COUNTED}"
        return Text.of("At most **{} parameters** end {}" if self.rows else "{} ends {}", most, end)

    def to_json(self, top: int = MOST_ROWS) -> Record:
        """The request, the shapes, what their days count, and why none is larger."""
        asked = {name: value for name, value in self.request.to_json().items() if name != "parameters"}
        values: Record = {"request": asked, "runnable": len(self.rows)}
        values["candidates"] = [{**p.to_json(self.rows[0][0]), **days} for p, days in self.rows[:top]]
        return {**values, "days": self.limit, "probability": 0.9, "counted": COUNTED, "reason": self.reason}

    def as_text(self, top: int = MOST_ROWS) -> str:
        """What was asked, a line for each shape, and why none is larger."""
        r, table = self.request, [self.to_frame().head(top).to_string(index=False)] * bool(self.rows)
        asked = f"{r.gpus} GPUs of {r.cluster.name}, {r.tokens / 1e9:g} B tokens, {r.gbs} sequences an iteration."
        head = f"within {self.limit:g} days with 90 % probability: {asked}"
        notes = [f"{p.size}: {note}" for p, _ in self.rows[:top] for note in (p.shape.kind, *p.notes) if note]
        return "\n".join([head, COUNTED, *table, *notes, *support_lines([p for p, _ in self.rows]), self.reason])


def sizes_within(days: float, **asked: Any) -> SizesInTime:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are SizeRequest's other fields.

        sizes_within(60, cluster=load_cluster("jz-a100-80g"), gpus=384, vocabulary=250880).summary()

    A bisection over sizes, of each the depths next to it at a few widths; then all shapes up to two tolerances above.
    """
    require_positive("days", days)
    require(days <= 36500, "days", f"{days:g}", "must be at most 36500")
    r = SizeRequest(parameters=MOST, **asked)

    def ended(found: Proposals) -> list[Dated]:
        able = (p for p in found.rows if p.days <= days and not p.prediction.is_risky)
        return [(p, d) for p in able if (d := dated(p, r))["days_90"] <= days]

    def first(size: float) -> list[Dated]:
        """One shape of about that size that ends, if any does; most are at the middle widths, which are looked at."""
        try:
            near = replace(r, parameters=size, tolerance=0.01)
        except ValueError:  # no usual width has that size: the embedding alone nearly reaches it
            return []
        shapes = near.shapes()
        middle = sorted(shapes, key=lambda s: abs(shapes.index(s) - len(shapes) // 2))[:6]
        return next(filter(None, (ended(survey(near, [shape])) for shape in middle)), [])

    one = next(one for h in range(64, 4096, 64) if (one := r.layer(h)))
    # the least size of which there is any shape: one layer of the smallest width
    low = 1.001 * (one.embedding_parameters * (1 if one.tied_embeddings else 2) + one.layer_weights)
    # twice what takes the days at the card's peak, 6 FLOPs a parameter and token: an embedding computes nothing
    peak = r.cluster.gpu.flops_per_s(r.choices.get("precision") or default_precision(r.cluster)) * r.gpus
    high = max(min(MOST, 2 * peak * days * 86400 / 6 / r.tokens), 1.01 * low)
    least, best = replace(r, parameters=low), list[Dated]()
    size = high / 4  # half of the peak
    while high > 1.02 * low:
        if now := first(size):
            low, best = size, now
        else:
            high = size
        size = (low * high) ** 0.5
    if not best:
        return SizesInTime(limit=days, request=least, rows=(), reason=_why_none(least))
    above = replace(r, parameters=low * (1 + r.tolerance))  # low itself is the least of these
    rows = sorted(ended(survey(above))[:MOST_ROWS] or best, key=lambda row: -row[0].shape.parameters)
    slow = max(d["days_90"] for _, d in rows) > 0.9 * days
    reason = "larger shapes take longer" if slow else "larger shapes may run out of memory"
    last = replace(r, parameters=rows[0][0].shape.parameters)
    return SizesInTime(limit=days, request=last, rows=tuple(rows), reason=reason)


def _why_none(request: SizeRequest) -> str:
    """Why not even the smallest shape ends in time."""
    found = survey(replace(request, tolerance=1e-9))
    if not found.rows:
        return found.why_none()
    took = f"{dated(found.rows[0], request)['days_90']:.3g} days for nine runs of ten"
    return f"the smallest shape ({size_text(found.rows[0].shape.parameters)} parameters) takes {took}"


def dated(proposal: Proposal, request: SizeRequest) -> Record:
    """Days and GPU-hours that half and nine of ten simulated runs keep, and tokens a parameter.

    20 of these are compute-optimal: Hoffmann et al. 2022, arXiv:2203.15556. Without end where interruptions leave no
    progress.
    """
    found: Record = {"tokens_per_parameter": request.tokens / proposal.shape.parameters}
    try:
        made = forecast(proposal.plan, tokens=request.tokens, calibration=request.calibration)
    except ValueError:
        return found | dict.fromkeys(("days_50", "days_90", "gpu_hours_50", "gpu_hours_90"), math.inf)
    for name, share in (("50", 0.5), ("90", 0.9)):
        found |= {f"days_{name}": made.days(share), f"gpu_hours_{name}": made.gpu_hours(share)}
    return found
