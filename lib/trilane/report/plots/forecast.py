"""Figures of a forecast: its jobs, the tokens trained over the dates, and what costs GPU-hours."""

from collections.abc import Mapping
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


def gantt(found: Forecast) -> Figure:
    """The jobs of the expected run over the dates, a bar each: batch size above, nodes below."""
    record, chains, run = found.record, found.record["schedule"], found.expected
    longest = found.request.risks.job_hours
    made, (above, below) = figure(8.6, 4.2, rows=2)
    above.sharex(below)
    ends = np.array([0.0, *run.reached_s[0]]) / 86400
    above.step(
        ends + _start(record),
        [*found.pieces[0], found.pieces[0][-1]],
        where="post",
        color=COLORS[0],
    )
    colors = dict[str, str]()
    for chain in chains:
        edges = np.append(
            np.arange(chain["from_day"], chain["to_day"], longest / 24), chain["to_day"]
        )
        kind = f"DP {chain['dp']}, MBS {chain['mbs']}"
        label = None if kind in colors else kind
        look: Any = {
            "color": colors.setdefault(kind, COLORS[len(colors) % len(COLORS)]),
            "label": label,
        }
        below.bar(
            edges[:-1] + _start(record),
            chain["nodes"],
            np.diff(edges),
            ec="white",
            lw=0.5,
            align="edge",
            **look,
        )
    _over_dates(below, record)
    jobs = sum(chain["jobs"] for chain in chains)
    heading = (
        f"{jobs} job{'s' * (jobs > 1)} of at most {amount(longest)} hours, in the expected run"
    )
    finished(above, heading, ylabel="batch size (sequences)", ylim=(0, None))
    finished(below, "", xlabel="date (UTC)", ylabel="nodes", ylim=(0, None))
    return made


def page(found: Forecast, height: float = 1.35) -> Figure:
    """The fan of finish dates next to the GPU-hours that causes add to the iterations; inches of a
    printed page.
    """
    made, (left, right) = figure(7.3, height, columns=2)
    made.set_dpi(220)  # of paper; a screen shows it smaller
    _fan(left, found.record)
    _bars(right, dict([*_causes(found.record).items()][: max(4, int(2.5 * height))]))
    left.set_ylabel("billion tokens")
    right.set_xlabel("GPU-hours beyond the iterations")
    for axes in (left, right):
        axes.tick_params(labelsize=9)  # of ticks that are made when it is drawn
    for text in made.findobj(Text):
        text.set_fontsize(9)
    return made


def _start(record: Json) -> float:
    """The first day as matplotlib counts days."""
    return float(date2num(date.fromisoformat(record["start"])))


def _over_dates(axes: Axes, record: Json) -> None:
    """Dates on the x axis, and the end of the deadline's day as a line, where there is a deadline."""
    locator = AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    if record["deadline"]:
        end = float(date2num(date.fromisoformat(record["deadline"]))) + 1
        axes.axvline(end, color=LIMIT, label="deadline")


def _fan(axes: Axes, record: Json) -> None:
    """Bands from quantile to quantile over their dates; the dot is the run without interruptions."""
    tokens, days = record["fan"]["tokens"], np.array(record["fan"]["days"]).T + _start(record)
    for low, high, alpha, words in ((0, 4, 0.25, "90 % of the runs"), (1, 3, 0.45, "50 % of them")):
        axes.fill_betweenx(
            tokens, days[low], days[high], color=COLORS[0], alpha=alpha, lw=0, label=words
        )
    axes.plot(days[2], tokens, color=COLORS[0], label="median")
    axes.plot(
        record["ideal"]["days"] + _start(record),
        tokens[-1],
        "o",
        color=COLORS[2],
        label="no interruptions",
    )
    _over_dates(axes, record)


def _bars(axes: Axes, rows: Mapping[str, float]) -> None:
    """GPU-hours of each cause."""
    drawn = axes.barh(range(len(rows)), [*rows.values()], 0.6, color=COLORS[1])
    axes.bar_label(drawn, [amount(hours, 2) for hours in rows.values()], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    name_rows(axes, [*rows])


def _causes(record: Json) -> dict[str, float]:
    """GPU-hours that each cause adds to the iterations, the most first; what adds none is left out."""
    hours = {**record["gpu_hours_by_cause"], Cause.ITERATIONS: 0.0}
    # as the table of delays calls it, where the interval of the prediction is part of it
    hours[Cause.PREDICTION] += hours.pop(Cause.SLOWDOWN)
    return {
        name: spent for name, spent in sorted(hours.items(), key=lambda pair: -pair[1]) if spent > 0
    }
