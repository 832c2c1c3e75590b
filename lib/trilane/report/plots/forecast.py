"""Figures of a forecast: its jobs, the tokens trained over the dates, and what costs GPU-hours."""

from datetime import date
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from trilane.forecasting.failures import Cause
from trilane.forecasting.forecast import Forecast, Json
from trilane.report.plots.style import COLORS, LIMIT, figure, finished, name_rows
from trilane.utils.numbers import amount

LETTERS = 9  # points, on paper


def gantt(found: Forecast) -> Figure:
    """The jobs of the expected run over the dates, a bar each: batch size above, nodes below."""
    record = found.record
    chains = record["schedule"]
    start = _day(record["start"])
    drawn, (above, below) = figure(8.6, 4.2, rows=2)
    above.sharex(below)
    ends = start + np.array([0.0, *found.expected.reached_s[0]]) / 86400
    sizes = [*found.pieces[0], found.pieces[0][-1]]
    above.step(ends, sizes, where="post", color=COLORS[0])
    longest_days = found.request.risks.job_hours / 24
    colors: dict[str, str] = {}
    for chain in chains:
        edges = np.arange(chain["from_day"], chain["to_day"], longest_days)
        days = np.diff(np.append(edges, chain["to_day"]))
        kind = f"DP {chain['dp']}, MBS {chain['mbs']}"
        look: Any = {"ec": "white", "lw": 0.5, "align": "edge"}
        if kind not in colors:
            colors[kind] = COLORS[len(colors) % len(COLORS)]
            look["label"] = kind
        below.bar(start + edges, chain["nodes"], days, color=colors[kind], **look)
    _over_dates(below, record)
    jobs = sum(chain["jobs"] for chain in chains)
    count = "1 job" if jobs == 1 else f"{jobs} jobs"
    heading = (
        f"{count} of at most {amount(found.request.risks.job_hours)} hours, in the expected run"
    )
    finished(above, heading, ylabel="batch size (sequences)", ylim=(0, None))
    finished(below, "", xlabel="date (UTC)", ylabel="nodes", ylim=(0, None))
    return drawn


def page(found: Forecast, height: float = 1.35) -> Figure:
    """The fan of finish dates next to the GPU-hours that causes add to the iterations; inches of a
    printed page.
    """
    drawn, (left, right) = figure(7.3, height, columns=2)
    drawn.set_dpi(220)  # of paper; a screen shows it smaller
    _fan(left, found.record)
    _bars(right, found.record, most=max(4, int(2.5 * height)))
    for axes in (left, right):
        axes.tick_params(labelsize=LETTERS)  # of ticks that are made when it is drawn
    for text in drawn.findobj(Text):
        text.set_fontsize(LETTERS)
    return drawn


def _day(text: str) -> float:
    """A date as matplotlib counts days."""
    return float(date2num(date.fromisoformat(text)))


def _over_dates(axes: Axes, record: Json) -> None:
    """Dates on the x axis, and the end of the deadline's day as a line, where there is
    a deadline.
    """
    locator = AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    if record["deadline"]:
        axes.axvline(_day(record["deadline"]) + 1, color=LIMIT, label="deadline")


def _fan(axes: Axes, record: Json) -> None:
    """Bands from quantile to quantile over their dates; the dot is the run without
    interruptions.
    """
    start = _day(record["start"])
    tokens = record["fan"]["tokens"]
    low, lower, median, upper, high = np.array(record["fan"]["days"]).T + start
    look: Any = {"color": COLORS[0], "lw": 0}
    axes.fill_betweenx(tokens, low, high, alpha=0.25, label="90 % of the runs", **look)
    axes.fill_betweenx(tokens, lower, upper, alpha=0.45, label="50 % of them", **look)
    axes.plot(median, tokens, color=COLORS[0], label="median")
    ideal = start + record["ideal"]["days"]
    axes.plot(ideal, tokens[-1], "o", color=COLORS[2], label="no interruptions")
    axes.set_ylabel("billion tokens")
    _over_dates(axes, record)


def _bars(axes: Axes, record: Json, most: int) -> None:
    """GPU-hours that each cause adds to the iterations, the most first; what adds none
    is left out.
    """
    hours = {**record["gpu_hours_by_cause"], Cause.ITERATIONS: 0.0}
    # as the table of delays calls it, where the interval of the prediction is part of it
    hours[Cause.PREDICTION] += hours.pop(Cause.SLOWDOWN)
    names = sorted((name for name in hours if hours[name] > 0), key=lambda name: -hours[name])[
        :most
    ]
    spent = [hours[name] for name in names]
    bars = axes.barh(range(len(names)), spent, 0.6, color=COLORS[1])
    axes.bar_label(bars, [amount(number, 2) for number in spent], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("GPU-hours beyond the iterations")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    name_rows(axes, names)
