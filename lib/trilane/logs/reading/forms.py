"""Forms: which lines are alike but for their digits, so that one parse gives the positions of the numbers of all.

A form is a line with every digit as 0. Programs pad or round their numbers, so a log has few forms, and in lines of the
same form the numbers have the same positions. Forms of lines that hold nothing are remembered as such.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from trilane.logs.arguments import UNDOTTED
from trilane.logs.dialects import megatron, trainers
from trilane.logs.dialects.dialect import EPOCHS
from trilane.logs.dialects.megatron import Span
from trilane.logs.reading.decimals import is_exact
from trilane.logs.reading.prefilter import NUMBER, STEP, TABLE, line_kinds, lookup
from trilane.logs.reading.table_lines import DIGITS, TableLines

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
    if b"\x1b" in line or b"\0" in line or trainers.has_parts(line):
        return None
    form = None
    if b"elapsed time per iteration" not in line and (best := tables.best(line)):
        spans, dialect = best
        simple = dialect.lines in ("", "json") and not dialect.fallback and len(dialect.parts(line)) == 1
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
