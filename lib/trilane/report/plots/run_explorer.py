"""The figure of a study's trainings to explore: loss and gradient norm, smoothed or not, over what one chooses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import altair as alt

from trilane.analysis.loss_curve import Curve
from trilane.report.plots.interactive import Interactive
from trilane.report.plots.run_explorer_rows import COLUMN, restarts_of, series_of, validation_of, varies, widths
from trilane.report.plots.style import COLORS, plain
from trilane.utils.tables import Text

SMOOTHED = (1, 5, 20, 100, 500)  # lines that a smoothed value stands for
POINTS = 2400  # of all trainings together, about: a report stays small, and a screen has no more
WIDTH, HEIGHT = 400, 250
SERIES = {"loss": "loss (nats per token)", "norm": "gradient norm", "rate": "learning rate"}  # panel: its y axis
ONLY: Any = {"param": "only"}  # the training that was clicked in the legend
LEGEND: Any = {"title": "training (a click shows it alone)", "titleLimit": 300, "orient": "bottom", "columns": 2}
LEGEND |= {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 3}
NAMED = 6  # trainings that the text names
UNITS = {"iterations": ",", "samples": ",", "tokens": ",", "hours": ".4~g"}  # and how a tooltip writes the number
# A position as a person writes it: 2 billion tokens is 2B, not 2G; a thousandth of an hour is no "1m".
TICKS = "across == 'hours' ? format(datum.value, '.3~g') : replace(format(datum.value, '.3~s'), 'G', 'B')"


def explorer(curves: Mapping[str, Curve]) -> Interactive | Text:
    """Loss, gradient norm and learning rate of the trainings, where their logs have them; validation losses as dots.

    To choose: what lies on the x axis, how many lines a value is smoothed over (exponentially; the lines as printed
    stay behind it, pale), and a logarithmic axis. A click on a name in the legend shows that training alone. Dashed
    lines are restarts; pale, too, is what was trained again, as it first was. A long log is drawn by its lowest
    and highest lines (see `thinned`), and the text has how many.
    """
    curves = {plain(name): c for name, c in curves.items() if c.table["lm_loss"].notna().any()}
    if not curves:
        return Text("No log prints a loss.")
    across = [x for x in UNITS if all(x in c.axes() for c in curves.values())]
    longest = max(len(c.table) for c in curves.values())
    levels = [n for n in SMOOTHED if n == 1 or 3 * n <= longest]
    most = max(200, POINTS // len(curves))
    series = [
        s
        for (name, curve), w in zip(curves.items(), widths(curves), strict=True)
        for s in series_of(name, curve, w, levels, most)
    ]
    shown = [key for key in SERIES if key == "loss" or any(varies(c.table, COLUMN[key]) for c in curves.values())]
    picks = _picks(across, levels, longest, _falls_far(curves))
    columns = [
        name for name in series[0] if isinstance(series[0][name], list) and (name in across or name[:-1] in shown)
    ]
    columns = [name for name in columns if name != "iterations"]
    given = [{name: s[name] for name in ("run", "piece", "thick", "iterations", *columns)} for s in series]
    marks = _marks(restarts_of(curves))
    held_out = validation_of(curves)
    panels = [_panel(key, given, list(curves), marks + _dots(held_out) * (key == "loss")) for key in shown]
    panels[0] = panels[0].add_params(alt.selection_point(name=ONLY["param"], fields=["run"], bind="legend"))
    chart = alt.concat(*panels, columns=2, data=alt.Data(values=given)).add_params(*picks)
    chart = chart.transform_flatten(["iterations", *columns]).transform_calculate(at="datum[across]")
    chart = chart.resolve_scale(color="shared", strokeWidth="shared")
    return Interactive(chart, _text(curves, series))


def _falls_far(curves: Mapping[str, Curve]) -> bool:
    """Whether a linear axis would show little more than the first drop of the loss."""
    losses = [c.table["lm_loss"].dropna() for c in curves.values()]
    return any(loss.iloc[0] > 3 * loss.min() > 0 for loss in losses)


def _picks(across: Sequence[str], levels: Sequence[int], longest: int, as_log: bool) -> list[Any]:
    labels = ["none" if n == 1 else f"over {n} lines" for n in levels]
    chosen = max(i for i, n in enumerate(levels) if n == 1 or 100 * n <= longest)
    smooth = alt.binding_select(options=list(range(len(levels))), labels=labels, name="smoothing ")
    found: list[Any] = [
        alt.param(name="across", value=across[0], bind=alt.binding_select(options=list(across), name="x axis ")),
        alt.param(name="as_log", value=as_log, bind=alt.binding_checkbox(name="logarithmic loss and norm ")),
    ]
    return [*found, alt.param(name="level", value=chosen, bind=smooth)] if len(levels) > 1 else found


def _value(key: str, column: str) -> str:
    """Vega's expression of a quantity as the axis has it: its logarithm where that is ticked; null is a gap."""
    if key == "rate":
        return f"datum[{column}]"
    return (
        f"!isValid(datum[{column}]) || (as_log && datum[{column}] <= 0) ? null "
        f": as_log ? log(datum[{column}]) / LN10 : datum[{column}]"
    )


def _panel(key: str, series: Sequence[Mapping[str, Any]], names: Sequence[str], marks: Sequence[Any]) -> Any:
    """One quantity over the chosen axis: as printed, smoothed, what was trained again, restarts, the hovered point."""
    level = f"'{key}' + level" if f"{key}1" in series[0] else f"'{key}0'"
    base = alt.Chart().transform_filter(ONLY).transform_calculate(printed=_value(key, f"'{key}0'"))
    base = base.transform_calculate(value=_value(key, level)).transform_filter("isValid(datum.at)")
    whole = base.transform_filter("datum.piece == 0")
    palette = alt.Scale(domain=list(names), range=_colours(len(names)))
    colour, (x, y) = alt.Color("run:N", scale=palette, legend=alt.Legend(**LEGEND)), _axes(key, series)
    common = {"x": x, "color": colour, "detail": "piece:N", "order": alt.Order("at:Q")}
    fields, width = ["run", "iterations"], alt.StrokeWidth("thick:Q", scale=None)
    near = alt.selection_point(name=f"near_{key}", fields=fields, on="pointerover", clear="pointerout", empty=False)
    points = whole.mark_point(filled=True, size=120).encode(
        x=x, y=y, color=colour, tooltip=_tooltips(series), opacity=alt.condition(near, alt.value(1), alt.value(0))
    )
    layers = [
        base.mark_line(opacity=0.3, strokeWidth=0.8, tooltip=None).encode(y="printed:Q", **common),
        whole.mark_line(tooltip=None).encode(y=y, strokeWidth=width, **common),
        *marks,
        points.add_params(near),
    ]
    title = alt.TitleParams(alt.expr("across"), orient="bottom", anchor="middle", fontSize=11, fontWeight="normal")
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


def _axes(key: str, series: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """The chosen axis to the right, and that of the quantity upwards."""
    number, steps = "datum.value", cast(Any, alt.Undefined)
    if key != "rate":
        number, steps = (
            "as_log ? pow(10, datum.value) : datum.value",
            alt.expr(f"as_log ? {_decades(series, key)} : null"),
        )
    free, ticks = alt.Scale(zero=False, nice=False), f"format({number}, '.3~g')"
    x = alt.X("at:Q", title=None, scale=free, axis=alt.Axis(labelExpr=TICKS, tickCount=5))
    axis = alt.Axis(labelExpr=ticks, tickCount=6, values=steps)
    return x, alt.Y("value:Q", title=SERIES[key], scale=free, axis=axis)


def _tooltips(series: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Of the hovered point: training, its place on every axis, each quantity as printed."""
    places = [alt.Tooltip(f"{name}:Q", format=UNITS[name]) for name in UNITS if name in series[0]]
    printed = [(f"{name}0", words) for name, words in SERIES.items() if f"{name}0" in series[0]]
    values = [alt.Tooltip(f"{field}:Q", title=words, format=".5~g") for field, words in printed]
    return [alt.Tooltip("run:N", title="training"), *places, *values]


def _decades(series: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The decimal logarithms of 1, 2, 3, 5, 10, ... that a logarithmic axis names."""
    known = [v for s in series for v in s[f"{key}0"] if v is not None and v > 0] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    steps = (1, 2, 3, 5) if high - low <= 2 else (1, 3) if high - low <= 4 else (1,)
    return [round(decade + math.log10(step), 6) for decade in range(low, high + 1) for step in steps]


def _marks(restarts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A dashed line at each restart, none where there is none."""
    tooltips = [alt.Tooltip(f"{name}:N") for name in ("run", "resumed", "again", "log")]
    drawn = alt.Chart(alt.Data(values=list(restarts))).transform_calculate(at="datum[across]")
    rule = drawn.mark_rule(strokeDash=[4, 3], strokeWidth=1.2)
    seen: Any = alt.condition(ONLY, alt.value(1), alt.value(0))
    return [rule.encode(x="at:Q", color="run:N", tooltip=tooltips, opacity=seen)] if restarts else []


def _dots(evaluations: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The validation losses, joined by a thin line; none where there is none."""
    names = [alt.Tooltip("run:N", title="training"), alt.Tooltip("iterations:Q", format=",")]
    tooltips = [*names, alt.Tooltip("validation:Q", title="validation loss", format=".5~g")]
    drawn = alt.Chart(alt.Data(values=list(evaluations))).transform_filter(ONLY)
    drawn = drawn.transform_calculate(at="datum[across]", value=_value("loss", "'validation'"))
    common = {"x": "at:Q", "y": "value:Q", "color": "run:N"}
    line = drawn.mark_line(strokeDash=[2, 2], strokeWidth=1, tooltip=None).encode(**common)
    dots = drawn.mark_point(filled=True, size=40, stroke="black", strokeWidth=0.7).encode(tooltip=tooltips, **common)
    return [line, dots] if evaluations else []


def _colours(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _text(curves: Mapping[str, Curve], series: Sequence[Mapping[str, Any]]) -> str:
    """What is drawn, and of how many lines, for who cannot see it and for who must know what was left out."""
    ends = [(name, c.table["lm_loss"].dropna()) for name, c in curves.items()]
    losses = "; ".join(f"{name} {loss.iloc[0]:.4g} to {loss.iloc[-1]:.4g}" for name, loss in ends[:NAMED])
    lines, points = sum(s["lines"] for s in series), sum(len(s["iterations"]) for s in series)
    resumed = sum(len(c.restarts) for c in curves.values())
    thin = (
        f" Of {lines:,} lines {points:,} are drawn: the lowest and highest of each stretch." if points < lines else ""
    )
    more = f" and {len(ends) - NAMED} more" if len(ends) > NAMED else ""
    last = {name: c.validation["lm_loss"].iloc[-1] for name, c in curves.items() if len(c.validation)}
    words = "; ".join(f"{name} {loss:.4g}" for name, loss in list(last.items())[:NAMED])
    held_out = f" Dots are validation losses, the last of each: {words}." if last else ""
    found = f"Loss of {len(ends)} trainings, first to last: {losses}{more}. {resumed} restarts are marked."
    return f"{found}{held_out}{thin}"
