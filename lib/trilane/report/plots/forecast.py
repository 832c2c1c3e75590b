"""Figures of a forecast: its jobs, the tokens trained over the dates, and what costs GPU-hours."""

from collections.abc import Mapping
from datetime import date
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trilane.forecasting.failures import Cause
from trilane.forecasting.forecast import Described, Forecast, Record
from trilane.report.plots.style import COLORS, INK, LIMIT, figure, finished, name_rows
from trilane.utils.numbers import amount


def gantt(found: Forecast) -> Figure:
    """The jobs of the expected run over the dates: batch size above, nodes below, under the dashed capacity."""
    record, jobs, run = found.record, found.record["schedule"], found.expected
    made, (above, below) = figure(8.6, 4.2, rows=2)
    above.sharex(below)
    ends = np.array([0.0, *run.reached_s[0]]) / 86400
    above.step(ends + _start(record), [*found.pieces[0], found.pieces[0][-1]], where="post", color=COLORS[0])
    kinds = [f"DP {job['dp']}, MBS {job['mbs']}" for job in jobs]
    for i, kind in enumerate(dict.fromkeys(kinds)):
        mine = [job for job, of in zip(jobs, kinds, strict=True) if of == kind]
        begins, ends, nodes = (np.array([job[name] for job in mine]) for name in ("from_day", "to_day", "nodes"))
        look: Any = {"color": COLORS[i % len(COLORS)], "ec": "white", "lw": 0.4, "align": "edge", "label": kind}
        below.bar(begins + _start(record), nodes, ends - begins, **look)
    last, each = float(run.wall_s[0]), found.request.plan.cluster.gpus_per_node
    for i, (window, _) in enumerate((w, s) for w, s in found.schedules if w.start_s < last):
        span = np.array([window.start_s, min(window.end_s, last)]) / 86400 + _start(record)
        label = None if i else "capacity"
        below.hlines(-(-window.gpus // each), *span, color=LIMIT, ls="--", lw=1.4, label=label)
    _over_dates(below, record)
    finished(above, f"Jobs of the expected run: {len(jobs)}", ylabel="batch size (sequences)")
    finished(below, "", xlabel="date (UTC)", ylabel="nodes", ylim=(0, None))
    return made


def fan(found: Described) -> Figure:
    """Tokens trained over the dates: the median, 50 % and 90 % of the simulated runs, and the deadline."""
    made, axes = figure(8.0, 3.4)
    _fan(axes, found.record)
    finished(axes, "", xlabel="date (UTC)", ylabel="billion tokens")
    return made


def causes(found: Described) -> Figure:
    """GPU-hours: above of the whole run with nine in ten runs and the allocation, below beyond the iterations.

    What a cause adds is its mean over the simulated runs.
    """
    record, rows = found.record, _causes(found.record)
    made, (above, below) = figure(8.0, 2.4 + 0.26 * len(rows), rows=2)
    above.get_gridspec().set_height_ratios([1, 1 + 0.4 * len(rows)])
    (low, high), median = record["gpu_hours_interval"], record["gpu_hours"]
    work = min(record["gpu_hours_by_cause"]["iterations"], median)
    above.barh(0, work, 0.5, color=COLORS[0], label="iterations")
    above.barh(0, median - work, 0.5, left=work, color=COLORS[1], label="the rest, in the median")
    above.plot([low, high], [0, 0], color=INK, lw=3, label="nine of ten runs")
    if record["allocation"]:
        above.axvline(record["allocation"], color=LIMIT, label="allocation")
    _hours(above)
    _bars(below, rows)
    finished(above, "", xlabel="GPU-hours of the run", yticks=[], ylim=(-0.5, 0.5))
    finished(below, "", xlabel="GPU-hours beyond the iterations, on average")
    return made


def page(found: Described) -> Figure:
    """For the page of who decides: the fan of finish dates next to the GPU-hours, small enough for a printed page."""
    made, (left, right) = figure(7.3, 1.45, columns=2)
    made.set_dpi(220)  # of paper; a screen shows it smaller
    _fan(left, found.record)
    _bars(right, dict([*_causes(found.record).items()][:4]))
    for axes, label in ((left, "billion tokens"), (right, "GPU-hours beyond the iterations")):
        axes.tick_params(labelsize=8)
        axes.set_xlabel(label if axes is right else "", fontsize=8)
        axes.set_ylabel(label if axes is left else "", fontsize=8)
    return made


def _start(record: Record) -> float:
    """The first day as matplotlib counts days."""
    return float(date2num(date.fromisoformat(record["start"])))


def _over_dates(axes: Axes, record: Record) -> None:
    """Dates on the x axis, and the end of the deadline's day as a line, where there is a deadline."""
    locator = AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    if record["deadline"]:
        end = float(date2num(date.fromisoformat(record["deadline"]))) + 1
        axes.axvline(end, color=LIMIT, label="deadline")


def _fan(axes: Axes, record: Record) -> None:
    """Bands from quantile to quantile over their dates; the dot is the run without interruptions."""
    tokens, days = record["fan"]["tokens"], np.array(record["fan"]["days"]).T + _start(record)
    for low, high, alpha, words in ((0, 4, 0.25, "90 % of the runs"), (1, 3, 0.45, "50 % of them")):
        axes.fill_betweenx(tokens, days[low], days[high], color=COLORS[0], alpha=alpha, lw=0, label=words)
    axes.plot(days[2], tokens, color=COLORS[0], label="median")
    axes.plot(record["ideal"]["days"] + _start(record), tokens[-1], "o", color=COLORS[2], label="no interruptions")
    _over_dates(axes, record)


def _bars(axes: Axes, rows: Mapping[str, float]) -> None:
    """GPU-hours of each cause."""
    drawn = axes.barh(range(len(rows)), [*rows.values()], 0.6, color=COLORS[1])
    axes.bar_label(drawn, [amount(hours) for hours in rows.values()], padding=3, fontsize=8)
    axes.margins(x=0.15)
    _hours(axes)
    name_rows(axes, [*rows])


def _hours(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _causes(record: Record) -> dict[str, float]:
    """GPU-hours that each cause adds to the iterations, the most first; what adds none is left out."""
    hours = {**record["gpu_hours_by_cause"], Cause.ITERATIONS: 0.0}
    # as the table of delays calls it, where the interval of the prediction is part of it
    hours[Cause.PREDICTION] = hours.pop(Cause.SLOWDOWN, 0.0)
    return {name: spent for name, spent in sorted(hours.items(), key=lambda pair: -pair[1]) if spent > 0}
