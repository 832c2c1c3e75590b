"""Plans that end in time, side by side: as a table, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trilane.costmodel.predict import SAFE
from trilane.planning.search_result import Candidate, plan_columns
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import Proposal, Proposals
from trilane.utils.numbers import amount, size_text
from trilane.utils.tables import Brief, DataFrame, Table, Text, displayed
from trilane.utils.validation import require

Record = dict[str, Any]  # a JSON object

COUNTED = (
    "Days are those of 'plan calendar' without a ramp and without a queue: the prediction's error, a run slower than "
    "its benchmark, evaluation, checkpoints, ends of jobs, failures and lost work, 4 spare nodes where there are."
)


@dataclass(frozen=True, kw_only=True)
class Dated(Brief):
    """A proposal; days, GPU-hours and money that half and nine of ten of its simulated runs keep."""

    request: SizeRequest
    proposal: Proposal
    costs: Record

    @property
    def evidence(self) -> str:
        """What the plan rests on, its kind of shape and the rules that it breaks, and that its memory is not safe."""
        p = self.proposal.prediction
        found = [p.support.words, *filter(None, [self.proposal.shape.kind]), *self.proposal.notes]
        found += [f"its memory is to be measured first: P(OOM) above {SAFE:g}"] * (p.oom_probability > SAFE)
        return "; ".join(found)

    def to_json(self) -> Record:
        """The plan as a search has it, with its costs."""
        return {
            **Candidate(plan=self.proposal.plan, prediction=self.proposal.prediction).to_json(),
            "costs": self.costs,
        }


@dataclass(frozen=True, kw_only=True)
class InTime(Table):
    """Plans that end in time, those of a cluster together and its best first; without rows nothing ends.

    `same` is one model on each of several clusters, `reasons` why no larger one ends on each, or why none does.
    """

    digits = 1
    shown = "cluster gpus parameters num_layers hidden_size tokens engine label days_50 days_90 gpu_hours_50"
    shown += " money memory_gib oom_probability"
    limit: float
    request: SizeRequest  # of the first cluster; its `parameters` are no target of the user
    rows: tuple[Dated, ...]
    reasons: dict[str, str]
    same: tuple[Dated, ...] = ()

    def proposals(self) -> Proposals:
        """The shapes as those of a target size, that of the largest; ValueError where nothing ends in time."""
        require(bool(self.rows), "days", f"{self.limit:g}", "; ".join(self.reasons.values()))
        return Proposals(request=self.request, rows=tuple(row.proposal for row in self.rows))

    def to_frame(self) -> DataFrame:
        """A row a plan in the columns of a search; tokens, days_50, days_90, gpu_hours_50, gpu_hours_90 that half and
        nine of ten runs keep, and money, NaN without a price.
        """
        return _frame(self.rows)

    def worth(self) -> list[str]:
        """What a GPU-hour of each further cluster is worth in those of the first one, by the common model."""
        return [_worth(self.same[0], other) for other in self.same[1:]]

    def assumptions(self) -> list[str]:
        """What model, tokens and days take for granted."""
        r, kind = (
            self.request,
            "published ratios of width to depth; predicted only: which shape learns best is not asked",
        )
        by = ", compute-optimal by Hoffmann et al. 2022; for much serving fewer parameters on more"
        return [
            f"model: {r.like}, {r.vocab_size} rows of embedding, sequences of {r.seq_length}, {kind}",
            f"tokens: {r.tokens_text}{by * (r.tokens == '20x')}; {r.gbs} sequences an iteration",
            COUNTED,
        ]

    def summary(self) -> Text:
        """The largest size, why none is larger, and what its days count."""
        most = size_text(self.rows[0].proposal.shape.parameters) if self.rows else "nothing"
        end = f"within {self.limit:g} days with 90 % probability; {'; '.join(self.reasons.values())}. {COUNTED}"
        return Text.of("At most **{} parameters** end {}" if self.rows else "{} ends {}", most, end)

    def to_json(self, top: int = 12) -> Record:
        """The plans with their costs, the common model's costs, what is assumed, and why none is larger."""
        same = [{"cluster": row.request.cluster.name, **row.costs} for row in self.same]
        found: Record = {"days": self.limit, "probability": 0.9, "request": self.request.to_json(), "same_model": same}
        found |= {"worth": self.worth(), "reasons": self.reasons, "assumptions": self.assumptions()}
        return {**found, "plans": [row.to_json() for row in self.rows[:top]]}

    def as_text(self, top: int = 12) -> str:
        """The plans side by side, the worth of each cluster's GPU-hours, what each plan rests on, what is assumed."""
        rows = self.rows[:top]
        lines = [f"the largest that end within {self.limit:g} days with 90 % probability, on their fastest topology:"]
        lines += [_text(rows)] if rows else []
        lines += ["one model on each:", _text(self.same), *self.worth()] if self.same else []
        lines += [f"{number}. {row.evidence}" for number, row in enumerate(rows, start=1)]
        lines += [f"{cluster}: {reason}" for cluster, reason in self.reasons.items()]
        return "\n".join([*lines, *self.assumptions()])


def _frame(rows: Sequence[Dated]) -> DataFrame:
    import pandas as pd

    plans = ((row.proposal.plan, row.proposal.prediction, row.costs) for row in rows)
    frame = pd.DataFrame([plan_columns(plan, prediction) | costs for plan, prediction, costs in plans])
    return frame.astype({"money": float}).set_axis(range(1, len(rows) + 1)) if len(rows) else frame


def _text(rows: Sequence[Dated]) -> str:
    return displayed(_frame(rows), InTime.shown).to_string(float_format=amount)


def _worth(one: Dated, other: Dated) -> str:
    ratio = one.costs["gpu_hours_50"] / other.costs["gpu_hours_50"]
    text = f"a GPU-hour of {other.request.cluster.name} does the work of {ratio:.2f} of {one.request.cluster.name}"
    if one.costs["money"] is None:
        return f"{text}, and is worth as many times their price"
    return f"{text}: {other.costs['money'] / one.costs['money'] - 1:+.0%} of money at these prices"
