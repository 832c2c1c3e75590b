"""Spikes: where the loss or the gradient norm leaves its course, whether it comes back, and what a restart changed.

Humps: slow rises of a series that come back: too slow for a median that looks back, which rises with them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trilane.analysis.loss_curve import Curve

WINDOW = 128  # lines before a line that tell its level and its noise


LEAST = 10  # lines before anything is judged


SIGMAS = 8.0  # of robust noise: false alarms per 10,000 lines are in docs/log.md and held by a test


LEAST_RISE = {"lm_loss": math.log(1.05), "grad_norm": math.log(2.0)}


DIVERGED = math.log(1.1)  # above the best level so far, at the end of the log


JUMP = 0.01  # of ln(loss), at a restart


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a training should not do.

    kind        "loss spike", "grad norm spike", "divergence" (the level rose and stayed, or the loss became NaN), or
                "restart jump" (the loss after a restart is not what it was)
    iteration   where it begins; `peak_iteration` where it is worst
    level       the value that was expected, `peak` the worst one seen
    recovered   the iteration from which the value is back at its level; None where that is not in the log
    """

    kind: str
    iteration: int
    peak_iteration: int
    level: float
    peak: float
    recovered: int | None

    @property
    def sentence(self) -> str:
        """The event in words."""
        lost = "" if self.recovered is None else f" after {self.recovered - self.iteration} iterations"
        back = f"; back at {self.recovered}{lost}" if self.recovered else "; not back at the end of the log"
        worst = f"{self.level:.4g} -> {self.peak:.4g} ({_change(self.level, self.peak)}) at {self.peak_iteration}"
        return f"{self.kind} from iteration {self.iteration}: {worst}{'' if self.kind == 'restart jump' else back}"


def events(curve: Curve) -> list[Event]:
    """All events of one training, by iteration. Lines without a number (skipped iterations) are passed over.

    A value spikes where ln(value) stands more than SIGMAS times its noise, and LEAST_RISE, above the median of the
    WINDOW lines before it, their own rise taken off; noise is 1.4826 times the median absolute deviation. The level is
    held from there on until the value comes back, so that a long spike does not become the new normal. A loss that rose
    more slowly and came back is a spike too (see humps.py); one that stays above is a divergence.
    Left out: what happens in the first LEAST lines, and drops.
    """
    found = list[Event]()
    for name, kind in (("lm_loss", "loss spike"), ("grad_norm", "grad norm spike")):
        at, values = _numbers(curve, name)
        if len(at) > LEAST:
            found += _spikes(kind, at, np.log(values), LEAST_RISE[name])
    at, values = _numbers(curve, "lm_loss")
    found = _humps(at, np.log(values), found)
    found += _divergence(curve, found)
    found += _restart_jumps(curve)
    return sorted(found, key=lambda event: event.iteration)


def noise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Level, own rise, and noise of each x by the WINDOW values before it; NaN for the first LEAST. All are (N,)."""
    import pandas as pd

    series = pd.Series(x)
    level = series.shift(1).rolling(WINDOW, min_periods=LEAST).median()
    residual = series - level
    past = residual.shift(1).rolling(WINDOW, min_periods=LEAST)
    lag = past.median()
    spread = (residual - lag).abs().shift(1).rolling(WINDOW, min_periods=LEAST).median() * 1.4826
    # few lines know their noise badly; before there are any residuals, that of differences stands in
    first = series.diff().abs().shift(1).rolling(WINDOW, min_periods=LEAST - 1).median() * 1.4826
    known = np.minimum(np.arange(len(x)), WINDOW)
    wide = np.maximum(spread.fillna(first), first / math.sqrt(2)) * (1 + 2 * LEAST / np.maximum(known, 1))
    return level.to_numpy(), np.maximum(lag.fillna(0.0), 0.0).to_numpy(), np.maximum(wide, LEAST_NOISE).to_numpy()


def _spikes(kind: str, at: np.ndarray, x: np.ndarray, least: float) -> Iterator[Event]:
    level, rise, sigma = noise(x)
    above = x - level - rise
    flagged = np.flatnonzero((above > SIGMAS * sigma) & (above > least))
    end = -1
    for i in flagged.tolist():
        if i < end:
            continue
        limit = level[i] + rise[i] + CALM * sigma[i]
        end = back(x, i, limit)
        peak = i + int(np.argmax(x[i:end]))
        yield Event(
            kind=kind,
            iteration=int(at[i]),
            peak_iteration=int(at[peak]),
            level=float(np.exp(level[i] + rise[i])),
            peak=float(np.exp(x[peak])),
            recovered=int(at[end]) if end < len(x) else None,
        )


def _humps(at: np.ndarray, x: np.ndarray, spikes: list[Event]) -> list[Event]:
    """The spikes, with what rose too slowly for them; one event where both overlap."""
    found = list(spikes)
    for hump in slow_spikes(x):
        start, peak, end = (int(at[place]) for place in hump[:3])
        same = [e for e in found if e.kind == "loss spike" and start <= (e.recovered or start) and e.iteration <= end]
        if any(e.iteration <= peak and (e.recovered is None or e.recovered > peak) for e in same):
            continue  # it is known
        found = [e for e in found if e not in same]
        level, top = float(np.exp(hump.level)), float(np.exp(x[hump.peak]))
        found.append(
            Event(kind="loss spike", iteration=start, peak_iteration=peak, level=level, peak=top, recovered=end)
        )
    return found


def _divergence(curve: Curve, spikes: list[Event]) -> Iterator[Event]:
    """The level at the end stands above the best one; a loss that is no number to the end is the plainest case."""
    import pandas as pd

    if "lm_loss" not in curve.table:
        return
    loss, every = curve.table["lm_loss"].to_numpy(float), curve.table["iteration"].to_numpy()
    at, values = _numbers(curve, "lm_loss")
    if len(at) and not np.isfinite(loss[-CALM_LINES:]).any() and len(loss) > CALM_LINES:
        first = int(every[np.flatnonzero(np.isfinite(loss))[-1] + 1])
        level = float(np.median(values[-WINDOW:]))
        yield Event(
            kind="divergence", iteration=first, peak_iteration=first, level=level, peak=math.nan, recovered=None
        )
        return
    if len(at) < 2 * LEAST:
        return
    x, width = np.log(values), min(WINDOW, len(at) // 2)
    smooth = pd.Series(x).rolling(width, min_periods=width).median().to_numpy()
    best = int(np.nanargmin(smooth))
    sigma = float(np.median(np.abs(np.diff(x)))) * 1.4826 / math.sqrt(2)
    if smooth[-1] - smooth[best] > max(DIVERGED, SIGMAS * 1.25 * math.sqrt(2 / width) * sigma):
        peak = best + int(np.argmax(x[best:]))
        told = [e for e in spikes if e.kind == "loss spike" and e.recovered is None]
        yield Event(
            kind="divergence",
            iteration=told[0].iteration if told else int(at[best]),
            peak_iteration=int(at[peak]),
            level=float(np.exp(smooth[best])),
            peak=float(values[peak]),
            recovered=None,
        )


def _restart_jumps(curve: Curve) -> Iterator[Event]:
    """A restart after which the loss is another: on the iterations that were done again where there are at least three,
    for their data are the same; else the lines after it against the lines before, their trend continued.
    """
    at, values = _numbers(curve, "lm_loss")
    x = np.log(values)
    for restart in curve.restarts:
        place = int(np.searchsorted(at, restart.iteration))
        change, doubt = _redone(curve, restart.iteration, at, x)
        if change != change:
            k = min(WINDOW // 4, place // 2, len(x) - place)
            if k < CALM_LINES:
                continue
            older, newer, after = (np.median(x[a : a + k]) for a in (place - 2 * k, place - k, place))
            change = float(after - newer - min(newer - older, 0.0))
            sigma = float(np.median(np.abs(np.diff(x[place - 2 * k : place])))) * 1.4826 / math.sqrt(2)
            doubt = 1.25 * max(sigma, LEAST_NOISE) * math.sqrt(3 / k)
        if abs(change) > max(JUMP, 5 * doubt):
            level = float(np.exp(np.median(x[max(place - CALM_LINES, 0) : place])))
            yield Event(
                kind="restart jump",
                iteration=restart.iteration,
                peak_iteration=restart.iteration,
                level=level,
                peak=level * math.exp(change),
                recovered=None,
            )


def _redone(curve: Curve, first: int, at: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """ln(loss) the second time over the first, and how far that is in doubt; NaN where too little was done again."""
    old = curve.redone
    old = old[(old["iteration"] >= first) & (old["lm_loss"] > 0)].drop_duplicates("iteration", keep="last")
    both, mine, theirs = np.intersect1d(at, old["iteration"].to_numpy(float), return_indices=True)
    if len(both) < CALM_LINES:
        return math.nan, math.nan
    differences = x[mine] - np.log(old["lm_loss"].to_numpy(float)[theirs])
    change = float(np.median(differences))
    spread = 1.4826 * float(np.median(np.abs(differences - change)))
    return change, 1.25 * max(spread, LEAST_NOISE) / math.sqrt(len(both))


def _numbers(curve: Curve, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and values of a column where it is a number above zero."""
    if name not in curve.table:
        return np.empty(0), np.empty(0)
    values = curve.table[name].to_numpy(float)
    good = np.isfinite(values) & (values > 0)
    return curve.table["iteration"].to_numpy(float)[good], values[good]


def _change(level: float, peak: float) -> str:
    return f"x {peak / level:.3g}" if peak > 2 * level else f"{peak / level - 1:+.1%}"


SHORT = 32  # lines whose median is the level: rises that take longer than half of them are seen


SLOW_WINDOW = 128  # lines that tell the noise


SLOW_SIGMAS = 8.0  # of the noise of one line, which a median of SHORT lines hardly ever reaches: docs/log.md


CALM = 3.0  # sigmas above the lowest level within which it has come back, for CALM_LINES lines on end


CALM_LINES = 3


LEAST_NOISE = 2e-3  # of ln(value): losses are printed, and batches differ


LEAST_SLOW_RISE = math.log(1.1)


TO_SIGMA = 1.4826  # times the median absolute deviation is a Gaussian's sigma


class SlowSpike(NamedTuple):
    """Places where it starts, is highest, and is back; the level that it left."""

    start: int
    peak: int
    back: int
    level: float


def slow_spikes(x: np.ndarray) -> Iterator[SlowSpike]:
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
    for i in np.flatnonzero(level - lowest > np.maximum(LEAST_SLOW_RISE, SLOW_SIGMAS * sigma)).tolist():
        if i < end:
            continue
        limit = lowest[i] + CALM * sigma[i]
        end = back(level, i, limit)  # the median lies above it for some lines more
        calm = np.flatnonzero(x[left[i] : i] <= limit)
        start = int(left[i] + (calm[-1] if len(calm) else 0)) + 1
        peak = start + int(np.argmax(x[start:end]))
        if (returned := back(x, peak, limit)) < len(x):
            yield SlowSpike(start, peak, returned, float(lowest[i]))


def _noise(deviations: np.ndarray) -> np.ndarray:
    import pandas as pd

    return pd.Series(deviations).rolling(SLOW_WINDOW, min_periods=10).median().to_numpy() * TO_SIGMA


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
