"""Figures of sizing: where shapes lie between width and depth, how large they are, and how fast."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.planning.sizing import Proposal
from trilane.report.plots.style import COLORS, figure

NAMED = 5  # proposals that are named, the best first


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
    dots = axes.scatter(hidden, layers, c=rate, cmap="Blues", s=46, edgecolors="#1b2530", linewidths=0.6, zorder=3)
    dots.set_clim(*ends)
    for i, p in enumerate(proposals[:NAMED]):
        text = f"{i + 1}: {p.shape.num_layers} × {p.shape.hidden_size}"
        weight = "bold" if i == 0 else "normal"
        place: Any = {"textcoords": "offset points", "xytext": (7, 5), "fontsize": 8, "weight": weight, "zorder": 4}
        axes.annotate(
            text, (hidden[i], layers[i]), bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.8}, **place
        )
    axes.scatter(hidden[:1], layers[:1], s=120, facecolors="none", edgecolors=COLORS[1], linewidths=2, zorder=4)
    bar = made.colorbar(dots, ax=axes, pad=0.02)
    bar.set_label("TFLOP/s a GPU (predicted)")
    bar.outline.set_visible(False)
    axes.set(xlabel="hidden size", ylabel="layers", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    axes.set_title("Shapes of the target size (ring: the best)", loc="left", weight="bold", fontsize=11)
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
