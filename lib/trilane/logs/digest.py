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
NUMBERS = (int, float)  # faster than a union, which is made anew each time
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
        self.rows, self.stride = rows, 1
        while -(-rows // self.stride) > 2 * MOST:
            self.stride *= 2
        self._sample = np.full(-(-rows // self.stride), np.nan)
        self.low, self.high, self._last = np.inf, -np.inf, np.nan
        self.low_at = self.high_at = self.falls_at = -1
        self._new: list[float] = []

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
            self.put(values)

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
            self.put(values)

    def put(self, values: np.ndarray) -> None:
        """Append numbers, where none are appended otherwise."""
        before, self.rows = self.rows, self.rows + len(values)
        sample = values[-before % self.stride :: self.stride]
        self._sample = np.concatenate([self._sample, sample]) if before else sample.copy()
        while len(self._sample) > 2 * MOST:
            self._sample, self.stride = self._sample[::2].copy(), 2 * self.stride
        known: np.ndarray | range = range(len(values))
        if (values != values).any():
            known = np.flatnonzero(values == values)
            values = values[known]
        if not len(values):
            return
        low, high = int(values.argmin()), int(values.argmax())
        if values[low] < self.low:
            self.low, self.low_at = float(values[low]), before + int(known[low])
        if values[high] > self.high:
            self.high, self.high_at = float(values[high]), before + int(known[high])
        if self.falls_at < 0:
            falls = values[1:] < values[:-1]
            place = 0 if values[0] < self._last else int(falls.argmax()) + 1 if falls.any() else -1
            self.falls_at = before + int(known[place]) if place >= 0 else -1
        self._last = float(values[-1])


class Columns:
    """The columns of a run, as the rules read them; and its launch arguments."""

    def __init__(self, table: "NumericTable", arguments: Mapping[str, Value]) -> None:
        self.table, self._arguments = table, arguments
        self._digests: dict[str, Digest] = {}
        self._absent = Digest(table.rows)
        self._nothing = self._absent.sample()

    def digest(self, name: str) -> Digest:
        """The column's digest, made once; one of NaN for a column that is not there."""
        if name not in self._digests:
            self._digests[name] = self.table.digest(name) or self._absent
        return self._digests[name]

    def __contains__(self, name: str) -> bool:
        return self.digest(name) is not self._absent

    def __getitem__(self, name: str) -> np.ndarray:
        """The numbers of evenly spaced rows, NaN where there are none, (sampled rows,)."""
        return self.digest(name).sample() if name in self else self._nothing

    def or_argument(self, column: str, *names: str) -> np.ndarray | float:
        """The column, or else the first argument of these names; NaN where there is neither."""
        return self[column] if column in self and np.isfinite(self[column]).any() else self.argument(*names)

    def argument(self, *names: str) -> float:
        """The first argument of these names that is a number above zero, else NaN."""
        for name in names:
            value = self._arguments.get(name)
            if isinstance(value, NUMBERS) and not isinstance(value, bool) and 0 < value < math.inf:
                return float(value)
        return math.nan


def median_ratio(numbers: np.ndarray, others: np.ndarray | float) -> float:
    """The median ratio over the lines after the first, which includes the start; 1 where there are too few."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = numbers / others
    ratios = ratios[1:] if len(ratios) > LINES else ratios
    middle = quantile(ratios[ratios > 0], 0.5)
    return middle if middle == middle else 1.0


def steps(numbers: np.ndarray) -> np.ndarray:
    """The differences of numbers that follow each other. numpy's diff takes five times as long on few."""
    return numbers[1:] - numbers[:-1]


def median(numbers: np.ndarray) -> float:
    """The median of the finite numbers, NaN without any."""
    return quantile(numbers, 0.5)


def quantile(numbers: np.ndarray, share: float) -> float:
    """Of the finite numbers, NaN without any. numpy's takes ten times as long on the few lines of a short run."""
    known = np.sort(numbers[np.isfinite(numbers)])
    place, part = divmod(share * (len(known) - 1), 1) if len(known) else (0, 0.0)
    near = known[int(place) : int(place) + 2].tolist() or [math.nan]
    return (1 - part) * near[0] + part * near[-1] if part else near[0]
