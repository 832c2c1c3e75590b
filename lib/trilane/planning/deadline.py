"""From a deadline to a size: the largest models that clusters train in time, each on its best
topologies.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, default_precision
from trilane.planning.size_request import ANY, MOST, SizeRequest
from trilane.planning.sizing import SHOWN, Proposal, Proposals, fastest, proposed, survey
from trilane.utils.frozen import frozen
from trilane.utils.numbers import size_text
from trilane.utils.tables import Json, Text
from trilane.utils.validation import require, require_positive
from trilane.workspace.study import load_cluster

# tokens of an iteration: GPT-3's 3.2 million (arXiv:2005.14165, table 2.1) to Llama 2's 4
BATCH = 1 << 22
MIDDLE_WIDTHS = 6  # of those of a size that a bisection looks at
NEAR = 1.02  # sizes that a bisection no longer tells apart
NOTE = "Shapes have published ratios of width to depth: which of them learns best is not asked."


@frozen
class InTime(Proposals):
    """Plans that end in time, those of a cluster together and its best first; without rows nothing
    ends. Its request is that of the first cluster, for the largest size; `reasons` is why nothing
    ends on a cluster.
    """

    shown = (
        "cluster gpus parameters num_layers hidden_size tokens engine label days_p50 days_p90 "
        "gpu_hours_p50 money_p50 cost_over_best memory_gib oom_probability"
    )
    limit: float
    reasons: dict[str, str]

    def why_none(self) -> str:
        """Why nothing ends on each cluster."""
        return "; ".join(f"{cluster}: {reason}" for cluster, reason in self.reasons.items())

    def heading(self) -> str:
        """What was asked."""
        return f"the largest that nine of ten runs end within {self.limit:g} days:"

    def summary(self) -> Text:
        """The largest size, or why there is none."""
        if not self.rows:
            return Text.of("Nothing ends in time: {}.", self.why_none())
        most = size_text(self.rows[0].shape.parameters)
        text = "Nine of ten runs end within {:g} days with at most: **{}**. {} {}"
        return Text.of(text, self.limit, most, self.request.assumed, NOTE)

    def to_json(self, top: int = SHOWN) -> Json:
        """The plans with their costs, and why nothing ends."""
        limits = {"days": self.limit, "probability": 0.9, "reasons": self.reasons}
        return {**super().to_json(top), **limits}

    def as_text(self, top: int = SHOWN) -> str:
        """The plans side by side, what each rests on, and why nothing ends on a cluster."""
        lines = [super().as_text(top)]
        if self.rows and self.reasons:
            lines.append(self.why_none())
        return "\n".join([*lines, NOTE])


def _largest(r: SizeRequest, days: float) -> Proposal | None:
    """The largest shape that ends within `days` in nine of ten runs; None where none does.

    A bisection over sizes, of each the depths next to it at a few widths; then all shapes up to two
    tolerances above.
    """
    low = _least_size(r)
    # with so many tokens a parameter their product is the square of the parameters
    power = 1 / (1 + math.log2(r.tokens_of(2.0) / r.tokens_of(1.0)))
    high = max(min(MOST, _computed(r, days) ** power), 1.01 * low)
    best = []
    size = high / 4**power  # half of the peak
    while high > NEAR * low:
        if ended := _some_of_size(size, r, days):
            low = size
            best = ended
        else:
            high = size
        size = (low * high) ** 0.5
    if not best:
        return None
    above = replace(r, parameters=low * (1 + r.tolerance))  # low itself is the least of these
    rows = _ended(survey(above).rows, days)[:12] or best
    return max(rows, key=lambda p: p.shape.parameters)


def _least_size(request: SizeRequest) -> float:
    """The least size of which there is any shape: one layer of the smallest width."""
    for hidden in range(64, 4096, 64):
        if layer := request.layer(hidden):
            matrices = 1 if layer.tied_embeddings else 2
            return 1.001 * (layer.embedding_parameters * matrices + layer.layer_weights)
    raise AssertionError("no width has heads")


def _computed(request: SizeRequest, days: float) -> float:
    """Twice the parameters that one token a parameter's tokens train in these days at the card's
    peak, 6 FLOPs a parameter and token: an embedding computes nothing.
    """
    precision = request.choices.get("precision") or default_precision(request.cluster)
    peak = request.cluster.gpu.flops_per_s(precision) * request.gpus
    return 2 * peak * days * 86400 / 6 / request.tokens_of(1.0)


def _ended(proposals: Sequence[Proposal], days: float) -> list[Proposal]:
    """Those that nine of ten runs end in time, without a risk of memory."""
    able = [p for p in proposals if not p.prediction.is_risky]
    return [p for p in able if p.costs["days_p90"] <= days]


def _some_of_size(size: float, request: SizeRequest, days: float) -> list[Proposal]:
    """One shape of about that size that ends, if any does; most are at the middle widths, which
    are looked at.
    """
    try:
        near = replace(request, parameters=size, tolerance=0.01)
    except ValueError:  # no usual width has that size: the embedding alone nearly reaches it
        return []
    shapes = near.shapes()
    middle = sorted(shapes, key=lambda shape: abs(shapes.index(shape) - len(shapes) // 2))
    # one engine after the other: most often the first ends
    engines = ENGINES if request.engine == ANY else (request.engine,)
    for shape, engine in product(middle[:MIDDLE_WIDTHS], engines):
        rows = survey(replace(near, engine=engine), [shape]).rows
        ended = _ended(rows, days)
        # depths that divide badly cost up to a third: where one takes twice the days, none ends
        if ended or (rows and rows[0].costs["days_p90"] > 2 * days):
            return ended
    return []


def _why_none(r: SizeRequest) -> str:
    """Why not even the smallest shape ends in time."""
    least = replace(r, parameters=_least_size(r), tolerance=1e-9)
    proposals = survey(least)
    if not proposals.rows:
        return proposals.why_none()
    smallest = proposals.rows[0]
    size = size_text(smallest.shape.parameters)
    days = smallest.costs["days_p90"]
    takes = f"the smallest shape ({size} parameters) takes {days:.3g} days for nine runs of ten"
    return f"no shape that was tried ends in time; {takes}"


def best_within(
    days: float,
    clusters: Sequence[Cluster | str],
    *,
    gpus: int = 0,
    gbs: int = 0,
    prices: Sequence[float] = (),
    **asked: Any,
) -> InTime:
    """The largest model that each cluster ends within `days`, by any engine, on its three fastest
    tp x pp x dp.

        best_within(14, ["jz-a100-80g", "jz-h100"], gpus=64, prices=[1, 2]).to_frame()

    `gpus` 0: all of the smallest cluster, on each. `gbs` 0: the multiple of the GPUs nearest to 4
    million tokens, which every dp divides. `prices` of a GPU-hour: one for all clusters, or one for
    each. `asked` are SizeRequest's other fields: tokens (20 a parameter), vocabulary, like, ...
    Raises ValueError for a cluster without GPUs.
    """
    require_positive("days", days)
    machines = [load_cluster(cluster) for cluster in clusters]
    each: list[float | None] = [*prices] or [None]
    if len(each) == 1:
        each *= len(machines)
    rule = f"give one for all, or one for each of {len(machines)} clusters"
    given = ",".join(f"{price:g}" for price in prices)
    require(len(each) == len(machines), "price", given, rule)
    count = gpus or min(machine.max_gpus for machine in machines)
    batch = gbs or max(1, round(BATCH / asked.get("seq_length", 2048) / count)) * count
    asked = {"engine": ANY, **asked, "gpus": count, "gbs": batch}
    requests = []
    # a search takes seconds: first what is wrong
    for machine, price in zip(machines, each, strict=True):
        require(machine.gpu.kind == "cuda", "cluster", machine.name, "has no GPUs")
        requests.append(SizeRequest(parameters=MOST, cluster=machine, price=price, **asked))
    rows = []
    reasons = {}
    for request in requests:
        largest = _largest(request, days)
        if largest:
            plans, _ = fastest(largest.shape, request, 3)
            rows += _ended([proposed(c.plan, request) for c in plans], days) or [largest]
        else:
            reasons[request.cluster.name] = _why_none(request)
    first = requests[0]
    if rows:
        first = replace(first, parameters=rows[0].shape.parameters)
    return InTime(limit=days, request=first, rows=tuple(rows), reasons=reasons)
