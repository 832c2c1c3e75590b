"""Spikes: where the loss or the gradient norm leaves its course, whether it returns, and what a
restart changed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import LEAST, SIGMAS, WINDOW, Curve, baseline, change
from trilane.logs.run import RunLog
from trilane.utils.tables import Record, as_json

CALM = "no spike, jump or divergence"


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """An anomaly of a training.

    kind        "loss spike", "grad norm spike", or "divergence" (the level rose and stayed, or the loss became NaN)
    iteration   where it begins; `peak_iteration` where it is worst
    level       the expected value; `peak` the worst one seen; `size` the logarithm of their ratio
    recovered   the iteration from which the value is back at its level; None where that is not in the log
    """

    DERIVED: ClassVar = ("size",)
    kind: str
    iteration: int
    peak_iteration: int
    level: float
    peak: float
    recovered: int | None = None

    @property
    def size(self) -> float:
        return math.log(self.peak / self.level)

    @property
    def sentence(self) -> str:
        """Where it begins, how far the value goes, and when it is back."""
        lost = (
            "" if self.recovered is None else f" after {self.recovered - self.iteration} iterations"
        )
        back = (
            f"back at {self.recovered}{lost}"
            if self.recovered
            else "not back at the end of the log"
        )
        worst = f"{self.level:.4g} -> {self.peak:.4g} ({change(self.peak, self.level)}) at {self.peak_iteration}"
        return f"{self.kind} from iteration {self.iteration}: {worst}; {back}"


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
    loss = list(_spikes(curve, "lm_loss", "loss spike", math.log(1.05)))
    norm = _spikes(curve, "grad_norm", "grad norm spike", math.log(2))
    return sorted([*loss, *norm, *_divergence(curve, loss)], key=lambda event: event.iteration)


def _spikes(curve: Curve, name: str, kind: str, least: float) -> Iterator[Event]:
    at, x = _logarithms(curve, name)
    level, sigma = baseline(x)
    end = -1
    for i in np.flatnonzero(x - level > np.maximum(least, SIGMAS * sigma)).tolist():
        if i < end:
            continue
        # it has returned where three lines in a row, or all that are left, lie within 3 sigmas
        calm = x[i + 1 :] <= level[i] + 3 * sigma[i]
        lasting = calm & np.append(calm[1:], True) & np.append(calm[2:], [True, True])[: len(calm)]
        end = i + 1 + int(np.argmax(lasting)) if lasting.any() else len(x)
        peak, back = i + int(np.argmax(x[i:end])), int(at[end]) if end < len(x) else None
        usual, worst = float(np.exp(level[i])), float(np.exp(x[peak]))
        first, top = int(at[i]), int(at[peak])
        yield Event(
            kind=kind, iteration=first, peak_iteration=top, level=usual, peak=worst, recovered=back
        )


def _divergence(curve: Curve, spikes: Sequence[Event]) -> Iterator[Event]:
    """The level at the end exceeds the best one by 10 %, or the loss is NaN from some line to the
    end.
    """
    at, x = _logarithms(curve, "lm_loss")
    table = curve.table
    table = table[~(table["skipped"] > 0)] if "skipped" in table else table  # which print no loss
    loss = table["lm_loss"].to_numpy(float) if len(x) else x
    if len(loss) > 3 and not np.isfinite(loss[-3:]).any():
        first = int(table["iteration"].iloc[np.flatnonzero(np.isfinite(loss))[-1] + 1])
        level = float(np.exp(np.median(x[-WINDOW:])))
        yield Event(
            kind="divergence", iteration=first, peak_iteration=first, level=level, peak=math.nan
        )
    elif len(x) >= 2 * LEAST:
        width = min(WINDOW, len(x) // 2)
        smooth = pd.Series(x).rolling(width).median().to_numpy()
        best, sigma = int(np.nanargmin(smooth)), baseline(x)[1][-1]
        # variance of the difference of two medians: pi / width
        if smooth[-1] - smooth[best] > max(
            math.log(1.1), SIGMAS * sigma * math.sqrt(math.pi / width)
        ):
            peak = best + int(np.argmax(x[best:]))
            start = next(
                (event.iteration for event in spikes if event.recovered is None), int(at[best])
            )
            level, worst = (float(np.exp(v)) for v in (smooth[best], x[peak]))
            yield Event(
                kind="divergence",
                iteration=start,
                peak_iteration=int(at[peak]),
                level=level,
                peak=worst,
            )


def _logarithms(curve: Curve, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and logarithms of a column, where it is a number above zero."""
    values = (
        curve.table[name].to_numpy(float) if name in curve.table else np.zeros(len(curve.table))
    )
    good = np.isfinite(values) & (values > 0)
    return curve.table["iteration"].to_numpy(float)[good], np.log(values[good])


def training_record(group: Sequence[RunLog], curve: Curve, continuity: Any) -> dict[str, Any]:
    """A training as JSON; a loss that is no number is null."""
    restarts = [
        {"iteration": r.iteration, "redone": r.redone, "log": r.log} for r in curve.restarts
    ]
    found = {
        "files": [log.source for log in group],
        "iterations": len(curve.table),
        "restarts": restarts,
    }
    found |= {
        "events": find_spikes(curve),
        "breaks": continuity.breaks,
        "unjudged": continuity.unjudged,
    }
    problems = [
        {"file": log.source, **as_json(problem)} for log in group for problem in log.problems
    ]
    return dict(as_json(found | {"problems": problems}))


def training_text(group: Sequence[RunLog], curve: Curve, continuity: Any) -> str:
    """A training in a line, and a line for each restart, event, break of a restart, and problem of
    a log.
    """
    lines = [f"{', '.join(str(log.source) for log in group)}: {len(curve.table)} lines"]
    lines += [
        f"  restart at iteration {r.iteration} ({r.redone} lines done again): {r.log}"
        for r in curve.restarts
    ]
    known = max(len(_logarithms(curve, name)[0]) for name in ("lm_loss", "grad_norm"))
    calm = (
        CALM
        if 2 * known >= len(curve.table)
        else f"cannot be judged: {known} lines have a loss or norm above 0"
    )
    events = [event.sentence for event in find_spikes(curve)] or [calm] * (not continuity.breaks)
    lines += [f"  {line}" for line in (*events, *continuity.lines())]
    return "\n".join(
        [*lines, *(f"  problem of {g.source.name}: {p}" for g in group for p in g.problems)]
    )
