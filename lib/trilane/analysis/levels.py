"""Level and noise of a series of logarithms, where it has returned, and rises that a level which follows would miss.

Slow spikes rise so slowly that a median of the lines before rises with them.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

WINDOW = 128  # lines before a line that give its level and its noise
LEAST = 10  # lines before spikes are looked for
SIGMAS = 8.0  # of robust noise: false alarms per 10,000 lines are in docs/log.md and limited by a test
CALM = 3.0  # sigmas above the level within which it has returned, for CALM_LINES lines in a row
CALM_LINES = 3
LEAST_NOISE = 2e-3  # of ln(value): losses are printed, and batches differ
TO_SIGMA = 1.4826  # times the median absolute deviation is a Gaussian's sigma
SHORT = 32  # lines whose median is the level of slow spikes: rises that take longer than half of them are seen
SUDDEN = 16  # lines that a jump exceeds all of
LEAST_SLOW_RISE = math.log(1.1)


def noise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Level, own rise and noise of each x by the WINDOW values before it, each (N,); NaN for the first LEAST."""
    import pandas as pd

    series = pd.Series(x)
    level = _before(series)
    lag = _before(series - level)
    spread = _before((series - level - lag).abs()) * TO_SIGMA
    # few lines give a poor estimate of noise; before there are residuals, that of differences is used
    first = _before(series.diff().abs(), LEAST - 1) * TO_SIGMA
    known = np.minimum(np.arange(len(x)), WINDOW)
    wide = np.maximum(spread.fillna(first), first / math.sqrt(2)) * (1 + 2 * LEAST / np.maximum(known, 1))
    return level.to_numpy(), np.maximum(lag.fillna(0.0), 0.0).to_numpy(), np.maximum(wide, LEAST_NOISE).to_numpy()


def steps(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How far each x lies above all SUDDEN values before it, their last level, and the noise of a step, each (N,).

    A value that no line of the last ones reached is no trend, however steep the fall in which noise() sees a spread. Of
    100,000 steps of Gaussian noise, of noise that remembers and of running means none exceeds 3.4 times that noise.
    """
    import pandas as pd

    series = pd.Series(x)
    step, past = series.diff(), series.shift(1)
    spread = _before((step - _before(step, LEAST - 1)).abs(), LEAST - 1) * TO_SIGMA
    above, before = series - past.rolling(SUDDEN, min_periods=LEAST).max(), past.rolling(CALM_LINES).median()
    return above.to_numpy(), before.to_numpy(), np.maximum(spread, LEAST_NOISE).to_numpy()


def _before(series: "pd.Series", least: int = LEAST) -> "pd.Series":
    """The median of the WINDOW values before each, of at least `least`."""
    return series.shift(1).rolling(WINDOW, min_periods=least).median()


def step_noise(x: np.ndarray) -> float:
    """The noise of single values by their steps, which a slow course hardly changes."""
    return float(np.median(np.abs(np.diff(x)))) * TO_SIGMA / math.sqrt(2)


class SlowSpike(NamedTuple):
    """Indices where it starts, is highest and is back; the level that it left."""

    start: int
    peak: int
    back: int
    level: float


def slow_spikes(x: np.ndarray) -> Iterator[SlowSpike]:
    """Rises of x, (N,) logarithms, above its lowest level so far that returned to it; those that stay are left out.

    The level is the median of the last SHORT lines. It must rise by LEAST_SLOW_RISE, and by SIGMAS of the noise that
    single lines have about it before the rise, or from line to line now; a median hardly ever reaches that by chance.
    """
    import pandas as pd

    if len(x) < 2 * SHORT:
        return
    level = pd.Series(x).rolling(SHORT).median().to_numpy()
    lowest = np.fmin.accumulate(level)
    left = np.maximum.accumulate(np.where(level <= lowest, np.arange(len(x)), 0))
    before, now = _noise(np.abs(x - level))[left], _noise(np.abs(np.diff(x, prepend=x[0]))) / math.sqrt(2)
    sigma = np.fmax(np.fmax(before, now), LEAST_NOISE)
    end = 0
    for i in np.flatnonzero(level - lowest > np.maximum(LEAST_SLOW_RISE, SIGMAS * sigma)).tolist():
        if i < end:
            continue
        limit = lowest[i] + CALM * sigma[i]
        end = back(level, i, limit)  # the median stays above it for some more lines
        calm = np.flatnonzero(x[left[i] : i] <= limit)
        start = int(left[i] + (calm[-1] if len(calm) else 0)) + 1
        peak = start + int(np.argmax(x[start:end]))
        if (returned := back(x, peak, limit)) < len(x):
            yield SlowSpike(start, peak, returned, float(lowest[i]))


def _noise(deviations: np.ndarray) -> np.ndarray:
    import pandas as pd

    return pd.Series(deviations).rolling(WINDOW, min_periods=LEAST).median().to_numpy() * TO_SIGMA


def back(x: np.ndarray, start: int, limit: float) -> int:
    """The first index after `start` from which CALM_LINES values (or all that are left) lie below `limit`."""
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
