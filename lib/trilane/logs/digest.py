"""Digest: what the gate of plausibility needs of a column, in a memory that does not grow with the log."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trilane.logs.arguments import Value

if TYPE_CHECKING:
    from trilane.logs.table import NumericTable

MOST = 1 << 12  # evenly spaced numbers that are kept of a column, up to twice as many
CHECKED = (
    *("learning_rate", "grad_norm", "consumed_samples", "consumed_tokens", "seq_length", "flops_per_s_per_gpu", "mfu"),
    *("tokens_per_second", "tokens_per_gpu_per_second"),
)
LINES = 3  # at least: a single odd line proves nothing


@dataclass(frozen=True)
class Finding:
    """A problem before its line is known; `row` is the table's row that shows it, -1 for the last."""

    rule: str
    column: str
    message: str
    row: int = -1


class Digest:
    """The lowest and the highest number of a growing column and the first that is below the one before it, with the
    rows where they are (-1: none); and the numbers of every `stride`-th row. NaN counts in the sample alone.
    """

    def __init__(self, rows: int = 0) -> None:
        self.rows, self.stride, self._sample = 0, 1, np.empty(0)
        self.low, self.high, self._last = np.inf, -np.inf, np.nan
        self.low_at = self.high_at = self.falls_at = -1
        self._new: list[float] = []
        if 0 < rows <= MOST:
            self.rows, self._sample = rows, np.full(rows, np.nan)
        elif rows:
            self._put(np.full(rows, np.nan))

    def append(self, value: float) -> None:
        self._new.append(value)
        self.rows += 1
        if len(self._new) >= MOST:
            self._settle()

    def extend(self, values: np.ndarray) -> None:
        self._new += values.tolist() if len(values) < MOST else []
        self.rows += len(values) if len(values) < MOST else 0
        if len(self._new) >= MOST or len(values) >= MOST:
            self._settle()
        if len(values) >= MOST:
            self._put(values)

    def __setitem__(self, place: int, value: float) -> None:
        """Change a number; of the one before it the extremes remain."""
        self._settle()
        if value < self.low:
            self.low, self.low_at = value, place
        if value > self.high:
            self.high, self.high_at = value, place
        if place % self.stride == 0:
            self._sample[place // self.stride] = value
        self._last = value if place == self.rows - 1 else self._last

    def sample(self) -> np.ndarray:
        """The numbers of the rows 0, stride, 2 stride, ...; equally many for every column of a table."""
        self._settle()
        return self._sample

    def settled(self) -> "Digest":
        """Itself, with every number counted."""
        self._settle()
        return self

    def _settle(self) -> None:
        if self._new:
            values, self._new = np.array(self._new), []
            self.rows -= len(values)
            self._put(values)

    def _put(self, values: np.ndarray) -> None:
        before, self.rows = self.rows, self.rows + len(values)
        self._sample = np.concatenate([self._sample, values[-before % self.stride :: self.stride]])
        while len(self._sample) > 2 * MOST:
            self._sample, self.stride = self._sample[::2].copy(), 2 * self.stride
        known = np.flatnonzero(values == values)
        if not len(known):
            return
        numbers = values[known]
        low, high = int(numbers.argmin()), int(numbers.argmax())
        if numbers[low] < self.low:
            self.low, self.low_at = float(numbers[low]), before + int(known[low])
        if numbers[high] > self.high:
            self.high, self.high_at = float(numbers[high]), before + int(known[high])
        if self.falls_at < 0:
            falls = np.flatnonzero(numbers < np.concatenate([[self._last], numbers[:-1]]))
            self.falls_at = before + int(known[falls[0]]) if len(falls) else -1
        self._last = float(numbers[-1])


class Columns:
    """The columns of a run, as the rules read them; and its launch arguments."""

    def __init__(self, table: "NumericTable", arguments: Mapping[str, Value]) -> None:
        self.table, self._arguments = table, arguments
        self._digests: dict[str, Digest] = {}

    def digest(self, name: str) -> Digest:
        """The column's digest, made once."""
        if name not in self._digests:
            self._digests[name] = self.table.digest(name)
        return self._digests[name]

    def __getitem__(self, name: str) -> np.ndarray:
        """The numbers of evenly spaced rows, NaN where there are none, (sampled rows,)."""
        return self.digest(name).sample()

    def or_argument(self, column: str, *names: str) -> np.ndarray | float:
        """The column, or else the first argument of these names; NaN where there is neither."""
        return self[column] if np.isfinite(self[column]).any() else self.argument(*names)

    def argument(self, *names: str) -> float:
        """The first argument of these names that is a number above zero, else NaN."""
        values = (self._arguments.get(name) for name in names)
        numbers = (float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
        return next((v for v in numbers if 0 < v < math.inf), math.nan)


def median_ratio(numbers: np.ndarray, others: np.ndarray | float) -> float:
    """The median ratio over the lines after the first, which includes the start; 1 where there are too few."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = numbers / others
    ratios = ratios[1:] if len(ratios) > LINES else ratios
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    return float(np.median(ratios)) if len(ratios) else 1.0


def median(numbers: np.ndarray) -> float:
    numbers = numbers[np.isfinite(numbers)]
    return float(np.median(numbers)) if len(numbers) else math.nan
