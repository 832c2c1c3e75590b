"""Figures of measured runs: time, rates, memory, predictions (a Text if there is nothing to draw); of a hang."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from trilane.analysis.measure import Measurement
from trilane.analysis.measure import memory_by_rank as bytes_by_rank
from trilane.analysis.next_run import NextRuns
from trilane.analysis.recalibrate import NOTHING
from trilane.diagnose.hang.verdict import Verdict
from trilane.report.plots.style import COLORS, GIB, LIMIT, figure, finished, plain, title
from trilane.utils.tables import Text

NAMED = len(COLORS)  # groups of a hang's ranks with a colour of their own; the others share a grey
GREY = "#c4ccd3"


def seconds_per_iteration(measurements: Sequence[Measurement]) -> Figure | Text:
    """Seconds of each iteration, one line a run; hollow dots are left out of the medians, the dotted lines."""
    if not measurements:
        return Text("No log prints times.")
    made, axes = figure()
    for i, m in enumerate(measurements):
        table, color = m.log.iterations, COLORS[i % len(COLORS)]
        at, seconds = table["iteration"].to_numpy(float), table["sec_per_it"].to_numpy(float)
        out = ~m.window.counts
        axes.plot(at, seconds, color=color, lw=1.2, label=plain(m.name))
        axes.plot(at[out], seconds[out], "o", ms=4, mfc="white", mec=color, mew=1, ls="")
        axes.axhline(m.sec_per_it, color=color, lw=0.8, ls=":")
    axes.plot([], [], "o", ms=4, mfc="white", mec=COLORS[4], ls="", label="left out")
    if _far_apart([m.sec_per_it for m in measurements]):
        axes.set_yscale("log")
    else:
        highest = max(float(m.log.iterations["sec_per_it"].quantile(0.95)) for m in measurements)
        axes.set_ylim(bottom=0, top=1.5 * highest)
    return finished(made, "Time (dotted: the median)", xlabel="iteration", ylabel="seconds per iteration")


def _far_apart(values: Sequence[float]) -> bool:
    """Whether the values need a logarithmic axis."""
    return max(values) > 20 * min(values)


def rates_by_definition(measurements: Sequence[Measurement]) -> Figure | Text:
    """FLOP/s per GPU of each run by every definition that could be computed; the card's peak where in range."""
    rated = [m for m in measurements if m.flops_per_s]
    if not rated:
        return Text("The logs give neither shape nor FLOPs.")
    every = list(dict.fromkeys(name for m in rated for name in m.flops_per_s))
    names = sorted(every, key=lambda name: name in ("printed", "profiler"))
    highest = max(rate for m in rated for rate in m.flops_per_s.values())
    scale, unit = (1e12, "TFLOP/s") if highest >= 1e12 else (1e9, "GFLOP/s")
    made, axes = figure(8.0, 1.1 + 0.17 * (len(names) + 1) * len(rated))
    for i, name in enumerate(names):
        places = [row + (i - (len(names) - 1) / 2) * 0.8 / len(names) for row in range(len(rated))]
        # logs print one decimal, which is too few below a TFLOP/s
        rates = [m.flops_per_s.get(name, 0.0) for m in rated]
        widths = [rate / scale if name != "printed" or rate >= 1e12 else 0.0 for rate in rates]
        axes.barh(places, widths, height=0.8 / len(names), color=COLORS[i], label=plain(name.replace("_", " ")))
    peaks = {m.config.peak_flops_per_s for m in rated if m.config.peak_flops_per_s}
    if len(peaks) == 1 and (peak := peaks.pop()) < 3 * highest:
        axes.axvline(peak / scale, color=LIMIT, lw=1.5, label="the card's peak")
    axes.set_yticks(range(len(rated)), [plain(m.name) for m in rated])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return finished(made, "One run, several definitions", xlabel=f"{unit} per GPU (process)")


def memory_by_rank(measurements: Sequence[Measurement]) -> Figure | Text:
    """Peak memory of each rank, GiB, a row a run and a dot a rank; the line is the card's memory, if all have one."""
    known = [m for m in measurements if m.memory_bytes > 0]
    if not known:
        return Text("No log prints memory.")
    cards = {m.config.card_bytes for m in known}
    limit = max(cards) if len(cards) == 1 else 0.0
    made, axes = figure(8.0, 1.1 + 0.42 * len(known))
    for row, m in enumerate(known):
        held = np.array([*bytes_by_rank(m.log).values()]) / GIB
        axes.plot(held, np.full(len(held), row), "o", ms=6, mfc="none", mec=COLORS[0], mew=1.2)
        axes.annotate(f"{held.max():.3g}", (held.max(), row), (7, -3), textcoords="offset points", fontsize=8)
    if limit:
        axes.axvline(limit / GIB, color=LIMIT, lw=1.5)
        spot = (limit / GIB, 1.0)
        axes.annotate("limit ", spot, xycoords=("data", "axes fraction"), color=LIMIT, fontsize=8, ha="right")
    axes.set_yticks(range(len(known)), [plain(m.name) for m in known])
    end = 1.12 * max([limit / GIB, *(m.memory_bytes / GIB for m in known)])
    axes.set(xlim=(0, end), ylim=(len(known) - 0.5, -0.5), xlabel="GiB, peak of a rank (a dot)")
    title(axes, "Measured memory")
    return made


def next_runs(choice: NextRuns) -> Figure | Text:
    """What each possible short run costs, and the interval of the winner's time after it, in percent."""
    if not choice.decision:
        return NOTHING
    made, axes = figure(8.0, 3.4)
    runs, now = choice.runs, 100 * float(np.expm1(choice.decision.half_width))
    cost = [run.gpu_hours for run in runs]
    after = [100 * float(np.expm1(run.half_width_after)) for run in runs]
    axes.scatter(cost, after, s=36, color=COLORS[0], label="a possible run")
    axes.scatter(cost[:1], after[:1], s=110, facecolors="none", edgecolors=COLORS[1], linewidths=1.8, label="the best")
    axes.axhline(now, color=LIMIT, lw=1.2, ls="--", label="now")
    if _far_apart(cost):
        axes.set_xscale("log")
    name = runs[0].label
    axes.annotate(plain(name), (cost[0], after[0]), (0, -16), textcoords="offset points", fontsize=8, ha="center")
    axes.margins(x=0.15)
    axes.set_ylim(0, 1.15 * now)
    labels = {"xlabel": "GPU-hours (process-hours) of the run", "ylabel": "uncertainty left (± %, 90 %)"}
    return finished(made, "How well the winner's time is known after one more run", **labels)


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
