"""Lines of one form, thousands at once: the form is read once, the numbers of all its lines by array operations.

Megatron pads its numbers, so among lines of equal length few forms occur. A form is a line with every digit as 0. Where
a line has the form of one that was read before, its numbers stand in the same places.

Bulk: the lines of a block that were read by their form, in the order of the file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trilane.logs.megatron import Span

FEWEST = 3  # lines of equal length in a block before a form is worth its set-up
FORMS = 12  # new forms tried for one length in one block; what is left is read line by line
LONGEST = 4096  # bytes
DIGITS = 15  # a number of more digits is not exact in float64's integers
POWERS = np.array([float(f"1e{k}") for k in range(23)])  # exact; numpy's 10.0 ** k need not be
NO_NUMBERS = (b"nan", b"inf", b"-inf")


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all lines of a form are: "iteration" or "timers"; the numbers' places; the dialect."""

    kind: str
    spans: Sequence[Span] = ()
    dialect: str = ""


@dataclass(frozen=True, kw_only=True)
class LineBatch:
    """The lines `at` (numbers of lines in the block) of one form, and their numbers, (spans, lines)."""

    form: Form
    at: np.ndarray
    values: np.ndarray


Reader = Callable[[bytes], Form | None]


class Forms:
    """The forms met so far in a file, by the length of the line."""

    def __init__(self, read: Reader) -> None:
        self._read, self._known = read, dict[int, list[tuple[np.ndarray, Form]]]()

    def batches(self, block: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[list[LineBatch], np.ndarray]:
        """The lines of the block whose form is known, and the numbers of the others."""
        found: list[LineBatch] = []
        rest = []
        for length, group in _by_length(np.arange(len(starts)), stops - starts):
            lines, shapes = _lines(block, starts[group], length) if length in self._known else (None, None)
            for shape, form in list(self._known.get(length, [])):
                if lines is not None and shapes is not None and len(group):
                    group, lines, shapes = _take(shape, form, group, lines, shapes, found)
            rest.append(group)
        return found, np.sort(np.concatenate(rest)) if rest else np.empty(0, np.int64)

    def learn(self, block: bytes, starts: np.ndarray, stops: np.ndarray, at: np.ndarray) -> list[LineBatch]:
        """Read new forms among the lines `at`; the lines that have one."""
        found: list[LineBatch] = []
        for length, group in _by_length(at, (stops - starts)[at]):
            if not 0 < length <= LONGEST or len(group) < FEWEST:
                continue
            lines, shapes = _lines(block, starts[group], length)
            for _ in range(FORMS):
                if len(group) < FEWEST:
                    break
                shape, form = shapes[0].copy(), self._read(lines[0].tobytes())
                if form:
                    self._known.setdefault(length, []).append((shape, form))
                group, lines, shapes = _take(shape, form, group, lines, shapes, found)
        return found


def _by_length(at: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The lines `at` in groups of equal length."""
    order = np.argsort(lengths, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        if len(group):
            yield int(lengths[group[0]]), at[group]


def _lines(block: bytes, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:  # (lines, length) twice
    """The text of lines of equal length, and the same with every digit as 0."""
    text = np.frombuffer(block, np.uint8)
    windows = np.lib.stride_tricks.as_strided(text, (len(text) - length + 1, length), (1, 1), writeable=False)
    lines = windows[starts]
    return lines, np.where((lines - np.uint8(48)) < 10, np.uint8(48), lines)


def _take(
    shape: np.ndarray,
    form: Form | None,
    group: np.ndarray,
    lines: np.ndarray,
    shapes: np.ndarray,
    found: list[LineBatch],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add the lines of that shape to `found`, unless they have no form; what is left."""
    same = (shapes == shape).all(axis=1)
    if form and same.any():
        found.append(_batch(form, group[same], lines[same]))
    return group[~same], lines[~same], shapes[~same]


def _batch(form: Form, at: np.ndarray, lines: np.ndarray) -> LineBatch:
    values = np.empty((len(form.spans), len(at)))
    for row, span in zip(values, form.spans, strict=True):
        row[:] = numbers(lines[:, span.start : span.stop]) * span.times / span.over
    return LineBatch(form=form, at=at, values=values)


def readable(text: bytes) -> bool:
    """Whether `numbers` reads such a text exactly as float() does: a decimal of at most 15 digits, small exponent."""
    if text.lower() in NO_NUMBERS:
        return True
    mantissa, _, exponent = text.replace(b"e", b"E").partition(b"E")
    plain = mantissa.lstrip(b"+-").replace(b".", b"", 1)
    scale = abs(int(exponent or 0)) + len(mantissa.partition(b".")[2])
    return plain.isdigit() and len(plain) <= DIGITS and scale <= 22 and len(exponent.lstrip(b"+-")) <= 2


def numbers(field: np.ndarray) -> np.ndarray:  # (lines, characters)
    """The decimals in a column of text of one form.

    An integer below 2^53 over or times a power of ten of at most 22 is rounded once, so it equals float()
    (Clinger 1990, 'How to read floating point numbers accurately', section 3). Other exponents go through float().
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
    """The digits of the columns as one whole number, signs and points left out."""
    total: np.ndarray = np.zeros(len(text), np.int64)
    for place in (i for i, c in enumerate(pattern) if 48 <= c <= 57):
        total = total * 10 + (text[:, place] - np.uint8(48))
    return total


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """`at`, numbers of lines, rising; `values`, (names, lines), NaN where a line does not say it."""

    names: list[str]
    at: np.ndarray
    values: np.ndarray
    dialects: list[str]

    @property
    def first(self) -> float:
        """The first line's number, infinite where there is none."""
        return float(self.at[0]) if len(self.at) else float("inf")

    def split(self, before: int) -> tuple["Bulk", "Bulk"]:
        """What stands before the line of that number, and the rest."""
        cut = int(np.searchsorted(self.at, before))
        return self._part(slice(None, cut)), self._part(slice(cut, None))

    def _part(self, p: slice) -> "Bulk":
        return Bulk(names=self.names, at=self.at[p], values=self.values[:, p], dialects=self.dialects)


def merge(batches: Sequence[LineBatch]) -> Bulk:
    """Several batches as one."""
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
    return Bulk(names=names, at=at[order], values=values[:, order], dialects=sorted({b.form.dialect for b in batches}))


def by_iteration(timers: Bulk, iterations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Timers' lines as one row an iteration: the iterations, and the values (names, rows). The last word counts."""
    rows, place = np.unique(iterations, return_inverse=True)
    values = np.full((len(timers.names), len(rows)), np.nan)
    for out, line in zip(values, timers.values, strict=True):
        said = line == line
        out[place[said]] = line[said]
    return rows, values
