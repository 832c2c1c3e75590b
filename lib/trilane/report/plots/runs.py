"""Figures of measured runs: loss, time, rates, memory, and predictions beside them. Each returns a Figure."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from trilane.analysis.loss_curve import Curve
from trilane.analysis.measure import Measurement
from trilane.analysis.next_run import ShortRun
from trilane.analysis.phase_times import ORDER
from trilane.report.plots.style import COLORS, GIB, figure, legend, stacked_bars, title


def loss_curves(curves: Mapping[str, Curve]) -> Figure:
    """Loss (nats per token) over samples, one line a training, so that topologies of one plan lie on each other.

    A dotted upright line is a restart; what was done again is drawn thin as it was the first time.
    """
    made, axes = figure()
    # drawn thick to thin where they may lie on each other: a line that hides another would look like a missing run
    ends = [float(c.table["lm_loss"].dropna().iloc[-1]) for c in curves.values() if c.table["lm_loss"].notna().any()]
    widths = [5.0, 3.0, 1.5, 0.8] if ends and max(ends) - min(ends) < 0.05 else [1.5]
    labels = set()
    for i, (name, curve) in enumerate(curves.items()):
        label, x = curve.axis()
        labels.add(label)
        color, width = COLORS[i % len(COLORS)], widths[min(i, len(widths) - 1)]
        axes.plot(x, curve.table["lm_loss"], color=color, lw=width, label=name)
        column = "consumed_samples" if "samples" in label else "consumed_tokens" if "tokens" in label else "iteration"
        for restart in curve.restarts:
            begins = x[int(np.searchsorted(curve.table["iteration"], restart.iteration))]
            axes.axvline(float(begins), color=color, lw=0.8, ls=":")
        if len(curve.redone) and column in curve.redone:
            axes.plot(curve.redone[column], curve.redone["lm_loss"], color=color, lw=0.6)
    axes.set(xlabel=" / ".join(sorted(labels)), ylabel="loss (nats per token)")
    title(axes, "Loss" + (" (dotted: a restart)" if any(c.restarts for c in curves.values()) else ""))
    legend(axes)
    return made


def seconds_per_iteration(measurements: Sequence[Measurement]) -> Figure:
    """Seconds of each iteration, one line a run; hollow dots are left out of the medians, the dotted lines."""
    made, axes = figure()
    for i, m in enumerate(measurements):
        table, color = m.log.iterations, COLORS[i % len(COLORS)]
        at, seconds = table["iteration"].to_numpy(float), table["sec_per_it"].to_numpy(float)
        out = ~m.window.counts
        axes.plot(at, seconds, color=color, lw=1.2, label=m.label)
        axes.plot(at[out], seconds[out], "o", ms=4, mfc="white", mec=color, mew=1, ls="")
        axes.axhline(m.sec_per_it, color=color, lw=0.8, ls=":")
    axes.plot([], [], "o", ms=4, mfc="white", mec=COLORS[4], ls="", label="left out")
    axes.set(xlabel="iteration", ylabel="seconds per iteration")
    title(axes, "Time (dotted: the median)")
    if _far_apart([m.sec_per_it for m in measurements]):
        axes.set_yscale("log")
    else:
        highest = max(float(m.log.iterations["sec_per_it"].quantile(0.95)) for m in measurements)
        axes.set_ylim(bottom=0, top=1.5 * highest)
    legend(axes)
    return made


def _far_apart(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis to be seen beside each other."""
    return max(values) > 20 * min(values)


def predicted_against_measured(
    labels: Sequence[str],
    measured: Sequence[float],
    before: Sequence[tuple[float, float, float]],
    after: Sequence[tuple[float, float, float]],
) -> Figure:
    """Seconds per iteration, predicted (with its 90 % interval) over measured, before and after calibration.

    `before` and `after` hold (predicted, low, high). On the diagonal a prediction is right.
    """
    made, axes = figure(7.0, 4.2)
    groups = ((before, COLORS[4], "o", "before calibration"), (after, COLORS[0], "s", "after"))
    for predictions, color, marker, name in groups:
        middle = [p[0] for p in predictions]
        arms = [[p[0] - p[1] for p in predictions], [p[2] - p[0] for p in predictions]]
        axes.errorbar(measured, middle, yerr=arms, fmt=marker, color=color, capsize=3, lw=1, label=name)
    highest = 1.3 * max([*measured, *(p[0] for p in (*before, *after))])
    lowest = 0.5 * min([*measured, *(p[1] for p in (*before, *after))]) if _far_apart(measured) else 0.0
    axes.plot([lowest, highest], [lowest, highest], color="#1b2530", lw=0.8, ls="--", label="predicted = measured")
    for number, (label, x) in enumerate(sorted(zip(labels, measured, strict=True), key=lambda pair: pair[1])):
        # below the axis' end, one above the other: runs of one speed would write on each other
        spot = (x, 0.02 + 0.06 * number)
        side = "right" if x > 0.7 * max(measured) else "left"
        axes.annotate(label, spot, xycoords=("data", "axes fraction"), fontsize=8, ha=side)
        axes.axvline(x, color="#c4ced6", lw=0.6, zorder=0)
    axes.set(xlabel="measured (s/iteration)", ylabel="predicted (s/iteration)")
    title(axes, "Prediction against measurement")
    if lowest:
        axes.set(xscale="log", yscale="log")
    axes.set(xlim=(lowest, 1.25 * max(measured)), ylim=(lowest, highest))
    legend(axes)
    return made


def rates_by_definition(measurements: Sequence[Measurement]) -> Figure:
    """FLOP/s per GPU of each run by every definition that could be computed; the card's peak where it is in sight."""
    told = [m for m in measurements if m.flops_per_s]
    every = list(dict.fromkeys(name for m in told for name in m.flops_per_s))
    names = sorted(every, key=lambda name: name in ("printed", "profiler"))
    highest = max(rate for m in told for rate in m.flops_per_s.values())
    scale, unit = (1e12, "TFLOP/s") if highest >= 1e12 else (1e9, "GFLOP/s")
    made, axes = figure(8.0, 1.1 + 0.17 * (len(names) + 1) * len(told))
    for i, name in enumerate(names):
        places = [row + (i - (len(names) - 1) / 2) * 0.8 / len(names) for row in range(len(told))]
        # logs print one decimal: below a TFLOP/s that is no number
        rates = [m.flops_per_s.get(name, 0.0) for m in told]
        widths = [rate / scale if name != "printed" or rate >= 1e12 else 0.0 for rate in rates]
        axes.barh(places, widths, height=0.8 / len(names), color=COLORS[i], label=name.replace("_", " "))
    peaks = {m.config.peak_flops_per_s for m in told if m.config.peak_flops_per_s}
    if len(peaks) == 1 and (peak := peaks.pop()) < 3 * highest:
        axes.axvline(peak / scale, color="#b3261e", lw=1.5, label="the card's peak")
    axes.set_yticks(range(len(told)), [m.label for m in told])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=f"{unit} per GPU (process)")
    title(axes, "One run, several definitions")
    legend(axes)
    return made


def memory_by_rank(measurements: Sequence[Measurement], limit_bytes: float = 0.0) -> Figure:
    """The most that each rank held, GiB, a row a run and a dot a rank; the card's memory is the line where given."""
    told = [m for m in measurements if m.memory_bytes > 0]
    made, axes = figure(8.0, 1.1 + 0.42 * len(told))
    for row, m in enumerate(told):
        column = next(c for c in ("max_allocated", "max_reserved") if c in m.log.memory)
        held = m.log.memory[column].dropna().to_numpy(float) / GIB
        axes.plot(held, np.full(len(held), row), "o", ms=6, mfc="none", mec=COLORS[0], mew=1.2)
        axes.annotate(f"{held.max():.3g}", (held.max(), row), (7, -3), textcoords="offset points", fontsize=8)
    if limit_bytes:
        axes.axvline(limit_bytes / GIB, color="#b3261e", lw=1.5)
        spot = (limit_bytes / GIB, 1.0)
        axes.annotate("limit ", spot, xycoords=("data", "axes fraction"), color="#b3261e", fontsize=8, ha="right")
    axes.set_yticks(range(len(told)), [m.label for m in told])
    axes.set_ylim(len(told) - 0.5, -0.5)
    axes.set_xlim(left=0, right=1.12 * max([limit_bytes / GIB, *(m.memory_bytes / GIB for m in told)]))
    axes.set(xlabel="GiB, the most that a rank (a dot) allocated")
    title(axes, "Measured memory")
    return made


def phases_measured(phases: Mapping[str, Mapping[str, float]], seconds: Sequence[float]) -> Figure:
    """Where an iteration goes by the log's own timers, in percent, one bar a run; `other` is what they do not tell."""
    names = [name for name in ORDER if any(name in told for told in phases.values())]
    parts = []
    for told, whole in zip(phases.values(), seconds, strict=True):
        part = {name: told.get(name, 0.0) for name in names}
        parts.append({**part, "other": max(whole - sum(part.values()), 0.0)})
    return shares(list(phases), parts, "Measured time by part (the printing rank)")


def shares(labels: Sequence[str], parts: Sequence[Mapping[str, float]], heading: str) -> Figure:
    """What each part has of its bar's whole, in percent: bars of any length beside each other."""
    wholes = [sum(part.values()) for part in parts]
    percent = [{name: 100 * v / whole for name, v in p.items()} for p, whole in zip(parts, wholes, strict=True)]
    named = [f"{label}, {whole:.3g} s" for label, whole in zip(labels, wholes, strict=True)]
    made = stacked_bars(named, percent, "% of an iteration", heading)
    made.axes[0].set_xlim(0, 100)
    return made


def next_runs(runs: Sequence[ShortRun], now: float) -> Figure:
    """What each possible short run costs and what it leaves of the doubt about the winner's time, in percent."""
    made, axes = figure(8.0, 3.4)
    cost = [run.gpu_hours for run in runs]
    doubt = [100 * float(np.expm1(run.half_width_after)) for run in runs]
    axes.scatter(cost, doubt, s=36, color=COLORS[0], label="a possible run")
    axes.scatter(cost[:1], doubt[:1], s=110, facecolors="none", edgecolors=COLORS[1], linewidths=1.8, label="the best")
    axes.axhline(100 * float(np.expm1(now)), color="#b3261e", lw=1.2, ls="--", label="now")
    axes.set(
        xlabel="GPU-hours (process-hours) of the run",
        ylabel="doubt left (± %, 90 %)",
    )
    if _far_apart(cost):
        axes.set_xscale("log")
    name = runs[0].case.topology.label
    axes.annotate(name, (cost[0], doubt[0]), (0, -16), textcoords="offset points", fontsize=8, ha="center")
    axes.margins(x=0.15)
    axes.set_ylim(0, 115 * float(np.expm1(now)))
    title(axes, "How well the winner's time is known after one more run")
    legend(axes)
    return made
