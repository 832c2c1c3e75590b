"""Figure of a forecast: the tokens trained over the dates, and what delays it."""

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.text import Text

from trilane.forecasting.forecast import Forecast
from trilane.report.plots.style import COLORS, LIMIT, figure, name_rows
from trilane.utils.numbers import amount

LETTERS = 9  # points, on paper


def page(found: Forecast, height: float = 1.35) -> Figure:
    """The fan of finish dates next to the days that causes add to the iterations; inches of a
    printed page.
    """
    drawn, (left, right) = figure(7.3, height, columns=2)
    _fan(left, found)
    _bars(right, found, most=max(4, int(2.5 * height)))
    for axes in (left, right):
        axes.tick_params(labelsize=LETTERS)  # of ticks that are made when it is drawn
    for text in drawn.findobj(Text):
        text.set_fontsize(LETTERS)
    return drawn


def _fan(axes: Axes, found: Forecast) -> None:
    """Bands from quantile to quantile over their dates; the dot is the run without
    interruptions, the line the end of the deadline's day.
    """
    start = date2num(found.request.start)
    tokens, days = found.fan
    low, lower, median, upper, high = days.T + start
    look = {"color": COLORS[0], "lw": 0}
    axes.fill_betweenx(tokens, low, high, alpha=0.25, label="90 % of the runs", **look)
    axes.fill_betweenx(tokens, lower, upper, alpha=0.45, label="50 % of them", **look)
    axes.plot(median, tokens, color=COLORS[0], label="median")
    ideal = start + found.work_s / 86400
    axes.plot(ideal, tokens[-1], "o", color=COLORS[2], label="no interruptions", clip_on=False)
    axes.set_ylabel("billion tokens")
    locator = AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    if found.request.deadline:
        axes.axvline(date2num(found.request.deadline) + 1, color=LIMIT, label="deadline")


def _bars(axes: Axes, found: Forecast, most: int) -> None:
    """Mean days that each cause of delay takes, the worst first."""
    delays = found.delays.columns
    names = delays["cause"][:most]
    days = delays["mean_days"][:most]
    bars = axes.barh(range(len(names)), days, 0.6, color=COLORS[1])
    axes.bar_label(bars, [amount(number, 2) for number in days], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("days beyond the iterations")
    axes.locator_params(axis="x", nbins=4)
    name_rows(axes, names)
