"""From a deadline to a size: the largest models that clusters train in time, each on its best
topologies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import default_precision
from trilane.config.model import ModelShape
from trilane.costmodel.predict import SAFE
from trilane.costmodel.shipped import calibration_for
from trilane.forecasting.forecast import Json, forecast
from trilane.planning.search_result import Candidate, plan_columns
from trilane.planning.size_request import ANY, MOST, SizeRequest
from trilane.planning.sizing import Proposal, Proposals, fastest, survey
from trilane.utils.numbers import amount, size_text
from trilane.utils.tables import DataFrame, Record, Table, Text, displayed
from trilane.utils.validation import require, require_positive
from trilane.workspace.study import load_cluster

BATCH = (
    1 << 22
)  # tokens of an iteration: GPT-3's 3.2 million (arXiv:2005.14165, table 2.1) to Llama 2's 4
COUNTED = (
    "Days are those of 'plan calendar' without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)


@dataclass(frozen=True, kw_only=True)
class Dated(Record):
    """A proposal; days, GPU-hours and money that half and nine of ten of its simulated runs keep."""

    request: SizeRequest
    proposal: Proposal
    costs: Json

    @property
    def evidence(self) -> str:
        """What the plan rests on, its kind of shape and the rules that it breaks, and that its
        memory is not safe.
        """
        p = self.proposal.prediction
        found = [p.support.words, *filter(None, [self.proposal.shape.kind]), *self.proposal.notes]
        found += [f"its memory is to be measured first: P(OOM) above {SAFE:g}"] * (
            p.oom_probability > SAFE
        )
        return "; ".join(found)

    def to_json(self) -> Json:
        """The plan as a search has it, with its costs."""
        found = Candidate(plan=self.proposal.plan, prediction=self.proposal.prediction)
        return {**found.to_json(), "costs": self.costs}


@dataclass(frozen=True, kw_only=True)
class InTime(Table):
    """Plans that end in time, those of a cluster together and its best first; without rows nothing
    ends.

    `same` is one model on each of several clusters, `reasons` why no larger one ends on each, or
    why none does.
    """

    digits = 1
    shown = "cluster gpus parameters num_layers hidden_size tokens engine label days_p50 days_p90 gpu_hours_p50"
    shown += " money memory_gib oom_probability"
    limit: float
    request: SizeRequest  # of the first cluster; its `parameters` are no target of the user
    rows: tuple[Dated, ...]
    reasons: dict[str, str]
    same: tuple[Dated, ...] = ()

    def proposals(self) -> Proposals:
        """The shapes as those of a target size, that of the largest; ValueError where nothing ends
        in time.
        """
        require(bool(self.rows), "days", f"{self.limit:g}", "; ".join(self.reasons.values()))
        return Proposals(request=self.request, rows=tuple(row.proposal for row in self.rows))

    def to_frame(self) -> DataFrame:
        """A row a plan in the columns of a search; tokens; days_p50, days_p90, gpu_hours_p50,
        gpu_hours_p90, which half and nine of ten runs keep; money, NaN without a price.
        """
        return _frame(self.rows)

    def worth(self) -> list[str]:
        """What a GPU-hour of each further cluster is worth in those of the first one, by the common
        model.
        """
        lines = []
        for one, other in ((self.same[0], other) for other in self.same[1:]):
            ratio, name = (
                one.costs["gpu_hours_p50"] / other.costs["gpu_hours_p50"],
                other.request.cluster.name,
            )
            text = (
                f"a GPU-hour of {name} does the work of {ratio:.2f} of {one.request.cluster.name}"
            )
            money = ", and is worth as many times their price"
            if one.costs["money"] is not None:
                money = f": {other.costs['money'] / one.costs['money'] - 1:+.0%} of money at these prices"
            lines.append(text + money)
        return lines

    def assumptions(self) -> list[str]:
        """What model, tokens and days take for granted."""
        r = self.request
        kind = "published ratios of width to depth; predicted only: which shape learns best is not asked"
        by = ", compute-optimal by Hoffmann et al. 2022; for much serving fewer parameters on more"
        return [
            f"model: {r.like}, {r.vocab_size} rows of embedding, sequences of {r.seq_length}, {kind}",
            f"tokens: {r.tokens_text}{by * (r.tokens == '20x')}; {r.gbs} sequences an iteration",
            COUNTED,
        ]

    def summary(self) -> Text:
        """The largest size, why none is larger, and what its days count."""
        most = size_text(self.rows[0].proposal.shape.parameters) if self.rows else "nothing"
        end = f"within {self.limit:g} days with 90 % probability; {'; '.join(self.reasons.values())}. {COUNTED}"
        return Text.of("At most **{} parameters** end {}" if self.rows else "{} ends {}", most, end)

    def to_json(self, top: int = 12) -> Json:
        """The plans with their costs, the common model's costs, what is assumed, and why none is
        larger.
        """
        same = [{"cluster": row.request.cluster.name, **row.costs} for row in self.same]
        found: Json = {
            "days": self.limit,
            "probability": 0.9,
            "request": self.request.to_json(),
            "same_model": same,
        }
        found |= {"worth": self.worth(), "reasons": self.reasons, "assumptions": self.assumptions()}
        return {**found, "plans": [row.to_json() for row in self.rows[:top]]}

    def as_text(self, top: int = 12) -> str:
        """The plans side by side, the worth of each cluster's GPU-hours, what each plan rests on,
        what is assumed.
        """
        rows = self.rows[:top]
        lines = [
            f"the largest that end within {self.limit:g} days with 90 % probability, on their fastest topology:"
        ]
        lines += [_text(rows)] if rows else []
        lines += ["one model on each:", _text(self.same), *self.worth()] if self.same else []
        lines += [f"{number}. {row.evidence}" for number, row in enumerate(rows, start=1)]
        lines += [f"{cluster}: {reason}" for cluster, reason in self.reasons.items()]
        return "\n".join([*lines, *self.assumptions()])


def _frame(rows: Sequence[Dated]) -> DataFrame:
    import pandas as pd

    plans = ((row.proposal.plan, row.proposal.prediction, row.costs) for row in rows)
    frame = pd.DataFrame(
        [plan_columns(plan, prediction) | costs for plan, prediction, costs in plans]
    )
    return frame.astype({"money": float}).set_axis(range(1, len(rows) + 1)) if len(rows) else frame


def _text(rows: Sequence[Dated]) -> str:
    return displayed(_frame(rows), InTime.shown).to_string(float_format=amount)


def sizes_within(days: float, price: float | None = None, **asked: Any) -> InTime:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are
    SizeRequest's other fields.

        sizes_within(60, cluster=load_cluster("jz-a100-80g"), gpus=384, vocabulary=250880).summary()

    A bisection over sizes, of each the depths next to it at a few widths; then all shapes up to two
    tolerances above.
    """
    require_positive("days", days)
    require(days <= 36500, "days", f"{days:g}", "must be at most 36500")
    r = SizeRequest(parameters=MOST, **asked)

    def ended(found: Proposals) -> list[Dated]:
        able = (p for p in found.rows if p.days <= days and not p.prediction.is_risky)
        return [d for p in able if (d := dated(p, r, price)).costs["days_p90"] <= days]

    def first(size: float) -> list[Dated]:
        """One shape of about that size that ends, if any does; most are at the middle widths, which
        are looked at.
        """
        try:
            near = [
                replace(r, parameters=size, tolerance=0.01, engine=engine) for engine in r.engines
            ]
        except ValueError:  # no usual width has that size: the embedding alone nearly reaches it
            return []
        shapes = near[0].shapes()
        middle = sorted(shapes, key=lambda s: abs(shapes.index(s) - len(shapes) // 2))[:6]
        for shape, one in product(middle, near):
            found = survey(one, [shape])
            # depths that divide badly cost up to a third: where one takes twice the days, none ends
            if (now := ended(found)) or (found.rows and found.rows[0].days > 2 * days):
                return now
        return []

    one = next(one for h in range(64, 4096, 64) if (one := r.layer(h)))
    # the least size of which there is any shape: one layer of the smallest width
    low = 1.001 * (one.embedding_parameters * (1 if one.tied_embeddings else 2) + one.layer_weights)
    # twice what takes the days at the card's peak, 6 FLOPs a parameter and token: an embedding
    # computes nothing
    peak = (
        r.cluster.gpu.flops_per_s(r.choices.get("precision") or default_precision(r.cluster))
        * r.gpus
    )
    # with so many tokens a parameter that is the square of the parameters
    power = 1 / (1 + math.log2(r.tokens_of(2.0) / r.tokens_of(1.0)))
    high = max(min(MOST, (2 * peak * days * 86400 / 6 / r.tokens_of(1.0)) ** power), 1.01 * low)
    least, best = replace(r, parameters=low), list[Dated]()
    size = high / 4**power  # half of the peak
    while high > 1.02 * low:
        if now := first(size):
            low, best = size, now
        else:
            high = size
        size = (low * high) ** 0.5
    if not best:
        return InTime(
            limit=days, request=least, rows=(), reasons={r.cluster.name: _why_none(least)}
        )
    above = replace(r, parameters=low * (1 + r.tolerance))  # low itself is the least of these
    rows = sorted(ended(survey(above))[:12] or best, key=lambda row: -row.costs["parameters"])
    full = (
        max(row.proposal.prediction.memory_bytes for row in rows) > 0.8 * r.cluster.gpu.memory_bytes
    )
    slow = max(row.costs["days_p90"] for row in rows) > 0.9 * days
    reason = "take longer" if slow else "may run out of memory" if full else "divide badly"
    last = replace(r, parameters=rows[0].costs["parameters"])
    return InTime(
        limit=days,
        request=last,
        rows=tuple(rows),
        reasons={r.cluster.name: f"larger shapes {reason}"},
    )


def _why_none(request: SizeRequest) -> str:
    """Why not even the smallest shape ends in time."""
    found = survey(replace(request, tolerance=1e-9))
    if not found.rows:
        return found.why_none()
    took = f"{dated(found.rows[0], request).costs['days_p90']:.3g} days for nine runs of ten"
    return (
        f"the smallest shape ({size_text(found.rows[0].shape.parameters)} parameters) takes {took}"
    )


def dated(proposal: Proposal, request: SizeRequest, price: float | None = None) -> Dated:
    """Days, GPU-hours and money of a proposal. Without end where interruptions leave no progress."""
    size, tokens, found = proposal.shape.parameters, proposal.tokens, dict[str, Any]()
    try:
        made = forecast(proposal.plan, tokens=tokens, calibration=request.calibration)
    except ValueError:
        found = dict.fromkeys(("days_p50", "days_p90", "gpu_hours_p50", "gpu_hours_p90"), math.inf)
    for name, share in (("p50", 0.5), ("p90", 0.9)) if not found else ():
        found |= {f"days_{name}": made.days(share), f"gpu_hours_{name}": made.gpu_hours(share)}
    found |= {"parameters": size, "tokens": tokens, "tokens_per_parameter": tokens / size}
    found["money"] = None if price is None else price * found["gpu_hours_p50"]
    return Dated(request=request, proposal=proposal, costs=found)


def best_within(
    days: float,
    clusters: Sequence[Cluster | str],
    *,
    gpus: int = 0,
    gbs: int = 0,
    prices: Sequence[float] = (),
    calibration: str = "",
    **asked: Any,
) -> InTime:
    """The largest model that each cluster ends within `days`, by any engine, on its three fastest
    tp x pp x dp.

        best_within(14, [load_cluster("jz-a100-80g"), load_cluster("jz-h100")], gpus=64, prices=[1,
        2]).as_text()

    `gpus` 0: all of the smallest cluster, on each. `gbs` 0: the multiple of the GPUs nearest to 4
    million tokens, which every dp divides. `prices` of a GPU-hour: one for all clusters, or one for
    each. `asked` are SizeRequest's other fields: tokens (20 a parameter), vocabulary, like, ...
    Raises ValueError for a cluster without GPUs.
    """
    machines = [load_cluster(cluster) for cluster in clusters]
    names = [cluster.name for cluster in machines]
    for cluster in machines:
        require(
            cluster.gpu.kind == "cuda",
            "cluster",
            cluster.name,
            "has no GPUs; trilane plan size takes it",
        )
        require(names.count(cluster.name) == 1, "cluster", cluster.name, "is there twice")
    rule = f"give one for all, or one for each of {len(machines)} clusters"
    require(len(prices) in (0, 1, len(clusters)), "price", ",".join(f"{p:g}" for p in prices), rule)
    count = gpus or min(cluster.max_gpus for cluster in machines)
    batch = gbs or max(1, round(BATCH / asked.get("seq_length", 2048) / count)) * count
    asked = {"engine": ANY, **asked, "gpus": count, "gbs": batch}
    for cluster in machines:  # a search takes seconds: first what is wrong
        SizeRequest(parameters=MOST, cluster=cluster, **asked)
    each = [*prices, *[prices[0] if prices else None] * (len(clusters) - len(prices))]
    found, rows = list[InTime](), list[list[Dated]]()
    for cluster, price in zip(machines, each, strict=True):
        largest = sizes_within(
            days, price, **asked, cluster=cluster, calibration=calibration_for(cluster, calibration)
        )
        shapes = _on_several(largest.request, [row.proposal.shape for row in largest.rows[:4]])
        made = [_on(shape, largest.request, price, 3) for shape in shapes]
        in_time = [plans for plans in made if plans and plans[0].costs["days_p90"] <= days]
        found, rows = [*found, largest], [*rows, max(in_time, key=len, default=[])]
    able = [
        (one.request, price, some[0])
        for one, price, some in zip(found, each, rows, strict=True)
        if some
    ]
    same = list[Dated]()
    if len(able) > 1:
        least = min((row.proposal.shape for *_, row in able), key=lambda shape: shape.parameters)
        same = [row for request, price, _ in able for row in _on(least, request, price, 1)]
    return InTime(
        limit=days,
        request=found[0].request,
        rows=tuple(row for some in rows for row in some),
        same=tuple(same),
        reasons={name: reason for one in found for name, reason in one.reasons.items()},
    )


def _on(shape: ModelShape, request: SizeRequest, price: float | None, count: int) -> list[Dated]:
    """The shape on its fastest tp x pp x dp."""
    tokens = request.tokens_of(shape.parameters)
    made = [
        Proposal(plan=c.plan, prediction=c.prediction, tokens=tokens)
        for c in fastest(shape, request, count)[0]
    ]
    return [dated(p, request, price) for p in made]


def _on_several(request: SizeRequest, shapes: Sequence[ModelShape]) -> list[ModelShape]:
    """The first of the shapes that has three tp x pp x dp, alone; else all, each with its heads and
    the usual ones too.

    A prime number of layers has few pipelines, and 15 heads, the fastest of a width at tp 1, no tp
    that a node has.
    """
    every = []
    for shape in shapes:
        heads = {
            shape.num_attention_heads,
            (request.layer(shape.hidden_size) or shape).num_attention_heads,
        }
        every += [replace(shape, num_attention_heads=n) for n in heads]
    return [shape for shape in every if len(fastest(shape, request, 3)[0]) == 3][:1] or every
