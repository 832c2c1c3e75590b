"""The figure of a hang: the grid of ranks, coloured by stack."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from trilane.diagnose.hang.verdict import Verdict
from trilane.report.plots.style import COLORS, figure, plain, title

NAMED = len(COLORS)  # groups with a colour of their own; the others share a grey
GREY = "#c4ccd3"


def hang_grid(verdict: Verdict) -> Figure:
    """Every rank as a square: replica and tensor rank to the right, stage downwards; suspects framed."""
    tp, pp, dp = verdict.grid.sizes
    made, axes = figure(min(13.0, 4.5 + 0.16 * tp * dp), 1.9 + 0.32 * pp + 0.22 * min(NAMED, len(verdict.groups)))
    colour = {r: _colour(i) for i, group in enumerate(verdict.groups) for r in group.ranks}
    for place in verdict.grid.places:
        _square(axes, place.dp * (tp + 0.6) + place.tp, place.pp, colour.get(place.rank, "white"))
    for rank in verdict.suspects:
        place = verdict.grid[rank]
        x = place.dp * (tp + 0.6) + place.tp
        axes.add_patch(Rectangle((x + 0.02, place.pp + 0.02), 0.96, 0.96, fill=False, ec="black", lw=2.2))
    axes.set(xlim=(-0.2, dp * (tp + 0.6) - 0.4), ylim=(pp + 0.2, -0.2), ylabel="pipeline stage")
    axes.set_xticks([k * (tp + 0.6) + tp / 2 for k in range(dp)], [f"dp {k}" for k in range(dp)])
    axes.set_yticks([k + 0.5 for k in range(pp)], [str(k) for k in range(pp)])
    axes.set_xlabel(f"replica, and in each its {tp} tensor rank{'s' if tp > 1 else ''}")
    title(axes, f"{'Example: t' if verdict.example else 'T'}he stacks of {len(verdict.grid.ranks)} ranks")
    axes.grid(False)
    made.legend(
        handles=_legend(verdict), loc="outside lower left", frameon=False
    )  # long names take no width of the grid
    return made


def _legend(verdict: Verdict) -> list[Patch]:
    handles = [
        Patch(color=_colour(i), label=plain(f"{len(g.ranks)} ranks: {g.site or g.text}"))
        for i, g in enumerate(verdict.groups[:NAMED])
    ]
    rest = sum(len(g.ranks) for g in verdict.groups[NAMED:])
    handles += [Patch(color=GREY, label=f"{rest} ranks elsewhere")] if rest else []
    return handles + ([Patch(fill=False, ec="black", lw=2.2, label="suspects")] if verdict.suspects else [])


def _colour(index: int) -> str:
    return COLORS[index] if index < NAMED else GREY


def _square(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, fc=colour, ec="#8b98a3", lw=0.4))
