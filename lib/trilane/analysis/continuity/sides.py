"""The two sides of a restart in the logs of one training, as the rules see them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

import numpy as np
import pandas as pd

from trilane.analysis.continuity.causes import Break, Line
from trilane.analysis.steady_state import interval
from trilane.logs.arguments import Value
from trilane.logs.run import RunLog
from trilane.utils.tables import short

LARGEST = 1e18  # number that counts, and one over the smallest: others are damaged
MAY_BE_ZERO = ("iteration", "learning_rate", "consumed_samples", "consumed_tokens", "skipped")
TAIL = 512  # rows before a restart, and after it, that rules look at


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
