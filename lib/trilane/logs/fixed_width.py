"""Lines of one form, read by the thousand: the form is parsed once, the numbers of all its lines by array operations.

A form is a line with every digit as 0. Megatron pads its numbers, so lines of equal length have few forms, and in lines
of the same form the numbers have the same positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trilane.logs import megatron
from trilane.logs.megatron import Span

MIN_LINES = 3  # of equal length in a block, before a form is worth parsing
MAX_FORMS = 12  # new forms tried for one length in one block; the rest is read line by line
MAX_LENGTH = 4096  # bytes
MAX_DIGITS = 15  # a number of more digits is not exact as a float64
POWERS = np.array([float(f"1e{k}") for k in range(23)])  # exact, unlike numpy's 10.0 ** k
Group = tuple[np.ndarray, np.ndarray, np.ndarray]  # indices, text and shapes of lines of one length
NO_NUMBERS = (b"nan", b"inf", b"-inf")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form: its kind, "iteration" or "timers", the positions of its numbers, and its dialect."""

    kind: str
    spans: Sequence[Span] = ()
    dialect: str = ""


@dataclass(frozen=True, kw_only=True)
class LineBatch:
    """The lines of one form: their indices `at` in the block and their `values`, (spans, lines)."""

    form: Form
    at: np.ndarray
    values: np.ndarray


class Forms:
    """The forms met so far in a file, by length of line."""

    def __init__(self) -> None:
        self._known = dict[int, list[tuple[np.ndarray, Form]]]()

    def batches(self, block: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[list[LineBatch], np.ndarray]:
        """The lines of the block whose form is known, and the indices of the others."""
        found: list[LineBatch] = []
        rest = []
        for length, group in _by_length(np.arange(len(starts)), stops - starts):
            lines, shapes = _lines(block, starts[group], length) if length in self._known else (None, None)
            for shape, form in list(self._known.get(length, [])):
                if lines is not None and shapes is not None and len(group):
                    group, lines, shapes = _take(shape, form, (group, lines, shapes), found)
            rest.append(group)
        return found, np.sort(np.concatenate(rest)) if rest else np.empty(0, np.int64)

    def learn(self, block: bytes, starts: np.ndarray, stops: np.ndarray, at: np.ndarray) -> list[LineBatch]:
        """Parse new forms among the lines `at`; returns the lines that have one."""
        found: list[LineBatch] = []
        for length, group in _by_length(at, (stops - starts)[at]):
            if not 0 < length <= MAX_LENGTH or len(group) < MIN_LINES:
                continue
            lines, shapes = _lines(block, starts[group], length)
            for _ in range(MAX_FORMS):
                if len(group) < MIN_LINES:
                    break
                shape, form = shapes[0].copy(), parse_form(lines[0].tobytes())
                if form:
                    self._known.setdefault(length, []).append((shape, form))
                group, lines, shapes = _take(shape, form, (group, lines, shapes), found)
        return found


def parse_form(line: bytes) -> Form | None:
    """The form of a line that may be read in bulk; None if it must be read on its own."""
    if any(c in line for c in (b"\x1b", b"\0", b"\r")):
        return None
    # a line wrapped after a bar would look complete, so the last field, which all dialects print, must be present
    ends = line.rstrip().endswith(b"|") and b"nan iterations:" in line
    is_step = ends and len(megatron.ITERATION.findall(line)) == 1
    spans = next(megatron.iterations(line)) if is_step else megatron.timers(line)
    kind = "iteration" if is_step else "timers"
    if not spans or (b"time (ms)" in line and is_step) or not all(is_exact(line[s.start : s.stop]) for s in spans):
        return None
    return Form(kind=kind, spans=spans, dialect=megatron.dialect(line) if is_step else "")


def _by_length(at: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The lines `at`, in groups of equal length."""
    order = np.argsort(lengths, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        if len(group):
            yield int(lengths[group[0]]), at[group]


def _lines(block: bytes, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:  # (lines, length) twice
    """The lines as arrays of bytes, and the same with every digit as 0."""
    text = np.frombuffer(block, np.uint8)
    windows = np.lib.stride_tricks.as_strided(text, (len(text) - length + 1, length), (1, 1), writeable=False)
    lines = windows[starts]
    return lines, np.where((lines - np.uint8(48)) < 10, np.uint8(48), lines)


def _take(shape: np.ndarray, form: Form | None, lines: Group, found: list[LineBatch]) -> Group:
    """Move the lines of that shape to `found`, or drop them if they have no form; returns the rest."""
    at, text, shapes = lines
    same = (shapes == shape).all(axis=1)
    if form and same.any():
        found.append(_batch(form, at[same], text[same]))
    return at[~same], text[~same], shapes[~same]


def _batch(form: Form, at: np.ndarray, lines: np.ndarray) -> LineBatch:
    values = np.empty((len(form.spans), len(at)))
    for row, span in zip(values, form.spans, strict=True):
        row[:] = parse_numbers(lines[:, span.start : span.stop]) * span.multiplier / span.divisor
    return LineBatch(form=form, at=at, values=values)


def is_exact(text: bytes) -> bool:
    """Whether parse_numbers gives the same as float(): a decimal of at most 15 digits with a small exponent."""
    if text.lower() in NO_NUMBERS:
        return True
    mantissa, _, exponent = text.replace(b"e", b"E").partition(b"E")
    plain = mantissa.lstrip(b"+-").replace(b".", b"", 1)
    scale = abs(int(exponent or 0)) + len(mantissa.partition(b".")[2])
    return plain.isdigit() and len(plain) <= MAX_DIGITS and scale <= 22 and len(exponent.lstrip(b"+-")) <= 2


def parse_numbers(field: np.ndarray) -> np.ndarray:  # (lines, characters)
    """The decimals in a column of text of one form, (lines,).

    An integer below 2^53, divided or multiplied by a power of ten up to 22, is rounded once and so equals float()
    (Clinger 1990, 'How to read floating point numbers accurately', section 3). Other exponents use float() itself.
    """
    pattern = field[0].tobytes()
    if pattern.lower() in NO_NUMBERS:
        return np.full(len(field), float(pattern))
    pattern = pattern.replace(b"e", b"E")
    mantissa, mark, exponent = pattern.partition(b"E")
    whole = _integer(field[:, : len(mantissa)], mantissa)
    power: np.ndarray = np.full(len(field), -len(mantissa.partition(b".")[2]) if b"." in mantissa else 0)
    if mark:
        sign = -1 if exponent.startswith(b"-") else 1
        power = power + sign * _integer(field[:, len(mantissa) + 1 :], exponent)
    value: np.ndarray = np.where(power < 0, whole / POWERS[(-power).clip(0, 22)], whole * POWERS[power.clip(0, 22)])
    for odd in np.flatnonzero(abs(power) > 22):
        value[odd] = abs(float(field[odd].tobytes()))
    return -value if mantissa.startswith(b"-") else value


def _integer(text: np.ndarray, pattern: bytes) -> np.ndarray:
    """The digits of each row as an integer, ignoring signs and points."""
    total: np.ndarray = np.zeros(len(text), np.int64)
    for place in (i for i, c in enumerate(pattern) if 48 <= c <= 57):
        total = total * 10 + (text[:, place] - np.uint8(48))
    return total


@dataclass(frozen=True, kw_only=True)
class MergedLines:
    """Lines of several forms in the order of the file: indices `at`, and `values`, (names, lines), NaN if missing."""

    names: list[str]
    at: np.ndarray
    values: np.ndarray
    dialects: list[str]

    @property
    def first(self) -> float:
        """Index of the first line, infinite if there is none."""
        return float(self.at[0]) if len(self.at) else float("inf")

    def split(self, before: int) -> tuple["MergedLines", "MergedLines"]:
        """The lines before index `before`, and the rest."""
        cut = int(np.searchsorted(self.at, before))
        return self._part(slice(None, cut)), self._part(slice(cut, None))

    def _part(self, p: slice) -> "MergedLines":
        return MergedLines(names=self.names, at=self.at[p], values=self.values[:, p], dialects=self.dialects)


def merge(batches: Sequence[LineBatch]) -> MergedLines:
    """Several batches as one, sorted by line."""
    names = list(dict.fromkeys(span.column for b in batches for span in b.form.spans))
    row = {name: i for i, name in enumerate(names)}
    at = np.concatenate([b.at for b in batches]) if batches else np.empty(0, np.int64)
    values = np.full((len(names), len(at)), np.nan)
    begin = 0
    for batch in batches:
        end = begin + len(batch.at)
        for span, numbers in zip(batch.form.spans, batch.values, strict=True):
            values[row[span.column], begin:end] = numbers
        begin = end
    order = np.argsort(at)
    dialects = sorted({b.form.dialect for b in batches})
    return MergedLines(names=names, at=at[order], values=values[:, order], dialects=dialects)


def by_iteration(timers: MergedLines, iterations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Timer lines as one row per iteration: the iterations and the values, (names, rows). The last value counts."""
    rows, place = np.unique(iterations, return_inverse=True)
    values = np.full((len(timers.names), len(rows)), np.nan)
    for out, line in zip(values, timers.values, strict=True):
        known = line == line
        out[place[known]] = line[known]
    return rows, values
