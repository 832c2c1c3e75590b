"""Why a plan takes what it takes: what limits its time and memory, which single change helps most, how sure that is."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trilane.config.engines import default_attention, untrainable_reason
from trilane.config.parallelism import CHOICES, Topology
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import IMPOSSIBLE, RISKY, Prediction, predict
from trilane.planning.search_result import Candidate
from trilane.planning.vary import varied
from trilane.utils.tables import Text

SMALLEST_GAIN = 0.005  # of the seconds: what is called faster
# Two topologies are predicted with a median error of 1.2 % each (docs/planner.md, 'Errors').
SURE_GAIN = 0.025

Sentence = tuple[str, tuple[Any, ...]]  # a template and its values, for a terminal or for Markdown


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What decides the seconds and the memory of a plan, what one change would bring, and what measurements support it.

    change      the fastest topology that differs in one choice on as many GPUs and does not risk the memory, which may
                be slower than the plan; None where none fits
    more        the same plan on twice the GPUs, None where the cluster has none or the batch cannot be divided
    recomputed  by their names, the plans with no and with full recomputation, where a flash kernel leaves selective
                recomputation little to save; else empty
    """

    plan: Plan
    prediction: Prediction
    change: Candidate | None
    more: Candidate | None
    recomputed: dict[str, Candidate] = dataclasses.field(default_factory=dict)

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
        stages = self.prediction.stages
        number = max(range(len(stages)), key=lambda i: stages[i].total)
        part, size = max(vars(stages[number]).items(), key=lambda pair: pair[1])
        return number, part, size / stages[number].total

    @property
    def predicted_only(self) -> str | None:
        """Why no engine here can train the plan; None where one can."""
        return untrainable_reason(self.plan.topology)

    def sentences(self) -> list[Sentence]:
        """What limits the plan, what a change would bring, how sure that is, on what it rests."""
        found = [self._limits(), self._memory(), self._recomputed(), self._changed(), self._more()]
        found += [self._sure(), self._rests()]
        only = ("Predicted only: {}.", (self.predicted_only,)) if self.predicted_only else None
        return [sentence for sentence in (only, *found) if sentence]

    def as_lines(self) -> list[str]:
        """The sentences for a terminal."""
        return [template.format(*values) for template, values in self.sentences()]

    def _repr_markdown_(self) -> str:
        return "\n".join(f"- {Text.of(template, *values)}" for template, values in self.sentences())

    def to_json(self) -> dict[str, Any]:
        """Shares, the fullest stage, the changes with what they bring, and the sentences."""
        number, part, share = self.fullest
        return {
            "shares": self.shares,
            "memory": {"stage": number, "part": part, "share": share},
            "best_change": self._change_json(self.change),
            "twice_the_gpus": self._change_json(self.more),
            "predicted_only": self.predicted_only,
            "measured": {"nearest": self.prediction.support.nearest, "differs": self.prediction.support.differs},
            "sentences": self.as_lines(),
        }

    def _change_json(self, other: Candidate | None) -> dict[str, Any] | None:
        if other is None:
            return None
        p = other.prediction
        values: dict[str, Any] = {"change": _difference(self.plan.topology, other.topology), "id": other.plan.id}
        values |= {"label": other.label, "sec_per_it": p.sec_per_it, "memory_bytes": p.memory_bytes}
        values["seconds_saved"] = self.prediction.sec_per_it - p.sec_per_it
        return {**values, "bytes_saved": self.prediction.memory_bytes - p.memory_bytes}

    def _limits(self) -> Sentence:
        t, parts = self.prediction.time, list(self.shares.items())[:3]
        words = ", ".join(f"{name} {share:.0%}" for name, share in parts)
        return "Time: {} of an iteration; all communication takes {:.0%}.", (words, t.communication / t.total)

    def _memory(self) -> Sentence:
        number, part, share = self.fullest
        count, used, limit = (
            len(self.prediction.stages),
            self.prediction.memory_bytes,
            self.plan.cluster.gpu.memory_bytes,
        )
        where = f"stage {number} of {count} decides" if count > 1 else "one GPU"
        values = (where, used / 2**30, limit / 2**30, part, share)
        return "Memory: {}, {:.1f} of {:.1f} GiB, most of it {} ({:.0%}).", values

    def _recomputed(self) -> Sentence | None:
        """That selective recomputation, which is there to drop the s x s scores, drops none of a flash kernel's.

        Korthikanti et al. 2022, arXiv:2205.05198, section 5, drop the scores; flash attention recomputes them in
        its own backward pass (Dao et al. 2022, arXiv:2205.14135, section 3.1).
        """
        if not self.recomputed:
            return None
        found = []
        for name, other in self.recomputed.items():
            seconds = other.prediction.sec_per_it - self.prediction.sec_per_it
            found.append(f"{name} would take {seconds:+.3g} s, memory {self._gain(other)[1]:+.1f} GiB")
        return "Selective recomputation saves little here, for a flash kernel keeps no scores: {}.", ("; ".join(found),)

    def _changed(self) -> Sentence:
        if self.change is None:
            return "Best change: no single change of its topology on these GPUs fits the memory.", ()
        gain, gib = self._gain(self.change)
        what, seconds = _difference(self.plan.topology, self.change.topology), self.change.prediction.sec_per_it
        saved = f"{abs(gain) * self.prediction.sec_per_it:.3g} s ({abs(gain):.1%}) {'less' if gain > 0 else 'more'}"
        if gain <= SMALLEST_GAIN and not self.prediction.is_risky:
            what = f"none makes it faster; the nearest, {what}"
        caution = "; too little to be sure of: measure both" if SMALLEST_GAIN < gain < SURE_GAIN else ""
        values = (what, seconds, saved, gib, caution)
        return "Best change: {} would take {:.4g} s, {}, memory {:+.1f} GiB{}.", values

    def _more(self) -> Sentence | None:
        if self.more is None:
            return None
        gain, gib = self._gain(self.more)
        cost, gpus = 2 * (1 - gain) - 1, self.more.topology.gpus
        values = (gpus, self.more.topology.dp, self.more.prediction.sec_per_it, gib, cost)
        return "More GPUs: {} (dp {}) would take {:.4g} s, memory {:+.1f} GiB, GPU-hours {:+.0%}.", values

    def _sure(self) -> Sentence:
        p = self.prediction
        words = ("almost certainly fits", 0.01), ("very probably fits", RISKY), ("may run out of", IMPOSSIBLE)
        fits = next((text for text, most in words if p.oom_probability <= most), "probably runs out of")
        values = (p.sec_lo, p.sec_hi, p.sec_hi / p.sec_per_it - 1, fits, p.oom_probability)
        return (
            "How sure: 9 of 10 such runs take {:.4g} to {:.4g} s (within {:.0%}); it {} memory (P(OOM) {:.2f}).",
            values,
        )

    def _rests(self) -> Sentence:
        support = self.prediction.support
        others = ", ".join(f"{row} ({distance:.1f})" for row, distance in support.nearest[1:])
        return "Support: {}{}.", (support.words, f"; then {others}" if others else "")

    def _gain(self, other: Candidate) -> tuple[float, float]:
        """Share of the seconds that the other plan saves, and GiB that it takes more."""
        p, q = self.prediction, other.prediction
        return 1 - q.sec_per_it / p.sec_per_it, (q.memory_bytes - p.memory_bytes) / 2**30


def explain(plan: Plan, calibration: Calibration | None = None) -> Explanation:
    """Why a plan takes what it takes, with the best of its neighbours: plans that differ in one choice."""
    prediction = predict(plan, calibration)
    changed = _predicted(plan, neighbours(plan), calibration)
    double = [{"dp": 2 * plan.topology.dp}]
    others = ("none", "full") if (plan.topology.recompute, plan.topology.attention) == ("selective", "fused") else ()
    return Explanation(
        plan=plan,
        prediction=prediction,
        change=min(changed, key=lambda c: c.prediction.sec_per_it, default=None),
        more=next(iter(_predicted(plan, double, calibration)), None),
        recomputed={c.topology.recompute: c for c in _predicted(plan, [{"recompute": r} for r in others], calibration)},
    )


def neighbours(plan: Plan) -> Iterator[dict[str, Any]]:
    """The fields in which a topology differs by one choice on as many GPUs; a size changes by 2 against another."""
    t, sizes = plan.topology, ("tp", "pp", "dp")
    for up in sizes:
        yield from (
            {up: 2 * getattr(t, up), n: getattr(t, n) // 2} for n in sizes if n != up and getattr(t, n) % 2 == 0
        )
    yield from ({"mbs": mbs} for mbs in (2 * t.mbs, t.mbs // 2) if mbs)
    yield from ({"interleaving": v} for v in {1, 2 * t.interleaving, t.interleaving // 2} - {0, t.interleaving})
    values: dict[str, Any] = {
        "zero": range(4),
        "recompute": CHOICES["recompute"],
        "partition": CHOICES["partition"],
        "offload": CHOICES["offload"],
    }
    values |= {"sequence_parallel": (False, True)}
    values |= {"attention": (default_attention(plan.shape, plan.cluster, t.precision),)}
    for name, choices in values.items():
        yield from ({name: value} for value in choices if value != getattr(t, name))


def _predicted(plan: Plan, changes: Any, calibration: Calibration | None) -> list[Candidate]:
    """The changes of a plan that can be trained and do not risk the memory, with their predictions."""
    found = []
    for fields in changes:
        with contextlib.suppress(ValueError):
            candidate = varied(plan, calibration, **fields)
            found += [] if candidate.prediction.is_risky else [candidate]
    return found


def _difference(a: Topology, b: Topology) -> str:
    """What `b` has that `a` has not, in words."""
    pairs = [(f.name.replace("_", " "), getattr(b, f.name), getattr(a, f.name)) for f in dataclasses.fields(Topology)]
    yes = {True: "yes", False: "no"}
    words = [(n, *(yes[v] if isinstance(v, bool) else v for v in pair)) for n, *pair in pairs if pair[0] != pair[1]]
    return ", ".join(f"{name} {new} instead of {old}" for name, new, old in words)
