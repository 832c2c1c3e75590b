"""Humps: slow rises of a series that come back: too slow for a median that looks back, which rises with them."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

SHORT = 32  # lines whose median is the level: rises that take longer than half of them are seen
WINDOW = 128  # lines that tell the noise
SIGMAS = 8.0  # of the noise of one line, which a median of SHORT lines hardly ever reaches: docs/log.md
CALM = 3.0  # sigmas above the lowest level within which it has come back, for CALM_LINES lines on end
CALM_LINES = 3
LEAST_NOISE = 2e-3  # of ln(value): losses are printed, and batches differ
LEAST_RISE = math.log(1.1)
TO_SIGMA = 1.4826  # times the median absolute deviation is a Gaussian's sigma


class Hump(NamedTuple):
    """Places where it starts, is highest, and is back; the level that it left."""

    start: int
    peak: int
    back: int
    level: float


def humps(x: np.ndarray) -> Iterator[Hump]:
    """Rises of x, (N,) logarithms, above its lowest level so far that came back to it; those that stay are left out.

    The level is the median of the last SHORT lines. It must rise by LEAST_RISE, and by SIGMAS of the noise that single
    lines have about it before the rise, or from line to line now.
    """
    import pandas as pd

    if len(x) < 2 * SHORT:
        return
    level = pd.Series(x).rolling(SHORT).median().to_numpy()
    lowest = np.fmin.accumulate(level)
    left = np.maximum.accumulate(np.where(level <= lowest, np.arange(len(x)), 0))
    sigma = np.fmax(
        np.fmax(_noise(np.abs(x - level))[left], _noise(np.abs(np.diff(x, prepend=x[0]))) / math.sqrt(2)), 0
    )
    sigma = np.maximum(sigma, LEAST_NOISE)
    end = 0
    for i in np.flatnonzero(level - lowest > np.maximum(LEAST_RISE, SIGMAS * sigma)).tolist():
        if i < end:
            continue
        limit = lowest[i] + CALM * sigma[i]
        end = back(level, i, limit)  # the median lies above it for some lines more
        calm = np.flatnonzero(x[left[i] : i] <= limit)
        start = int(left[i] + (calm[-1] if len(calm) else 0)) + 1
        peak = start + int(np.argmax(x[start:end]))
        if (returned := back(x, peak, limit)) < len(x):
            yield Hump(start, peak, returned, float(lowest[i]))


def _noise(deviations: np.ndarray) -> np.ndarray:
    import pandas as pd

    return pd.Series(deviations).rolling(WINDOW, min_periods=10).median().to_numpy() * TO_SIGMA


def back(x: np.ndarray, start: int, limit: float) -> int:
    """The first place after `start` from which CALM_LINES values (or all that are left) lie below `limit`."""
    block = 256
    for low in range(start + 1, len(x), block):
        part = x[low : low + block + CALM_LINES - 1] <= limit
        calm = part[:block].copy()
        for shift in range(1, CALM_LINES):
            later = part[shift : shift + len(calm)]
            calm[: len(later)] &= later
        if calm.any():
            return low + int(np.argmax(calm))
    return len(x)
