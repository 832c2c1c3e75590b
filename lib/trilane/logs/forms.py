"""Lines of one form, read by the thousand: the form is parsed once, the numbers of all its lines by array operations.

A form is a line with every digit as 0. Programs pad or round their numbers, so a log has few forms, and in lines of the
same form the numbers have the same positions. Forms of lines that hold nothing are remembered as such.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from trilane.logs import megatron, trainers
from trilane.logs.arguments import UNDOTTED
from trilane.logs.decimals import is_exact, parse_column
from trilane.logs.dialect import EPOCHS
from trilane.logs.megatron import Span
from trilane.logs.prefilter import ALL, MAYBE, NUMBER, STEP, TABLE, line_kinds, lookup
from trilane.logs.table_lines import DIGITS, TableLines

UNKNOWN, NOTHING, ARGUMENT = 0, 1, 2  # numbers of forms: not known, holds nothing, an argument if a dump is open
KINDS = ("iteration", "timers", "deepspeed", "validation")  # of forms
CHECKED = 8  # lines of a form, before all are read by it
MIN_LINES = 3  # of a form in a block, before it is worth parsing
MAX_LENGTH = 4096  # bytes of a line
CAPACITY = 32 << 20  # bytes of forms
STAMP = ("_year", "_month", "_day", "_month", "_day", "_year", "_hour", "_minute", "_second", "_fraction")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form: its kind (see KINDS), the positions of its numbers, and its dialect.

    Columns with an underscore are the line's `_source`, and the parts of its time stamp.
    """

    kind: str
    spans: Sequence[Span]
    dialect: str = ""
    first_iteration: int | None = None  # None: the dialect has no table


class Forms:
    """The forms met so far in a file, by number; a full memory is emptied, as the wording of a log changes."""

    def __init__(self, tables: TableLines) -> None:
        self._tables, self._pieces = tables, lookup(tables.words)
        self._numbers, self._free = dict[bytes, int](), CAPACITY
        self.known: list[Form | None] = [None] * (ARGUMENT + 1)

    def sort(self, block: bytes, texts: Sequence[bytes]) -> tuple[np.ndarray, dict[int, int], list[bytes]]:
        """Of the whole lines of a block: the number of each line's form, the kind (see prefilter) of those lines of an
        unknown form that may matter, and each line with its digits as 0."""
        shapes = block.translate(DIGITS).split(b"\n")[:-1]
        numbers = np.fromiter(map(self._numbers.get, shapes, repeat(UNKNOWN)), np.int64, len(shapes))
        unknown = np.flatnonzero(numbers == UNKNOWN).tolist()
        if not unknown:
            return numbers, {}, shapes
        kinds = self._learn(texts, [shapes[i] for i in unknown], unknown)
        numbers[unknown] = [self._numbers.get(shapes[i], UNKNOWN) for i in unknown]
        return numbers, {i: kind for i in unknown if (kind := kinds.get(shapes[i]))}, shapes

    def holds_nothing(self, shape: bytes) -> bool:
        """Whether lines of this form are known to hold nothing."""
        return self._numbers.get(shape) == NOTHING

    def add_nothing(self, shape: bytes) -> None:
        """Record that lines of this form hold nothing."""
        self._add(shape, NOTHING)

    def _learn(self, texts: Sequence[bytes], shapes: list[bytes], at: list[int]) -> dict[bytes, int]:
        """Find forms among the lines `at` of these shapes; returns the kinds of the shapes that have none."""
        first, times = dict(zip(shapes[::-1], at[::-1], strict=True)), Counter(shapes)
        left = dict[bytes, int]()
        for (shape, place), kind in zip(
            first.items(), line_kinds([texts[i] for i in first.values()], self._pieces), strict=True
        ):
            text, form = texts[place], None
            if not kind:
                self._add(shape, ARGUMENT if b"  " in text and UNDOTTED.match(text) else NOTHING)
                continue
            if times[shape] >= MIN_LINES and kind & (STEP | NUMBER | TABLE) and len(shape) <= MAX_LENGTH:
                form = parse_form(text, self._tables)
            if form and self._is_all(form, [texts[i] for i, other in zip(at, shapes, strict=True) if other == shape]):
                self._add(shape, len(self.known))
                self.known.append(form)
            else:
                left[shape] = int(kind)
        return left

    def _is_all(self, form: Form, lines: list[bytes]) -> bool:
        """Whether lines of one form are read alike: digits that decide what a line is would make one form of two."""
        chosen = {place * (len(lines) - 1) // CHECKED for place in range(CHECKED + 1)}
        return all(parse_form(lines[place], self._tables) == form for place in chosen)

    def _add(self, shape: bytes, number: int) -> None:
        if len(shape) <= MAX_LENGTH:
            self._free -= len(shape) + 120  # with Python's overhead for an object and an entry
            if self._free < 0:
                self._numbers.clear()
                self._free = CAPACITY
            self._numbers[shape] = number


def parse_form(line: bytes, tables: TableLines) -> Form | None:
    """The form of a line that may be read in bulk; None if it must be read on its own."""
    if any(c in line for c in (b"\x1b", b"\0", b"\r", trainers.JOINED)):
        return None
    form = None
    if b"elapsed time per iteration" not in line and (best := tables.best(line)):
        spans, dialect = best
        simple = dialect.lines in ("", "json") and not dialect.fallback
        if simple and spans[0].column == "iteration" and EPOCHS.keys().isdisjoint(span.column for span in spans):
            form = Form(
                kind="iteration",
                spans=(*spans, *_stamp(line, spans), *_source(line)),
                dialect=dialect.name,
                first_iteration=dialect.first_iteration,
            )
    elif megatron.ITERATION.search(line):
        # a line wrapped after a bar would look complete, so the last field, which all dialects print, must be present
        whole = line.rstrip().endswith(b"|") and b"nan iterations:" in line and b"time (ms)" not in line
        if whole and len(megatron.ITERATION.findall(line)) == 1 and (name := megatron.dialect(line)):
            form = Form(kind="iteration", spans=tuple(next(megatron.iterations(line))), dialect=name)
    elif len(steps := list(trainers.deepspeed_spans(line))) == 1:
        form = Form(kind="deepspeed", spans=tuple(steps[0]), dialect="deepspeed")
    elif b"validation" in line and (found := megatron.validation_spans(line)):
        form = Form(kind="validation", spans=tuple(found))
    elif spans := megatron.timers(line):
        form = Form(kind="timers", spans=tuple(spans))
    return form if form and all(is_exact(line[s.start : s.stop]) for s in form.spans) else None


def _source(line: bytes) -> list[Span]:
    prefix = megatron.PREFIX.match(line)
    return [Span("_source", *prefix.span(prefix.lastindex or 0))] if prefix else []


def _stamp(line: bytes, spans: Sequence[Span]) -> list[Span]:
    """The parts of the time stamp that gives the seconds of a line that does not print them."""
    if {"sec_per_it", "iterations_per_second", "time_s"} & {span.column for span in spans}:
        return []
    found = trainers.STAMP.search(line)
    return [
        Span(name, *found.span(i), 1.0, 10.0 ** len(found[i]) if name == "_fraction" else 1.0)
        for i, name in enumerate(STAMP, 1)
        if found and found[i]
    ]


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
