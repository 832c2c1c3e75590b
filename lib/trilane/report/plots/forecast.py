"""Figures of a forecast: the jobs over the dates, the tokens trained with their spread, the GPU-hours."""

from datetime import date, datetime, time, timedelta
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.forecasting.forecast import QUANTILES, Forecast
from trilane.report.plots.style import COLORS, INK, LIMIT, STYLE, figure, finished, legend, plain, title

PARTS = 6  # causes named in the bar of GPU-hours


def _at(start: date, seconds: Any) -> Any:
    """Dates as numbers that matplotlib draws, of seconds after midnight of `start`."""
    return dates.date2num(datetime.combine(start, time())) + np.asarray(seconds) / 86400


def _as_dates(axes: Axes) -> None:
    locator = dates.AutoDateLocator(minticks=4, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


def _deadline(axes: Axes, found: Forecast) -> None:
    if found.request.deadline:
        end = _at(found.request.deadline + timedelta(days=1), 0)
        axes.axvline(end, color=LIMIT, lw=1.5, label="deadline")


def gantt(found: Forecast) -> Figure:
    """The jobs of the expected run over the dates: the batch size above, the nodes below, under the capacity."""
    start, jobs = found.request.start, found.jobs()
    with plt.rc_context(STYLE):
        made, (above, below) = plt.subplots(
            2, 1, figsize=(9.0, 4.4), sharex=True, layout="constrained", height_ratios=(1, 1.3)
        )
    plt.close(made)
    ends = np.concatenate([[0.0], found.expected.reached_s[0]])
    sizes = [p.gbs for p in found.phases[:-1]] + [found.phases[-1].gbs] * (len(ends) - len(found.phases))
    above.stairs(sizes, _at(start, ends), color=COLORS[0], lw=1.6, baseline=None)
    above.set(ylabel="batch size\n(sequences)", ylim=(0, 1.12 * max(sizes)))
    title(above, "Jobs of the expected run")
    kinds = list(dict.fromkeys((b.choice.dp, b.choice.mbs) for b in jobs))
    seen: set[tuple[int, int]] = set()
    for job in jobs:
        c = job.choice
        kind = (c.dp, c.mbs)
        left, right = _at(start, job.start_s), _at(start, job.end_s)
        color = COLORS[kinds.index(kind) % len(COLORS)]
        name = None if kind in seen else f"dp {c.dp}, mbs {c.mbs}: {c.nodes} nodes"
        seen.add(kind)
        edge = {"edgecolor": "white", "linewidth": 0.4 if len(jobs) < 40 else 0.0}
        below.bar(left, c.nodes, right - left, align="edge", color=color, label=name, **edge)
    _capacity(below, found)
    for axes in (above, below):
        _deadline(axes, found)
    _as_dates(below)
    below.set(ylabel="nodes", xlabel="date (UTC)", ylim=(0, None))
    legend(below)
    return made


def _capacity(axes: Axes, found: Forecast) -> None:
    """The nodes of the capacity until the run ends."""
    start, last = found.request.start, float(found.expected.wall_s[0])
    windows = [window for window, _ in found.schedules if window.start_s < last]
    edges = [*(w.start_s for w in windows), last]
    per_node = found.request.plan.cluster.gpus_per_node
    nodes = [-(-w.gpus // per_node) for w in windows]  # whole nodes, as a job takes them
    axes.stairs(nodes, _at(start, edges), color=LIMIT, lw=1.3, ls="--", baseline=None, label="capacity")


def fan(found: Forecast) -> Figure:
    """Tokens trained over the dates: the median, 50 % and 90 % of the simulated runs, and the deadline."""
    made, axes = figure(8.6, 3.8)
    start, samples = found.request.start, found.request.samples
    reached = np.quantile(found.outcomes.reached_s, QUANTILES, axis=0)
    gbs, iterations = found.pieces
    tokens = np.concatenate([[0.0], (gbs * iterations).cumsum()]) * found.request.plan.shape.seq_length / 1e9
    when = [_at(start, np.concatenate([[0.0], row])) for row in reached]
    axes.fill_betweenx(tokens, when[0], when[4], color=COLORS[0], alpha=0.18, lw=0, label="9 of 10 runs")
    axes.fill_betweenx(tokens, when[1], when[3], color=COLORS[0], alpha=0.35, lw=0, label="half of them")
    axes.plot(when[2], tokens, color=COLORS[0], lw=1.6, label="median")
    ideal = _at(start, found.ideal.wall_s[0])
    axes.plot([ideal], [tokens[-1]], "o", color=COLORS[2], ms=6, label="without interruptions")
    axes.axhline(samples * found.request.plan.shape.seq_length / 1e9, color=COLORS[4], lw=0.8, ls=":")
    _deadline(axes, found)
    _as_dates(axes)
    labels = {"xlabel": "date (UTC)", "ylabel": "tokens trained (billions)", "ylim": (0, None)}
    return finished(made, "When the run is finished", **labels)


def budget(found: Forecast) -> Figure:
    """Mean GPU-hours by cause as one bar, 90 % of the simulated runs as a whisker, and the allocation."""
    made, axes = figure(9.0, 2.3)
    unit, word = (1e3, "thousand GPU-hours") if found.gpu_hours(0.95) > 5e3 else (1.0, "GPU-hours")
    spent = list(found.gpu_hours_by_cause.items())
    spent = [*spent[:PARTS], ("other", sum(hours for _, hours in spent[PARTS:]))]
    left = 0.0
    for color, (name, hours) in zip(COLORS, spent, strict=False):
        axes.barh(["GPU-hours"], [hours / unit], left=left, color=color, height=0.5, label=plain(name))
        left += hours / unit
    low, middle, high = (found.gpu_hours(q) / unit for q in (0.05, 0.5, 0.95))
    bar = [[middle - low], [high - middle]]
    axes.errorbar([middle], [-0.42], xerr=bar, fmt="|", color=INK, capsize=4, lw=1.4, ms=9, label="9 of 10 runs")
    if found.request.allocation:
        axes.axvline(found.request.allocation / unit, color=LIMIT, lw=1.8, label="allocation")
    axes.grid(axis="y", visible=False)
    return finished(made, "What the run costs", xlabel=word, ylim=(-0.65, 0.4))
