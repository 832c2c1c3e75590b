"""Sizing: shapes of a target size, each on its best topology; the largest shape that one process trains in time."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import default_topology, label_of
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.plan import Plan
from trilane.costmodel.predict import RISKY, Prediction, predict
from trilane.planning.proposals import Proposal, Proposals
from trilane.planning.search import MEMORY_RULE, search
from trilane.planning.shape_rules import broken_rules, usable_heads
from trilane.planning.size_request import SizeRequest
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require, require_known


def propose_shapes(cluster: Cluster, **asked: Any) -> Proposals:
    """The shapes of a target size on a cluster, the best first; `asked` are SizeRequest's other fields."""
    request = SizeRequest(cluster=cluster, **asked)
    return Proposals(request=request, rows=tuple(propose(request)))


def propose(request: SizeRequest) -> list[Proposal]:
    """A proposal for every shape that some topology can run, best (days at the target size) first.

    What may well run out of memory comes after what does not. ValueError gives the reason where nothing can run.
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
