"""Figures of measured runs: their time, rates and predictions; of the ranks of a hang."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from trilane.analysis import measure
from trilane.analysis.measure import TIMERS, Measurement
from trilane.costmodel.recalibration import NOTHING, Recalibration
from trilane.report.plots.style import COLORS, INK, figure, finished, name_rows, plain
from trilane.utils.tables import Text

PARTS = colormaps["Set3"].colors  # type: ignore[attr-defined]


def seconds_per_iteration(measurements: Sequence[Measurement]) -> Figure | Text:
    """Seconds of each iteration, one line a run; hollow dots do not count for the medians, the
    dotted lines.
    """
    if not measurements:
        return Text("No log prints times.")
    made, axes = figure(8.0, 3.0)
    for i, m in enumerate(measurements):
        table, color = m.log.iterations, COLORS[i % len(COLORS)]
        at, seconds = table["iteration"].to_numpy(float), table["sec_per_it"].to_numpy(float)
        axes.plot(at, seconds, color=color, lw=1.2, label=plain(m.name))
        hollow: Any = {
            "ms": 4,
            "mfc": "white",
            "mec": color,
            "ls": "",
            "label": "not counted" if i == 0 else None,
        }
        axes.plot(at[~m.window.counts], seconds[~m.window.counts], "o", **hollow)
        axes.axhline(m.sec_per_it, color=color, lw=0.8, ls=":")
    medians = [m.sec_per_it for m in measurements]
    if max(medians) > 20 * min(medians):
        axes.set_yscale("log")
    else:
        # one slow iteration, such as one that saves, would flatten all others
        highest = max(float(m.log.iterations["sec_per_it"].quantile(0.95)) for m in measurements)
        axes.set_ylim(bottom=0, top=1.5 * highest)
    finished(axes, "Time (dotted: the median)", xlabel="iteration", ylabel="seconds per iteration")
    return made


def phases(measurements: Sequence[Measurement], recalibration: Recalibration) -> Figure | Text:
    """An iteration of each run: by the log's own timers, in their order, above the parts of its
    calibrated prediction.

    Each phase is the sum over the microbatches, which in truth alternate.
    """
    order, bars = (
        dict.fromkeys(["data", *TIMERS["phases"]], 0.0),
        dict[str, list[tuple[str, Mapping[str, float]]]](),
    )
    for m, found in ((m, measure.phases(m.log, m.window)) for m in measurements):
        parts = {
            **order,
            **found,
            "covered by no timer": max(m.sec_per_it - sum(found.values()), 0.0),
        }
        bars.setdefault("Measured, by the timers of the printing rank", []).extend(
            [(m.name, parts)] * bool(found)
        )
    predicted = zip(recalibration.rows, recalibration.after, strict=True) if recalibration else ()
    bars["Predicted, after calibration"] = [(row.row_id, vars(p.time)) for row, p in predicted]
    bars = {heading: rows for heading, rows in bars.items() if rows}
    if not bars:
        return Text("No log has timers of an iteration, and no run can be predicted.")
    made, axes = figure(8.0, sum(1.2 + 0.3 * len(rows) for rows in bars.values()), rows=len(bars))
    for place, (heading, rows) in zip(np.ravel(axes), bars.items(), strict=True):
        _shares(place, rows, heading)
    return made


def _shares(axes: Any, rows: Sequence[tuple[str, Mapping[str, float]]], heading: str) -> None:
    """A bar a run of its stacked parts in percent of their sum, which is at its name; a part has
    one colour.
    """
    wholes, left = np.array([sum(parts.values()) for _, parts in rows]), np.zeros(len(rows))
    for i, part in enumerate(part for part in rows[0][1] if any(parts[part] for _, parts in rows)):
        percent = 100 * np.array([parts[part] for _, parts in rows]) / wholes
        look: Any = {
            "color": PARTS[i % len(PARTS)],
            "ec": INK,
            "lw": 0.3,
        }  # other colours than those of the runs
        axes.barh(range(len(rows)), percent, 0.62, left=left, label=part.replace("_", " "), **look)
        left = left + percent
    name_rows(
        axes, [f"{name}, {whole:.3g} s" for (name, _), whole in zip(rows, wholes, strict=True)]
    )
    finished(axes, heading, xlabel="% of an iteration")


def predicted_over_measured(recalibration: Recalibration) -> Figure | Text:
    """Predicted / measured seconds per iteration with its 90 % interval, a row a run, before and
    after calibration.

    On the dashed line a prediction is exact; what was measured lies outside the interval with a
    diamond.
    """
    if not recalibration:
        return NOTHING
    made, axes = figure(8.0, 1.2 + 0.34 * len(recalibration.rows))
    axes.axvline(1, color=INK, ls="--", lw=0.8)
    when = (
        ("before these runs", "white", recalibration.before),
        ("fitted to them", INK, recalibration.after),
    )
    for i, (label, fill, predictions) in enumerate(when):
        for row, (run, p) in enumerate(zip(recalibration.rows, predictions, strict=True)):
            low, at, high = (
                seconds / run.seconds for seconds in (p.sec_lo, p.sec_per_it, p.sec_hi)
            )
            height, shape = row + 0.3 * i - 0.15, "o" if low <= 1 <= high else "D"
            axes.plot([low, high], [height] * 2, lw=1.6, color=INK, alpha=0.5 + 0.5 * i)
            axes.plot(at, height, shape, mec=INK, mfc=fill, ls="", label=None if row else label)
    name_rows(axes, [f"{row.row_id}, {row.seconds:.3g} s" for row in recalibration.rows])
    axes.set_xlim(left=0)
    finished(axes, "", xlabel="predicted / measured (bars: 90 % interval)")
    return made
