"""Figures of measured runs: their time, rates and predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from trilane.analysis import measure
from trilane.analysis.measure import Measurement
from trilane.costmodel.recalibration import NOTHING, Recalibration
from trilane.report.plots.style import COLORS, INK, figure, finished, name_rows, plain
from trilane.utils.tables import Text

# other colours than those of the runs
PARTS = colormaps["Set3"].colors  # type: ignore[attr-defined]


def seconds_per_iteration(measurements: Sequence[Measurement]) -> Figure | Text:
    """Seconds of each iteration, one line a run; hollow dots do not count for the medians, the
    dotted lines.
    """
    if not measurements:
        return Text("No log prints times.")
    drawn, axes = figure(8.0, 3.0)
    for number, run in enumerate(measurements):
        color = COLORS[number % len(COLORS)]
        table = run.log.iterations
        axes.plot(
            table["iteration"], table["sec_per_it"], color=color, lw=1.2, label=plain(run.name)
        )
        others = table[~run.window.counts]
        label = "not counted" if number == 0 else None
        hollow: Any = {"ms": 4, "mfc": "white", "mec": color, "ls": "", "label": label}
        axes.plot(others["iteration"], others["sec_per_it"], "o", **hollow)
        axes.axhline(run.sec_per_it, color=color, lw=0.8, ls=":")
    # one slow iteration, such as one that saves, would flatten all others
    usual = [float(run.log.iterations["sec_per_it"].quantile(0.95)) for run in measurements]
    axes.set_ylim(bottom=0, top=1.5 * max(usual))
    finished(axes, "Time (dotted: the median)", xlabel="iteration", ylabel="seconds per iteration")
    return drawn


def phases(measurements: Sequence[Measurement]) -> Figure | Text:
    """An iteration of each run by the log's own timers, those of the printing rank, in their order.

    Each phase is the sum over the microbatches, which in truth alternate.
    """
    rows = {}
    for run in measurements:
        seconds = measure.phases(run)
        if seconds:
            rest = max(run.sec_per_it - sum(seconds.values()), 0.0)
            rows[run.name] = {**seconds, "covered by no timer": rest}
    if not rows:
        return Text("No log has timers of an iteration.")
    drawn, axes = figure(8.0, 1.2 + 0.3 * len(rows))
    table = pd.DataFrame(rows).T.fillna(0.0)
    whole = table.sum(axis=1)
    share = 100 * table.div(whole, axis=0)
    share.plot.barh(stacked=True, ax=axes, width=0.62, color=PARTS, ec=INK, lw=0.3)
    name_rows(axes, [f"{name}, {seconds:.3g} s" for name, seconds in whole.items()])
    finished(axes, "", xlabel="% of an iteration")
    return drawn


def predicted_over_measured(recalibration: Recalibration) -> Figure | Text:
    """Predicted / measured seconds per iteration with its 90 % interval, a row a run, before and
    after calibration.

    On the dashed line a prediction is exact.
    """
    if not recalibration:
        return NOTHING
    drawn, axes = figure(8.0, 1.2 + 0.34 * len(recalibration.rows))
    axes.axvline(1, color=INK, ls="--", lw=0.8)
    before = (recalibration.before, -0.15, "before these runs", "white")
    after = (recalibration.after, 0.15, "fitted to them", INK)
    for predictions, shift, label, fill in (before, after):
        bounds = [(p.sec_lo, p.sec_per_it, p.sec_hi) for p in predictions]
        low, middle, high = np.array(bounds).T / [row.seconds for row in recalibration.rows]
        look: Any = {"fmt": "o", "color": INK, "mfc": fill, "label": label}
        rows = np.arange(len(middle)) + shift
        axes.errorbar(middle, rows, xerr=[middle - low, high - middle], **look)
    name_rows(axes, [f"{row.row_id}, {row.seconds:.3g} s" for row in recalibration.rows])
    axes.set_xlim(left=0)
    finished(axes, "", xlabel="predicted / measured (bars: 90 % interval)")
    return drawn
