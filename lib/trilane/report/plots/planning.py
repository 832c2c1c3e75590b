"""Figures of planning: shapes by width and depth; of a backtest."""

from matplotlib.figure import Figure

from trilane.costmodel.backtest import Backtest
from trilane.planning.sizing import Proposals
from trilane.report.plots.style import COLORS, INK, figure, finished, plain
from trilane.utils.tables import Text

NAMED = 5  # shapes


def shapes_and_efficiency(found: Proposals) -> Figure:
    """Shapes on the plane of hidden size and layers, colored by predicted TFLOP/s a GPU on the best
    topology.

    The first five are named, the best is framed.
    """
    drawn, axes = figure(8.6, 4.6)
    shapes = [proposal.shape for proposal in found.rows]
    hidden = [shape.hidden_size for shape in shapes]
    layers = [shape.num_layers for shape in shapes]
    tflops = [proposal.tflops for proposal in found.rows]
    dots = axes.scatter(hidden, layers, c=tflops, cmap="Blues", s=46, edgecolors=INK, lw=0.6)
    axes.scatter(hidden[:1], layers[:1], s=120, facecolors="none", edgecolors=COLORS[1], lw=2)
    for number, shape in enumerate(shapes[:NAMED], 1):
        text = f"{number}: {shape.num_layers} × {shape.hidden_size}"
        place = (shape.hidden_size, shape.num_layers)
        axes.annotate(text, place, (7, 5), textcoords="offset points", fontsize=8)
    axes.margins(0.08, 0.14)
    drawn.colorbar(dots, ax=axes, pad=0.02, label="TFLOP/s a GPU (predicted)")
    heading = "Shapes of the target size (ring: the best)"
    finished(axes, heading, xlabel="hidden size", ylabel="layers")
    return drawn


def predicted_over_measured(result: Backtest, what: str = "seconds") -> Figure | Text:
    """Predicted against measured, a dot per row, a color per GPU and stack, with the diagonal;
    seconds on log axes.

    `what` is "seconds" (per iteration) or "memory" (GiB of a first-stage GPU).
    """
    columns = ["sec_per_it", "sec_pred"]
    if what == "memory":
        columns = ["mem_gib", "mem_gib_pred"]
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
    unit = "GiB" if what == "memory" else "seconds per iteration"
    scale = "linear" if what == "memory" else "log"
    names = {"xlabel": f"measured ({unit})", "ylabel": f"predicted ({unit})"}
    finished(axes, "", xscale=scale, yscale=scale, **names)
    return drawn
