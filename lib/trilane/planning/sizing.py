"""Sizing: shapes of a target size, each on its best topology; the largest shape that one process
trains in time.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import default_topology, label_of
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.predict import RISKY, Prediction, predict
from trilane.planning.search import search
from trilane.planning.search_result import (
    Candidate,
    Candidates,
    first_per_sizes,
    plan_columns,
    sizes_of,
)
from trilane.planning.size_request import TILE, SizeRequest, usable_heads
from trilane.utils.numbers import amount, size_text, with_bounds
from trilane.utils.tables import DataFrame, Table, Text, displayed
from trilane.utils.validation import require, require_known, to_mapping
from trilane.workspace.study import load_cluster

SHOWN = 12  # shapes in a table
HALF_A_LAYER = 0.5  # from which size on an embedding should count as a layer: our choice


@dataclass(frozen=True, kw_only=True)
class Proposal(Candidate):
    """A shape on its best topology, what training it costs, and which rules it breaks."""

    tokens: float
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return self.plan.shape

    @property
    def tflops(self) -> float:
        """TFLOP/s a GPU (Narayanan's formula)."""
        t = self.topology
        flops = self.shape.flops_per_iteration(t.gbs, t.recompute == "full")
        return flops / self.prediction.sec_per_it / (t.gpus * 1e12)

    @property
    def days(self) -> float:
        return training_days(self.shape, self.topology, self.prediction.sec_per_it, self.tokens)

    @property
    def days_interval(self) -> tuple[float, float, float]:
        """Days, and the lowest and highest of their 90 % interval."""
        p = self.prediction
        return self.days, self.days * p.sec_lo / p.sec_per_it, self.days * p.sec_hi / p.sec_per_it

    @property
    def cost(self) -> float:
        """Days per parameter and token: what ranks shapes that are not equally large."""
        return self.days / self.shape.parameters / self.tokens

    def columns(self, best: "Proposal") -> dict[str, Any]:
        """As a row of a frame."""
        _, low, high = self.days_interval
        return {
            **plan_columns(self.plan, self.prediction),
            "tflops": self.tflops,
            "hidden_per_layer": self.shape.hidden_size / self.shape.num_layers,
            "tokens": self.tokens,
            "days": self.days,
            "days_lo": low,
            "days_hi": high,
            "gpu_hours": 24 * self.days * self.topology.gpus,
            "cost_over_best": self.cost / best.cost - 1,
            "notes": "; ".join(self.notes),
        }


def training_days(shape: ModelShape, topology: Topology, sec_per_it: float, tokens: float) -> float:
    """Days of so many tokens at that pace, with nothing going wrong (see calendar for the rest) and
    no ramp.
    """
    return tokens / shape.seq_length / topology.gbs * sec_per_it / 86400


@dataclass(frozen=True, kw_only=True)
class Proposals(Table):
    """Shapes of a target size, the best first (by `cost`), and how many topologies each rule
    refuses.
    """

    most = SHOWN
    shown = (
        "num_layers hidden_size num_attention_heads kv_heads ffn parameters hidden_per_layer label "
        "sec_per_it tflops memory_gib days days_lo days_hi cost_over_best notes"
    )
    request: SizeRequest
    rows: tuple[Proposal, ...]
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def best(self) -> Proposal:
        return self.rows[0]

    def summary(self) -> Text:
        """The best shape: its days with their 90 % interval, and its GPU-hours, with nothing going
        wrong; and what that rests on.
        """
        if not self.rows:
            return Text("No shape of that size can run.")
        r = self.request
        p = self.best
        return Text.of(
            "Of {} parameters on {} GPUs of {}, the best shape is **{} layers × {:,}**: "
            "**{} days** and {} GPU-hours for {} tokens, with nothing going wrong. It {}.",
            size_text(r.parameters),
            r.gpus,
            r.cluster.name,
            p.shape.num_layers,
            p.shape.hidden_size,
            with_bounds(*p.days_interval),
            amount(24 * r.gpus * p.days),
            size_text(p.tokens),
            p.prediction.support.words,
        )

    def to_frame(self) -> DataFrame:
        """A row a shape, the best first: the columns of a search, tflops a GPU, tokens, days with
        their interval, gpu_hours, cost_over_best, by how much a parameter and token costs more than
        the best shape's, and in notes the rules that the shape breaks.
        """
        import pandas as pd

        return pd.DataFrame([p.columns(self.best) for p in self.rows])

    def to_json(self, top: int = SHOWN) -> dict[str, Any]:
        """The request, the first shapes, and what is refused; bytes, seconds, days, GPU-hours."""
        return {
            "request": self.request.to_json(),
            "runnable": len(self.rows),
            "refused": dict(self.refused),
            "candidates": [
                {**p.columns(self.best), "shape": to_mapping(p.shape)} for p in self.rows[:top]
            ],
        }

    def as_text(self, top: int = SHOWN) -> str:
        """What was asked, the table of the first shapes, their notes, and what the first rests on;
        or why there is none.
        """
        r = self.request
        asked = f"{size_text(r.parameters)} parameters, {r.vocab_size} rows of embedding"
        asked += (
            f", {r.gpus} GPUs of {r.cluster.name}, {size_text(r.tokens_of(r.parameters))} tokens"
        )
        lines = [f"{asked}; days with nothing going wrong:"]
        if not self.rows:
            return "\n".join([*lines, self.why_none()])
        table = displayed(self.to_frame().head(top), self.shown.removesuffix(" notes"))
        lines.append(table.to_string(index=False, float_format=amount))
        for number, p in enumerate(self.rows[:top], start=1):
            lines += [f"{number}. {note}" for note in p.notes]
        lines.append(f"The first of them: {self.best.prediction.support.words}.")
        return "\n".join(lines)

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
    if not proposals.rows:
        require(False, "params", f"{proposals.request.parameters:g}", proposals.why_none())
    return proposals


def survey(request: SizeRequest, shapes: Sequence[ModelShape] | None = None) -> Proposals:
    """A proposal for each of the request's shapes (or of `shapes`) that some topology can run; what
    may well run out of memory comes after the others.
    """
    refused = Counter[str]()
    proposals = list[Proposal]()
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
    refused = Counter[str]()
    candidates = list[Candidate]()
    for engine in request.engines:
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
        refused.update(result.refused_by_rule)
        candidates += result.candidates or result.risky
    candidates.sort(key=lambda c: (c.prediction.is_risky, c.prediction.sec_per_it))
    safe = [c for c in candidates if not c.prediction.is_risky]
    return first_per_sizes(safe or candidates, sizes_of)[:top], refused


def _proposal(plan: Plan, request: SizeRequest) -> Proposal:
    """The plan with the heads that break the fewest rules, then the fastest: a rule may see what
    the model does not.

    Where heads share keys and values, another number of them would be another size of model.
    """
    t = plan.topology
    prediction = predict(plan, request.calibration)
    # the number of rules broken and seconds, of each number of heads that is safe enough
    able = list[tuple[int, float, Plan, Prediction]]()
    counts = list[int]()
    if plan.shape.num_key_value_heads is None:
        counts = usable_heads(plan.shape.hidden_size, t.tp)
    for heads in counts:
        shape = dataclasses.replace(plan.shape, num_attention_heads=heads)
        label = label_of(shape, plan.cluster, t, plan.engine)
        other = dataclasses.replace(plan, shape=shape, label=label)
        p = predict(other, request.calibration)
        if p.oom_probability <= max(RISKY, prediction.oom_probability):
            able.append((len(broken_rules(shape, t)), p.sec_per_it, other, p))
    if able:
        _, _, plan, prediction = min(able, key=lambda tried: tried[:2])
    notes = broken_rules(plan.shape, t)
    return Proposal(
        plan=plan,
        prediction=prediction,
        tokens=request.tokens_of(plan.shape.parameters),
        notes=tuple(notes),
    )


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


@dataclass(frozen=True, kw_only=True)
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
            t = default_topology(shape, cluster, mbs=gbs, gbs=gbs)
            plan = Plan(label=t.label, shape=shape, cluster=cluster, topology=t)
            rows.append(Candidate(plan=plan, prediction=predict(plan)))
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
