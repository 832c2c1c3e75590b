"""Figures of measured runs: their time, rates and predictions."""

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure

from trilane.analysis.measure import Measurement
from trilane.costmodel.backtest import Backtest
from trilane.report.plots.style import COLORS, INK, figure, finished, plain
from trilane.utils.tables import Text


def seconds_per_iteration(measurements: Sequence[Measurement]) -> Figure | Text:
    """Seconds of each iteration, one line a run; the dotted lines are their medians."""
    if not measurements:
        return Text("No log prints times.")
    drawn, axes = figure(8.0, 3.0)
    for color, run in zip(itertools.cycle(COLORS), measurements, strict=False):
        line = {"color": color, "lw": 1.2, "label": plain(run.name), "grid": True}
        run.log.iterations.plot("iteration", "sec_per_it", ax=axes, **line)
        axes.axhline(run.sec_per_it, color=color, lw=0.8, ls=":")
    # one slow iteration, such as one that saves, would flatten all others
    usual = [float(run.log.iterations["sec_per_it"].quantile(0.95)) for run in measurements]
    axes.set_ylim(bottom=0, top=1.5 * max(usual))
    finished(axes, "Time (dotted: the median)", xlabel="iteration", ylabel="seconds per iteration")
    return drawn


def predicted_over_measured(result: Backtest, what: str = "seconds") -> Figure | Text:
    """Predicted against measured, a dot per row, a color per GPU and stack, with the diagonal;
    seconds on log axes.

    `what` is "seconds" (per iteration) or "memory" (GiB of a first-stage GPU).
    """
    columns = ["sec_per_it", "sec_pred"]
    unit = "seconds per iteration"
    scale = "log"
    if what == "memory":
        columns = ["mem_gib", "mem_gib_pred"]
        unit = "GiB"
        scale = "linear"
    runs = result.runs.dropna(subset=columns)
    if runs.empty:
        return Text.of("No row has its {}.", what)
    drawn, axes = figure(7.5, 5.0)
    groups = runs.groupby("group", sort=False)[columns]
    for color, (name, dots) in zip(COLORS, groups, strict=False):
        label = plain(f"{name} ({len(dots)})")
        axes.scatter(*dots.to_numpy().T, s=22, color=color, alpha=0.75, lw=0, label=label)
    values = runs[columns].to_numpy()
    ends = [values.min(), values.max()]
    axes.plot(ends, ends, color=INK, lw=0.8, ls="--", label="predicted = measured")
    names = {"xlabel": f"measured ({unit})", "ylabel": f"predicted ({unit})"}
    finished(axes, "", xscale=scale, yscale=scale, **names)
    return drawn
