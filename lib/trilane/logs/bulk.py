"""Bulk: the lines of a block that were read by their form, in the order of the file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.logs.fast import Batch


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """`at`, numbers of lines, rising; `values`, (names, lines), NaN where a line does not say it."""

    names: list[str]
    at: np.ndarray
    values: np.ndarray
    dialects: list[str]

    @property
    def first(self) -> float:
        """The first line's number, infinite where there is none."""
        return float(self.at[0]) if len(self.at) else float("inf")

    def split(self, before: int) -> tuple["Bulk", "Bulk"]:
        """What stands before the line of that number, and the rest."""
        cut = int(np.searchsorted(self.at, before))
        return self._part(slice(None, cut)), self._part(slice(cut, None))

    def _part(self, p: slice) -> "Bulk":
        return Bulk(names=self.names, at=self.at[p], values=self.values[:, p], dialects=self.dialects)


def merge(batches: Sequence[Batch]) -> Bulk:
    """Several batches as one."""
    names = list(dict.fromkeys(span.column for b in batches for span in b.form.spans))
    row = {name: i for i, name in enumerate(names)}
    at = np.concatenate([b.at for b in batches]) if batches else np.empty(0, np.int64)
    values = np.full((len(names), len(at)), np.nan)
    begin = 0
    for batch in batches:
        end = begin + len(batch.at)
        for span, numbers in zip(batch.form.spans, batch.values, strict=True):
            values[row[span.column], begin:end] = numbers
        begin = end
    order = np.argsort(at)
    return Bulk(names=names, at=at[order], values=values[:, order], dialects=sorted({b.form.dialect for b in batches}))


def by_iteration(timers: Bulk, iterations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Timers' lines as one row an iteration: the iterations, and the values (names, rows). The last word counts."""
    rows, place = np.unique(iterations, return_inverse=True)
    values = np.full((len(timers.names), len(rows)), np.nan)
    for out, line in zip(values, timers.values, strict=True):
        said = line == line
        out[place[said]] = line[said]
    return rows, values
