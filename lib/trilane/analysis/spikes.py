"""Spikes: where the loss or the gradient norm leaves its course, whether it returns, and what a
restart changed.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import LEAST, SIGMAS, WINDOW, Curve, baseline, change, join
from trilane.logs.run import RunLog
from trilane.utils.frozen import frozen
from trilane.utils.hooks import hook
from trilane.utils.tables import Json, Record

# the least size of an event, as the logarithm of value over level
LOSS_SPIKE = math.log(1.05)
NORM_SPIKE = math.log(2)
DIVERGENCE = math.log(1.1)
RETURNED = 3.0  # of robust noise: the value is back at its level


@frozen
class Event(Record):
    """An anomaly of a training.

    kind        "loss spike", "grad norm spike", or "divergence" (the level rose and stayed)
    iteration   where it begins; `peak_iteration` where it is worst
    level       the expected value; `peak` the worst one seen
    recovered   the iteration from which the value is back at its level; None where that is not in
                the log
    """

    kind: str
    iteration: int
    peak_iteration: int
    level: float
    peak: float
    recovered: int | None = None

    @property
    def sentence(self) -> str:
        """Where it begins, how far the value goes, and when it is back."""
        back = "not back at the end of the log"
        if self.recovered is not None:
            back = f"back at {self.recovered}"
        worst = f"{self.level:.4g} -> {self.peak:.4g} ({change(self.peak, self.level)})"
        where = f"from iteration {self.iteration}: {worst} at {self.peak_iteration}"
        return f"{self.kind} {where}; {back}"


def find_spikes(curve: Curve) -> list[Event]:
    """All events of one training, by iteration. Lines without a number (skipped iterations) are
    ignored.

        find_spikes(join([read_log("run.log")]))

    A value spikes where its logarithm exceeds its baseline by more than SIGMAS times the noise, and
    by 5 % (a gradient norm: by a factor of 2). The level is kept from there until the value
    returns, so that a long spike does not become the new level. Left out: the first LEAST lines,
    drops, rises so slow that the median of the last WINDOW lines follows them (unless they stay: a
    divergence), and what a restart changed (see find_breaks).
    """
    loss = _spikes(curve, "lm_loss", "loss spike", LOSS_SPIKE)
    norm = _spikes(curve, "grad_norm", "grad norm spike", NORM_SPIKE)
    return sorted([*loss, *norm, *_divergence(curve)], key=lambda event: event.iteration)


def _spikes(curve: Curve, name: str, kind: str, least: float) -> Iterator[Event]:
    iteration, x = _logarithms(curve, name)
    level, sigma = baseline(x)
    end = -1
    for i in np.flatnonzero(x - level > np.maximum(least, SIGMAS * sigma)).tolist():
        if i < end:
            continue
        # it has returned where three lines in a row, or all that are left, are calm
        is_calm = np.append(x[i + 1 :] <= level[i] + RETURNED * sigma[i], [True, True])
        lasting = is_calm[:-2] & is_calm[1:-1] & is_calm[2:]
        if lasting.any():
            end = i + 1 + int(np.argmax(lasting))
        else:
            end = len(x)
        peak = i + int(np.argmax(x[i:end]))
        yield Event(
            kind=kind,
            iteration=int(iteration[i]),
            peak_iteration=int(iteration[peak]),
            level=math.exp(level[i]),
            peak=math.exp(x[peak]),
            recovered=int(iteration[end]) if end < len(x) else None,
        )


def _divergence(curve: Curve) -> Iterator[Event]:
    """The level at the end, of up to WINDOW lines, exceeds the lowest one before by 10 % and by
    more than its noise; not of a log of a few lines.
    """
    iteration, x = _logarithms(curve, "lm_loss")
    if len(x) < 2 * LEAST:
        return
    width = min(WINDOW, len(x) // 2)
    level = pd.Series(x).rolling(width).median().to_numpy()
    # the deviation of a median is sqrt(pi / 2) times that of a mean, and two levels differ
    noise = baseline(x)[1][-1] * math.sqrt(math.pi / width)
    best = int(np.nanargmin(level))
    peak = best + int(np.argmax(x[best:]))
    if level[-1] - level[best] > max(DIVERGENCE, SIGMAS * noise):
        yield Event(
            kind="divergence",
            iteration=int(iteration[best]),
            peak_iteration=int(iteration[peak]),
            level=math.exp(level[best]),
            peak=math.exp(x[peak]),
        )


def _logarithms(curve: Curve, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and logarithms of a column, where it is a number above zero."""
    table = curve.table.reindex(columns=["iteration", name]).astype(float)
    table = table[(table[name] > 0) & (table[name] < math.inf)]
    return table["iteration"].to_numpy(), np.log(table[name].to_numpy())


def training_record(logs: Sequence[RunLog]) -> Json:
    """The logs of one training, how many lines have a loss, its restarts, events, and breaks, which
    are what restarts did not continue.
    """
    curve = join(logs)
    continuity = hook("breaks")(logs)
    names = ("iteration", "redone", "log")
    return {
        "files": [str(log.source) for log in logs],
        "iterations": len(curve.table),
        "losses": len(_logarithms(curve, "lm_loss")[0]),
        "restarts": [{name: getattr(one, name) for name in names} for one in curve.restarts],
        "events": find_spikes(curve),
        "breaks": continuity.breaks,
        "unjudged": continuity.unjudged,
    }


def training_text(record: Json) -> str:
    """A training in a line, and a line for each restart, event and break of a restart."""
    lines = [f"{', '.join(record['files'])}: {record['iterations']} lines"]
    for restart in record["restarts"]:
        again = f"({restart['redone']} lines done again)"
        lines.append(f"  restart at iteration {restart['iteration']} {again}: {restart['log']}")
    events = [*record["events"], *record["breaks"]]
    lines += [f"  {event.sentence}" for event in events]
    if record["losses"] < LEAST:
        lines.append(f"  cannot be judged: {record['losses']} lines have a loss above 0")
    elif not events:
        lines.append("  no spike, jump or divergence")
    return "\n".join([*lines, *(f"  not judged: {what}" for what in record["unjudged"])])
