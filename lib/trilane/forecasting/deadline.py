"""From a deadline to a size: the largest models that clusters train in time, each on its best topologies."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import default_precision
from trilane.config.model import ModelShape
from trilane.costmodel.shipped import calibration_for
from trilane.forecasting.forecast import forecast
from trilane.forecasting.in_time import Dated, InTime
from trilane.planning.size_request import ANY, MOST, SizeRequest
from trilane.planning.sizing import Proposal, Proposals, fastest, survey
from trilane.utils.numbers import size_text
from trilane.utils.validation import require, require_positive

BATCH = 1 << 22  # tokens of an iteration: GPT-3's 3.2 million (arXiv:2005.14165, table 2.1) to Llama 2's 4


def sizes_within(days: float, price: float | None = None, **asked: Any) -> InTime:
    """The largest shapes that end within `days` in nine of ten simulated runs; `asked` are SizeRequest's other fields.

        sizes_within(60, cluster=load_cluster("jz-a100-80g"), gpus=384, vocabulary=250880).summary()

    A bisection over sizes, of each the depths next to it at a few widths; then all shapes up to two tolerances above.
    """
    require_positive("days", days)
    require(days <= 36500, "days", f"{days:g}", "must be at most 36500")
    r = SizeRequest(parameters=MOST, **asked)

    def ended(found: Proposals) -> list[Dated]:
        able = (p for p in found.rows if p.days <= days and not p.prediction.is_risky)
        return [d for p in able if (d := dated(p, r, price)).costs["days_90"] <= days]

    def first(size: float) -> list[Dated]:
        """One shape of about that size that ends, if any does; most are at the middle widths, which are looked at."""
        try:
            near = [replace(r, parameters=size, tolerance=0.01, engine=engine) for engine in r.engines]
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
    # twice what takes the days at the card's peak, 6 FLOPs a parameter and token: an embedding computes nothing
    peak = r.cluster.gpu.flops_per_s(r.choices.get("precision") or default_precision(r.cluster)) * r.gpus
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
        return InTime(limit=days, request=least, rows=(), reasons={r.cluster.name: _why_none(least)})
    above = replace(r, parameters=low * (1 + r.tolerance))  # low itself is the least of these
    rows = sorted(ended(survey(above))[:12] or best, key=lambda row: -row.costs["parameters"])
    full = max(row.proposal.prediction.memory_bytes for row in rows) > 0.8 * r.cluster.gpu.memory_bytes
    slow = max(row.costs["days_90"] for row in rows) > 0.9 * days
    reason = "take longer" if slow else "may run out of memory" if full else "divide badly"
    last = replace(r, parameters=rows[0].costs["parameters"])
    return InTime(limit=days, request=last, rows=tuple(rows), reasons={r.cluster.name: f"larger shapes {reason}"})


def _why_none(request: SizeRequest) -> str:
    """Why not even the smallest shape ends in time."""
    found = survey(replace(request, tolerance=1e-9))
    if not found.rows:
        return found.why_none()
    took = f"{dated(found.rows[0], request).costs['days_90']:.3g} days for nine runs of ten"
    return f"the smallest shape ({size_text(found.rows[0].shape.parameters)} parameters) takes {took}"


def dated(proposal: Proposal, request: SizeRequest, price: float | None = None) -> Dated:
    """Days, GPU-hours and money of a proposal. Without end where interruptions leave no progress."""
    size, tokens, found = proposal.shape.parameters, proposal.tokens, dict[str, Any]()
    try:
        made = forecast(proposal.plan, tokens=tokens, calibration=request.calibration)
    except ValueError:
        found = dict.fromkeys(("days_50", "days_90", "gpu_hours_50", "gpu_hours_90"), math.inf)
    for name, share in (("50", 0.5), ("90", 0.9)) if not found else ():
        found |= {f"days_{name}": made.days(share), f"gpu_hours_{name}": made.gpu_hours(share)}
    found |= {"parameters": size, "tokens": tokens, "tokens_per_parameter": tokens / size}
    found["money"] = None if price is None else price * found["gpu_hours_50"]
    return Dated(request=request, proposal=proposal, costs=found)


def best_within(
    days: float,
    clusters: Sequence[Cluster],
    *,
    gpus: int = 0,
    gbs: int = 0,
    prices: Sequence[float] = (),
    calibration: str = "",
    **asked: Any,
) -> InTime:
    """The largest model that each cluster ends within `days`, by any engine, on its three fastest tp x pp x dp.

        best_within(14, [load_cluster("jz-a100-80g"), load_cluster("jz-h100")], gpus=64, prices=[1, 2]).as_text()

    `gpus` 0: all of the smallest cluster, on each. `gbs` 0: the multiple of the GPUs nearest to 4 million tokens, which
    every dp divides. `prices` of a GPU-hour: one for all clusters, or one for each. `asked` are SizeRequest's other
    fields: tokens (20 a parameter), vocabulary, like, ... Raises ValueError for a cluster without GPUs.
    """
    names = [cluster.name for cluster in clusters]
    for cluster in clusters:
        require(cluster.gpu.kind == "cuda", "cluster", cluster.name, "has no GPUs; trilane plan size takes it")
        require(names.count(cluster.name) == 1, "cluster", cluster.name, "is there twice")
    rule = f"give one for all, or one for each of {len(clusters)} clusters"
    require(len(prices) in (0, 1, len(clusters)), "price", ",".join(f"{p:g}" for p in prices), rule)
    count = gpus or min(cluster.max_gpus for cluster in clusters)
    batch = gbs or max(1, round(BATCH / asked.get("seq_length", 2048) / count)) * count
    asked = {"engine": ANY, **asked, "gpus": count, "gbs": batch}
    for cluster in clusters:  # a search takes seconds: first what is wrong
        SizeRequest(parameters=MOST, cluster=cluster, **asked)
    each = [*prices, *[prices[0] if prices else None] * (len(clusters) - len(prices))]
    found, rows = list[InTime](), list[list[Dated]]()
    for cluster, price in zip(clusters, each, strict=True):
        largest = sizes_within(days, price, **asked, cluster=cluster, calibration=calibration_for(cluster, calibration))
        shapes = _on_several(largest.request, [row.proposal.shape for row in largest.rows[:4]])
        made = [_on(shape, largest.request, price, 3) for shape in shapes]
        in_time = [plans for plans in made if plans and plans[0].costs["days_90"] <= days]
        found, rows = [*found, largest], [*rows, max(in_time, key=len, default=[])]
    able = [(one.request, price, some[0]) for one, price, some in zip(found, each, rows, strict=True) if some]
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
    made = [Proposal(plan=c.plan, prediction=c.prediction, tokens=tokens) for c in fastest(shape, request, count)[0]]
    return [dated(p, request, price) for p in made]


def _on_several(request: SizeRequest, shapes: Sequence[ModelShape]) -> list[ModelShape]:
    """The first of the shapes that has three tp x pp x dp, alone; else all, each with its heads and the usual ones too.

    A prime number of layers has few pipelines, and 15 heads, the fastest of a width at tp 1, no tp that a node has.
    """
    every = []
    for shape in shapes:
        heads = {shape.num_attention_heads, (request.layer(shape.hidden_size) or shape).num_attention_heads}
        every += [replace(shape, num_attention_heads=n) for n in heads]
    return [shape for shape in every if len(fastest(shape, request, 3)[0]) == 3][:1] or every
