"""Figures of a backtest: predicted against measured, and the error of each row."""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from trilane.costmodel.backtest import Backtest
from trilane.costmodel.metrics import group_name
from trilane.report.plots.style import COLORS, INK, figure, finished, plain

OUTLIER = 0.09  # rows with a larger error are labelled
LABEL_GAP = 4  # rows between two labels, so that they do not overlap


def predicted_over_measured(result: Backtest, what: str = "seconds") -> Figure:
    """Predicted against measured, a dot per row, a color per GPU and stack, with the diagonal; seconds on log axes.

    `what` is "seconds" (per iteration) or "memory" (GiB of a first-stage GPU).
    """
    made, axes = figure(7.5, 5.0)
    points: dict[str, list[tuple[float, float]]] = {}
    for row, prediction in result.pairs:
        measured = row.seconds if what == "seconds" else row.memory_bytes / 2**30
        predicted = prediction.sec_pred if what == "seconds" else prediction.mem_gib_pred
        if np.isfinite(measured):
            points.setdefault(group_name(row), []).append((measured, predicted))
    for color, (name, dots) in zip(COLORS, points.items(), strict=False):
        x, y = ([dot[i] for dot in dots] for i in (0, 1))
        axes.scatter(x, y, s=22, color=color, alpha=0.75, linewidths=0, label=plain(f"{name} ({len(dots)})"))
    ends = [f(v for dots in points.values() for dot in dots for v in dot) for f in (min, max)]
    axes.plot(ends, ends, color=INK, lw=0.8, ls="--", label="predicted = measured")
    unit = "seconds per iteration" if what == "seconds" else "GiB"
    scale = "log" if what == "seconds" else "linear"
    return finished(made, "", xscale=scale, yscale=scale, xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})")


def _spaced(places: Iterable[int]) -> list[int]:
    """Those of the ascending places that are LABEL_GAP after the one chosen before."""
    chosen: list[int] = []
    for place in places:
        if not chosen or place - chosen[-1] >= LABEL_GAP:
            chosen.append(int(place))
    return chosen


def residuals(result: Backtest) -> Figure:
    """Predicted / measured of every timed row, table by table, with the 90 % interval; outliers are labelled."""
    timed = [(r, p) for r, p in result.pairs if np.isfinite(r.seconds) and not r.duplicate_of]
    made, axes = figure(10.0, 4.0)
    places = np.arange(len(timed))
    ratio = np.array([p.sec_pred / r.seconds for r, p in timed])
    low = np.array([p.sec_lo / p.sec_pred for _, p in timed])
    axes.fill_between(places, low, 1 / low, color=COLORS[4], alpha=0.2, lw=0, step="mid", label="90 % interval")
    excluded = np.array([r.excluded for r, _ in timed])
    axes.scatter(places[~excluded], ratio[~excluded], s=14, color=COLORS[0], label="predicted / measured")
    axes.scatter(places[excluded], ratio[excluded], s=20, facecolors="none", edgecolors=COLORS[7], label="excluded")
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    for i in _spaced(np.flatnonzero(abs(ratio - 1) > OUTLIER)):
        name = timed[i][0].row_id.partition("-")[2]
        axes.annotate(plain(name), (i, ratio[i]), (3, 3), textcoords="offset points", fontsize=7)
    tables = [row.table for row, _ in timed]
    ticks = _spaced([i for i, table in enumerate(tables) if i == 0 or table != tables[i - 1]])
    axes.set_xticks(ticks, [plain(tables[i]) for i in ticks], rotation=90, fontsize=7)
    return finished(made, "", ylabel="predicted / measured (seconds)", xlabel="rows, table by table")
