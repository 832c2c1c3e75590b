"""Proposals of shapes: what each costs to train on its best topology, as a table, as text and as JSON."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trilane.config.engines import untrainable_reason
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.predict import Prediction
from trilane.planning.published import published_models, state_lines
from trilane.planning.size_request import SizeRequest
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require_positive, to_mapping


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
        return training_days(self.shape, self.topology, self.prediction.sec_per_it, self.tokens)

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


def training_seconds(parameters: float, tokens: float, flops_per_s: float) -> float:
    """Seconds of training at a total rate of `flops_per_s`, with full recomputation: 8 T P / X.

    Narayanan et al. 2021, arXiv:2104.04473, equation 4. Left out: attention's s x s part, evaluation, restarts.
    """
    for name, value in (("parameters", parameters), ("tokens", tokens), ("flops_per_s", flops_per_s)):
        require_positive(name, value)
    return 8 * tokens * parameters / flops_per_s


def training_days(shape: ModelShape, topology: Topology, sec_per_it: float, tokens: float) -> float:
    """Days of so many tokens at the pace `sec_per_it`, with nothing going wrong; no ramp of the batch."""
    return tokens / shape.seq_length / topology.gbs * sec_per_it / 86400


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
            "heads": [heads_text(p.shape) for p in top],
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

    def support(self) -> Text:
        """Which measured runs the best shape rests on, and why no engine here can train it, where that is so."""
        return Text(" ".join(Text.of("{}.", line[0].upper() + line[1:]) for line in support_lines(self.rows)))

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


def proposals_json(request: SizeRequest, proposals: list[Proposal], runnable: int) -> dict[str, Any]:
    """The request, the candidates and the published models as one JSON object; bytes, seconds, days, GPU-hours."""
    asked = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name != "calibration"}
    return {
        "request": {**asked, "cluster": request.cluster.name, "vocab_size": request.vocab_size},
        "runnable": runnable,
        "candidates": [p.to_json(proposals[0]) for p in proposals],
        "published": [model.to_json() for model in published_models()],
    }


def heads_text(shape: ModelShape) -> str:
    """Heads, and where they share keys and values how many of these there are: "32", "32/8"."""
    return f"{shape.num_attention_heads}" + (f"/{shape.kv_heads}" if shape.num_key_value_heads else "")


def size_text(parameters: float) -> str:
    """A number of parameters or tokens, such as 176.2B, or 20.3M where that is below a billion."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def proposals_text(request: SizeRequest, proposals: list[Proposal]) -> str:
    """The proposals, a line each and one for each note."""
    lines = [
        f"{size_text(request.parameters)} parameters, {request.vocab_size} rows of embedding, {request.gpus} GPUs of",
        f"{request.cluster.name}, {request.tokens / 1e9:g} B tokens; days with nothing going wrong:",
    ]
    for p in proposals:
        s, (middle, low, high) = p.shape, p.tflops
        relative = p.days_at_target / proposals[0].days_at_target - 1
        lines.append(
            f"{s.num_layers:4} x {s.hidden_size:5} a{heads_text(s):<4}{size_text(s.parameters):>8} "
            f"ratio {p.ratio:4.0f} {p.prediction.sec_per_it:8.2f} s {middle:4.0f} TFLOP/s ({low:.0f}-{high:.0f}) "
            f"{p.days:7.1f} d {p.gpu_hours:10,.0f} GPU-h {p.prediction.memory_bytes / 2**30:5.1f} GiB "
            f"{relative:+6.1%}  {p.plan.label}"
        )
        lines += [f"{'':10}{note}" for note in (s.kind, *p.notes) if note]
    return "\n".join([*lines, *support_lines(proposals)])


def support_lines(proposals: Sequence[Proposal]) -> list[str]:
    """Which measured runs the first shape rests on, and why no engine here can train such shapes, where that is so."""
    reasons = [reason for p in proposals[:1] if (reason := untrainable_reason(p.topology))]
    rests = [f"the first of them: {p.prediction.support.words}" for p in proposals[:1]]
    return [*rests, *(f"predicted only: {reason}" for reason in reasons)]
