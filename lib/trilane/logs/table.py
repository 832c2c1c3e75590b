"""Growing tables of numbers, by column."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trilane.utils.tables import DataFrame

NAN = float("nan")
MAX_COLUMNS = 500  # of a table, which a damaged log of ever new names would fill the memory with
MAX_LATE = 64  # iterations that a rank may lag behind another
MAX_WHOLE = 2**53  # of a whole number that a float holds exactly
Columns = dict[str, np.ndarray]


class NumericTable:
    """Rows of numbers by column, NaN where a row lacks one; 8 bytes a number."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def add(self, row: Mapping[str, float]) -> None:
        """Append a row."""
        if row.keys() != self._columns.keys():
            self._widen(row)
            row = {name: row.get(name, NAN) for name in self._columns}
        for name, value in row.items():
            self._columns[name].append(value)
        self.rows += 1

    def change_last(self, more: Mapping[str, float]) -> None:
        """Update the last row."""
        self._widen(more)
        for name in more.keys() & self._columns.keys():
            self._columns[name][-1] = more[name]

    def fill(self, more: Mapping[str, float]) -> None:
        """Add what the row of that iteration lacks, if it is one of the last."""
        self._widen(more)
        numbers = self._columns["iteration"]
        for at in range(max(0, self.rows - MAX_LATE), self.rows):
            if numbers[at] == more["iteration"]:
                for name in more.keys() & self._columns.keys():
                    if math.isnan(self._columns[name][at]):
                        self._columns[name][at] = more[name]

    def last(self, name: str) -> float:
        """The number in the last row, NaN if missing."""
        if name in self._columns:
            return self._columns[name][-1]
        return NAN

    def columns(self) -> Columns:
        """Each column, (rows,), which shares its memory with the table."""
        return {name: np.frombuffer(column) for name, column in self._columns.items()}

    def _widen(self, row: Mapping[str, float]) -> None:
        for name in row:
            if name not in self._columns and len(self._columns) < MAX_COLUMNS:
                self._columns[name] = array("d", [NAN]) * self.rows


def frame(columns: Any = None, integers: Sequence[str] = ()) -> DataFrame:
    """A DataFrame of columns or rows, of which the columns `integers` without gaps become int64."""
    import pandas as pd

    table = pd.DataFrame(columns, copy=False)
    for name in integers:
        # false for NaN
        if name in table and (abs(table[name]) < MAX_WHOLE).all():
            table[name] = np.rint(table[name]).astype(np.int64)
    return table
