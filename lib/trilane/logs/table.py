"""Table: rows of numbers as compact columns, at most 8 bytes a number, whatever the dialect says in each row."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trilane.logs.spill import TAIL, SpilledColumn

if TYPE_CHECKING:
    import pandas as pd


NAN = float("nan")


class Column:
    """Numbers that are appended, in memory or on `tape`. As long as all are the same, as some columns', one is kept."""

    def __init__(self, rows: int, tape: SpilledColumn | None = None) -> None:
        self.rows, self._same, self._tape = rows, NAN, tape
        self._all: array[float] | SpilledColumn | None = None
        if not rows:
            self._spread()

    @property
    def is_taped(self) -> bool:
        """Whether the numbers go to a file."""
        return self._tape is not None

    def append(self, value: float) -> None:
        """One number more."""
        if self._all is None and not (value == self._same or (value != value and self._same != self._same)):
            self._spread()
        if self._all is not None:
            self._all.append(value)
        self.rows += 1

    def extend(self, values: np.ndarray) -> None:
        """Many numbers more."""
        if not self.rows and len(values):
            self._same, self._all = float(values[0]), None
        if self._all is None:
            same = values == self._same if self._same == self._same else values != values
            if not same.all():
                self._spread()
        if self._all is not None:
            self._all.frombytes(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        self.rows += len(values)

    def __getitem__(self, place: int) -> float:
        return self._same if self._all is None else self._all[place]

    def __setitem__(self, place: int, value: float) -> None:
        if self._all is None:
            self._spread()
        assert self._all is not None
        self._all[place] = value

    def numbers(self) -> np.ndarray:
        """All of them, without a copy where there is an array: append no more while it is used."""
        return np.frombuffer(self._all) if isinstance(self._all, array) else self.read(0, self.rows)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers from `start` up to `stop`."""
        if self._all is None:
            return np.full(stop - start, self._same)
        return self._all.read(start, stop) if isinstance(self._all, SpilledColumn) else np.array(self._all[start:stop])

    def _spread(self) -> None:
        if self._tape is None:
            self._all = array("d", [self._same]) * self.rows
            return
        self._all = self._tape
        for start in range(0, self.rows, TAIL):
            self._tape.frombytes(np.full(min(TAIL, self.rows - start), self._same).tobytes())


class Table:
    """Columns that grow together. A number that a row does not say is NaN; a column that comes late is NaN above.

    With `keep`, only columns of these names are kept in memory; the others in files of the folder `spill`, or nowhere.
    """

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self.rows, self._keep, self._spill, self._columns = 0, keep, spill, dict[str, Column]()

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def add(self, row: Mapping[str, float]) -> None:
        """Append one row."""
        for name, value in row.items():
            if column := self._column(name):
                column.append(value)
        self.rows += 1
        self._pad()

    def extend(self, names: Sequence[str], values: np.ndarray) -> None:  # (names, rows)
        """Append many rows, one line of `values` for each name."""
        for name, numbers in zip(names, values, strict=True):
            if column := self._column(name):
                column.extend(numbers)
        self.rows += values.shape[1]
        self._pad()

    def append(self, other: "Table") -> None:
        """Append the rows of another table."""
        names = list(other._columns)
        if names and other.rows:
            self.extend(names, np.array([other.column(name) for name in names]))

    def change(self, place: int, row: Mapping[str, float]) -> None:
        """Write the numbers of `row` into the row at `place`."""
        for name, value in row.items():
            if column := self._column(name):
                column[place] = value

    def change_last(self, row: Mapping[str, float]) -> None:
        """Write the numbers of `row` into the last row."""
        self.change(self.rows - 1, row)

    def find(self, name: str, value: float, back: int = 64) -> int | None:
        """The place of the last row, at most `back` before the end, whose column `name` is `value`."""
        if name not in self._columns:
            return None
        column = self._columns[name]
        return next((i for i in range(self.rows - 1, max(-1, self.rows - 1 - back), -1) if column[i] == value), None)

    def last(self, name: str) -> float:
        """The number in the last row, NaN where there is none."""
        return self._columns[name][-1] if self.rows and name in self._columns else NAN

    def column(self, name: str) -> np.ndarray:
        """The column, for reading, while the table does not grow."""
        return self._columns[name].numbers()

    def replace(self, name: str, values: np.ndarray) -> None:
        """Put `values` in place of the column."""
        assert len(values) == self.rows
        column = Column(0)
        column.extend(values)
        self._columns[name] = column

    def frame(self, integers: Sequence[str] = ()) -> "pd.DataFrame":
        """The rows as a DataFrame, columns of `integers` that lack no number as int64; without those in files.

        It empties the table.
        """
        import pandas as pd

        columns = {}
        for name in [name for name, column in self._columns.items() if not column.is_taped]:
            numbers = self._columns.pop(name).numbers()
            whole = name in integers and bool((abs(numbers) < 2**53).all())  # False for NaN
            columns[name] = numbers.astype(np.int64) if whole else numbers
        return pd.DataFrame(columns, copy=False)

    def taped(self) -> dict[str, Column]:
        """The columns in files."""
        return {name: column for name, column in self._columns.items() if column.is_taped}

    def _column(self, name: str) -> Column | None:
        if name not in self._columns:
            kept = self._keep is None or name in self._keep
            if not kept and self._spill is None:
                return None
            self._columns[name] = Column(self.rows, None if kept or self._spill is None else SpilledColumn(self._spill))
        return self._columns[name]

    def _pad(self) -> None:
        for column in self._columns.values():
            if column.rows < self.rows:
                column.extend(np.full(self.rows - column.rows, NAN))
