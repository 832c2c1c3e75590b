"""Lines of one form, thousands at once: the form is read once, the numbers of all its lines by array operations.

Megatron pads its numbers, so among lines of equal length few forms occur. A form is a line with every digit as 0. Where
a line has the form of one that was read before, its numbers stand in the same places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trilane.logs.megatron import Span

FEWEST = 12  # lines of equal length in a block before a form is worth its set-up
FORMS = 6  # new forms tried for one length in one block; what is left is read line by line
DIGITS = 15  # a number of more digits is not exact in float64's integers
POWERS = np.array([float(f"1e{k}") for k in range(23)])  # exact; numpy's 10.0 ** k need not be
NO_NUMBERS = (b"nan", b"inf", b"-inf")


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all lines of a form are: "iteration", "timers" or "noise"; the numbers' places; the dialect."""

    kind: str
    spans: Sequence[Span] = ()
    dialect: str = ""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The lines `at` (numbers of lines in the block) of one form, and their numbers, (spans, lines)."""

    form: Form
    at: np.ndarray
    values: np.ndarray


Reader = Callable[[bytes], Form | None]


class Forms:
    """The forms met so far in a file, by the length of the line."""

    def __init__(self, read: Reader) -> None:
        self._read, self._known = read, dict[int, list[tuple[np.ndarray, Form]]]()

    def batches(self, block: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[list[Batch], np.ndarray]:
        """The lines of the block that have a form, and the numbers of those that must be read one by one."""
        text, lengths = np.frombuffer(block, np.uint8), stops - starts
        order = np.argsort(lengths, kind="stable")
        edges = np.flatnonzero(np.diff(lengths[order])) + 1
        found: list[Batch] = []
        rest = []
        for group in np.split(order, edges):
            length = int(lengths[group[0]]) if len(group) else 0
            if length == 0:
                continue
            if len(group) < FEWEST or length > 4096:
                rest.append(group)
            else:
                rest.append(self._group(text, starts, group, length, found))
        return found, np.sort(np.concatenate(rest)) if rest else np.empty(0, np.int64)

    def _group(
        self, text: np.ndarray, starts: np.ndarray, group: np.ndarray, length: int, found: list[Batch]
    ) -> np.ndarray:
        """Add the batches among lines of equal length to `found`; the lines that have no form."""
        windows = np.lib.stride_tricks.as_strided(text, (len(text) - length + 1, length), (1, 1), writeable=False)
        lines = windows[starts[group]]  # (lines, length)
        shape = np.where((lines - np.uint8(48)) < 10, np.uint8(48), lines)
        known = self._known.setdefault(length, [])
        unread = []
        for number, (form_shape, form) in enumerate(known):
            same = _equal(shape, form_shape)
            if same.any():
                found.append(_batch(form, group[same], lines[same]))
                group, lines, shape = group[~same], lines[~same], shape[~same]
                if number > 2:
                    known.insert(0, known.pop(number))
                    break
            if not len(group):
                return group
        for _ in range(FORMS):
            if len(group) < FEWEST:
                break
            form_shape, new = shape[0].copy(), self._read(lines[0].tobytes())
            same = _equal(shape, form_shape)
            if new is None or same.sum() < 3:
                unread.append(group[same])
            else:
                known.append((form_shape, new))
                found.append(_batch(new, group[same], lines[same]))
            group, lines, shape = group[~same], lines[~same], shape[~same]
        return np.concatenate([*unread, group])


def _equal(shapes: np.ndarray, one: np.ndarray) -> np.ndarray:
    return (shapes == one).all(axis=1)


def _batch(form: Form, at: np.ndarray, lines: np.ndarray) -> Batch:
    values = np.empty((len(form.spans), len(at)))
    for row, span in zip(values, form.spans, strict=True):
        row[:] = numbers(lines[:, span.start : span.stop]) * span.times / span.over
    return Batch(form=form, at=at, values=values)


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
