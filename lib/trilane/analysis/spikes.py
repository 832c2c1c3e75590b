"""Spikes: where the loss or the gradient norm leaves its course, whether it returns, and what a restart changed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trilane.analysis.continuity.breaks import Continuity
from trilane.analysis.continuity.causes import change
from trilane.analysis.levels import (
    CALM,
    CALM_LINES,
    LEAST,
    LEAST_NOISE,
    SIGMAS,
    TO_SIGMA,
    WINDOW,
    back,
    noise,
    slow_spikes,
    step_noise,
    steps,
)
from trilane.analysis.loss_curve import Curve
from trilane.logs.run import RunLog

LEAST_RISE = {"lm_loss": math.log(1.05), "grad_norm": math.log(2.0)}
DIVERGED = math.log(1.1)  # above the best level so far, at the end of the log
JUMP = 0.01  # of ln(loss), at a restart


@dataclass(frozen=True, kw_only=True)
class Event:
    """An anomaly of a training.

    kind        "loss spike", "grad norm spike", "divergence" (the level rose and stayed, or the loss became NaN), or
                "restart jump" (the loss after a restart differs from the one before)
    iteration   where it begins; `peak_iteration` where it is worst
    level       the expected value; `peak` the worst one seen
    recovered   the iteration from which the value is back at its level; None where that is not in the log
    """

    kind: str
    iteration: int
    peak_iteration: int
    level: float
    peak: float
    recovered: int | None = None

    @property
    def sentence(self) -> str:
        """The event in words."""
        lost = "" if self.recovered is None else f" after {self.recovered - self.iteration} iterations"
        back = f"; back at {self.recovered}{lost}" if self.recovered else "; not back at the end of the log"
        worst = f"{self.level:.4g} -> {self.peak:.4g} ({change(self.peak, self.level)}) at {self.peak_iteration}"
        return f"{self.kind} from iteration {self.iteration}: {worst}{'' if self.kind == 'restart jump' else back}"


def find_spikes(curve: Curve) -> list[Event]:
    """All events of one training, by iteration. Lines without a number (skipped iterations) are ignored.

    A value spikes where ln(value) exceeds the median of the WINDOW lines before it, plus their own rise, by more than
    SIGMAS times its noise and by more than LEAST_RISE; noise is 1.4826 times the median absolute deviation. While a
    training falls steeply, its fall would count as noise: there, a value that exceeds all lines just before it counts
    by the noise of steps (see steps). The level is kept from there until the value returns, so that a long spike does
    not become the new level. A loss that rose more slowly and returned is a spike too (see slow_spikes); one that stays
    above is a divergence.
    Left out: the first LEAST lines, and drops.
    """
    found = list[Event]()
    for name, kind in (("lm_loss", "loss spike"), ("grad_norm", "grad norm spike")):
        at, values = _numbers(curve, name)
        if len(at) > LEAST:
            found += _spikes(kind, at, np.log(values), LEAST_RISE[name])
    at, values = _numbers(curve, "lm_loss")
    found = _with_slow(at, np.log(values), found)
    found += _divergence(curve, found)
    found += _restart_jumps(curve)
    return sorted(found, key=lambda event: event.iteration)


def _spikes(kind: str, at: np.ndarray, x: np.ndarray, least: float) -> Iterator[Event]:
    level, rise, sigma = noise(x)
    above, last, step = steps(x)
    level = level + rise
    clear = (x - level > SIGMAS * sigma) & (x - level > least)
    sudden = (above > SIGMAS * step) & (above > least)
    level, sigma = np.where(sudden, last, level), np.where(sudden, step, sigma)
    end = -1
    for i in np.flatnonzero(clear | sudden).tolist():
        if i < end:
            continue
        end = back(x, i, level[i] + CALM * sigma[i])
        peak = i + int(np.argmax(x[i:end]))
        yield Event(
            kind=kind,
            iteration=int(at[i]),
            peak_iteration=int(at[peak]),
            level=float(np.exp(level[i])),
            peak=float(np.exp(x[peak])),
            recovered=int(at[end]) if end < len(x) else None,
        )


def _with_slow(at: np.ndarray, x: np.ndarray, spikes: list[Event]) -> list[Event]:
    """The spikes and the slow ones; one event where both overlap."""
    found = list(spikes)
    for slow in slow_spikes(x):
        start, peak, end = (int(at[place]) for place in slow[:3])
        same = [e for e in found if e.kind == "loss spike" and start <= (e.recovered or start) and e.iteration <= end]
        if any(e.iteration <= peak and (e.recovered is None or e.recovered > peak) for e in same):
            continue  # found already
        found = [e for e in found if e not in same]
        level, top = float(np.exp(slow.level)), float(np.exp(x[slow.peak]))
        event = Event(kind="loss spike", iteration=start, peak_iteration=peak, level=level, peak=top, recovered=end)
        found.append(event)
    return found


def _divergence(curve: Curve, spikes: list[Event]) -> Iterator[Event]:
    """The level at the end exceeds the best one, or the loss is NaN from some line to the end."""
    import pandas as pd

    if "lm_loss" not in curve.table:
        return
    loss, every = curve.table["lm_loss"].to_numpy(float), curve.table["iteration"].to_numpy()
    at, values = _numbers(curve, "lm_loss")
    if len(at) and not np.isfinite(loss[-CALM_LINES:]).any() and len(loss) > CALM_LINES:
        first = int(every[np.flatnonzero(np.isfinite(loss))[-1] + 1])
        level = float(np.median(values[-WINDOW:]))
        yield Event(kind="divergence", iteration=first, peak_iteration=first, level=level, peak=math.nan)
        return
    if len(at) < 2 * LEAST:
        return
    x, width = np.log(values), min(WINDOW, len(at) // 2)
    smooth = pd.Series(x).rolling(width, min_periods=width).median().to_numpy()
    best = int(np.nanargmin(smooth))
    sigma = step_noise(x)
    if smooth[-1] - smooth[best] > max(DIVERGED, SIGMAS * 1.25 * math.sqrt(2 / width) * sigma):
        peak = best + int(np.argmax(x[best:]))
        lasting = [e for e in spikes if e.kind == "loss spike" and e.recovered is None]
        yield Event(
            kind="divergence",
            iteration=lasting[0].iteration if lasting else int(at[best]),
            peak_iteration=int(at[peak]),
            level=float(np.exp(smooth[best])),
            peak=float(values[peak]),
        )


def _restart_jumps(curve: Curve) -> Iterator[Event]:
    """Restarts after which the loss differs: on the repeated iterations where there are at least three, since they
    have the same data; else the lines after it against the lines before, their trend continued.
    """
    at, values = _numbers(curve, "lm_loss")
    x = np.log(values)
    for restart in curve.restarts:
        place = int(np.searchsorted(at, restart.iteration))
        change, error = _redone(curve, restart.iteration, at, x)
        if change != change:
            k = min(WINDOW // 4, place // 2, len(x) - place)
            if k < CALM_LINES:
                continue
            older, newer, after = (np.median(x[a : a + k]) for a in (place - 2 * k, place - k, place))
            change = float(after - newer - min(newer - older, 0.0))
            sigma = step_noise(x[place - 2 * k : place])
            error = 1.25 * max(sigma, LEAST_NOISE) * math.sqrt(3 / k)
        if abs(change) > max(JUMP, 5 * error):
            level = float(np.exp(np.median(x[max(place - CALM_LINES, 0) : place])))
            peak, at_ = level * math.exp(change), restart.iteration
            yield Event(kind="restart jump", iteration=at_, peak_iteration=at_, level=level, peak=peak)


def _redone(curve: Curve, first: int, at: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """Change of ln(loss) from the first to the second time, and its standard error; NaN where too few were repeated."""
    old = curve.redone
    old = old[(old["iteration"] >= first) & (old["lm_loss"] > 0)].drop_duplicates("iteration", keep="last")
    both, mine, theirs = np.intersect1d(at, old["iteration"].to_numpy(float), return_indices=True)
    if len(both) < CALM_LINES:
        return math.nan, math.nan
    differences = x[mine] - np.log(old["lm_loss"].to_numpy(float)[theirs])
    change = float(np.median(differences))
    spread = TO_SIGMA * float(np.median(np.abs(differences - change)))
    return change, 1.25 * max(spread, LEAST_NOISE) / math.sqrt(len(both))


def _numbers(curve: Curve, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and values of a column, where it is a number above zero."""
    if name not in curve.table:
        return np.empty(0), np.empty(0)
    values = curve.table[name].to_numpy(float)
    good = np.isfinite(values) & (values > 0)
    return curve.table["iteration"].to_numpy(float)[good], values[good]


def training_record(group: Sequence[RunLog], curve: Curve, continuity: Continuity) -> dict[str, Any]:
    """A training as JSON; a loss that is no number is null."""
    found = [{k: None if v != v else v for k, v in asdict(event).items()} for event in find_spikes(curve)]
    for event in found:
        event["size"] = event["peak"] and event["level"] and math.log(event["peak"] / event["level"])
    return {
        "files": [str(log.source) for log in group],
        "iterations": len(curve.table),
        "restarts": [asdict(restart) for restart in curve.restarts],
        "events": found,
        **continuity.to_json(),
        "problems": [{"file": str(log.source), **asdict(problem)} for log in group for problem in log.problems],
    }


def training_text(group: Sequence[RunLog], curve: Curve, continuity: Continuity) -> str:
    """A training in a line, and a line for each restart, event, break of a restart, and problem of a log."""
    files = ", ".join(str(log.source) for log in group)
    restarts = [f"  restart at iteration {r.iteration} ({r.redone} lines done again): {r.log}" for r in curve.restarts]
    lines = [f"  {event.sentence}" for event in find_spikes(curve)]
    lines += [] if lines or continuity.breaks else ["  no spike, jump or divergence"]
    lines += [f"  {line}" for line in continuity.lines()]
    lines += [f"  problem of {log.source.name}: {problem}" for log in group for problem in log.problems]
    return "\n".join([f"{files}: {len(curve.table)} lines", *restarts, *lines])
