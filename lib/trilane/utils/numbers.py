"""Numbers as a person reads them: shares, amounts, intervals."""

import math
from collections.abc import Iterable
from itertools import groupby

DIGITS = 4  # significant ones of a number


def chance(p: float, runs: int = 10_000) -> str:
    """A probability as a person reads it, with two digits, as far as a share of so many simulated
    runs tells it.
    """
    # what none of N runs does has a probability below 3/N, with 95 % confidence
    least = max(0.001, 3 / runs)
    most = min(0.99, 1 - least)
    if p < least:
        return f"under {100 * least:.2g} %"
    if p > most:
        return f"over {100 * most:.2g} %"
    # .2g would write 100 % as 1e+02 %
    if p < 0.0995:
        return f"{100 * p:.2g} %"
    return f"{100 * p:.0f} %"


def amount(value: float, digits: int = DIGITS) -> str:
    """A number as a person writes it, with four significant digits: 1,119,000, 122.4, 0.0312."""
    if abs(value) < 10 ** (digits - 1):
        return f"{value:.{digits}g}"
    return f"{float(f'{value:.{digits}g}'):,.0f}"


def size_text(number: float) -> str:
    """A number of parameters or tokens in short: 4.04T, 176B, 1.32B, 20.3M."""
    for unit, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 0.9995 * unit:  # is rounded up to it
            return f"{float(f'{number / unit:.3g}'):g}{word}"
    return f"{float(f'{number:.3g}'):g}"


def with_bounds(value: float, low: float, high: float) -> str:
    """A number and its interval with two significant digits of half the width, at most four in all:
    103.27 of 97.162 to 109.83 is "103.3 (97.2 to 109.8)".
    """
    half = (high - low) / 2
    if not (0 < half < math.inf and value):
        return f"{amount(value)} ({amount(low)} to {amount(high)})"
    place = math.floor(math.log10(half)) - 1
    place = max(place, math.floor(math.log10(abs(value))) + 1 - DIGITS)
    decimals = max(0, -place)

    def rounded(number: float) -> str:
        return f"{round(number, -place) + 0.0:,.{decimals}f}"  # + 0.0: no "-0"

    return f"{rounded(value)} ({rounded(low)} to {rounded(high)})"


def ranges(numbers: Iterable[int]) -> str:
    """ "1-5, 100, 200": whole numbers in order as ranges."""
    words = []
    # in a range number and place rise together
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *others = [number for _, number in group]
        words.append(f"{first}-{others[-1]}" if others else str(first))
    return ", ".join(words)
