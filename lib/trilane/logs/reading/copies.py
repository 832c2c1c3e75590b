"""Copies: the iterations that several ranks of a run print, which count once."""

from collections.abc import Mapping

import numpy as np

from trilane.logs.table import NAN, NumericTable

MAX_LOST = 100  # numbers that are kept of them
TOLERANCE = 1e-6  # of a loss that several ranks print, relative
REPORTERS = 0.05  # of a loss that two reporters print, such as a bar, which rounds it or averages it: relative
LAGGING = 4  # iterations by which a rank may print later than another one
KNOWN = ("lm_loss", "sec_per_it", "consumed_samples", "epoch")  # columns that are equal in two lines of one iteration


class Copies:
    """What the sources of a run's lines, its ranks, have printed; `table` is that of the run's iterations.

    printed     the last iteration of each source (NaN: not named)
    lost        numbers of lines that were left out as copies of lines that are not there
    differing   the first iteration with two losses, and these
    """

    def __init__(self) -> None:
        self.printed: dict[float, float] = {}
        self.lost: list[float] = []
        self.differing: tuple[float, float, float] | None = None

    def accepts(self, row: Mapping[str, float], source: float, table: NumericTable, named: bool) -> bool | None:
        """Whether the row is the next of the run; None if it was read before, as several ranks may print the same.

        `named`: the source of the run's iterations is known.
        """
        number, last = row["iteration"], table.last("iteration")
        before = self.printed.get(source)
        self.printed[source] = number
        if not table.rows or number > last:
            return True
        # a source that lags behind another one, or begins after it, prints copies
        if source == source and (number > before if before is not None else named):
            return None
        known = [name for name in KNOWN if name in row and name in table]
        if number == last and all(row[n] == table.last(n) or row[n] != row[n] for n in known):
            return None
        return False

    def compare(self, row: Mapping[str, float], table: NumericTable, tolerance: float = TOLERANCE) -> None:
        """Note a line that was left out as another rank's or reporter's copy, where there is no line of its number, or
        its loss is another one."""
        numbers = table.column("iteration")
        place = int(np.searchsorted(numbers, row["iteration"]))
        if place == len(numbers) or numbers[place] != row["iteration"]:
            self.lost += [row["iteration"]] * (len(self.lost) < MAX_LOST)
        elif "lm_loss" in row and "lm_loss" in table and not self.differing:
            one, other = table.at("lm_loss", place), row["lm_loss"]
            if abs(one - other) > tolerance * abs(one):
                self.differing = (row["iteration"], one, other)


def is_late(row: Mapping[str, float], table: NumericTable) -> bool:
    """Whether the row is a copy of one of the last iterations: unnamed ranks may all print a loss. A number further
    back is a restart's, or another program's."""
    last = range(max(0, table.rows - LAGGING), table.rows)
    of_epoch = not row.get("epoch", NAN) > table.last("epoch")
    return of_epoch and row["iteration"] in [table.at("iteration", place) for place in last]
