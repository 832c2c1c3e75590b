"""Figures of planning: shapes by width and depth; of a backtest."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from trilane.costmodel.backtest import Backtest, group_name
from trilane.planning.sizing import Proposals
from trilane.report.plots.style import COLORS, INK, figure, finished, plain
from trilane.utils.tables import Text


def shapes_and_efficiency(found: Proposals) -> Figure:
    """Shapes on the plane of hidden size and layers, colored by predicted TFLOP/s a GPU on the best
    topology.

    The first five are named, the best is framed.
    """
    (made, axes), proposals = figure(8.6, 4.6), found.rows
    hidden, layers = (
        np.array([getattr(p.shape, n) for p in proposals]) for n in ("hidden_size", "num_layers")
    )
    dots = axes.scatter(
        hidden,
        layers,
        c=[p.tflops[0] for p in proposals],
        cmap="Blues",
        s=46,
        edgecolors=INK,
        lw=0.6,
    )
    axes.scatter(
        hidden[:1], layers[:1], s=120, facecolors="none", edgecolors=COLORS[1], linewidths=2
    )
    for i, p in enumerate(proposals[:5]):
        look: Any = {"fontsize": 8, "weight": "bold" if i == 0 else "normal", "zorder": 4}
        look["bbox"] = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.8}
        text = f"{i + 1}: {p.shape.num_layers} × {p.shape.hidden_size}"
        axes.annotate(text, (hidden[i], layers[i]), (7, 5), textcoords="offset points", **look)
    axes.margins(0.08, 0.14)
    made.colorbar(dots, ax=axes, pad=0.02, label="TFLOP/s a GPU (predicted)").outline.set_visible(
        False
    )
    finished(
        axes, "Shapes of the target size (ring: the best)", xlabel="hidden size", ylabel="layers"
    )
    return made


def predicted_over_measured(result: Backtest, what: str = "seconds") -> Figure | Text:
    """Predicted against measured, a dot per row, a color per GPU and stack, with the diagonal;
    seconds on log axes.

    `what` is "seconds" (per iteration) or "memory" (GiB of a first-stage GPU).
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row, p in result.pairs:
        pair = (
            (row.seconds, p.sec_pred)
            if what == "seconds"
            else (row.memory_bytes / 2**30, p.mem_gib_pred)
        )
        if np.isfinite(pair[0]):
            points.setdefault(group_name(row), []).append(pair)
    if not points:
        return Text.of("No row has its {}.", what)
    made, axes = figure(7.5, 5.0)
    for color, (name, dots) in zip(COLORS, points.items(), strict=False):
        axes.scatter(
            *zip(*dots, strict=True),
            s=22,
            color=color,
            alpha=0.75,
            lw=0,
            label=plain(f"{name} ({len(dots)})"),
        )
    ends = [f(v for dots in points.values() for dot in dots for v in dot) for f in (min, max)]
    axes.plot(ends, ends, color=INK, lw=0.8, ls="--", label="predicted = measured")
    unit, scale = ("seconds per iteration", "log") if what == "seconds" else ("GiB", "linear")
    finished(
        axes,
        "",
        xscale=scale,
        yscale=scale,
        xlabel=f"measured ({unit})",
        ylabel=f"predicted ({unit})",
    )
    return made
