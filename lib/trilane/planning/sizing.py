"""Sizing: shapes of a target size, each on its best topology; the largest shape that one process
trains in time.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan, plan_of
from trilane.costmodel.predict import SAFE, predict
from trilane.forecasting.forecast import forecast
from trilane.planning.search import search
from trilane.planning.search_result import (
    Candidate,
    Candidates,
    first_per_lane,
    plan_columns,
)
from trilane.planning.size_request import ANY, TILE, SizeRequest, usable_heads
from trilane.utils.frozen import frozen
from trilane.utils.numbers import amount, size_text, with_bounds
from trilane.utils.tables import DataFrame, Json, Table, Text, as_json, displayed
from trilane.utils.validation import parse_integers, require, require_known
from trilane.workspace.study import load_cluster

SHOWN = 12  # shapes in a table
HALF_A_LAYER = 0.5  # from which size on an embedding should count as a layer: our choice


@frozen
class Proposal(Candidate):
    """A shape on a topology, what training it takes, and which rules it breaks."""

    request: SizeRequest
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return self.plan.shape

    @property
    def tokens(self) -> float:
        """Tokens of the whole run."""
        return self.request.tokens_of(self.shape.parameters)

    @property
    def tflops(self) -> float:
        """TFLOP/s a GPU (Narayanan's formula)."""
        t = self.topology
        flops = self.shape.flops_per_iteration(t.gbs, t.recompute == "full")
        return flops / self.prediction.sec_per_it / (t.gpus * 1e12)

    @property
    def cost(self) -> float:
        """GPU-seconds per parameter and token: what ranks shapes that are not equally large."""
        t = self.topology
        tokens = t.gbs * self.shape.seq_length
        return self.prediction.sec_per_it * t.gpus / tokens / self.shape.parameters

    @cached_property
    def costs(self) -> dict[str, float]:
        """Days, GPU-hours and money that half and nine of ten simulated runs keep; without end
        where interruptions leave no progress.
        """
        r = self.request
        costs = dict.fromkeys(("days_p50", "days_p90", "gpu_hours_p50", "gpu_hours_p90"), math.inf)
        asked = {"tokens": self.tokens, "spare_nodes": r.spare_nodes}
        with contextlib.suppress(ValueError):
            run = forecast(self.plan, calibration=r.calibration, **asked)
            for quantile, end in ((0.5, "p50"), (0.9, "p90")):
                costs[f"days_{end}"] = run.days(quantile)
                costs[f"gpu_hours_{end}"] = run.gpu_hours(quantile)
        if r.price is not None:
            costs["money_p50"] = r.price * costs["gpu_hours_p50"]
        return costs

    def columns(self, best: float) -> dict[str, Any]:
        """As a row of a frame, beside the least cost."""
        return {
            **plan_columns(self.plan, self.prediction),
            "tflops": self.tflops,
            "hidden_per_layer": self.shape.hidden_size / self.shape.num_layers,
            "tokens": self.tokens,
            **self.costs,
            "cost_over_best": self.cost / best - 1,
            "notes": "; ".join(self.notes),
        }

    def to_json(self) -> Json:
        """The plan as a search has it; its tokens, costs and notes."""
        costs = as_json({"tokens": self.tokens, **self.costs})
        return {**super().to_json(), "costs": costs, "notes": [*self.notes]}


@frozen
class Proposals(Table):
    """Shapes of a target size, the best first (by `cost`), and how many topologies each rule
    refuses.
    """

    most = SHOWN
    shown = (
        "num_layers hidden_size num_attention_heads kv_heads ffn parameters hidden_per_layer label "
        "sec_per_it tflops memory_gib days_p50 days_p90 gpu_hours_p50 money_p50 cost_over_best "
        "notes"
    )
    request: SizeRequest
    rows: tuple[Proposal, ...]
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def best(self) -> Proposal:
        """The first; ValueError where there is none."""
        require(bool(self.rows), "params", f"{self.request.parameters:g}", self.why_none())
        return self.rows[0]

    def summary(self) -> Text:
        """The best shape: its days and GPU-hours, what they count, and what that rests on."""
        if not self.rows:
            return Text("No shape of that size can run.")
        r = self.request
        p = self.best
        return Text.of(
            "Of {} parameters on {} GPUs of {}, the best shape is **{} layers × {:,}**: "
            "**{} days** (nine of ten runs: {}) and {} GPU-hours for {} tokens; {}. {}",
            size_text(r.parameters),
            r.gpus,
            r.cluster.name,
            p.shape.num_layers,
            p.shape.hidden_size,
            amount(p.costs["days_p50"]),
            amount(p.costs["days_p90"]),
            amount(p.costs["gpu_hours_p50"]),
            size_text(p.tokens),
            p.prediction.support.words,
            r.assumed,
        )

    def to_frame(self) -> DataFrame:
        """A row a shape, the best first: the columns of a search; tflops a GPU; tokens; days_p50,
        days_p90, gpu_hours_p50, gpu_hours_p90, which half and nine of ten simulated runs keep;
        money_p50 where there is a price; cost_over_best, by how much a parameter and token costs
        more than the best shape's; in notes the rules that the shape breaks.
        """
        import pandas as pd

        least = min(p.cost for p in self.rows) if self.rows else 0.0
        rows = [p.columns(least) for p in self.rows]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def to_json(self, top: int = SHOWN) -> Json:
        """The request, the first shapes as plans, and what is refused; bytes, seconds, days,
        GPU-hours.
        """
        return {
            "request": self.request.to_json(),
            "runnable": len(self.rows),
            "refused": dict(self.refused),
            "plans": [p.to_json() for p in self.rows[:top]],
        }

    def heading(self) -> str:
        """What was asked."""
        r = self.request
        tokens = size_text(r.tokens_of(r.parameters))
        where = f"{r.gpus} GPUs of {r.cluster.name}, {tokens} tokens"
        return f"{size_text(r.parameters)} parameters, {r.vocab_size} rows of embedding, {where}:"

    def as_text(self, top: int = SHOWN) -> str:
        """What was asked, the table of the first shapes, their notes, and what each cluster's first
        rests on; or why there is none.
        """
        if not self.rows:
            return f"{self.heading()}\n{self.why_none()}"
        shown = replace(self, rows=self.rows[:top])
        table = displayed(shown.to_frame(), self.shown.removesuffix(" notes"))
        lines = [self.heading(), table.to_string(float_format=amount)]
        support = dict[str, str]()
        for number, p in enumerate(shown.rows, start=1):
            lines += [f"{number}. {note}" for note in p.notes]
            support.setdefault(p.plan.cluster.name, p.prediction.support.words)
        lines += [f"the first on {cluster}: {words}" for cluster, words in support.items()]
        return "\n".join([*lines, self.request.assumed])

    def why_none(self) -> str:
        """Why no shape can run, by the commonest rule."""
        r = self.request
        why = "no dp and microbatch divide that batch"
        for rule, count in self.refused.most_common(1):
            why = f"{count} of {self.refused.total()} topologies are refused: {rule}"
        where = f"{r.gpus} GPUs of {r.cluster.name} and a batch of {r.gbs}"
        return f"no shape can run on {where}; {why}"


def propose_shapes(cluster: Cluster | str, **asked: Any) -> Proposals:
    """The shapes of a target size on a cluster, the best first; `asked` are SizeRequest's other
    fields.

    propose_shapes(load_cluster("jz-a100-80g"), parameters=200e9, vocabulary=250_880, gpus=384)
    """
    proposals = survey(SizeRequest(cluster=load_cluster(cluster), **asked))
    assert proposals.best
    return proposals


def survey(request: SizeRequest, shapes: Sequence[ModelShape] | None = None) -> Proposals:
    """A proposal for each of the request's shapes (or of `shapes`) that some topology can run; what
    may well run out of memory comes after the others.
    """
    refused = Counter[str]()
    proposals = []
    for shape in request.shapes() if shapes is None else shapes:
        best, rules = fastest(shape, request)
        refused.update(rules)
        proposals += [_proposal(c.plan, request) for c in best]
    proposals.sort(key=lambda p: (p.prediction.is_risky, p.cost))
    return Proposals(request=request, rows=tuple(proposals), refused=refused)


def fastest(
    shape: ModelShape, request: SizeRequest, top: int = 1
) -> tuple[list[Candidate], Counter[str]]:
    """The shape on the `top` fastest tp x pp x dp by the request's engines, and how many topologies
    each rule refuses.

    Where none is safe, those that may run out of memory.
    """
    safe: list[Candidate] = []
    risky: list[Candidate] = []
    refused = Counter[str]()
    for engine in ENGINES if request.engine == ANY else (request.engine,):
        result = search(
            shape,
            request.cluster,
            gpus=request.gpus,
            gbs=request.gbs,
            engine=engine,
            calibration=request.calibration,
            top=top,
            distinct=True,
            **request.choices,
        )
        safe += result.rows
        risky += result.risky
        refused.update(result.refused_by_rule)
    ranked = sorted(safe or risky, key=lambda c: c.prediction.sec_per_it)
    return first_per_lane(ranked)[:top], refused


def _proposal(plan: Plan, request: SizeRequest) -> Proposal:
    """The plan with the heads that break the fewest rules, then the fastest: a rule may see what
    the model does not.

    Where heads share keys and values, another number of them would be another size of model.
    """
    t = plan.topology
    prediction = predict(plan, request.calibration)
    # the number of rules broken and seconds, of each number of heads that is safe enough
    able = []
    counts = []
    if plan.shape.num_key_value_heads is None:
        counts = usable_heads(plan.shape.hidden_size, t.tp)
    for heads in counts:
        other = plan.replace(shape=replace(plan.shape, num_attention_heads=heads))
        p = predict(other, request.calibration)
        if p.oom_probability <= max(SAFE, prediction.oom_probability):
            able.append((len(broken_rules(other.shape, t)), p.sec_per_it, other))
    if able:
        plan = min(able, key=lambda tried: tried[:2])[2]
    return proposed(plan, request, broken_rules(plan.shape, t))


def proposed(plan: Plan, request: SizeRequest, notes: Iterable[str] = ()) -> Proposal:
    """The plan as long as the request's tokens, whole iterations."""
    batch = plan.topology.gbs * plan.shape.seq_length
    iterations = math.ceil(request.tokens_of(plan.shape.parameters) / batch)
    plan = replace(plan, run=replace(plan.run, train_iters=iterations))
    return Proposal(plan=plan, calibration=request.calibration, request=request, notes=tuple(notes))


def broken_rules(shape: ModelShape, topology: Topology) -> list[str]:
    """A line for every rule that the shape breaks on that topology."""
    t = topology
    reason = invalid_reason(shape, t)
    notes = [reason] if reason else []
    if shape.head_dim % 8:
        notes.append(
            f"head_dim={shape.head_dim}: must be a multiple of 8, or attention leaves the tensor "
            "cores (33 to 43 % slower in the chronicles)"
        )
    widths = {"hidden_size": shape.hidden_size, "ffn_hidden_size": shape.ffn}
    for name, width in widths.items():
        if width % TILE or width // t.tp % TILE:
            rule = f"should be a multiple of the {TILE}-wide tile"
            notes.append(f"{name}={width}: {width} / tp {t.tp} {rule}")
    if shape.kv_heads < t.tp:
        rule = f"should be a multiple of tp {t.tp}: GPUs use the same, and gather them"
        notes.append(f"num_key_value_heads={shape.kv_heads}: {rule}")
    layers = shape.embedding_parameters / shape.layer_parameters
    if t.pp > 1 and t.partition == "uniform" and layers > HALF_A_LAYER:
        rule = f"the embedding is {layers:.1f} layers; count it (type:transformer|embedding)"
        notes.append(f"partition=uniform: {rule}")
    return notes


@frozen
class ShapeSurvey(Candidates):
    """Shapes on one process of a machine, smallest first; `best` is the chosen one."""

    shown = (
        "num_layers hidden_size num_attention_heads parameters sec_per_it sec_lo sec_hi memory_gib"
    )
    limit_s: float
    best: Candidate

    def summary(self) -> Text:
        """The chosen shape in a sentence."""
        s = self.best.plan.shape
        p = self.best.prediction
        return Text.of(
            "For {:g} s an iteration on one process of {}: **{} layers × {}**, {} parameters, "
            "in **{} s**.",
            self.limit_s,
            self.best.plan.cluster.name,
            s.num_layers,
            s.hidden_size,
            size_text(s.parameters),
            with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi),
        )


def survey_shapes(
    cluster: Cluster | str,
    *,
    gbs: int,
    seq_length: int,
    vocabulary: int,
    head_dim: int,
    seconds: float,
) -> ShapeSurvey:
    """GPTs of 6 and 10 layers and 64 to 448 channels, predicted on one process in one microbatch.

    Chosen is the one with most parameters that takes at most `seconds` an iteration, of equal sizes
    the faster one; where none is fast enough, the fastest.

        survey_shapes(load_cluster("local"), gbs=8, seq_length=128, vocabulary=257, head_dim=32,
        seconds=0.15)
    """
    cluster = load_cluster(cluster)
    rows = []
    for layers in (6, 10):
        for hidden in range(64, 449, 64):
            if hidden % head_dim:
                continue
            shape = ModelShape(
                num_layers=layers,
                hidden_size=hidden,
                num_attention_heads=hidden // head_dim,
                seq_length=seq_length,
                vocab_size=padded_vocab_size(vocabulary),
            )
            plan = plan_of(shape, cluster, ENGINES[0], {"mbs": gbs, "gbs": gbs})
            rows.append(Candidate(plan=plan))
    require(bool(rows), "head_dim", head_dim, "must divide some hidden size of 64, 128, ... 448")
    rows.sort(key=lambda c: (c.plan.shape.parameters, -c.prediction.sec_per_it))
    best = min(rows, key=lambda c: c.prediction.sec_per_it)
    in_time = [c for c in rows if c.prediction.sec_per_it <= seconds]
    return ShapeSurvey(rows=tuple(rows), limit_s=seconds, best=[best, *in_time][-1])


def hand_on(
    choose: str,
    survey: ShapeSurvey,
    cluster: str,
    gpus: str,
    proposals: Proposals,
    target_cluster: str,
) -> dict[str, Any]:
    """What 01_sizing leaves for 02_topology: the model "here" (of the survey) or "target" (the best
    proposal).

    hand_on("target", survey, "local", "1,2,4", proposals, "jz-a100-80g")
    """
    require_known("choose", choose, ("here", "target"))
    parse_integers("gpus", gpus)
    shape = survey.best.plan.shape
    gbs = survey.best.topology.gbs
    if choose == "target":
        shape = proposals.best.shape
        gbs = proposals.request.gbs
        gpus = str(proposals.request.gpus)
        cluster = target_cluster
    return {
        "shape": vars(shape),
        "cluster": cluster,
        "gpus": gpus,
        "gbs": gbs,
    }
