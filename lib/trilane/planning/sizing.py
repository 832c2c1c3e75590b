"""Sizing: shapes of a target size, each on its best topology; the largest shape that one process
trains in time.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import default_topology, label_of, untrainable_reason
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.predict import RISKY, Prediction, predict
from trilane.planning.search import MEMORY_RULE, search
from trilane.planning.search_result import (
    Candidate,
    Candidates,
    SearchResult,
    first_per_sizes,
    plan_columns,
    sizes_of,
)
from trilane.planning.size_request import TILE, SizeRequest, usable_heads
from trilane.utils.numbers import size_text, with_bounds, with_interval
from trilane.utils.tables import Columns, DataFrame, Record, Table, Text, frame_of
from trilane.utils.validation import require, require_known, to_mapping
from trilane.workspace.study import load_cluster


@dataclass(frozen=True, kw_only=True)
class Proposal(Record):
    """A shape on its best topology, what training it costs, and which rules it breaks."""

    plan: Plan
    prediction: Prediction
    tokens: float
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return self.plan.shape

    @property
    def topology(self) -> Topology:
        return self.plan.topology

    @property
    def size(self) -> str:
        """Layers and width, as a table has them."""
        return f"{self.shape.num_layers} × {self.shape.hidden_size}"

    @property
    def ratio(self) -> float:
        return self.shape.hidden_size / self.shape.num_layers

    @property
    def tflops(self) -> tuple[float, float, float]:
        """TFLOP/s a GPU (Narayanan's formula), predicted, lowest and highest of the 90 % interval."""
        flops = self.shape.flops_per_iteration(self.topology.gbs, self.topology.recompute == "full")
        p, gpus = self.prediction, self.topology.gpus * 1e12
        return flops / p.sec_per_it / gpus, flops / p.sec_hi / gpus, flops / p.sec_lo / gpus

    @property
    def days(self) -> float:
        return training_days(self.shape, self.topology, self.prediction.sec_per_it, self.tokens)

    @property
    def days_interval(self) -> tuple[float, float, float]:
        """Days, and the lowest and highest of their 90 % interval."""
        p = self.prediction
        return self.days, self.days * p.sec_lo / p.sec_per_it, self.days * p.sec_hi / p.sec_per_it

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.topology.gpus

    @property
    def cost(self) -> float:
        """Days per parameter and token: what ranks shapes that are not equally large."""
        return self.days / self.shape.parameters / self.tokens

    def columns(self, best: "Proposal") -> dict[str, Any]:
        """As a row of a frame."""
        rates = dict(zip(("tflops", "tflops_lo", "tflops_hi"), self.tflops, strict=True))
        sums = {
            "hidden_per_layer": self.ratio,
            "tokens": self.tokens,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
        }
        costs = {"cost_over_best": self.cost / best.cost - 1}
        return plan_columns(self.plan, self.prediction) | rates | sums | costs

    def to_json(self, best: "Proposal") -> dict[str, Any]:  # type: ignore[override]
        """One candidate. `cost_beside_best` is `cost` over that of `best`: 1.05 costs 5 % more."""
        p, s = self.prediction, self.shape
        values: dict[str, Any] = {
            "layers": s.num_layers,
            "hidden": s.hidden_size,
            "heads": s.num_attention_heads,
        }
        values |= {"params": s.parameters, "ratio": round(self.ratio, 1)}
        values |= {name: getattr(s, name) for name in ("kv_heads", "ffn", "kind", "head_dim")}
        values |= {name: to_mapping(getattr(self, name)) for name in ("shape", "topology")}
        values |= {
            "id": self.plan.id,
            "label": self.plan.label,
            "sec_interval": [p.sec_lo, p.sec_hi],
        }
        values |= {
            name: getattr(p, name) for name in ("sec_per_it", "memory_bytes", "oom_probability")
        }
        values |= {
            "tflops": self.tflops[0],
            "tflops_interval": list(self.tflops[1:]),
            "days": self.days,
        }
        values |= {"gpu_hours": self.gpu_hours}
        return {**values, "cost_beside_best": self.cost / best.cost, "notes": list(self.notes)}


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

    request: SizeRequest
    rows: tuple[Proposal, ...]
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def best(self) -> Proposal:
        return self.rows[0]

    def finding(self) -> Text:
        """The best shape: its days with their 90 % interval, and its GPU-hours, with nothing going
        wrong.
        """
        r, p = self.request, self.best
        days, low, high = p.days_interval
        hours = with_interval(*(24 * r.gpus * n for n in (days, low, high)))[0]
        return Text.of(
            "Of {} parameters on {} GPUs of {}, the best shape is **{} layers × {:,}**: **{} days** and {} GPU-hours "
            "for {} tokens, with nothing going wrong.",
            *(
                size_text(r.parameters),
                r.gpus,
                r.cluster.name,
                p.shape.num_layers,
                p.shape.hidden_size,
            ),
            *(with_bounds(days, low, high), hours, size_text(p.tokens)),
        )

    def to_frame(self) -> DataFrame:
        """A row a shape, the best first: the columns of a search, then tflops a GPU with its
        interval, tokens, days, gpu_hours, and cost_over_best, by how much a parameter and token
        costs more than the best shape's.
        """
        import pandas as pd

        return pd.DataFrame([p.columns(self.best) for p in self.rows])

    def view(self, most: int = 12) -> DataFrame:
        """The first shapes, with the 90 % interval of their days, and how much more they cost for
        equal work.
        """
        wide = any(p.shape.ffn_hidden_size for p in self.rows[:most])
        columns: dict[str, Any] = {
            "layers × hidden": "size",
            # "32/8" where 32 heads share 8 of keys and values
            "heads": lambda p: "/".join(
                map(str, dict.fromkeys((p.shape.num_attention_heads, p.shape.kv_heads)))
            ),
            **({"MLP": "shape.ffn"} if wide else {}),
            "parameters": lambda p: size_text(p.shape.parameters),
            "hidden / layers": lambda p: round(p.ratio),
            "plan": "plan.label",
            "s/it": lambda p: with_interval(
                p.prediction.sec_per_it, p.prediction.sec_lo, p.prediction.sec_hi
            )[0],
            "TFLOP/s a GPU": lambda p: with_interval(*p.tflops)[0],
            "GiB": lambda p: round(p.prediction.memory_bytes / 2**30, 1),
            "days (90 % interval)": lambda p: with_bounds(*p.days_interval),
            "extra cost": lambda p: f"{p.cost / self.best.cost - 1:+.1%}",
        }
        return frame_of(self.rows[:most], columns)

    def support_lines(self) -> list[str]:
        """Which measured runs the best shape rests on, and why no engine here can train it, where
        that is so.
        """
        lines = [f"The first of them: {p.prediction.support.words}." for p in self.rows[:1]]
        reasons = [untrainable_reason(p.topology) for p in self.rows[:1]]
        return lines + [f"Predicted only: {reason}." for reason in reasons if reason]

    def support(self) -> Text:
        """The same for a notebook."""
        return Text.joined(" ", self.support_lines())

    def broken_rules(self) -> Columns | Text:
        """The rules that the best twelve break, a row a shape and rule."""
        found = [(p.size, note) for p in self.rows[:12] for note in p.notes]
        return (
            Columns.of_rows(("shape", "rule"), found)
            if found
            else Text("None of these shapes breaks a rule.")
        )

    def to_json(self, top: int = 12) -> dict[str, Any]:
        """The request, the first shapes, and what is refused; bytes, seconds, days, GPU-hours."""
        found = {
            "request": self.request.to_json(),
            "runnable": len(self.rows),
            "refused": dict(self.refused),
        }
        return {**found, "candidates": [p.to_json(self.best) for p in self.rows[:top]]}

    def to_text(self, top: int = 12) -> str:
        """What was asked, the table of the first shapes, their notes; or why there is none."""
        r, rows = self.request, self.rows[:top]
        asked = f"{size_text(r.parameters)} parameters, {r.vocab_size} rows of embedding, {r.gpus} GPUs of "
        lines = [
            f"{asked}{r.cluster.name}, tokens: {r.tokens_text}; days with nothing going wrong:"
        ]
        lines += [self.view(top).to_string(index=False)] if rows else [self.why_none()]
        lines += [f"{p.size}: {note}" for p in rows for note in (p.shape.kind, *p.notes) if note]
        return "\n".join([*lines, *self.support_lines()])

    def why_none(self) -> str:
        """Why no shape can run: memory where that alone refuses some topology, else the commonest
        rule.
        """
        r, refused = self.request, self.refused
        rules = (
            [MEMORY_RULE]
            if MEMORY_RULE in refused
            else [rule for rule, _ in refused.most_common(1)]
        )
        why = "".join(
            f"{refused[rule]} of {refused.total()} topologies are refused: {rule}" for rule in rules
        )
        why = why or "no dp and microbatch divide that batch"
        cure = _searched(r.shapes()[0], r, r.engines[0], 1).cure
        return f"no shape can run on {r.gpus} GPUs of {r.cluster.name} and a batch of {r.gbs}; {why}; {cure}"


def propose_shapes(cluster: Cluster | str, **asked: Any) -> Proposals:
    """The shapes of a target size on a cluster, the best first; `asked` are SizeRequest's other
    fields.

    propose_shapes(load_cluster("jz-a100-80g"), parameters=200e9, vocabulary=250_880, gpus=384)
    """
    found = survey(SizeRequest(cluster=load_cluster(cluster), **asked))
    require(bool(found.rows), "params", f"{found.request.parameters:g}", found.why_none())
    return found


def survey(request: SizeRequest, shapes: Sequence[ModelShape] | None = None) -> Proposals:
    """A proposal for each of the request's shapes (or of `shapes`) that some topology can run; what
    may well run out of memory comes after the others.
    """
    refused, found = Counter[str](), list[Proposal]()
    for shape in request.shapes() if shapes is None else shapes:
        best, rules = fastest(shape, request)
        refused.update(rules)
        found += [_proposal(c.plan, request) for c in best]
    found.sort(key=lambda p: (p.prediction.is_risky, p.cost))
    return Proposals(request=request, rows=tuple(found), refused=refused)


def _searched(shape: ModelShape, r: SizeRequest, engine: str, top: int) -> SearchResult:
    given = {
        "gpus": r.gpus,
        "gbs": r.gbs,
        "engine": engine,
        "calibration": r.calibration,
        **r.choices,
    }
    return search(shape, r.cluster, top=top, distinct=True, **given)


def fastest(
    shape: ModelShape, request: SizeRequest, top: int = 1
) -> tuple[list[Candidate], Counter[str]]:
    """The shape on the `top` fastest tp x pp x dp by the request's engines, and how many topologies
    each rule refuses.

    Where none is safe, those that may run out of memory.
    """
    refused, found, r = Counter[str](), list[Candidate](), request
    for engine in r.engines:
        result = _searched(shape, r, engine, top)
        refused.update(result.refused_by_rule)
        found += result.candidates or result.risky
    found.sort(key=lambda c: (c.prediction.is_risky, c.prediction.sec_per_it))
    safe = [c for c in found if not c.prediction.is_risky]
    return first_per_sizes(safe or found, sizes_of)[:top], refused


def _proposal(plan: Plan, request: SizeRequest) -> Proposal:
    """The plan with the heads that break the fewest rules, then the fastest: a rule may see what
    the model does not.

    Where heads share keys and values, another number of them would be another size of model.
    """
    r, t, usual = request, plan.topology, predict(plan, request.calibration)
    counts = (
        usable_heads(plan.shape.hidden_size, t.tp) if plan.shape.num_key_value_heads is None else []
    )
    shapes = [dataclasses.replace(plan.shape, num_attention_heads=heads) for heads in counts]
    labels = [label_of(shape, plan.cluster, t, plan.engine) for shape in shapes]
    plans = [
        dataclasses.replace(plan, shape=s, label=label)
        for s, label in zip(shapes, labels, strict=True)
    ]
    tried = [(predict(it, r.calibration), it) for it in plans]
    able = [
        (p, it) for p, it in tried if p.oom_probability <= max(RISKY, usual.oom_probability)
    ] or [(usual, plan)]
    rules = [broken_rules(it.shape, t) for _, it in able]
    best = min(range(len(able)), key=lambda i: (len(rules[i]), able[i][0].sec_per_it))
    prediction, chosen = able[best]
    risk = f"may run out of memory (P {100 * prediction.oom_probability:.0f} %)"
    notes = (*([risk] if prediction.is_risky else []), *rules[best])
    return Proposal(
        plan=chosen, prediction=prediction, tokens=r.tokens_of(chosen.shape.parameters), notes=notes
    )


def broken_rules(shape: ModelShape, topology: Topology) -> list[str]:
    """One line for every rule that the shape breaks on that topology; the first may be a refusal."""
    t, h, ffn = topology, shape.hidden_size, shape.ffn
    beside = shape.embedding_parameters / shape.layer_parameters
    notes = {
        invalid_reason(shape, t): True,
        f"head_dim={shape.head_dim}: must be a multiple of 8, or attention leaves the tensor cores (33 to 43 % slower "
        "in the chronicles)": shape.head_dim % 8,
        f"hidden_size={h}: {h} / tp {t.tp} should be a multiple of the {TILE}-wide tile": (
            h // t.tp
        )
        % TILE
        or h % TILE,
        f"ffn_hidden_size={ffn}: {ffn} / tp {t.tp} should be a multiple of the {TILE}-wide tile": ffn
        != 4 * h
        and (ffn % TILE or (ffn // t.tp) % TILE),
        f"num_key_value_heads={shape.kv_heads}: should be a multiple of tp {t.tp}: GPUs use the same, and gather "
        "them": shape.kv_heads < t.tp,
        # half of a layer: our choice
        f"partition=uniform: the embedding is {beside:.1f} layers; count it (type:transformer|embedding)": t.pp
        > 1
        and t.partition == "uniform"
        and beside > 0.5,
    }
    return [note for note, is_broken in notes.items() if note and is_broken]


@dataclass(frozen=True, kw_only=True)
class ShapeSurvey(Candidates):
    """Shapes on one process of a machine, smallest first; `best` is the chosen one."""

    shown = (
        "num_layers hidden_size num_attention_heads parameters sec_per_it sec_lo sec_hi memory_gib"
    )
    limit_s: float
    best: Candidate

    def summary(self) -> Text:
        """The chosen shape in a sentence, and whether it keeps the limit."""
        s, p = self.best.plan.shape, self.best.prediction
        what = (
            "The largest shape under"
            if p.sec_per_it <= self.limit_s
            else "The fastest shape; none is under"
        )
        name = self.best.plan.cluster.name.replace("local", "this machine")
        return Text.of(
            "{} {:g} s an iteration on one process of {}: **{} layers × {}**, {} parameters, in **{} s**.",
            *(what, self.limit_s, name, s.num_layers, s.hidden_size, size_text(s.parameters)),
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
    same: dict[str, Any] = {"seq_length": seq_length, "vocab_size": padded_vocab_size(vocabulary)}
    rows = []
    for L, h in ((L, h) for L in (6, 10) for h in range(64, 449, 64) if h % head_dim == 0):
        shape = ModelShape(num_layers=L, hidden_size=h, num_attention_heads=h // head_dim, **same)
        t = default_topology(shape, cluster, mbs=gbs, gbs=gbs)
        plan = Plan(label=t.label, shape=shape, cluster=cluster, topology=t)
        rows.append(Candidate(plan=plan, prediction=predict(plan)))
    require(bool(rows), "head_dim", head_dim, "must divide some hidden size of 64, 128, ... 448")
    rows.sort(key=lambda c: c.plan.shape.parameters)
    fast = [c for c in rows if c.prediction.sec_per_it <= seconds]
    best = max(
        fast or rows, key=lambda c: (bool(fast) * c.plan.shape.parameters, -c.prediction.sec_per_it)
    )
    return ShapeSurvey(rows=tuple(rows), limit_s=seconds, best=best)


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
    r, here = proposals.request, survey.best.plan
    chosen = {"shape": vars(here.shape), "cluster": cluster, "gpus": gpus, "gbs": here.topology.gbs}
    if choose == "target":
        chosen = {
            "shape": vars(proposals.best.shape),
            "cluster": target_cluster,
            "gpus": str(r.gpus),
            "gbs": r.gbs,
        }
    return chosen | {
        "proposals": proposals.to_json()["candidates"],
        "tokens": proposals.best.tokens,
    }
