"""What a search found: plans with their predictions, ranked, and how many topologies each rule
refused.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trilane.config.engines import untrainable_reason
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.predict import RISKY, SAFE, Prediction
from trilane.planning.space import ParallelSizes, Space
from trilane.utils import tables
from trilane.utils.numbers import chance, with_bounds
from trilane.utils.tables import DataFrame, Record, T, Table, Text
from trilane.utils.validation import require

# Of 52 pairs of measured A100 rows of one table, model and batch whose left-out predictions differ
# by less than 3 %, 14 are predicted in the wrong order (27 %); of 63 that differ by 3 to 10 % 5, of
# 61 further apart one.
TIE = 0.03


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """A plan of a search and its prediction."""

    plan: Plan
    prediction: Prediction

    @property
    def topology(self) -> Topology:
        return self.plan.topology

    @property
    def label(self) -> str:
        return self.plan.label

    def to_json(self) -> dict[str, Any]:
        """The plan as plan.json has it, with its id, its prediction and the constants that made it."""
        return {"id": self.plan.id, **self.plan.to_json(), **self.prediction.beside()}

    def as_text(self) -> str:
        """Seconds with their interval, memory, P(OOM), batch, id and label in one line."""
        p = self.prediction
        seconds = f"{p.sec_per_it:9.3f} s ({p.sec_lo:.3f}-{p.sec_hi:.3f})"
        memory = f"{p.memory_bytes / 2**30:6.1f} GiB  P(OOM) {p.oom_probability:.2f}"
        return f"{seconds} {memory}  gbs {self.topology.gbs:5} {self.plan.id} {self.label}"


def plan_columns(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """A predicted plan as a row of a frame: each choice, its numbers, the sizes of its model."""
    t, s = plan.topology, plan.shape
    sizes = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "kv_heads",
        "ffn",
        "seq_length",
        "vocab_size",
    )
    names = {
        "id": plan.id,
        "label": plan.label,
        "engine": plan.engine,
        "cluster": plan.cluster.name,
    }
    choices = {**vars(t), "gpus": t.gpus, "microbatches": t.microbatches}
    return names | choices | prediction.numbers | {n: getattr(s, n) for n in (*sizes, "parameters")}


@dataclass(frozen=True, kw_only=True)
class Candidates(Table):
    """Plans of a search in their order, as a table."""

    rows: tuple[Candidate, ...]
    shown = "rank label id gpus microbatches sec_per_it sec_lo sec_hi memory_gib oom_probability"

    def to_frame(self) -> DataFrame:
        """A row a plan: rank (equal in a tie), id, tp, pp, dp and all other choices, gpus,
        microbatches, sec_per_it and its 90 % interval sec_lo to sec_hi, memory_gib,
        oom_probability, seconds by part, the model's sizes.
        """
        import pandas as pd

        frame = pd.DataFrame([plan_columns(c.plan, c.prediction) for c in self.rows])
        frame.insert(0, "rank", ranks([c.prediction.sec_per_it for c in self.rows]))
        return frame


def ranks(seconds: Sequence[float]) -> list[int]:
    """The ranks of plans, fastest first: equal for those that the first of them beats by less than
    TIE.
    """
    found: list[int] = []
    for number, own in enumerate(seconds, start=1):
        ties = found and seconds[found[-1] - 1] >= (1 - TIE) * own
        found.append(found[-1] if ties else number)
    return found


def sizes_of(candidate: Candidate) -> ParallelSizes:
    """Its tp, pp and dp."""
    return candidate.topology.tp, candidate.topology.pp, candidate.topology.dp


def first_per_sizes(rows: Iterable[T], sizes: Callable[[T], ParallelSizes]) -> list[T]:
    """The first row of each tp x pp x dp, in their order."""
    found: dict[ParallelSizes, T] = {}
    for row in rows:
        found.setdefault(sizes(row), row)
    return [*found.values()]


@dataclass(frozen=True, kw_only=True)
class SearchResult(Table):
    """The best candidates, best first; all refused topologies counted by rule.

    candidates   may run out of memory in one run of ten at most; `risky` ones more often: listed apart, best first too
    front        makes `pareto`, each of whose plans takes a full prediction
    cures        tries what would let a topology run, as options
    """

    shown = Candidates.shown
    space: Space
    candidates: tuple[Candidate, ...]
    risky: tuple[Candidate, ...]
    runnable: int
    refused_by_rule: dict[str, int]
    front: Callable[[], list[Candidate]] = field(repr=False, compare=False)
    cures: Callable[[], list[str]] = field(repr=False, compare=False)

    @cached_property
    def pareto(self) -> tuple[Candidate, ...]:
        """What no other plan beats in both seconds and memory, the risky left out; the fastest
        first.
        """
        return tuple(self.front())

    @property
    def evaluated(self) -> int:
        """Topologies that were looked at."""
        return self.runnable + sum(self.refused_by_rule.values())

    @property
    def cure(self) -> str:
        """What would let some topology run without risk; of a search without candidates."""
        return f"what would run: {', or '.join(self.cures()) or 'nothing near it: a smaller model, or a larger card'}"

    def best_per_sizes(self, count: int, risky: bool = False) -> Candidates:
        """The `count` best candidates that differ in tp, pp or dp, or the `risky` ones."""
        rows = first_per_sizes(self.risky if risky else self.candidates, sizes_of)
        return Candidates(rows=tuple(rows[:count]))

    def best(self, count: int) -> Candidates:
        """As best_per_sizes(); ValueError where no plan is safe to start."""
        rules = list(self.refused_by_rule)[:1] or ["no dp and microbatch divide the batch"]
        risk = f"; {len(self.risky)} may run out of memory" if self.risky else ""
        gpus, why = ",".join(map(str, self.space.gpus)), f"no topology can run; {rules[0]}{risk}"
        require(
            bool(self.candidates), "gpus", gpus, why if self.candidates else f"{why}; {self.cure}"
        )
        return self.best_per_sizes(count)

    def to_frame(self) -> DataFrame:
        """The candidates, best first, in the columns of Candidates.to_frame()."""
        return Candidates(rows=self.candidates).to_frame()

    @property
    def predicted_only(self) -> str | None:
        """Why no engine here can train these plans, by the best of them; None where one can."""
        return next((untrainable_reason(c.topology) for c in (*self.candidates, *self.risky)), None)

    def refusals(self) -> tables.Columns:
        """How many topologies each rule refuses."""
        return tables.Columns.of_rows(("rule", "topologies"), [*self.refused_by_rule.items()])

    def finding(self) -> Text:
        """The fastest plan with its interval, memory and risk, and the fastest that may be
        recommended.
        """
        (first,), safe = (
            self.best(1).rows,
            [c for c in self.candidates if c.prediction.oom_probability <= SAFE],
        )
        p = first.prediction
        seconds, gib = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi), p.memory_bytes / 2**30
        what = "Of {:,} topologies that can run the fastest is {:code} ({}): **{} s** an iteration, **{:.3g} GiB**, "
        words = [Text.of(what, self.runnable, first.label, first.plan.id, seconds, gib)]
        words += [Text.of("out of memory with a probability of **{}**.", chance(p.oom_probability))]
        if p.oom_probability > SAFE:
            words += [
                Text.of(
                    " `08_decision` recommends none above {}; the fastest that it may: ",
                    chance(SAFE),
                )
            ]
            others = [
                (c.label, c.plan.id, 100 * (c.prediction.sec_per_it / p.sec_per_it - 1))
                for c in safe[:1]
            ]
            words += [Text.of("{:code} ({}), {:.1f} % slower.", *other) for other in others] or [
                Text("none.")
            ]
        return Text.joined("", words)

    def summary(self) -> Text:
        """How many topologies there are, how many can run, and what was held fixed."""
        only = (
            Text.of(" Predicted only: {}.", self.predicted_only) if self.predicted_only else Text()
        )
        return Text.of(
            "**{:,}** topologies: **{:,}** can run, **{:,}** are refused. Held fixed: {}.{}",
            *(
                self.evaluated,
                self.runnable,
                self.evaluated - self.runnable,
                self.space.held_fixed,
                only,
            ),
        )

    def as_text(self) -> str:
        """How many topologies can run, why the others cannot, what was not varied, and a line for
        each candidate.
        """
        lines = [f"{self.evaluated} topologies, {self.runnable} can run"]
        lines += [f"{count:>12} refused: {rule}" for rule, count in self.refused_by_rule.items()]
        lines += [f"predicted only: {self.predicted_only}"] if self.predicted_only else []
        lines += [f"held fixed: {self.space.held_fixed}"]
        lines += [
            f"the best of them: {c.prediction.support.words}"
            for c in (*self.candidates, *self.risky)[:1]
        ]
        lines += map(Candidate.as_text, self.candidates) if self.candidates else [self.cure]
        lines += [
            f"apart, because these may run out of memory (P above {100 * RISKY:g} %):"
        ] * bool(self.risky)
        lines += map(Candidate.as_text, self.risky)
        return "\n".join(lines)

    def listing(self) -> dict[str, Any]:
        """All plans as JSON, those that may run out of memory apart."""
        plans, risky = ([c.to_json() for c in rows] for rows in (self.candidates, self.risky))
        counts: dict[str, Any] = {"evaluated": self.evaluated, "refused": self.refused_by_rule}
        counts |= {"held_fixed": self.space.held_fixed}
        counts |= {} if plans else {"cure": self.cure}
        return {**counts, "predicted_only": self.predicted_only, "plans": plans, "risky": risky}

    def to_json(self, keep: int) -> dict[str, Any]:  # type: ignore[override]
        """What 02_topology hands on: the best plans that differ in tp, pp or dp, the risky, what
        was fixed.
        """
        return {
            "plans": [c.to_json() for c in self.best_per_sizes(keep).rows],
            "risky": [c.to_json() for c in self.best_per_sizes(12, risky=True).rows],
            "held_fixed": self.space.held_fixed,
        }
