"""The figure of a hang."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from trilane.report.plots.style import COLORS, figure, finished, plain
from trilane_diagnose.hang import Verdict


def hang_grid(verdict: Verdict) -> Figure:
    """Every rank as a square: replica and tensor rank to the right, stage downwards; suspects
    framed.
    """
    (tp, pp, dp), groups = verdict.grid.sizes, verdict.groups[: len(COLORS)]
    made, axes = figure(min(13.0, 4.5 + 0.16 * tp * dp), 1.9 + 0.32 * pp + 0.22 * len(groups))
    colour = dict.fromkeys(verdict.grid.ranks, "#c4ccd3") | {
        r: c for g, c in zip(groups, COLORS, strict=False) for r in g.ranks
    }
    waiting = {rank for group in verdict.groups for rank in group.ranks}
    for place in verdict.grid.places:
        corner = place.dp * (tp + 0.6) + place.tp + 0.05, place.pp + 0.05
        is_suspect, fill = (
            place.rank in verdict.suspects,
            colour[place.rank] if place.rank in waiting else "white",
        )
        framed: Any = (
            {"ec": "black", "lw": 2.2, "zorder": 2} if is_suspect else {"ec": "#8b98a3", "lw": 0.4}
        )
        axes.add_patch(Rectangle(corner, 0.9, 0.9, fc=fill, **framed))
    axes.set_xticks([k * (tp + 0.6) + tp / 2 for k in range(dp)], [f"dp {k}" for k in range(dp)])
    axes.set_yticks([k + 0.5 for k in range(pp)], [str(k) for k in range(pp)])
    axes.grid(False)
    heading = (
        f"{'Example: t' if verdict.example else 'T'}he stacks of {len(verdict.grid.ranks)} ranks"
    )
    limits: Any = {
        "xlim": (-0.2, dp * (tp + 0.6) - 0.4),
        "ylim": (pp + 0.2, -0.2),
        "ylabel": "pipeline stage",
    }
    finished(axes, heading, **limits, xlabel=f"replica, and in each its {tp} tensor ranks")
    names = [
        (c, f"{len(g.ranks)} ranks: {g.site or g.where}")
        for g, c in zip(groups, COLORS, strict=False)
    ]
    rest = sum(len(g.ranks) for g in verdict.groups[len(COLORS) :])
    names += [("#c4ccd3", f"{rest} ranks elsewhere")] * (rest > 0)
    handles = [Patch(fc=c, label=plain(name)) for c, name in names]
    handles += [Patch(fill=False, ec="black", lw=2.2, label="suspects")] * bool(verdict.suspects)
    # off the axes, where long names take no width of the grid
    made.legend(handles=handles, loc="outside lower left", frameon=False)
    return made
