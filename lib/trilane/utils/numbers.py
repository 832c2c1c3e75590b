"""Numbers as a person reads them: shares, amounts, intervals."""

import math
from collections.abc import Iterable
from itertools import groupby


def percent(value: float, digits: int = 1) -> str:
    """A share as a percentage, empty for NaN."""
    return f"{value:.{digits}%}" if value == value else ""


def chance(p: float, runs: int = 10_000) -> str:
    """A probability as a person reads it, with two digits, as far as a share of so many simulated
    runs tells it.
    """
    # what none of N runs does has a probability below 3/N, with 95 % confidence
    inside, least = f"{100 * p:.2g} %" if p < 0.0995 else f"{100 * p:.0f} %", max(0.001, 3 / runs)
    most = min(0.99, 1 - least)
    return (
        f"under {100 * least:.2g} %"
        if p < least
        else f"over {100 * most:.2g} %"
        if p > most
        else inside
    )


def amount(value: float, digits: int = 4) -> str:
    """A number as a person writes it, with four significant digits: 1,119,000, 122.4, 0.0312."""
    return (
        f"{float(f'{value:.{digits}g}'):,.0f}"
        if abs(value) >= 10 ** (digits - 1)
        else f"{value:.{digits}g}"
    )


def size_text(number: float) -> str:
    """A number of parameters or tokens in short: 4.04T, 176B, 1.32B, 20.3M."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1, ""))
    unit, word = next(((unit, word) for unit, word in units if number >= 0.9995 * unit), (1, ""))
    return f"{float(f'{number / unit:.3g}'):g}{word}"


def with_interval(value: float, low: float, high: float) -> tuple[str, str, str]:
    """A number and its interval with two significant digits of half the width, at most four in all:
    103.27 of 97.162 to
    109.83 is "103.3", "97.2", "109.8".
    """
    half = (high - low) / 2
    if not (0 < half < math.inf and value):
        return amount(value), amount(low), amount(high)
    place = max(math.floor(math.log10(half)) - 1, math.floor(math.log10(abs(value))) - 3)
    one, two, three = (
        f"{round(number, -place) + 0.0:,.{max(0, -place)}f}" for number in (value, low, high)
    )
    return one, two, three


def with_bounds(value: float, low: float, high: float) -> str:
    """A number with its interval: "103.3 (97.2 to 109.8)"."""
    return "{} ({} to {})".format(*with_interval(value, low, high))


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """ "1-5, 100, 200 and 7 more": whole numbers in order as ranges, at most so many."""
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:most]]
    more = sum(map(len, runs[most:]))
    return ", ".join(words) + f" and {more} more" * (more > 0)
