"""The decimals in a column of text, as numbers: equal to float() of each, at a fraction of its time."""

import numpy as np

FEW_LINES = 12  # which are parsed one by one
MAX_DIGITS = 15  # a number of more digits is not exact as a float64, and numpy reads its text
POWERS = np.array([float(f"1e{k}") for k in range(23)])  # exact, unlike numpy's 10.0 ** k
NO_NUMBERS = (b"nan", b"inf", b"-inf")


def is_exact(text: bytes) -> bool:
    """Whether parse_numbers gives the same as float(): a decimal with a small exponent; one of more than 15 digits
    without commas."""
    if text.lower() in NO_NUMBERS:
        return True
    mantissa, _, exponent = text.replace(b"e", b"E").partition(b"E")
    plain = mantissa.lstrip(b"+-").replace(b".", b"", 1).replace(b",", b"")
    scale = abs(int(exponent or 0)) + len(mantissa.partition(b".")[2])
    fits = scale <= 22 if len(plain) <= MAX_DIGITS else b"," not in mantissa
    return plain.isdigit() and fits and len(exponent.lstrip(b"+-")) <= 2


def parse_column(field: np.ndarray) -> np.ndarray:  # (lines, characters)
    """The decimals in a column of text of one form, (lines,)."""
    if len(field) > FEW_LINES:
        return parse_numbers(field)
    return np.array([float(text.tobytes().replace(b",", b"")) for text in field])


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
    if sum(48 <= c <= 57 for c in mantissa) > MAX_DIGITS:
        return np.ascontiguousarray(field).view(f"S{len(pattern)}").ravel().astype(np.float64)
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
    """The digits of each row as an integer, ignoring signs, points and commas."""
    total: np.ndarray = np.zeros(len(text), np.int64)
    for place in (i for i, c in enumerate(pattern) if 48 <= c <= 57):
        total = total * 10 + (text[:, place] - np.uint8(48))
    return total
