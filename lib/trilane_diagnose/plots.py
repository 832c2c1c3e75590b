"""The figure of a hang."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from trilane.report.plots.style import COLORS, figure, finished, plain
from trilane_diagnose.hang import Verdict

GAP = 0.6  # between replicas, in ranks
EDGE: dict[str, Any] = {"ec": "#8b98a3", "lw": 0.4}
FRAME: dict[str, Any] = {"ec": "black", "lw": 2.2}  # of a suspect


def hang_grid(verdict: Verdict) -> Figure:
    """Every rank as a square: replica and tensor rank to the right, stage downwards; suspects
    framed.
    """
    tp, pp, dp = verdict.grid.sizes
    groups = verdict.groups[: len(COLORS)]  # ranks of others stay white
    width = min(13.0, 4.5 + 0.16 * tp * dp)
    drawing, axes = figure(width, 1.9 + 0.32 * pp + 0.22 * len(groups))
    colors: dict[int, str] = {}
    handles = []
    for group, color in zip(groups, COLORS, strict=False):
        colors |= dict.fromkeys(group.ranks, color)
        name = f"{len(group.ranks)} ranks: {group.site or group.where}"
        handles.append(Patch(fc=color, label=plain(name)))
    if verdict.suspects:
        handles.append(Patch(fill=False, label="suspects", **FRAME))
    for place in verdict.grid.places:
        corner = (place.dp * (tp + GAP) + place.tp + 0.05, place.pp + 0.05)
        edge = EDGE
        if place.rank in verdict.suspects:
            edge = {**FRAME, "zorder": 2}
        color = colors.get(place.rank, "white")
        axes.add_patch(Rectangle(corner, 0.9, 0.9, fc=color, **edge))
    middles = [replica * (tp + GAP) + tp / 2 for replica in range(dp)]
    axes.set_xticks(middles, [f"dp {replica}" for replica in range(dp)])
    axes.set_yticks([stage + 0.5 for stage in range(pp)], [str(stage) for stage in range(pp)])
    axes.grid(False)
    heading = f"The stacks of {len(verdict.grid.ranks)} ranks"
    if verdict.example:
        heading = f"Example: {heading}"
    limits: Any = {"xlim": (-0.2, dp * (tp + GAP) - 0.4), "ylim": (pp + 0.2, -0.2)}
    xlabel = f"replica, and in each its {tp} tensor ranks"
    finished(axes, heading, xlabel=xlabel, ylabel="pipeline stage", **limits)
    # off the axes, where long names take no width of the grid
    drawing.legend(handles=handles, loc="outside lower left", frameon=False)
    return drawing
