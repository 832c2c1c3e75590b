"""Growing tables of numbers, and the DataFrames that are made of them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

NAN = float("nan")
MAX_COLUMNS = 500  # of a table, which a damaged log of ever new names would fill the memory with


class NumericTable:
    """Rows of numbers by column; a number that a row lacks is NaN. The last rows are dicts, as they may still change;
    earlier ones are arrays, which take a tenth of the memory."""

    def __init__(self) -> None:
        self.rows = 0
        self._names: dict[str, None] = {}
        self._chunks: list[dict[str, np.ndarray]] = []
        self._rows: list[dict[str, float]] = []
        self._named = 0  # of these rows, whose names are among `_names`

    @property
    def names(self) -> dict[str, None]:
        """The names of the columns, in their order."""
        rows = self._rows[self._named :]
        self._named = len(self._rows)
        for row in rows:
            if len(self._names) < MAX_COLUMNS and not row.keys() <= self._names.keys():
                self._names |= dict.fromkeys([*row][: MAX_COLUMNS - len(self._names)])
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def add(self, row: dict[str, float]) -> None:
        """Append a row, which the table then owns."""
        self._rows.append(row)
        self.rows += 1
        if len(self._rows) > 8192:
            self._settle(8000)

    def extend(self, names: Sequence[str], values: np.ndarray) -> None:  # (names, rows)
        """Append rows; `values` has a line for each name."""
        for row in values.T.tolist():
            self.add(dict(zip(names, row, strict=True)))

    def append(self, other: "NumericTable") -> None:
        """Append the rows of a short table."""
        for row in other._rows:
            self.add(row)

    def change(self, place: int, row: Mapping[str, float]) -> None:
        """Update the row at index `place`."""
        if (recent := place - self.rows + len(self._rows)) >= 0:
            self._rows[recent].update(row)
            self._named = min(self._named, recent)
            return
        for name, value in row.items():
            numbers = self.column(name).copy()
            numbers[place] = value
            self.replace(name, numbers)

    def change_last(self, row: Mapping[str, float]) -> None:
        self.change(self.rows - 1, row)

    def at(self, name: str, place: int) -> float:
        """The number of the row at index `place`, NaN if missing."""
        place += self.rows if place < 0 else 0
        if place >= (start := self.rows - len(self._rows)):
            return self._rows[place - start].get(name, NAN)
        for chunk in reversed(self._chunks):
            if place >= (start := start - len(chunk[""])):
                return float(chunk[name][place - start]) if name in chunk else NAN
        raise IndexError(place)

    def last(self, name: str) -> float:
        """The number in the last row, NaN if missing."""
        return self._rows[-1].get(name, NAN) if self._rows else self.at(name, -1) if self.rows else NAN

    def find(self, name: str, value: float, back: int = 64) -> int | None:
        """Index of the last row, among the final `back`, whose column `name` is `value`; None if there is none."""
        last = range(self.rows - 1, max(-1, self.rows - 1 - back), -1)
        return next((place for place in last if self.at(name, place) == value), None)

    def column(self, name: str) -> np.ndarray:
        """The column, (rows,)."""
        if self._rows:
            self._settle(len(self._rows))
        parts = [chunk[name] if name in chunk else np.full(len(chunk[""]), NAN) for chunk in self._chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0)])

    def replace(self, name: str, values: np.ndarray) -> None:
        assert len(values) == self.rows
        self.column(name)  # leaves no row outside the chunks
        self._names[name] = None
        for chunk, part in zip(
            self._chunks, np.split(values, np.cumsum([len(c[""]) for c in self._chunks])), strict=False
        ):
            chunk[name] = part

    def frame(self, integers: Sequence[str] = ()) -> "pd.DataFrame":
        """The rows as a DataFrame; columns of `integers` without gaps become int64."""
        import pandas as pd

        columns = {name: self.column(name) for name in self.names}
        return pd.DataFrame({n: _whole(c) if n in integers else c for n, c in columns.items()}, copy=False)

    def _settle(self, count: int) -> None:
        """Make arrays of the first rows that are dicts."""
        if count > 1 and not self._chunks:
            self._settle(
                1
            )  # a first line has no time since another, and else all would be searched for missing numbers
            count -= 1
        rows, names = self._rows[:count], [*self._rows[0]]
        try:  # rows of equally many numbers that have all those of the first have no others
            is_alike = len({*map(len, rows)}) == 1 and len(names) < MAX_COLUMNS
            values = np.array([*map(itemgetter(*names, names[0]), rows)]).T if is_alike else None
        except KeyError:
            values = None
        if values is None or self._names.keys() - names:
            names = [*self.names]
            values = np.array([[row.get(name, NAN) for row in rows] for name in names])
        else:
            self._names |= dict.fromkeys(names)
        self._chunks.append({"": np.empty(count, np.int8), **dict(zip(names, values, strict=False))})
        del self._rows[:count]
        self._named = max(0, self._named - count)


def _whole(numbers: np.ndarray) -> np.ndarray:
    """The numbers as int64, where all can be."""
    return np.rint(numbers).astype(np.int64) if (abs(numbers) < 2**53).all() else numbers  # False for NaN


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
