"""Rows of numbers that grow while a log is read, and the table of them."""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from trilane.utils.tables import DataFrame

NAN = float("nan")
MAX_COLUMNS = 500  # of a table, which a damaged log of ever new names would fill the memory with
MAX_LATE = 64  # iterations that a rank may lag behind another
MAX_WHOLE = 2**53  # of a whole number that a float holds exactly
PIECE = 1 << 16  # numbers that are rounded at once
Row = dict[str, float]
Unit = tuple[str, float, float]  # column, multiplier and divisor to the unit of the column


class NumericTable:
    """Rows of numbers by column, NaN where a row lacks one; 8 bytes a number, but for columns of
    one number in all rows.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns: dict[str, array[float] | float] = {}  # a float stands in all rows

    def add(self, row: Row) -> None:
        """Append a row."""
        if row.keys() != self.columns.keys():
            self._widen(row)
            row = {name: row.get(name, NAN) for name in self.columns}
        for name, value in row.items():
            if self.columns[name] != value:
                self.numbers(name).append(value)
        self.rows += 1

    def extend(self, units: Sequence[Unit], rows: Sequence[Sequence[bytes]]) -> None:
        """Append rows of numbers as they are printed in these units."""
        names = [name for name, _, _ in units]
        self._widen(dict.fromkeys(names, NAN))
        for (name, multiplier, divisor), texts in zip(units, zip(*rows, strict=True), strict=True):
            if name not in self.columns:
                continue
            first = float(texts[0]) * multiplier / divisor
            if self.columns[name] == first and texts.count(texts[0]) == len(rows):
                continue
            self.numbers(name).extend([float(text) * multiplier / divisor for text in texts])
        for name in self.columns.keys() - {*names}:
            self.numbers(name).extend([NAN] * len(rows))
        self.rows += len(rows)

    def numbers(self, name: str) -> "array[float]":
        """The numbers of a column, to be changed."""
        column = self.columns[name]
        if isinstance(column, float):
            column = self.columns[name] = array("d", [column]) * self.rows
        return column

    def change_last(self, more: Row) -> None:
        """Update the last row."""
        self._widen(more)
        for name in more.keys() & self.columns.keys():
            self.numbers(name)[-1] = more[name]

    def fill(self, more: Row) -> None:
        """Add what the row of that iteration lacks, if it is one of the last."""
        self._widen(more)
        iterations = self.numbers("iteration")
        for at in range(max(0, self.rows - MAX_LATE), self.rows):
            if iterations[at] == more["iteration"]:
                for name in more.keys() & self.columns.keys():
                    numbers = self.numbers(name)
                    if math.isnan(numbers[at]):
                        numbers[at] = more[name]

    def last(self, name: str) -> float:
        """The number in the last row, NaN if missing."""
        column = self.columns.get(name, NAN)
        return column if isinstance(column, float) else column[-1]

    def _widen(self, row: Row) -> None:
        for name, value in row.items():
            if name not in self.columns and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = NAN if self.rows else value

    def frame(self, integers: Sequence[str] = ()) -> DataFrame:
        """A DataFrame of the columns, as `arrays` gives them."""
        import pandas as pd

        return pd.DataFrame(self.arrays(integers), copy=False)

    def arrays(self, integers: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """The columns, which are taken from the table; those of `integers` become int64 where they
        have no gaps.
        """
        columns = {}
        for name, column in self.columns.items():
            values = np.array([column]) if isinstance(column, float) else np.frombuffer(column)
            # false for NaN
            if name in integers and max(-values.min(), values.max()) < MAX_WHOLE:
                values = _rounded(values)
            columns[name] = values
            if isinstance(column, float):
                columns[name] = np.broadcast_to(values, self.rows)
        self.columns = {}
        return columns


def _rounded(values: np.ndarray) -> np.ndarray:
    """Whole numbers in the memory of `values`: a copy would be what a long log takes most for."""
    whole = values.view(np.int64)
    for first in range(0, len(values), PIECE):
        whole[first : first + PIECE] = np.rint(values[first : first + PIECE])
    return whole
