"""SortedLines: the lines of a block by what is to be done with them, and the numbers of those that have a form."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.logs.reading.decimals import parse_column
from trilane.logs.reading.forms import ARGUMENT, KINDS, NOTHING, UNKNOWN, Form, Forms
from trilane.logs.reading.prefilter import ALL, MAYBE


@dataclass(frozen=True, kw_only=True)
class MergedLines:
    """Lines of several forms in the order of the file: indices `at` in the block, `values`, (names, lines), NaN where
    missing, and `which` form each line has."""

    names: Sequence[str]
    at: list[int]
    values: np.ndarray
    which: np.ndarray

    def between(self, start: int, stop: int) -> slice:
        """The lines with indices from `start` to before `stop`."""
        return slice(bisect_left(self.at, start), bisect_left(self.at, stop))

    def column(self, name: str, part: slice) -> np.ndarray:
        """A number of each of the lines `part`."""
        return self.values[self.names.index(name), part] if name in self.names else np.empty(0)

    def row(self, place: int) -> dict[str, float]:
        """The numbers of one line."""
        column = self.values[:, place].tolist()
        return {name: value for name, value in zip(self.names, column, strict=True) if value == value}


class SortedLines:
    """The lines of a block by what is to be done with them: `alone` are the indices of those that may matter and have
    no form; `cuts` those of iterations that do not simply follow the one before: they may begin another run."""

    def __init__(self, block: bytes, forms: Forms) -> None:
        self.texts = block.split(b"\n")
        self.whole = len(self.texts) - 1  # what follows the last line end may be truncated
        self._numbers, self._kinds, self.shapes = forms.sort(block, self.texts)
        self.alone = sorted([*self._kinds, *np.flatnonzero(self._numbers == ARGUMENT).tolist()])
        self._known, self._block = forms.known, block
        self._starts = np.cumsum(np.fromiter(map(len, self.texts), np.int64, self.whole + 1) + 1)
        self.steps, self.timers, self.deepspeed, self.validation = map(self._merged, KINDS)
        self._of_forms = np.flatnonzero(self._numbers > ARGUMENT).tolist()
        self.cuts = self._cuts() if self.steps.at else []

    def kind(self, number: int) -> int:
        """What a line may hold, see prefilter."""
        form = int(self._numbers[number])
        return ALL if form > ARGUMENT else {UNKNOWN: self._kinds.get(number, 0), NOTHING: 0, ARGUMENT: MAYBE}[form]

    def has(self, start: int, stop: int) -> bool:
        """Whether a line from `start` to before `stop` has a form."""
        return bisect_left(self._of_forms, start) < bisect_left(self._of_forms, stop)

    def form(self, place: int) -> Form:
        """The form of an iteration."""
        form = self._known[int(self.steps.which[place])]
        assert form
        return form

    def _cuts(self) -> list[int]:
        steps = self.steps
        names = {form.dialect: i for i, form in enumerate(filter(None, self._known))}
        dialects = np.array([names[form.dialect] if form else -1 for form in self._known])[steps.which]
        sources = np.nan_to_num(steps.column("_source", slice(None)), nan=-1.0)
        falls = (np.diff(steps.column("iteration", slice(None))) <= 0) | (np.diff(dialects) != 0)
        if len(sources):
            falls |= np.diff(sources) != 0
        return [steps.at[place] for place in (np.flatnonzero(falls) + 1).tolist()]

    def _merged(self, kind: str) -> MergedLines:
        """The lines of the forms of that kind."""
        used = [n for n in np.unique(self._numbers).tolist() if (form := self._known[n]) and form.kind == kind]
        forms = {n: form for n in used if (form := self._known[n])}
        names = list(dict.fromkeys(span.column for form in forms.values() for span in form.spans))
        row = {name: i for i, name in enumerate(names)}
        at = np.flatnonzero(np.isin(self._numbers, used)) if used else np.empty(0, np.int64)
        values, which = np.full((len(names), len(at)), np.nan), self._numbers[at]
        for number, form in forms.items():
            mine = np.flatnonzero(which == number)
            starts = self._starts[at[mine] - 1] * (at[mine] > 0)
            lines = _windows(self._block, starts, max(span.stop for span in form.spans))
            for span in form.spans:
                found = parse_column(lines[:, span.start : span.stop]) * span.multiplier / span.divisor
                old = values[row[span.column], mine]  # hours, minutes and seconds of one time add up
                values[row[span.column], mine] = np.where(old == old, old + found, found)
        return MergedLines(names=names, at=at.tolist(), values=values, which=which)


def times(lines: MergedLines, part: slice) -> np.ndarray:
    """Seconds since 1970 by the lines' time stamps, as trainers.timestamp; NaN where a line has none."""
    parts = {name: lines.values[i, part] for i, name in enumerate(lines.names)}
    if "time_s" in parts:
        return parts["time_s"]
    if "_year" not in parts:
        return np.full(part.stop - part.start, np.nan)
    known = parts["_year"] == parts["_year"]
    day = {name: np.where(known, parts[name], 1).astype(np.int64) for name in ("_year", "_month", "_day")}
    months = (day["_year"] - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (day["_month"] - 1)
    days = (months.astype("datetime64[D]") + (day["_day"] - 1)).astype(np.float64)
    whole = 86400 * days + 3600 * parts["_hour"] + 60 * parts["_minute"] + parts["_second"]
    return np.where(known, whole + np.nan_to_num(parts.get("_fraction", np.zeros(len(whole)))), np.nan)


def _windows(block: bytes, starts: np.ndarray, length: int) -> np.ndarray:  # (lines, length)
    """The first bytes of the lines that begin at `starts`."""
    text = np.frombuffer(block, np.uint8)
    windows = np.lib.stride_tricks.as_strided(text, (len(text) - length + 1, length), (1, 1), writeable=False)
    return windows[starts]


def by_iteration(values: np.ndarray, iterations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Timer lines, (names, lines), as one row per iteration: the iterations and the values, (names, rows). The last
    value counts."""
    rows, place = np.unique(iterations, return_inverse=True)
    out = np.full((len(values), len(rows)), np.nan)
    for row, line in zip(out, values, strict=True):
        known = line == line
        row[place[known]] = line[known]
    return rows, out
