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
Row = dict[str, float]


class NumericTable:
    """Rows of numbers by column, NaN where a row lacks one; 8 bytes a number."""

    def __init__(self) -> None:
        self.rows = 0
        self.columns: dict[str, array[float]] = {}

    def add(self, row: Row) -> None:
        """Append a row."""
        if row.keys() != self.columns.keys():
            self._widen(row)
            row = {name: row.get(name, NAN) for name in self.columns}
        for name, value in row.items():
            self.columns[name].append(value)
        self.rows += 1

    def change_last(self, more: Row) -> None:
        """Update the last row."""
        self._widen(more)
        for name in more.keys() & self.columns.keys():
            self.columns[name][-1] = more[name]

    def fill(self, more: Row) -> None:
        """Add what the row of that iteration lacks, if it is one of the last."""
        self._widen(more)
        numbers = self.columns["iteration"]
        for at in range(max(0, self.rows - MAX_LATE), self.rows):
            if numbers[at] == more["iteration"]:
                for name in more.keys() & self.columns.keys():
                    if math.isnan(self.columns[name][at]):
                        self.columns[name][at] = more[name]

    def last(self, name: str) -> float:
        """The number in the last row, NaN if missing."""
        if name in self.columns:
            return self.columns[name][-1]
        return NAN

    def _widen(self, row: Row) -> None:
        for name in row:
            if name not in self.columns and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = array("d", [NAN]) * self.rows

    def frame(self, integers: Sequence[str] = ()) -> DataFrame:
        """A DataFrame that shares its memory with the table, but for the columns `integers`, of
        which those without gaps become int64.
        """
        import pandas as pd

        columns = {name: np.frombuffer(column) for name, column in self.columns.items()}
        table = pd.DataFrame(columns, copy=False)
        for name in integers:
            # false for NaN
            if name in table and (abs(table[name]) < MAX_WHOLE).all():
                table[name] = np.rint(table[name]).astype(np.int64)
        return table
