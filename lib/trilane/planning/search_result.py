"""What a search found: plans with their predictions, ranked, and how many topologies each rule
refused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

from trilane.config.parallelism import HasTopology, Topology
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import SAFE, Prediction, predict
from trilane.planning.space import Space
from trilane.utils import tables
from trilane.utils.frozen import frozen
from trilane.utils.numbers import chance, with_bounds
from trilane.utils.tables import DataFrame, Json, Record, Table, Text
from trilane.utils.validation import require_known

# Of 52 pairs of measured A100 rows of one table, model and batch whose left-out predictions differ
# by less than 3 %, 14 are predicted in the wrong order (27 %); of 63 that differ by 3 to 10 % 5, of
# 61 further apart one.
TIE = 0.03


@frozen
class Candidate(Record, HasTopology):
    """A plan of a search, with the constants that predict it."""

    plan: Plan
    calibration: Calibration | None = field(default=None, repr=False)

    @cached_property
    def prediction(self) -> Prediction:
        """What it is expected to take."""
        return predict(self.plan, self.calibration)

    @property
    def topology(self) -> Topology:
        return self.plan.topology

    @property
    def label(self) -> str:
        return self.plan.label

    @property
    def lane(self) -> tuple[int, ...]:
        """tp, pp and GPUs: replicas that share sequences are no other lane."""
        return self.tp, self.pp, self.gpus

    def to_json(self) -> Json:
        """The plan as plan.json has it, with its id, prediction and constants."""
        return {"id": self.plan.id, **self.plan.to_json(), **self.prediction.beside()}

    def summary(self) -> str:
        """Seconds with their interval, memory, P(OOM), batch, id and label in one line."""
        p = self.prediction
        seconds = f"{p.sec_per_it:9.3f} s ({p.sec_lo:.3f}-{p.sec_hi:.3f})"
        memory = f"{p.memory_bytes / 2**30:6.1f} GiB  P(OOM) {p.oom_probability:.2f}"
        return f"{seconds} {memory}  gbs {self.topology.gbs:5} {self.plan.id} {self.label}"


def plan_columns(plan: Plan, prediction: Prediction) -> Json:
    """A predicted plan as a row of a frame: each choice, its numbers, the sizes of its model."""
    t = plan.topology
    s = plan.shape
    return {
        "id": plan.id,
        "label": plan.label,
        "engine": plan.engine,
        "cluster": plan.cluster.name,
        **vars(t),
        "gpus": t.gpus,
        "microbatches": t.microbatches,
        **prediction.numbers,
        "num_layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "num_attention_heads": s.num_attention_heads,
        "kv_heads": s.kv_heads,
        "ffn": s.ffn,
        "seq_length": s.seq_length,
        "vocab_size": s.vocab_size,
        "parameters": s.parameters,
    }


@frozen
class Candidates(Table):
    """Plans of a search in their order, as a table."""

    rows: tuple[Candidate, ...]
    shown = "rank label id gpus sec_per_it sec_lo sec_hi memory_gib oom_probability"

    def to_frame(self) -> DataFrame:
        """A row a plan: rank (equal in a tie), id, tp, pp, dp and all other choices, gpus,
        microbatches, sec_per_it and its 90 % interval sec_lo to sec_hi, memory_gib,
        oom_probability, seconds by part, the model's sizes.
        """
        import pandas as pd

        frame = pd.DataFrame([plan_columns(c.plan, c.prediction) for c in self.rows])
        frame.insert(0, "rank", ranks([c.prediction.sec_per_it for c in self.rows]))
        return frame

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """A plan with its prediction, of a slice the plans."""
        if isinstance(index, slice):
            return Candidates(rows=self.rows[index])
        return self.rows[index]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.rows)

    def filter(self, query: str = "", **values: Any) -> "Candidates":
        """The plans of which a query of the frame's columns holds, or that have these values.

        found.filter("memory_gib < 40", tp=4)
        """
        frame = self.to_frame()
        kept = frame.query(query) if query else frame
        for name, value in values.items():
            require_known("filter", name, [*frame])
            kept = kept[kept[name] == value]
        return Candidates(rows=tuple(self.rows[row] for row in kept.index))

    def head(self, count: int = 5) -> "Candidates":
        """The first plans."""
        return Candidates(rows=self.rows[:count])


def ranks(seconds: Sequence[float]) -> list[int]:
    """The ranks of plans, fastest first: equal for those that the first of them beats by less than
    TIE.
    """
    found = []
    first = 0  # of those that share a rank
    for number, own in enumerate(seconds):
        if seconds[first] < (1 - TIE) * own:
            first = number
        found.append(first + 1)
    return found


def first_per_lane(rows: Iterable[Any]) -> list[Any]:
    """The first row of each tp x pp and number of GPUs, in their order."""
    first = dict[Any, Any]()
    for row in rows:
        first.setdefault(row.lane, row)
    return list(first.values())


@frozen
class SearchResult(Candidates):
    """The best plans, best first; all refused topologies counted by rule.

    rows         run out of memory with SAFE probability at most; `risky` ones more often:
                 listed apart, best first too
    kinds        makes the fastest plan of each tp x pp x dp, ZeRO stage and recomputation, and of
                 those that are risky; each takes a full prediction
    """

    space: Space
    risky: tuple[Candidate, ...]
    runnable: int
    refused_by_rule: dict[str, int]
    kinds: Callable[[], list[Candidate]] = field(repr=False, compare=False)

    @property
    def evaluated(self) -> int:
        """Topologies that were looked at."""
        return self.runnable + sum(self.refused_by_rule.values())

    def best(self, count: int = 0) -> Any:
        """The best plan, or a table of the `count` best; ValueError where none is safe to start."""
        if not self.rows:
            rule = next(iter(self.refused_by_rule), "no dp and microbatch divide the batch")
            gpus = ",".join(map(str, self.space.gpus))
            raise ValueError(f"gpus={gpus}: no topology can run; {rule}")
        return self.head(count) if count else self.rows[0]

    def refusals(self) -> tables.Columns:
        """How many topologies each rule refuses."""
        return tables.Columns.of_rows(("rule", "topologies"), [*self.refused_by_rule.items()])

    def summary(self) -> Text:
        """The fastest plan with its interval, memory and risk; how many topologies there are, how
        many can run, and what was held fixed.
        """
        if not self.rows:
            return Text.of("None of **{:,}** topologies can run.", self.evaluated)
        first = self.rows[0]
        p = first.prediction
        return Text.of(
            "Of **{:,}** topologies **{:,}** can run. The fastest is {:code} ({}): **{} s** an "
            "iteration, **{:.3g} GiB**, out of memory with a probability of **{}**. "
            "Held fixed: {}.",
            self.evaluated,
            self.runnable,
            first.label,
            first.plan.id,
            with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi),
            p.memory_bytes / 2**30,
            chance(p.oom_probability),
            self.space.held_fixed,
        )

    def as_text(self) -> str:
        """How many topologies can run, why the others cannot, what was not varied, and a line for
        each candidate.
        """
        lines = [f"{self.evaluated} topologies, {self.runnable} can run"]
        lines += [f"{count:>12} refused: {rule}" for rule, count in self.refused_by_rule.items()]
        lines.append(f"held fixed: {self.space.held_fixed}")
        plans = [*self.rows, *self.risky]
        if plans:
            lines.append(f"the best of them: {plans[0].prediction.support.words}")
        lines += [c.summary() for c in self.rows]
        if self.risky:
            lines.append(f"apart, because these may run out of memory (P above {SAFE:.0%}):")
            lines += [c.summary() for c in self.risky]
        return "\n".join(lines)

    def to_json(self, keep: int | None = None) -> Json:
        """The plans as JSON, at most `keep`, those that may run out of memory apart, and how many
        are refused.
        """
        return {
            "evaluated": self.evaluated,
            "refused": self.refused_by_rule,
            "held_fixed": self.space.held_fixed,
            "plans": [c.to_json() for c in self.rows[:keep]],
            "risky": [c.to_json() for c in self.risky[:keep]],
        }
