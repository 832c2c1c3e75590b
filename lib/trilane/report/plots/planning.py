"""Figures of planning: shapes by width and depth, where a plan's time goes, what fills its memory; of a backtest."""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.costmodel.backtest import Backtest
from trilane.costmodel.metrics import group_name
from trilane.planning.explain import Explanation
from trilane.planning.proposals import Proposal
from trilane.planning.sizing import ShapeSurvey
from trilane.report.plots.style import (
    COLORS,
    GIB,
    INK,
    LIMIT,
    STYLE,
    bars,
    figure,
    finished,
    legend,
    plain,
    title,
)

NAMED = 5  # proposals that are named, the best first
OUTLIER = 0.09  # of a backtest: rows with a larger error are labelled
LABEL_GAP = 4  # rows between two labels, so that they do not overlap


def shapes_and_efficiency(proposals: Sequence[Proposal]) -> Figure:
    """Shapes on the plane of hidden size and layers, colored by predicted TFLOP/s a GPU on the best topology.

    Lines: equal size (drawn, in B), equal hidden / layers (dotted). Shades around the dots: the same TFLOP/s, smoothed.
    """
    made, axes = figure(8.6, 4.6)
    hidden = np.array([p.shape.hidden_size for p in proposals], float)
    layers = np.array([p.shape.num_layers for p in proposals], float)
    rate = np.array([p.tflops[0] for p in proposals])
    wide, high = 0.04 * np.ptp(hidden) + 64, 0.12 * np.ptp(layers) + 1
    x = np.linspace(hidden.min() - wide, hidden.max() + wide, 80)
    y = np.linspace(max(layers.min() - high, 1), layers.max() + high, 80)
    ends = rate.min() - 1, rate.max() + 1
    axes.contourf(x, y, _smoothed(x, y, hidden, layers, rate), np.linspace(*ends, 7), cmap="Blues", alpha=0.35)
    _size_lines(axes, x, y, proposals[0])
    dots = axes.scatter(hidden, layers, c=rate, cmap="Blues", s=46, edgecolors=INK, linewidths=0.6, zorder=3)
    dots.set_clim(*ends)
    for i, p in enumerate(proposals[:NAMED]):
        text = f"{i + 1}: {p.shape.num_layers} × {p.shape.hidden_size}"
        look: Any = {"fontsize": 8, "weight": "bold" if i == 0 else "normal", "zorder": 4}
        look["bbox"] = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.8}
        axes.annotate(text, (hidden[i], layers[i]), (7, 5), textcoords="offset points", **look)
    axes.scatter(hidden[:1], layers[:1], s=120, facecolors="none", edgecolors=COLORS[1], linewidths=2, zorder=4)
    bar = made.colorbar(dots, ax=axes, pad=0.02)
    bar.set_label("TFLOP/s a GPU (predicted)")
    bar.outline.set_visible(False)
    axes.set(xlabel="hidden size", ylabel="layers", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    title(axes, "Shapes of the target size (ring: the best)")
    return made


def _smoothed(x: np.ndarray, y: np.ndarray, hidden: np.ndarray, layers: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """The mean of all dots, weighted by nearness: what a layer more or less does to the stages is not smooth itself."""
    grid = np.meshgrid(x, y)
    span = np.ptp(x), np.ptp(y)
    away = ((grid[0][..., None] - hidden) / span[0]) ** 2 + ((grid[1][..., None] - layers) / span[1]) ** 2
    weight = np.exp(-away / (2 * 0.06**2))
    near = np.where(away.min(axis=-1) < 0.13**2, 1.0, np.nan)  # further away nothing was predicted
    return near * (weight * rate).sum(axis=-1) / np.maximum(weight.sum(axis=-1), 1e-300)


def _size_lines(axes: Axes, x: np.ndarray, y: np.ndarray, best: Proposal) -> None:
    shape = best.shape
    wide, deep = np.meshgrid(x, y)
    size = (deep * (12 * wide**2 + 13 * wide) + (shape.vocab_size + shape.seq_length + 2) * wide) / 1e9
    target = best.target / 1e9
    levels = [target * f for f in (0.9, 0.95, 1.0, 1.05, 1.1)]
    lines = axes.contour(x, y, size, levels, colors=COLORS[2], linewidths=[0.7, 0.7, 1.6, 0.7, 0.7])
    axes.clabel(lines, fmt=lambda v: f"{v:.3g} B", fontsize=7)
    ratios = axes.contour(x, y, wide / deep, [100, 150, 200, 250], colors=COLORS[4], linewidths=0.7, linestyles=":")
    axes.clabel(ratios, fmt=lambda v: f"h/L {v:.0f}", fontsize=7)


def why(explained: Explanation) -> Figure:
    """The seconds of an iteration by part and the memory of the fullest stage, as planned and after the best change."""
    shown = explained.candidates
    with plt.rc_context(STYLE):
        made, (above, below) = plt.subplots(2, 1, figsize=(8.0, 2.2 + 0.7 * len(shown)), layout="constrained")
    plt.close(made)
    fullest = [max(c.prediction.stages, key=lambda stage: stage.total) for c in shown]
    labels = ["as planned", "changed"][: len(shown)]
    bars(above, labels, [vars(c.prediction.time) for c in shown])
    bars(below, labels, [{name: size / GIB for name, size in vars(stage).items()} for stage in fullest])
    below.axvline(explained.plan.cluster.gpu.memory_bytes / GIB, color=LIMIT, lw=1.5, label="limit")
    above.set(xlabel="seconds per iteration")
    below.set(xlabel="GiB of the fullest stage")
    for axes in (above, below):
        legend(axes, fontsize=8)
    title(above, "Where the time goes, and what fills the memory")
    return made


def shapes_on_the_plane(survey: ShapeSurvey) -> Figure:
    """Candidate shapes, layers over hidden, the dot's area by parameters; the chosen one is filled."""
    made, axes = figure(6.5, 3.6)
    shapes, sizes = survey.shapes, [shape.parameters / 1e6 for shape in survey.shapes]
    hidden, layers = [s.hidden_size for s in shapes], [s.num_layers for s in shapes]
    area = [40 + 260 * size / max(sizes) for size in sizes]
    faces = [COLORS[1] if i == survey.chosen else "none" for i in range(len(shapes))]
    axes.scatter(hidden, layers, s=area, facecolors=faces, edgecolors=COLORS[0], linewidths=1.3)
    for x, y, size in zip(hidden, layers, sizes, strict=True):
        axes.annotate(f"{size:.1f}M", (x, y), textcoords="offset points", xytext=(0, 13), ha="center", fontsize=8)
    axes.set(xlabel="hidden size", ylabel="layers")
    title(axes, "Candidate shapes (filled: the chosen one)")
    axes.margins(0.15, 0.3)
    return made


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
