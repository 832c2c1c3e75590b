"""Rows of numbers that grow while a log is read, and the table of them."""

import math
from collections.abc import Sequence

import numpy as np

from trilane.utils.tables import DataFrame

NAN = float("nan")
MAX_COLUMNS = 500  # of a table, which a damaged log of ever new names would fill the memory with
MAX_LATE = 64  # iterations that a rank may lag behind another
MAX_WHOLE = 2**53  # of a whole number that a float holds exactly
Row = dict[str, float]


def last(rows: Sequence[Row], name: str) -> float:
    """The number in the last row, NaN if missing."""
    return rows[-1].get(name, NAN) if rows else NAN


def fill(rows: Sequence[Row], more: Row) -> None:
    """Add what the row of that iteration lacks, if it is one of the last."""
    for row in rows[-MAX_LATE:]:
        if row["iteration"] == more["iteration"]:
            for name, value in more.items():
                if math.isnan(row.get(name, NAN)):
                    row[name] = value


def frame(rows: Sequence[Row] = (), integers: Sequence[str] = ()) -> DataFrame:
    """A DataFrame of the rows, of which the columns `integers` without gaps become int64."""
    import pandas as pd

    names = dict.fromkeys(name for row in rows for name in row)
    table = pd.DataFrame(rows, columns=list(names)[:MAX_COLUMNS], dtype=float)
    for name in integers:
        # false for NaN
        if name in table and (abs(table[name]) < MAX_WHOLE).all():
            table[name] = np.rint(table[name]).astype(np.int64)
    return table
