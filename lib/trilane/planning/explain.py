"""Why a plan takes what it takes: what limits its time and memory, which single change helps most, how sure that is."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from trilane.config.engines import default_attention, untrainable_reason
from trilane.config.parallelism import CHOICES, Topology
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, RISKY, Prediction, predict
from trilane.planning.search_result import Candidate
from trilane.planning.vary import varied, word
from trilane.utils.tables import Text

Sentence = tuple[str, tuple[Any, ...]]  # a template and its values, for a terminal or for Markdown


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What decides the seconds and the memory of a plan, what one change would bring, and what measurements support it.

    change      the fastest topology that differs in one choice on as many GPUs and does not risk the memory, which may
                be slower than the plan; None where none fits
    more        the same plan on twice the GPUs, None where the cluster has none or the batch cannot be divided
    """

    plan: Plan
    prediction: Prediction
    change: Candidate | None
    more: Candidate | None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The plan, and what the best change makes of it."""
        own = Candidate(plan=self.plan, prediction=self.prediction)
        return (own, self.change) if self.change else (own,)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of an iteration by part, the largest first."""
        parts = {k.replace("_", " "): v / self.prediction.time.total for k, v in vars(self.prediction.time).items()}
        return dict(sorted(((k, v) for k, v in parts.items() if v), key=lambda part: -part[1]))

    @property
    def fullest(self) -> tuple[int, str, float]:
        """The pipeline stage that needs the most memory, its largest part, and that part's share of it."""
        number, stage = max(enumerate(self.prediction.stages), key=lambda pair: pair[1].total)
        part, size = max(vars(stage).items(), key=lambda pair: pair[1])
        return number, part, size / stage.total

    def sentences(self) -> list[Sentence]:
        """What limits the plan, what a change would bring, how sure that is, on what it rests."""
        reason = untrainable_reason(self.plan.topology)
        found = [("Predicted only: {}.", (reason,)) if reason else None, *self._limits(), self._changed(), self._more()]
        return [sentence for sentence in (*found, *self._sure()) if sentence]

    def as_lines(self) -> list[str]:
        """The sentences for a terminal."""
        return [template.format(*values) for template, values in self.sentences()]

    def _repr_markdown_(self) -> str:
        return "\n".join(f"- {Text.of(template, *values)}" for template, values in self.sentences())

    def to_json(self) -> dict[str, Any]:
        """Shares, the fullest stage, the changes with what they bring, and the sentences."""
        return {
            "shares": self.shares,
            "memory": dict(zip(("stage", "part", "share"), self.fullest, strict=True)),
            "best_change": self._change_json(self.change),
            "twice_the_gpus": self._change_json(self.more),
            "predicted_only": untrainable_reason(self.plan.topology),
            "measured": {"nearest": self.prediction.support.nearest, "differs": self.prediction.support.differs},
            "sentences": self.as_lines(),
        }

    def _change_json(self, other: Candidate | None) -> dict[str, Any] | None:
        if other is None:
            return None
        values: dict[str, Any] = {"change": _difference(self.plan.topology, other.topology), "id": other.plan.id}
        names = {"sec_per_it": "seconds_saved", "memory_bytes": "bytes_saved"}
        figures = {name: getattr(other.prediction, name) for name in names}
        saved = {names[name]: getattr(self.prediction, name) - figure for name, figure in figures.items()}
        return {**values, "label": other.label, **figures, **saved}

    def _limits(self) -> list[Sentence]:
        p, (number, part, share) = self.prediction, self.fullest
        words = ", ".join(f"{name} {share:.0%}" for name, share in list(self.shares.items())[:3])
        where = f"stage {number} of {len(p.stages)} decides" if len(p.stages) > 1 else "one GPU"
        sizes = p.memory_bytes / 2**30, self.plan.cluster.gpu.memory_bytes / 2**30
        time = "Time: {} of an iteration; all communication takes {:.0%}."
        memory = "Memory: {}, {:.1f} of {:.1f} GiB, most of it {} ({:.0%})."
        return [(time, (words, p.time.communication / p.time.total)), (memory, (where, *sizes, part, share))]

    def _changed(self) -> Sentence:
        if self.change is None:
            return "Best change: no single change of its topology on these GPUs fits the memory.", ()
        gain, gib = self._gain(self.change)
        what, seconds = _difference(self.plan.topology, self.change.topology), self.change.prediction.sec_per_it
        saved = f"{abs(gain) * self.prediction.sec_per_it:.3g} s ({abs(gain):.1%}) {'less' if gain > 0 else 'more'}"
        if gain <= 0.005 and not self.prediction.is_risky:
            what = f"none makes it faster; the nearest, {what}"
        # two topologies are predicted with a median error of 1.2 % each (docs/planner.md, 'Errors')
        caution = "; too little to be sure of: measure both" if 0.005 < gain < 0.025 else ""
        return "Best change: {} would take {:.4g} s, {}, memory {:+.1f} GiB{}.", (what, seconds, saved, gib, caution)

    def _more(self) -> Sentence | None:
        if self.more is None:
            return None
        gain, gib = self._gain(self.more)
        values = (self.more.topology.gpus, self.more.topology.dp, self.more.prediction.sec_per_it, gib, 1 - 2 * gain)
        return "More GPUs: {} (dp {}) would take {:.4g} s, memory {:+.1f} GiB, GPU-hours {:+.0%}.", values

    def _sure(self) -> list[Sentence]:
        p = self.prediction
        words = ("almost certainly fits", 0.01), ("very probably fits", RISKY), ("may run out of", IMPOSSIBLE)
        fits = next((text for text, most in words if p.oom_probability <= most), "probably runs out of")
        values = (p.sec_lo, p.sec_hi, p.sec_hi / p.sec_per_it - 1, fits, p.oom_probability)
        sure = "How sure: 9 of 10 such runs take {:.4g} to {:.4g} s (within {:.0%}); it {} memory (P(OOM) {:.2f})."
        others = ", ".join(f"{row} ({distance:.1f})" for row, distance in p.support.nearest[1:])
        return [(sure, values), ("Support: {}{}.", (p.support.words, f"; then {others}" if others else ""))]

    def _gain(self, other: Candidate) -> tuple[float, float]:
        """Share of the seconds that the other plan saves, and GiB that it takes more."""
        p, q = self.prediction, other.prediction
        return 1 - q.sec_per_it / p.sec_per_it, (q.memory_bytes - p.memory_bytes) / 2**30


def explain(plan: Plan, calibration: Calibration | None = None) -> Explanation:
    """Why a plan takes what it takes, with the best of its neighbours: plans that differ in one choice.

    explain(search(shape, cluster, gpus=384, gbs=2048).candidates[0].plan)
    """
    changed = _predicted(plan, neighbours(plan), calibration)
    more = _predicted(plan, [{"dp": 2 * plan.topology.dp}], calibration)
    return Explanation(
        plan=plan,
        prediction=predict(plan, calibration),
        change=min(changed, key=lambda c: c.prediction.sec_per_it, default=None),
        more=next(iter(more), None),
    )


def neighbours(plan: Plan) -> Iterator[dict[str, Any]]:
    """The fields in which a topology differs by one choice on as many GPUs; a size changes by 2 against another."""
    t, sizes = plan.topology, ("tp", "pp", "dp")
    for up in sizes:
        halved = [n for n in sizes if n != up and getattr(t, n) % 2 == 0]
        yield from ({up: 2 * getattr(t, up), n: getattr(t, n) // 2} for n in halved)
    values: dict[str, Any] = {
        "mbs": {2 * t.mbs, t.mbs // 2} - {0},
        "zero": range(4),
        "sequence_parallel": (False, True),
    }
    values |= {"interleaving": {1, 2 * t.interleaving, t.interleaving // 2} - {0}}
    values |= {name: CHOICES[name] for name in ("recompute", "partition", "offload")}
    values |= {"attention": (default_attention(plan.shape, plan.cluster, t.precision),)}
    for name, choices in values.items():
        yield from ({name: value} for value in choices if value != getattr(t, name))


def _predicted(plan: Plan, changes: Iterable[dict[str, Any]], calibration: Calibration | None) -> list[Candidate]:
    """The changes of a plan that can be trained and do not risk the memory, with their predictions."""
    found = []
    for change in changes:
        with contextlib.suppress(ValueError):
            found.append(varied(plan, calibration, **change))
    return [candidate for candidate in found if not candidate.prediction.is_risky]


def _difference(a: Topology, b: Topology) -> str:
    """What `b` has that `a` has not, in words."""
    pairs = [(f.name.replace("_", " "), getattr(b, f.name), getattr(a, f.name)) for f in fields(Topology)]
    return ", ".join(f"{name} {word(new)} instead of {word(old)}" for name, new, old in pairs if new != old)
