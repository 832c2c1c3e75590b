"""Growing tables of numbers: rows while a log is read, columns afterwards."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trilane.utils.tables import DataFrame

NAN = float("nan")
MAX_COLUMNS = 500  # of a table, which a damaged log of ever new names would fill the memory with
Columns = dict[str, np.ndarray]


class NumericTable:
    """Rows of numbers by column, NaN where a row lacks one. The last rows, of which the last 64 at least are `recent`,
    are dicts and may still change; earlier ones are arrays, which take a tenth of the memory."""

    def __init__(self) -> None:
        self.rows = 0
        self.names: dict[str, None] = {}
        self.recent: list[dict[str, float]] = []
        self._parts: list[Columns] = []

    def add(self, row: dict[str, float]) -> None:
        """Append a row, which the table then owns."""
        self.recent.append(row)
        self.rows += 1
        if not row.keys() <= self.names.keys() and len(self.names) < MAX_COLUMNS:
            self.names |= dict.fromkeys(row)
        if len(self.recent) > 8192:
            self._parts.append(columns_of(self.recent[:8000], self.names))
            del self.recent[:8000]

    def change(self, row: dict[str, float], more: Mapping[str, float]) -> None:
        """Update a recent row."""
        row.update(more)
        self.names |= dict.fromkeys(more)

    def change_last(self, more: Mapping[str, float]) -> None:
        """Update the last row."""
        self.change(self.recent[-1], more)

    def last(self, name: str) -> float:
        """The number in the last row, NaN if missing."""
        return self.recent[-1].get(name, NAN) if self.recent else NAN

    def find(self, iteration: float) -> dict[str, float] | None:
        """The row of that iteration among the last ones."""
        return next((row for row in self.recent[:-65:-1] if row["iteration"] == iteration), None)

    def columns(self) -> Columns:
        """Each column, (rows,)."""
        parts = [*self._parts, columns_of(self.recent, self.names)]
        if len(parts) == 1:
            return parts[0]
        return {
            n: np.concatenate([p[n] if n in p else np.full(len(p["iteration"]), NAN) for p in parts])
            for n in self.names
        }


def columns_of(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> Columns:
    """The rows as columns of these names."""
    return {name: np.array([row.get(name, NAN) for row in rows]) for name in names}


def frame(columns: Columns | None = None, integers: Sequence[str] = ()) -> DataFrame:
    """A DataFrame of the columns, of which those of `integers` without gaps become int64."""
    import pandas as pd

    return pd.DataFrame({n: _whole(c) if n in integers else c for n, c in (columns or {}).items()}, copy=False)


def _whole(numbers: np.ndarray) -> np.ndarray:
    """The numbers as int64, where all can be."""
    return np.rint(numbers).astype(np.int64) if (abs(numbers) < 2**53).all() else numbers  # False for NaN
