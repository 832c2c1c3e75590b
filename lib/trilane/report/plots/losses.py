"""The loss of trainings to explore, with gradient norm and learning rate, over what one chooses."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import Curve
from trilane.report.plots.interactive import Interactive, chart, rounded, tooltips
from trilane.report.plots.style import COLORS, plain
from trilane.utils.tables import Text

# a panel each: the column of a log, and the name of the y axis
PANELS = {
    "loss": ("lm_loss", "loss (nats per token)"),
    "norm": ("grad_norm", "gradient norm"),
    "rate": ("learning_rate", "learning rate"),
}
AXES = ("iterations", "samples", "tokens", "hours")
WIDEST, THINNEST = 6.0, 2.0  # pixels, of the first curve and of the last
FALL = 3.0  # a quantity that changes by this factor has a logarithmic axis
Row = dict[str, Any]


def explorer(curves: Mapping[str, Curve], points: int = 2400) -> Interactive | Text:
    """Loss, gradient norm and learning rate of the trainings, where their logs have them;
    validation losses as dots.

    The x axis can be chosen. Strong lines are smoothed over a hundredth of the lines, pale ones as
    printed; dashed lines are restarts. Each curve is thinner than the one below it, so that equal
    ones are all seen. Of a long log the lowest and highest lines are drawn, about `points` of all
    together.
    """
    curves = {plain(name): c for name, c in curves.items() if c.table["lm_loss"].notna().any()}
    if not curves:
        return Text("No log prints a loss.")
    axes = {name: curve.axes() for name, curve in curves.items()}
    across = [axis for axis in AXES if all(axis in own for own in axes.values())]
    most = max(200, points // len(curves))
    rows = []
    for name, curve in curves.items():
        own = {axis: axes[name][axis] for axis in across}
        rows.append({"run": name, **series(curve, own, most)})
    numbers = {axis: axis for axis in across}
    for key, (_, title) in PANELS.items():
        values = {value for row in rows for value in row[key] if value == value}
        if key == "loss" or len(values) > 1:
            numbers[key] = title
    panels = [_panel(key, rows, numbers, curves, axes) for key in PANELS if key in numbers]
    panels[0] = panels[0].add_params(alt.selection_point("only", fields=["run"], bind="legend"))
    choice = alt.binding_select(options=across, name="x axis ")
    figure = alt.concat(*panels, columns=3, data=alt.Data(values=rows))
    figure = figure.add_params(alt.param("across", value=across[0], bind=choice))
    lists: Any = [name for name, value in rows[0].items() if isinstance(value, list)]
    figure = figure.transform_flatten(lists).transform_calculate(at="datum[across]")
    return Interactive(figure.resolve_scale(color="shared"), _text(curves, rows))


def series(curve: Curve, axes: Mapping[str, np.ndarray], most: int) -> Row:
    """What is drawn of a training: a list for each axis, and of each panel's quantity one as
    printed and one smoothed.
    """
    table = curve.table.reindex(columns=["iteration", *(column for column, _ in PANELS.values())])
    kept = thinned(table[["lm_loss", "grad_norm"]].to_numpy(float), most)
    columns: dict[str, Any] = dict(axes)
    for key, (column, _) in PANELS.items():
        columns[key] = table[column]
        columns[f"{key}_smooth"] = smoothed(table[column], max(1, len(table) // 100))
    columns["rate_smooth"] = table["learning_rate"]
    row: Row = {"lines": len(table)}
    for name, values in columns.items():
        row[name] = [rounded(value, 6) for value in np.asarray(values, float)[kept]]
    return row


def smoothed(values: pd.Series, lines: int) -> pd.Series:
    """The exponential average of the values so far, each weighing 1 - 1/lines of the next; NaN
    where one is missing.

    Divided by the sum of the weights, so that it does not begin at zero (Kingma and Ba 2015,
    arXiv:1412.6980, sec. 3).
    """
    return values.ewm(alpha=1 / lines, ignore_na=True).mean().where(values.notna())


def thinned(table: np.ndarray, most: int) -> np.ndarray:
    """The numbers of the rows that are drawn, at most about `most`; all where there are no more.

    Of each of equally long ranges: its first row, and the lowest and the highest value of each
    column, so that no spike is lost.
    """
    rows = np.arange(len(table))
    if len(table) <= most:
        return rows
    kept = {0, len(table) - 1}
    low = np.where(np.isnan(table), np.inf, table)
    high = np.where(np.isnan(table), -np.inf, table)
    for part in np.array_split(rows, max(1, most // (1 + 2 * table.shape[1]))):
        kept |= {part[0], *part[low[part].argmin(axis=0)], *part[high[part].argmax(axis=0)]}
    return np.array(sorted(kept))


def _panel(
    key: str,
    rows: Sequence[Row],
    numbers: Mapping[str, str],
    curves: Mapping[str, Curve],
    axes: Mapping[str, Mapping[str, np.ndarray]],
) -> Any:
    """One quantity over the chosen axis: as printed, smoothed, restarts, the hovered point."""
    names = list(curves)
    colors = [COLORS[number % len(COLORS)] for number in range(len(names))]
    widths = np.linspace(WIDEST if len(names) > 1 else THINNEST, THINNEST, len(names)).tolist()
    # the title of an axis is fixed, that of a chart may depend on a control
    look: Any = {"orient": "bottom", "anchor": "middle", "fontSize": 11, "fontWeight": "normal"}
    title = alt.TitleParams(alt.expr("across"), **look)
    legend: Any = {"title": "training (a click shows it alone)", "titleLimit": 300}
    legend |= {"orient": "bottom", "columns": 4, "symbolOpacity": 1, "symbolStrokeWidth": 3}
    color = alt.Color(
        "run:N",
        scale=alt.Scale(domain=names, range=colors),
        legend=alt.Legend(symbolType="stroke", **legend),
    )
    width = alt.StrokeWidth("run:N", scale=alt.Scale(domain=names, range=widths), legend=None)
    base = chart(width=270, height=220, title=title).transform_filter(alt.param("only"))
    base = base.encode(x=_x_axis(), color=color)
    line = base.mark_line(tooltip=None).encode(y=_y_axis(key, rows), strokeWidth=width)
    near: Any = {"on": "pointerover", "clear": "pointerout", "empty": False}
    hovered = alt.selection_point(f"near_{key}", fields=["run", "iterations"], **near)
    points = base.mark_point(filled=True, size=120).encode(
        y=f"{key}:Q",
        tooltip=tooltips({"run": "training"}, numbers),
        opacity=alt.condition(hovered, alt.value(1), alt.value(0)),
    )
    layers = [line, *_marks(key, curves, axes), points.add_params(hovered)]
    if key != "rate":
        pale = base.mark_line(opacity=0.3, strokeWidth=0.8, tooltip=None).encode(y=f"{key}:Q")
        layers.insert(0, pale)
    return alt.layer(*layers)


def _x_axis() -> Any:
    # as a person writes it: 2 billion tokens is 2B, not 2G; a thousandth of an hour is no "1m"
    hours = "format(datum.value, '.3~g')"
    others = "replace(format(datum.value, '.3~s'), 'G', 'B')"
    axis = alt.Axis(labelExpr=f"across == 'hours' ? {hours} : {others}", tickCount=5)
    return alt.X("at:Q", title=None, scale=alt.Scale(zero=False, nice=False), axis=axis)


def _y_axis(key: str, rows: Sequence[Row]) -> Any:
    values = [value for row in rows for value in row[key] if value == value]
    scale: Any = {"type": "linear", "zero": False}
    # a linear axis would show little more than the first drop, or the largest spike
    if key != "rate" and max(values) > FALL * min(values) > 0:
        scale = {"type": "log"}
    y = alt.Y(f"{key}_smooth:Q", title=PANELS[key][1], scale=alt.Scale(nice=False, **scale))
    return y.axis(format=".3~g", tickCount=6)


def _marks(
    key: str, curves: Mapping[str, Curve], axes: Mapping[str, Mapping[str, np.ndarray]]
) -> list[Any]:
    """A dashed line at each restart, and in the panel of the loss a dot for each validation."""
    restarts = []
    validations = []
    for name, curve in curves.items():
        for restart in curve.restarts:
            row = {"run": name, "log": plain(restart.log), "first": restart.iteration}
            row |= {"again": restart.redone, **_place(axes[name], restart.iteration)}
            restarts.append(row)
        for held_out in curve.validation.to_dict("records"):
            place = _place(axes[name], held_out["iteration"])
            validations.append({"run": name, "value": held_out["lm_loss"], **place})
    marks = []
    if restarts:  # Vega-Lite warns of layers without data
        titles = {"run": "training", "first": "resumed at iteration", "log": "log"}
        titles["again"] = "lines trained again"
        rules = _over(restarts).mark_rule(strokeDash=[4, 3])
        marks.append(rules.encode(tooltip=tooltips(titles)))
    if validations and key == "loss":
        numbers = {"iterations": "iterations", "value": "validation loss"}
        dots = _over(validations).mark_point(filled=True, size=40, stroke="black", strokeWidth=0.7)
        marks.append(dots.encode(y="value:Q", tooltip=tooltips({"run": "training"}, numbers)))
    return marks


def _over(rows: Sequence[Row]) -> Any:
    marks = chart(rows).transform_filter(alt.param("only"))
    return marks.transform_calculate(at="datum[across]").encode(x="at:Q", color="run:N")


def _place(axes: Mapping[str, np.ndarray], iteration: float) -> Row:
    """An iteration on each axis; one that was trained again lies over the hours of the second
    time.
    """
    return {axis: np.interp(iteration, axes["iterations"], at) for axis, at in axes.items()}


def _text(curves: Mapping[str, Curve], rows: Sequence[Row]) -> str:
    """What is drawn, and of how many lines, for who cannot see it."""
    ends = []
    for name, curve in [*curves.items()][:6]:
        loss = curve.table["lm_loss"].dropna()
        ends.append(f"{name} {loss.iloc[0]:.4g} to {loss.iloc[-1]:.4g}")
    resumed = sum(len(curve.restarts) for curve in curves.values())
    lines = sum(row["lines"] for row in rows)
    drawn = sum(len(row["iterations"]) for row in rows)
    losses = f"Loss of {len(curves)} trainings, first to last: {'; '.join(ends)}"
    return f"{losses}. {resumed} restarts are marked. Of {lines:,} lines {drawn:,} are drawn."
