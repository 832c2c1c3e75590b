"""Growing tables of numbers, and the DataFrames that are made of them."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trilane.logs.column import NAN, TAIL, Column, SpilledColumn
from trilane.logs.digest import CHECKED, Digest

if TYPE_CHECKING:
    import pandas as pd

MAX_COLUMNS = 500  # of a table; each row extends all, so that the names beyond are left out


class NumericTable:
    """Columns that grow together; a number that a row lacks is NaN.

    With `keep`, only the columns of these names are kept in memory; the others are written to files in the folder
    `spill`, or dropped where there is none, but for a digest of those that the gate of plausibility checks.
    """

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self.rows, self._keep, self._spill, self._columns = 0, keep, spill, dict[str, Column]()
        self._digests: dict[str, Digest] = {}

    @property
    def names(self) -> set[str]:
        """Of the columns that are kept."""
        return {*self._columns}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def add(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if column := self._column(name):
                column.append(value)
        self.rows += 1
        self._pad()

    def extend(self, names: Sequence[str], values: np.ndarray) -> None:  # (names, rows)
        """Append rows; `values` has a line for each name."""
        for name, numbers in zip(names, values, strict=True):
            if column := self._column(name):
                column.extend(numbers)
        self.rows += values.shape[1]
        self._pad()

    def append(self, other: "NumericTable") -> None:
        names = [*other._columns, *(name for name, digest in other._digests.items() if digest.stride == 1)]
        if names and other.rows:
            found = [other.column(name) if name in other else other._digests[name].sample() for name in names]
            self.extend(names, np.array(found))

    def change(self, place: int, row: Mapping[str, float]) -> None:
        """Update the row at index `place`."""
        for name, value in row.items():
            if column := self._column(name):
                column[place] = value

    def change_last(self, row: Mapping[str, float]) -> None:
        self.change(self.rows - 1, row)

    def find(self, name: str, value: float, back: int = 64) -> int | None:
        """Index of the last row, among the final `back`, whose column `name` is `value`; None if there is none."""
        if name not in self._columns:
            return None
        column = self._columns[name]
        return next((i for i in range(self.rows - 1, max(-1, self.rows - 1 - back), -1) if column[i] == value), None)

    def at(self, name: str, place: int) -> float:
        """The number of the row at index `place`."""
        return self._columns[name][place]

    def last(self, name: str) -> float:
        """The number in the last row, NaN if missing."""
        return self._columns[name][-1] if self.rows and name in self._columns else NAN

    def column(self, name: str) -> np.ndarray:
        """The column, to be read before the table grows further."""
        return self._columns[name].numbers()

    def digest(self, name: str) -> Digest | None:
        """The digest of a column, also of one in files or not kept; None where there is none of that name."""
        if name in self._digests or name not in self._columns:
            return self._digests[name].settled() if name in self._digests else None
        digest, column = Digest(), self._columns[name]
        for start in range(0, self.rows, TAIL):
            digest.put(column.read(start, min(self.rows, start + TAIL)))
        return digest

    def replace(self, name: str, values: np.ndarray) -> None:
        assert len(values) == self.rows
        column = Column(0)
        column.extend(values)
        self._columns[name] = column

    def frame(self, integers: Sequence[str] = ()) -> "pd.DataFrame":
        """The rows in memory as a DataFrame; columns of `integers` without gaps become int64. It empties the table."""
        import pandas as pd

        columns = {}
        for name in [name for name, column in self._columns.items() if not column.is_spilled]:
            numbers = self._columns.pop(name).numbers()
            columns[name] = _whole(numbers) if name in integers else numbers
        return pd.DataFrame(columns, copy=False)

    def latest(self, rows: int) -> "NumericTable":
        """A table of the last `rows` rows that are in memory, which does not grow with this one."""
        found, start = NumericTable(), max(0, self.rows - rows)
        for name, column in self._columns.items():
            if not column.is_spilled:
                found._columns[name] = Column(0)
                found._columns[name].extend(column.read(start, self.rows))
        found.rows = self.rows - start
        return found

    def spilled(self) -> dict[str, Column]:
        """The columns in files, by name."""
        return {name: column for name, column in self._columns.items() if column.is_spilled}

    def _column(self, name: str) -> Column | Digest | None:
        if name not in self._columns:
            if len(self._columns) >= MAX_COLUMNS:
                return None
            kept = self._keep is None or name in self._keep
            if not kept and self._spill is None:
                if name in CHECKED and name not in self._digests:
                    self._digests[name] = Digest(self.rows)
                return self._digests.get(name)
            self._columns[name] = Column(self.rows, None if kept or self._spill is None else SpilledColumn(self._spill))
        return self._columns[name]

    def _pad(self) -> None:
        columns: list[Column | Digest] = [*self._columns.values(), *self._digests.values()]
        for column in columns:
            if column.rows < self.rows:
                column.extend(np.full(self.rows - column.rows, NAN))


def _whole(numbers: np.ndarray) -> np.ndarray:
    """The numbers as int64, where all can be; of a constant column one is stored."""
    stored = numbers if numbers.strides[0] else numbers[:1]
    is_whole = bool((abs(stored) < 2**53).all())  # False for NaN
    return np.broadcast_to(np.rint(stored).astype(np.int64), numbers.shape) if is_whole else numbers


class Rows:
    """The rows of a table, which grows no more, with the `integers` that frame() takes."""

    def __init__(self, table: NumericTable, integers: Sequence[str] = ()) -> None:
        self._table, self._integers = table, integers

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """The rows as a DataFrame, made once."""
        return self._table.frame(self._integers)


class FrameField:
    """A field of a dataclass that is given a DataFrame, or Rows, which become one where it is asked for: of a file of
    thousands of runs most never are."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> "pd.DataFrame":
        given = vars(holder)[self._name] if holder is not None else Rows(NumericTable())
        return given.frame if isinstance(given, Rows) and holder is not None else given

    def __set__(self, holder: Any, given: "pd.DataFrame | Rows") -> None:
        vars(holder)[self._name] = given
