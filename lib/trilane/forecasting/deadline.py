"""From a deadline to a size: the largest shapes that a number of GPUs trains on given tokens within so many days."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trilane.config.engines import default_precision
from trilane.config.model import ModelShape
from trilane.forecasting.forecast import Record, forecast
from trilane.planning.size_request import MOST, SizeRequest
from trilane.planning.sizing import Proposal, Proposals, size_text, support_lines, survey
from trilane.utils.tables import DataFrame, Table, Text, frame_of
from trilane.utils.validation import require, require_positive

COUNTED = (
    "Days are those of 'plan calendar' without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)
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
        return frame_of(self.rows[:12], columns)

    def summary(self) -> Text:
        """The largest size, why none is larger, and what its days count."""
        most = size_text(self.rows[0][0].shape.parameters) if self.rows else "nothing"
        end = f"within {self.limit:g} days with 90 % probability; {self.reason}. {COUNTED}"
        return Text.of("At most **{} parameters** end {}" if self.rows else "{} ends {}", most, end)

    def to_json(self, top: int = 12) -> Record:
        """The request, the shapes, what their days count, and why none is larger."""
        asked = {name: value for name, value in self.request.to_json().items() if name != "parameters"}
        values: Record = {"request": asked, "runnable": len(self.rows)}
        values["candidates"] = [{**p.to_json(self.rows[0][0]), **days} for p, days in self.rows[:top]]
        return {**values, "days": self.limit, "probability": 0.9, "counted": COUNTED, "reason": self.reason}

    def as_text(self, top: int = 12) -> str:
        """What was asked, a line for each shape, and why none is larger."""
        r, table = self.request, [self.to_frame().head(top).to_string(index=False)] * bool(self.rows)
        asked = f"{r.gpus} GPUs of {r.cluster.name}, {r.tokens / 1e9:g} B tokens, {r.gbs} sequences an iteration."
        head = f"within {self.limit:g} days with 90 % probability: {asked}"
        return "\n".join([head, COUNTED, *table, *support_lines([p for p, _ in self.rows]), self.reason])


def sizes_within(days: float, **asked: Any) -> SizesInTime:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are SizeRequest's other fields.

        sizes_within(60, cluster=load_cluster("jz-a100-80g"), gpus=384, vocabulary=250880).summary()

    A bisection over sizes; then all widths and even depths near the size that it found are examined, as they differ in
    what they reach.
    """
    require_positive("days", days)
    require(days <= 36500, "days", f"{days:g}", "must be at most 36500")
    request = SizeRequest(parameters=MOST, **asked)
    seen = _examined(request, days)
    ended = [(p, d) for p, d in seen if _ends(p, d, days)]
    largest = max((p.shape.parameters for p, _ in ended), default=_least(request))
    last = replace(request, parameters=largest)
    # shapes of at least 0.9 of the largest are listed: our choice
    rows = [(p, d) for p, d in ended if p.shape.parameters >= 0.9 * largest]
    rows.sort(key=lambda row: -row[0].shape.parameters)
    if not seen:
        reason = survey(last, last.shapes()[:1]).why_none()
    elif not rows:
        took = f"{seen[0][1]['days_90']:.3g} days for nine runs of ten"
        reason = f"the smallest shape ({size_text(seen[0][0].shape.parameters)} parameters) takes {took}"
    else:
        slow = rows[0][1]["days_90"] > 0.9 * days
        reason = "larger shapes take longer" if slow else "larger shapes may run out of memory"
    return SizesInTime(limit=days, request=last, rows=tuple(rows), reason=reason)


def _least(request: SizeRequest) -> float:
    """The least size of which there is any shape: one layer of the smallest width."""
    one = next(one for h in range(64, 4096, 64) if (one := request.layer(h)))
    return 1.001 * (one.embedding_parameters * (1 if one.tied_embeddings else 2) + one.layer_weights)


def _examined(r: SizeRequest, days: float) -> list[Dated]:
    """The shapes that were examined, among them the largest that end in time."""
    seen = dict[ModelShape, list[Dated]]()

    def ends(shape: ModelShape) -> bool:
        if shape not in seen:
            seen[shape] = [(p, dated(p, r)) for p in survey(r, [shape]).rows]
        return any(_ends(p, d, days) for p, d in seen[shape])

    def sized(size: float, tolerance: float = 1e-9) -> list[ModelShape]:
        return replace(r, parameters=size, tolerance=tolerance).shapes()

    def smooth(size: float) -> Iterable[ModelShape]:
        """Shapes of about that size, with depths that many pipelines divide, alone or with embedding and head."""
        for s in sized(size):
            step = 8 if s.num_layers >= 32 else 4 if s.num_layers >= 8 else 1
            depth = round(s.num_layers / step) * step
            yield from (replace(s, num_layers=depth - n) for n in ((0, 2) if step > 1 else (0,)))

    low = _least(r)
    # twice what takes the days at the card's peak, 6 FLOPs a parameter and token: an embedding computes nothing
    peak = r.cluster.gpu.flops_per_s(r.choices.get("precision") or default_precision(r.cluster)) * r.gpus
    high = max(min(MOST, 2 * peak * days * 86400 / 6 / r.tokens), 1.01 * low)
    if not ends(sized(low)[0]):
        return [one for found in seen.values() for one in found]
    size = high / 4  # half of the peak
    while high > 1.05 * low:
        low, high = (size, high) if any(map(ends, smooth(size))) else (low, size)
        size = (low * high) ** 0.5
    for _ in range(5):  # windows of two tolerances, ever smaller sizes
        near = sized(high / (1 + r.tolerance), r.tolerance)
        if any([ends(s) for s in near if s.num_layers % 2 == 0 or s.num_layers < 8]):
            break
        high *= (1 - r.tolerance) / (1 + r.tolerance)
    return [one for found in seen.values() for one in found]


def _ends(proposal: Proposal, dates: Record, days: float) -> bool:
    return dates["days_90"] <= days and not proposal.prediction.is_risky


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
