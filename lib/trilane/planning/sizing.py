"""Sizing: shapes of a target size, each with its best topology, days and GPU-hours; shapes that a machine can train."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, default_topology, label_of, untrainable_reason
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import RISKY, Prediction, predict
from trilane.planning.published import published_models, state_lines
from trilane.planning.search import MEMORY_RULE, search
from trilane.planning.shape_rules import TILE, Kind, broken_rules, kind_of, usable_heads
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require, require_integer, require_known, require_positive, to_mapping

# hidden / layers: the prequel's table has 109 (its 'narrow' idea) to 195 (530B) above 100B, and 204 in what it trained;
# below 20B they are narrower: 64 (GPT-2, 12 x 768) to 128 (GPT-3 13B, 40 x 5140; arXiv:2005.14165, table 2.1).
LARGE, RATIOS, SMALL_RATIOS = 20e9, (100.0, 250.0), (48.0, 160.0)
MOST_WIDTHS = 10
MOST = 1e14  # parameters: a hundred times what has been trained


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """What is asked: a number of parameters, the machine, and how much is to be trained with what.

    `like` is a kind of shape (shape_rules.KINDS), or the JSON file of a model whose kind is wanted. `choices` pins what
    each shape's search would vary, or sets what it holds fixed (see planning.search.search).
    """

    parameters: float
    vocabulary: int
    gpus: int
    cluster: Cluster
    calibration: Calibration | None = None
    engine: str = ENGINES[0]
    tokens: float = 300e9
    gbs: int = 2048
    seq_length: int = 2048
    tolerance: float = 0.03
    like: str = "gpt2"
    choices: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens", "tolerance"):
            require_positive({"parameters": "params"}.get(name, name), getattr(self, name))
        require(self.parameters <= MOST, "params", f"{self.parameters:g}", f"must be at most {MOST:g}")
        for name in ("vocabulary", "gpus", "gbs", "seq_length"):
            require_integer({"vocabulary": "vocab"}.get(name, name), getattr(self, name), 1)
        require(self.tolerance < 0.5, "tolerance", self.tolerance, "must be below 0.5")
        rule = f"{self.cluster.name} has {self.cluster.max_gpus}"
        require(self.gpus <= self.cluster.max_gpus, "gpus", self.gpus, rule)
        iteration = self.gbs * self.seq_length
        require(self.tokens >= iteration, "tokens", self.tokens, f"one iteration takes gbs x seq_length = {iteration}")
        rule = f"at every usual width an embedding of {self.vocabulary} tokens nearly reaches that size; ask for more"
        require(bool(self.widths()), "params", f"{self.parameters:g}", rule)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of 128, which every tp up to 128 divides."""
        return padded_vocab_size(self.vocabulary)

    @cached_property
    def kind(self) -> Kind:
        """What all shapes have in common."""
        return kind_of(self.like, self.seq_length)

    def layer(self, hidden: int) -> ModelShape | None:
        """One layer of that width, its heads nearest to a head size of 128; None where no number of heads fits."""
        heads = usable_heads(hidden, min(self.cluster.gpus_per_node, self.gpus)) or usable_heads(hidden, 1)
        sizes = {"vocab_size": self.vocab_size, "seq_length": self.seq_length}
        return self.kind.shape(hidden, heads[0], **sizes) if heads else None

    def widths(self) -> list[int]:
        """Hidden sizes between the published ratios, at most MOST_WIDTHS: multiples of 64, 128, 256, 512, ..."""
        low, high = RATIOS if self.parameters >= LARGE else SMALL_RATIOS
        highest = (self.parameters * high / 12) ** (1 / 3)  # all parameters in layers of that ratio, of 12 h^2
        step = TILE if highest > 8 * TILE else TILE // 2
        found = []
        for h in range(step, int(highest) + 1, step):
            if one := self.layer(h):
                embeddings = one.embedding_parameters * (1 if one.tied_embeddings else 2)
                layers = (self.parameters - embeddings) / one.layer_weights
                found += [h] if layers >= 1 and low <= h / layers <= high else []
        while len(found) > MOST_WIDTHS:
            step *= 2
            found = [h for h in found if h % step == 0]
        return found

    def shapes(self) -> list[ModelShape]:
        """Every depth of every width within the tolerance, its heads nearest to a head size of 128.

        Where no depth comes so near (few layers), the nearest one.
        """
        found = []
        for h in self.widths():
            one = self.layer(h)
            assert one is not None
            exact = (self.parameters - one.parameters) / one.layer_parameters + 1
            margin = self.tolerance * self.parameters / one.layer_parameters
            depths = range(max(1, int(np.ceil(exact - margin))), int(np.floor(exact + margin)) + 1)
            for depth in depths or [max(1, round(exact))]:
                found.append(dataclasses.replace(one, num_layers=depth))
        return found


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A shape on its best topology, what training it costs, and which rules it breaks."""

    plan: Plan
    prediction: Prediction
    tokens: float
    target: float
    notes: tuple[str, ...]

    @property
    def shape(self) -> ModelShape:
        return self.plan.shape

    @property
    def topology(self) -> Topology:
        return self.plan.topology

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
        """Days of all tokens at the predicted pace, with nothing going wrong (see calendar for the rest)."""
        iterations = self.tokens / self.shape.seq_length / self.topology.gbs
        return iterations * self.prediction.sec_per_it / 86400

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.topology.gpus

    @property
    def days_at_target(self) -> float:
        """Days per parameter, times the target: what ranks shapes that are not equally large."""
        return self.days * self.target / self.shape.parameters

    def to_json(self, best: "Proposal") -> dict[str, Any]:
        """One candidate. `cost_beside_best` is days per parameter over those of `best`: 1.05 is 5 % dearer."""
        p, s = self.prediction, self.shape
        middle, low, high = self.tflops
        values: dict[str, Any] = {"layers": s.num_layers, "hidden": s.hidden_size, "heads": s.num_attention_heads}
        values |= {"kv_heads": s.kv_heads, "ffn": s.ffn, "kind": s.kind}
        values |= {"head_dim": s.head_dim, "params": s.parameters, "ratio": round(self.ratio, 1)}
        values |= {"shape": to_mapping(s), "topology": to_mapping(self.topology)}
        values |= {"id": self.plan.id, "label": self.plan.label, "sec_per_it": p.sec_per_it}
        values |= {"sec_interval": [p.sec_lo, p.sec_hi], "tflops": middle, "tflops_interval": [low, high]}
        values |= {"days": self.days, "gpu_hours": self.gpu_hours, "memory_bytes": p.memory_bytes}
        values |= {"oom_probability": p.oom_probability, "states": list(state_lines(s, self.topology.tp))}
        relative = self.days_at_target / best.days_at_target
        return {**values, "cost_beside_best": relative, "notes": list(self.notes)}


def propose_shapes(cluster: Cluster, **asked: Any) -> "Proposals":
    """The shapes of a target size on a cluster, the best first; `asked` are SizeRequest's other fields."""
    request = SizeRequest(cluster=cluster, **asked)
    return Proposals(request=request, rows=tuple(propose(request)))


def propose(request: SizeRequest) -> list[Proposal]:
    """A proposal for every shape that some topology can run, best (days at the target size) first.

    What may well run out of memory comes after what does not. ValueError says why where nothing can run.
    """
    found, refused = survey(request)
    require(bool(found), "params", f"{request.parameters:g}", why_none(request, refused))
    return found


def survey(request: SizeRequest, shapes: Sequence[ModelShape] | None = None) -> tuple[list[Proposal], Counter[str]]:
    """The proposals of the request's shapes (or of `shapes`), and how many topologies each rule refuses."""
    refused: Counter[str] = Counter()
    found = []
    r = request
    given = {"gpus": r.gpus, "gbs": r.gbs, "engine": r.engine, "calibration": r.calibration, **r.choices}
    for shape in r.shapes() if shapes is None else shapes:
        result = search(shape, r.cluster, top=1, **given)
        refused.update(result.refused_by_rule)
        found += [_proposal(c.plan, r) for c in result.candidates or result.risky]
    return sorted(found, key=lambda p: (p.prediction.is_risky, p.days_at_target)), refused


def why_none(request: SizeRequest, refused: Counter[str]) -> str:
    """Why no shape can run, in one line: memory where that alone refuses some topology, else the commonest rule."""
    rules = [MEMORY_RULE] if MEMORY_RULE in refused else [rule for rule, _ in refused.most_common(1)]
    why = [f"{refused[rule]} of {refused.total()} topologies are refused: {rule}" for rule in rules]
    asked = f"{request.gpus} GPUs of {request.cluster.name} and a batch of {request.gbs}"
    return f"no shape can run on {asked}; " + "".join(why or ["no dp and microbatch divide that batch"])


def _proposal(plan: Plan, request: SizeRequest) -> Proposal:
    """The plan with the heads that break the fewest rules, then the fastest: a rule may see what the model does not.

    Where heads share keys and values, another number of them would be another size of model.
    """
    r, t = request, plan.topology
    counts = usable_heads(plan.shape.hidden_size, t.tp) if plan.shape.num_key_value_heads is None else []
    plans = [_with_heads(plan, heads) for heads in counts] or [plan]
    tried = [(predict(p, r.calibration), p) for p in plans]
    usual = predict(plan, r.calibration)
    able = [(p, it) for p, it in tried if p.oom_probability <= max(RISKY, usual.oom_probability)] or [(usual, plan)]
    rules = [broken_rules(it.shape, t, r.cluster) for _, it in able]
    best = min(range(len(able)), key=lambda i: (len(rules[i]), able[i][0].sec_per_it))
    prediction, chosen = able[best]
    risk = f"may run out of memory (P {100 * prediction.oom_probability:.0f} %)"
    notes = (*([risk] if prediction.is_risky else []), *rules[best])
    return Proposal(plan=chosen, prediction=prediction, tokens=r.tokens, target=r.parameters, notes=notes)


def _with_heads(plan: Plan, heads: int) -> Plan:
    shape = dataclasses.replace(plan.shape, num_attention_heads=heads)
    label = label_of(shape, plan.cluster, plan.topology, plan.engine)
    return dataclasses.replace(plan, shape=shape, label=label)


def training_seconds(parameters: float, tokens: float, flops_per_s: float, recompute_full: bool = True) -> float:
    """Seconds of training at a total rate of `flops_per_s`: 8 T P / X, or 6 T P / X without full recomputation.

    Narayanan et al. 2021, arXiv:2104.04473, equation 4. Left out: attention's s x s part, evaluation, restarts.
    """
    for name, value in (("parameters", parameters), ("tokens", tokens), ("flops_per_s", flops_per_s)):
        require_positive(name, value)
    return (8 if recompute_full else 6) * tokens * parameters / flops_per_s


@dataclass(frozen=True, kw_only=True)
class ShapeSurvey(Table):
    """Shapes on one process of a machine, smallest first, each with its prediction, and the one that is chosen."""

    plans: tuple[Plan, ...]
    predictions: tuple[Prediction, ...]
    limit_s: float
    chosen: int

    @property
    def shapes(self) -> list[ModelShape]:
        return [plan.shape for plan in self.plans]

    @property
    def shape(self) -> ModelShape:
        return self.shapes[self.chosen]

    def to_frame(self) -> DataFrame:
        """Layers, hidden size, heads, parameters, predicted seconds and memory, a row a shape."""
        columns: dict[str, Any] = {
            "layers": [s.num_layers for s in self.shapes],
            "hidden": [s.hidden_size for s in self.shapes],
            "heads": [s.num_attention_heads for s in self.shapes],
            "parameters (M)": [round(s.parameters / 1e6, 2) for s in self.shapes],
            "predicted s/it": [round(p.sec_per_it, 3) for p in self.predictions],
            "memory (GiB)": [round(p.memory_bytes / 2**30, 2) for p in self.predictions],
            "": ["← chosen" if i == self.chosen else "" for i in range(len(self.plans))],
        }
        return Columns(columns).to_frame()

    def summary(self) -> Text:
        """The chosen shape in a sentence."""
        s, p = self.shape, self.predictions[self.chosen]
        return Text.of(
            "The largest shape under {:g} s an iteration is **{} layers × {}**, {} heads: **{:.2f} M parameters**, in "
            "{:.2f} s. The vocabulary is padded to {} rows, which 1, 2 and 4 tensor-parallel ranks divide.",
            *(self.limit_s, s.num_layers, s.hidden_size, s.num_attention_heads, s.parameters / 1e6),
            *(p.sec_per_it, s.vocab_size),
        )


def survey_shapes(
    cluster: Cluster, *, gbs: int, seq_length: int, vocabulary: int, head_dim: int, seconds: float
) -> ShapeSurvey:
    """GPTs of 6 and 10 layers and 64 to 448 channels, predicted on one process in one microbatch.

    Chosen is the one with most parameters that takes at most `seconds` an iteration, of equal sizes the faster one;
    where none is fast enough, the fastest.
    """
    same: dict[str, Any] = {"seq_length": seq_length, "vocab_size": padded_vocab_size(vocabulary)}
    sizes = [(L, h) for L in (6, 10) for h in range(64, 449, 64) if h % head_dim == 0]
    shapes = [ModelShape(num_layers=L, hidden_size=h, num_attention_heads=h // head_dim, **same) for L, h in sizes]
    shapes.sort(key=lambda shape: shape.parameters)
    require(bool(shapes), "head_dim", head_dim, "must divide some hidden size of 64, 128, ... 448")
    one = [(shape, default_topology(shape, cluster, mbs=gbs, gbs=gbs)) for shape in shapes]
    plans = tuple(Plan(label=t.label, shape=shape, cluster=cluster, topology=t) for shape, t in one)
    predictions = tuple(predict(plan) for plan in plans)
    times = [p.sec_per_it for p in predictions]
    fast = [i for i, time in enumerate(times) if time <= seconds]
    chosen = max(fast, key=lambda i: (shapes[i].parameters, -times[i])) if fast else times.index(min(times))
    return ShapeSurvey(plans=plans, predictions=predictions, limit_s=seconds, chosen=chosen)


@dataclass(frozen=True, kw_only=True)
class Proposals(Table):
    """Shapes of a target size, the best first (days per parameter)."""

    request: SizeRequest
    rows: tuple[Proposal, ...]

    @property
    def best(self) -> Proposal:
        return self.rows[0]

    def __iter__(self) -> Iterator[Proposal]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def to_frame(self) -> DataFrame:
        """The best twelve: shape, topology, seconds, TFLOP/s, memory, days, GPU-hours, cost per parameter."""
        top = self.rows[:12]
        columns: dict[str, Any] = {
            "layers × hidden": [f"{p.shape.num_layers} × {p.shape.hidden_size}" for p in top],
            "heads": [heads_words(p.shape) for p in top],
            **({"MLP": [p.shape.ffn for p in top]} if any(p.shape.ffn_hidden_size for p in top) else {}),
            "B": [round(p.shape.parameters / 1e9, 1) for p in top],
            "hidden / layers": [round(p.ratio) for p in top],
            "plan": [p.plan.label for p in top],
            "s/it": [round(p.prediction.sec_per_it, 1) for p in top],
            "TFLOP/s a GPU": ["{:.0f} ({:.0f} to {:.0f})".format(*p.tflops) for p in top],
            "GiB": [round(p.prediction.memory_bytes / 2**30, 1) for p in top],
            "days": [round(p.days, 1) for p in top],
            "GPU-hours": [f"{p.gpu_hours:,.0f}" for p in top],
            "cost per parameter": [f"{p.days_at_target / self.best.days_at_target - 1:+.1%}" for p in top],
        }
        return Columns(columns).to_frame()

    def broken_rules(self) -> Columns:
        """The rules that the best twelve break, a row a shape and rule."""
        rows = [(f"{p.shape.num_layers} × {p.shape.hidden_size}", note) for p in self.rows[:12] for note in p.notes]
        return Columns({"shape": [shape for shape, _ in rows], "rule": [note for _, note in rows]})

    def against_rule_of_thumb(self) -> Text:
        """Days and GPU-hours of document 003's rule of thumb, 8 T P / X, and of the best shape."""
        days = training_seconds(200e9, 300e9, 350 * 150e12) / 86400
        gpu_hours = training_seconds(200e9, 300e9, 150e12) / 3600
        best, r = self.best, self.request
        return Text.of(
            "Document 003: 300 billion tokens through 200 B parameters at 150 TFLOP/s each on 350 A100s, 8 T P / X: "
            "**{:.2f} days**, **{:,.2f} GPU-hours**. The best shape above, for {:.4g} billion tokens on {} GPUs at "
            "{:.0f} TFLOP/s: **{:.1f} days**, **{:,.0f} GPU-hours**.",
            *(days, gpu_hours, r.tokens / 1e9, r.gpus, best.tflops[0], best.days, best.gpu_hours),
        )

    def to_json(self) -> list[dict[str, Any]]:
        """The best twelve as JSON."""
        return [p.to_json(self.best) for p in self.rows[:12]]


def survey_json(request: SizeRequest, proposals: list[Proposal], runnable: int) -> dict[str, Any]:
    """The request, the candidates and the published models as one JSON object; bytes, seconds, days, GPU-hours."""
    asked = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name != "calibration"}
    return {
        "request": {**asked, "cluster": request.cluster.name, "vocab_size": request.vocab_size},
        "runnable": runnable,
        "candidates": [p.to_json(proposals[0]) for p in proposals],
        "published": [model.to_json() for model in published_models()],
    }


def heads_words(shape: ModelShape) -> str:
    """Heads, and where they share keys and values how many of these there are: "32", "32/8"."""
    return f"{shape.num_attention_heads}" + (f"/{shape.kv_heads}" if shape.num_key_value_heads else "")


def size_words(parameters: float) -> str:
    """A number of parameters or tokens, such as 176.2B, or 20.3M where that is below a billion."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def survey_text(request: SizeRequest, proposals: list[Proposal]) -> str:
    """The proposals, a line each and one for each note."""
    lines = [
        f"{size_words(request.parameters)} parameters, {request.vocab_size} rows of embedding, {request.gpus} GPUs of",
        f"{request.cluster.name}, {request.tokens / 1e9:g} B tokens; days with nothing going wrong:",
    ]
    for p in proposals:
        s, (middle, low, high) = p.shape, p.tflops
        relative = p.days_at_target / proposals[0].days_at_target - 1
        lines.append(
            f"{s.num_layers:4} x {s.hidden_size:5} a{heads_words(s):<4}{size_words(s.parameters):>8} "
            f"ratio {p.ratio:4.0f} {p.prediction.sec_per_it:8.2f} s {middle:4.0f} TFLOP/s ({low:.0f}-{high:.0f}) "
            f"{p.days:7.1f} d {p.gpu_hours:10,.0f} GPU-h {p.prediction.memory_bytes / 2**30:5.1f} GiB "
            f"{relative:+6.1%}  {p.plan.label}"
        )
        lines += [f"{'':10}{note}" for note in (s.kind, *p.notes) if note]
    return "\n".join([*lines, *predicted_only(proposals)])


def predicted_only(proposals: Sequence[Proposal]) -> list[str]:
    """A line that says why no engine here can train such shapes, where that is so."""
    reasons = [reason for p in proposals[:1] if (reason := untrainable_reason(p.shape, p.topology))]
    return [f"predicted only: {reason}" for reason in reasons]


def hand_on(
    choose: str, survey: ShapeSurvey, cluster: str, gpus: str, proposals: Proposals, target_cluster: str
) -> dict[str, Any]:
    """What 01_sizing leaves for 02_topology: the model "here" (of the survey) or "target" (the best proposal)."""
    require_known("choose", choose, ("here", "target"))
    r, best = proposals.request, proposals.best
    chosen = {"shape": vars(survey.shape), "cluster": cluster, "gpus": gpus, "gbs": survey.plans[0].topology.gbs}
    if choose == "target":
        chosen = {"shape": vars(best.shape), "cluster": target_cluster, "gpus": str(r.gpus), "gbs": r.gbs}
    return chosen | {"proposals": proposals.to_json(), "tokens": r.tokens}
