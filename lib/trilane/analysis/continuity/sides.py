"""The two sides of a restart in the logs of one training, and what a rule reports of them: a Break."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.steady_state import interval
from trilane.logs.arguments import Value
from trilane.logs.run import RunLog
from trilane.utils.tables import short

WORDS = {
    "iteration": "iteration number",
    "learning_rate": "learning rate",
    "consumed_samples": "consumed samples",
    "consumed_tokens": "consumed tokens",
    "global_batch_size": "batch size",
    "loss_scale": "loss scale",
    "seq_length": "sequence length",
    "lm_loss": "loss",
    "grad_norm": "gradient norm",
    "sec_per_it": "seconds per iteration",
    "samples_per_second": "samples per second",
    "tokens_per_second": "tokens per second",
}
CAUSES = {
    "scheduler-restarted": "the scheduler was not restored: the schedule begins again (warm-up, or its first rate)",
    "another-schedule": "a schedule of another length or form (train_iters, decay, warm-up or minimum changed)",
    "scaled-rate": "another peak rate, or a factor on it: the schedule has the same form",
    "shifted-schedule": "the scheduler's step is that of another iteration",
    "data-from-start": "the count of consumed samples was not restored: the data is replayed from the beginning",
    "data-replayed": "data is replayed: these samples were consumed before",
    "data-skipped": "data is skipped: these samples are not consumed by any iteration",
    "iterations-jump": "the iteration number was not restored: it jumps while the consumed samples go on",
    "iterations-restarted": "the iteration number was not restored: it begins again while the training goes on",
    "weights-only": "only the weights were loaded: iteration, scheduler and optimizer begin again",
    "ramp-up-restarted": "the ramp-up of the batch size was not restored: it begins again",
    "batch-changed": "other gradient accumulation, micro-batch size or number of replicas",
    "loss-scale-initial": "the loss scale was not restored: it is back at its initial value",
    "loss-scale-lost": "the loss scale was not restored",
    "precision-changed": "another precision: one side has no loss scaling",
    "sequence-length": "the sequence length or the state of its curriculum was not restored",
    "slower": "a slow node, link or file system, or another topology",
    "gradient-scale": "gradients are reduced or scaled otherwise (summed for averaged; ranks), or optimizer state",
    "optimizer-state": "optimizer state (Adam's moments, master weights) was not restored; it recovers",
    "weights-not-loaded": "the weights were not loaded: the loss is that of an untrained model, near ln(vocabulary)",
    "older-checkpoint": "the weights of an older checkpoint were loaded: the loss follows its earlier course",
    "moments-lost": "Adam's moments were not restored: the loss rises and converges again",
    "loss-level": "weights restored in part (norms, tied embedding), other data, or another loss",
}
LARGEST = 1e18  # number that counts, and one over the smallest: others are damaged
MAY_BE_ZERO = ("iteration", "learning_rate", "consumed_samples", "consumed_tokens", "skipped")
TAIL = 512  # rows before a restart, and after it, that rules look at


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a log: its name, the iteration, and the value; `number` in the file and `text` where they are known."""

    log: str
    iteration: int
    value: float
    number: int | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.value:.6g} in iteration {self.iteration} of {self.log}"


@dataclass(frozen=True, kw_only=True)
class Break:
    """What a restart did not continue: the last line before it, the first one after it that differs, the cause.

    quantity   of WORDS; `expected` is what the course before the restart leads to at the line `after`
    cause      of CAUSES; `detail` adds what supports it
    """

    quantity: str
    cause: str
    restart: int
    before: Line
    after: Line
    expected: float
    detail: str = ""

    def __post_init__(self) -> None:
        assert self.quantity in WORDS and self.cause in CAUSES, (self.quantity, self.cause)

    @property
    def likely(self) -> str:
        """The likely cause in words."""
        return CAUSES[self.cause] + (f"; {self.detail}" if self.detail else "")

    @property
    def sentence(self) -> str:
        """The break in words: both lines, the size of the jump and the likely cause."""
        size = f"{self.expected:.6g} expected, {change(self.after.value, self.expected)}"
        return f"{WORDS[self.quantity]}: {self.before}, {self.after} ({size}); likely: {self.likely}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `size` is the value over the expected one, null where that is 0."""
        size = self.after.value / self.expected if abs(self.expected) > 1e-30 else None
        return {**asdict(self), "size": size, "likely": self.likely, "sentence": self.sentence}


def change(value: float, expected: float) -> str:
    """A change in words: a factor where it is large, else per cent."""
    if not expected or not value:
        return f"{value - expected:+.6g}"
    ratio = value / expected
    return f"x {ratio:.3g}" if not 0.5 < ratio < 2 else f"{ratio - 1:+.2%}"


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Both sides of a restart.

    old     the rows before it: those that count up to its first iteration, and those that it repeats; rising
    new     the rows after it; rising
    start   the iteration that the first of them is, where their numbers begin again
    """

    old: pd.DataFrame
    new: pd.DataFrame
    old_log: RunLog
    new_log: RunLog

    start: float = math.nan

    @cached_property
    def first(self) -> float:
        """The first iteration after the restart."""
        return self.start if self.start == self.start else float(self.new["iteration"].iloc[0])

    @cached_property
    def every(self) -> float:
        """Iterations that a line covers."""
        return interval(self.new["iteration"].to_numpy(float)) if len(self.new) > 1 else self.old_every

    @cached_property
    def old_every(self) -> float:
        """The same before the restart."""
        return interval(self.old["iteration"].to_numpy(float))

    def before(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations and values of a quantity before the restart, where it is a number."""
        return numbers(self.old, name)

    def after(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The same after it."""
        return numbers(self.new, name)

    def both(self, name: str) -> bool:
        """Whether both sides have the quantity."""
        return bool(len(self.before(name)[0]) and len(self.after(name)[0]))

    def changed_arguments(self, names: Sequence[str]) -> str:
        """ "train_iters 500 -> 800": arguments that both logs print and that differ."""
        one, two = (with_columns(log) for log in (self.old_log, self.new_log))
        both = [n for n in names if n in one and n in two and one[n] != two[n]]
        words = [f"{n} {short(str(one[n]), 40)} -> {short(str(two[n]), 40)}" for n in both]
        return ", ".join(words)

    def found(self, name: str, cause: str, place: int, expected: float, detail: str = "") -> Break:
        """The Break of row `place` of the new values of a quantity, relative to the last line before the restart."""
        (at, values), (at_new, new) = self.before(name), self.after(name)
        last = max(int(np.searchsorted(at, self.first)) - 1, 0)
        old = Line(log=label(self.old_log), iteration=int(at[last]), value=float(values[last]))
        line = Line(log=label(self.new_log), iteration=int(at_new[place]), value=float(new[place]))
        return Break(
            quantity=name,
            cause=cause,
            restart=int(self.first),
            before=old,
            after=line,
            expected=float(expected),
            detail=detail,
        )


def label(log: RunLog) -> str:
    """The log's name; that of its folder too where it is the log of a run folder."""
    return f"{log.source.parent.name}/{log.source.name}" if log.source.name == "run.log" else log.source.name


def numbers(table: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and values of a column, where it is a number that training can have."""
    if name not in table:
        return np.empty(0), np.empty(0)
    values = table[name].to_numpy(float)
    values = np.where(np.abs(values) < 1 / LARGEST, 0.0, values)
    good = ((values > 0) | ((values == 0) & (name in MAY_BE_ZERO))) & (values < LARGEST)  # False for NaN
    return table["iteration"].to_numpy(float)[good], values[good]


def with_columns(log: RunLog) -> Mapping[str, Value]:
    """The log's arguments, with the number of iterations that its lines print."""
    table = log.iterations
    printed = float(table["train_iters"].iloc[-1]) if "train_iters" in table else math.nan
    return {**log.arguments, "train_iters": int(printed)} if math.isfinite(printed) else log.arguments


def derived(log: RunLog, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with batch size and sequence length by the differences of consumed samples and tokens, where those are
    printed and they themselves are not; the first row gets the second one's.
    """
    table = rows[np.abs(rows["iteration"].to_numpy(float)) < LARGEST]  # a typed table's row has no number
    table = table.sort_values("iteration", kind="stable").drop_duplicates("iteration", keep="last")
    steps = table["iteration"].diff()
    if "consumed_samples" in table and "global_batch_size" not in table:
        batch = (table["consumed_samples"].diff() / steps).bfill(limit=1)
        table = table.assign(global_batch_size=batch.where(batch > 0))
    if {"consumed_samples", "consumed_tokens"} <= {*table} and "seq_length" not in table:
        length = (table["consumed_tokens"].diff() / table["consumed_samples"].diff()).bfill(limit=1)
        table = table.assign(seq_length=length.where(length > 0))
    argument = log.arguments.get("seq_length")
    if "seq_length" not in table and isinstance(argument, int) and argument > 0:
        table = table.assign(seq_length=float(argument))
    return table


def restarts(logs: Sequence[RunLog]) -> Iterator[Sides]:
    """Both sides of each restart of one training, whose logs are given in the order in which they ran."""
    kept, last = pd.DataFrame(), None
    for log in (log for log in logs if len(log.iterations)):
        rows = derived(log, log.iterations)
        if not len(rows):
            continue
        for at, again in log.resumes:
            old = pd.concat([rows[rows["iteration"] < at], derived(log, again)])
            new = rows[rows["iteration"] >= at]
            if len(old) and len(new):
                yield Sides(old=old, new=new.head(TAIL), old_log=log, new_log=log)
        first = float(rows["iteration"].iloc[0])
        if last is not None:
            yield Sides(old=kept, new=rows.head(TAIL), old_log=last, new_log=log)
            kept = kept[kept["iteration"] < first]
        kept, last = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows, log


def resolution(values: np.ndarray) -> tuple[float, float]:
    """The last place of printed numbers, absolute and relative, by the digits of up to TAIL of them, 12 at most.
    3.787E-06: 1e-3 relative; 0.000123: 1e-6 absolute."""
    texts = [Decimal(f"{v:.12g}").normalize().as_tuple() for v in values[:TAIL] if v > 1 / LARGEST]
    if not texts:
        return 0.0, 0.0
    digits = max(len(text.digits) for text in texts)
    places = min(int(text.exponent) for text in texts)
    return math.pow(10, places), math.pow(10, 1 - digits)


def slope_of(at: np.ndarray, values: np.ndarray) -> float:
    """The slope from the first to the last value; NaN for one alone."""
    return float((values[-1] - values[0]) / (at[-1] - at[0])) if len(at) > 1 else math.nan
