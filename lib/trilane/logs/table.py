"""Growing tables of numbers, by column."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence

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


def columns_of(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> Columns:
    """The rows as columns of these names."""
    return {name: np.array([row.get(name, NAN) for row in rows]) for name in names}


def frame(columns: Columns | None = None, integers: Sequence[str] = ()) -> DataFrame:
    """A DataFrame of the columns, of which those of `integers` without gaps become int64."""
    import pandas as pd

    typed = dict(columns or {})
    for name in integers:
        # false for NaN
        if name in typed and (abs(typed[name]) < MAX_WHOLE).all():
            typed[name] = np.rint(typed[name]).astype(np.int64)
    return pd.DataFrame(typed, copy=False)
