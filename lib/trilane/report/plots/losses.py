"""The loss of trainings to explore, with gradient norm and learning rate, over what one chooses."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import Curve
from trilane.analysis.steady_state import interval
from trilane.report.plots.interactive import Interactive, chart, rounded, tooltips
from trilane.report.plots.style import COLORS, plain
from trilane.utils.tables import Text

# a panel each: the column of a log, and the name of the y axis
PANELS = {"loss": ("lm_loss", "loss (nats per token)"), "norm": ("grad_norm", "gradient norm")}
PANELS |= {"rate": ("learning_rate", "learning rate")}
Row = dict[str, Any]


def explorer(curves: Mapping[str, Curve], points: int = 2400) -> Interactive | Text:
    """Loss, gradient norm and learning rate of the trainings, where their logs have them;
    validation losses as dots.

    To choose: the x axis, and how many lines a value is smoothed over (exponentially). Dashed lines
    are restarts; pale are the lines as printed, and what was trained again, as it first was. A
    quantity that changes by a factor of 3 has a logarithmic axis. Of a long log the lowest and
    highest lines are drawn, about `points` of all together.
    """
    curves = {plain(name): c for name, c in curves.items() if c.table["lm_loss"].notna().any()}
    if not curves:
        return Text("No log prints a loss.")
    axes = {name: c.axes() for name, c in curves.items()}
    across = [
        x
        for x in ("iterations", "samples", "tokens", "hours")
        if all(x in own for own in axes.values())
    ]
    axes = {name: {x: own[x] for x in across} for name, own in axes.items()}
    longest = max(len(c.table) for c in curves.values())
    levels = [n for n in (1, 5, 20, 100, 500) if n == 1 or 3 * n <= longest]
    rows, most = list[Row](), max(200, points // len(curves))
    for name, curve in curves.items():
        rows += [{"run": name, **drawn} for drawn in pieces(curve, axes[name], levels, most)]
    shown = [
        key
        for key in PANELS
        if key == "loss" or len({v for r in rows for v in r[f"{key}0"] if v == v}) > 1
    ]
    scale = alt.Scale(domain=[*curves], range=[COLORS[i % len(COLORS)] for i in range(len(curves))])
    numbers = {**{x: x for x in across}, **{f"{key}0": PANELS[key][1] for key in shown}}
    dashed = [*curves] if coincide(curves) else []
    panels = [_panel(key, rows, scale, numbers, _marks(key, curves, axes), dashed) for key in shown]
    panels[0] = panels[0].add_params(alt.selection_point("only", fields=["run"], bind="legend"))
    lists: Any = [name for name, value in rows[0].items() if isinstance(value, list)]
    whole = alt.concat(*panels, columns=3, data=alt.Data(values=rows)).add_params(
        *_controls(curves, across, levels)
    )
    whole = whole.transform_flatten(lists).transform_calculate(at="datum[across]")
    return Interactive(whole.resolve_scale(color="shared"), _text(curves, rows))


def _controls(
    curves: Mapping[str, Curve], across: Sequence[str], levels: Sequence[int]
) -> Iterator[Any]:
    longest = max(int(c.table["lm_loss"].notna().sum()) for c in curves.values())
    yield alt.param(
        "across", value=across[0], bind=alt.binding_select(options=across, name="x axis ")
    )
    labels = ["none" if n == 1 else f"over {n} lines" for n in levels]
    first = max(i for i, n in enumerate(levels) if n == 1 or 100 * n <= longest)
    choice = alt.binding_select(options=[*range(len(levels))], labels=labels, name="smoothing ")
    yield alt.param("level", value=first, bind=choice)


def coincide(curves: Mapping[str, Curve]) -> bool:
    """Whether curves lie on each other: the last drawn would hide the others, which would look like
    missing runs.
    """
    ends = [float(c.table["lm_loss"].dropna().iloc[-1]) for c in curves.values()]
    return len(ends) > 1 and max(ends) - min(ends) < 0.05


def pieces(curve: Curve, axes: Row, levels: Sequence[int], most: int) -> Iterator[Row]:
    """The training's columns, piece 0, and those of each stretch that was trained again, as it was
    the first time.
    """
    again = curve.redone["iteration"].to_numpy(float) if len(curve.redone) else np.empty(0)
    new = np.flatnonzero((np.diff(again) <= 0) | (np.diff(again) > 1.5 * interval(again))) + 1
    parts = [curve.redone.iloc[rows] for rows in np.split(np.arange(len(again)), new) if len(rows)]
    for piece, table in enumerate([curve.table, *parts]):
        table = table.reindex(columns=["iteration", *(column for column, _ in PANELS.values())])
        kept = thinned(
            table[["lm_loss", "grad_norm"]].to_numpy(float), max(50, most // 4) if piece else most
        )
        found = places(axes, table["iteration"])
        for key, (column, _) in PANELS.items():
            found |= {
                f"{key}{i}": smoothed(table[column], n)
                for i, n in enumerate(levels)
                if i == 0 or key != "rate"
            }
        lists = {
            name: [rounded(v, 6) for v in np.asarray(values, float)[kept]]
            for name, values in found.items()
        }
        yield {"piece": piece, "lines": len(table), **lists}


def places(axes: Row, iterations: Any) -> Row:
    """These iterations on each axis; those that were trained again lie over the hours of the second
    time.
    """
    return {x: np.interp(iterations, axes["iterations"], values) for x, values in axes.items()}


def smoothed(values: pd.Series, lines: int) -> pd.Series:
    """The exponential average of the values so far, each weighing 1 - 1/lines of the next; NaN
    where one is missing.

    Divided by the sum of the weights, so that it does not begin at zero (Kingma and Ba 2015,
    arXiv:1412.6980, sec. 3).
    """
    # of the whole log, before it is thinned: Vega's window has a fixed width, and would average
    # extremes
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
    low, high = np.where(np.isnan(table), np.inf, table), np.where(np.isnan(table), -np.inf, table)
    for part in np.array_split(rows, max(1, most // (1 + 2 * table.shape[1]))):
        kept |= {part[0], *part[low[part].argmin(axis=0)], *part[high[part].argmax(axis=0)]}
    return np.array(sorted(kept))


def _panel(
    key: str,
    rows: Sequence[Row],
    scale: alt.Scale,
    numbers: Row,
    marks: Iterable[Any],
    dashed: Sequence[str],
) -> Any:
    """One quantity over the chosen axis: as printed, smoothed, what was trained again, restarts,
    the hovered point.

    The runs `dashed`, whose curves coincide, take turns along the line.
    """
    level = f"'{key}' + level" if key != "rate" else "'rate0'"
    # the title of an axis is fixed, that of a chart may depend on a control
    name = alt.TitleParams(
        alt.expr("across"), orient="bottom", anchor="middle", fontSize=11, fontWeight="normal"
    )
    base = chart(width=270, height=220, title=name).transform_filter(alt.param("only"))
    base = base.transform_calculate(printed=f"datum['{key}0']", value=f"datum[{level}]")
    legend: Any = {
        "title": "training (a click shows it alone)",
        "titleLimit": 300,
        "orient": "bottom",
        "columns": 4,
    }
    legend |= {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 3}
    x, y = _axes(key, rows)
    base = base.encode(
        x=x, color=alt.Color("run:N", scale=scale, legend=alt.Legend(**legend)), detail="piece:N"
    )
    whole = base.transform_filter("datum.piece == 0").encode(y=y)
    near: Any = {
        "fields": ["run", "iterations"],
        "on": "pointerover",
        "clear": "pointerout",
        "empty": False,
    }
    hovered = alt.selection_point(f"near_{key}", **near)
    points = whole.mark_point(filled=True, size=120).encode(
        tooltip=tooltips({"run": "training"}, numbers),
        opacity=alt.condition(hovered, alt.value(1), alt.value(0)),
    )
    return alt.layer(
        base.mark_line(opacity=0.3, strokeWidth=0.8, tooltip=None).encode(y="printed:Q"),
        *(
            whole.mark_line(strokeWidth=2.2, tooltip=None, **look)
            for look, whole in _turns(whole, dashed)
        ),
        *marks,
        points.add_params(hovered),
    )


def _turns(whole: Any, dashed: Sequence[str]) -> Iterator[tuple[Row, Any]]:
    """The lines: all alike, or a dash of each run in turn, so that of equal curves each is seen."""
    if not dashed:
        yield {}, whole
    for turn, name in enumerate(dashed):
        look = {"strokeDash": [9, 9 * (len(dashed) - 1)], "strokeDashOffset": -9 * turn}
        yield look, whole.transform_filter(alt.FieldEqualPredicate(field="run", equal=name))


def _axes(key: str, rows: Sequence[Row]) -> tuple[Any, Any]:
    """The chosen axis to the right, and that of the quantity upwards."""
    # as a person writes it: 2 billion tokens is 2B, not 2G; a thousandth of an hour is no "1m"
    ticks = "across == 'hours' ? format(datum.value, '.3~g') : replace(format(datum.value, '.3~s'), 'G', 'B')"
    x = alt.X(
        "at:Q",
        title=None,
        scale=alt.Scale(zero=False, nice=False),
        axis=alt.Axis(labelExpr=ticks, tickCount=5),
    )
    known = [v for row in rows for v in row[f"{key}0"] if v == v]
    # a linear axis would show little more than the first drop, or the largest spike
    is_log = key != "rate" and max(known) > 3 * min(known) > 0
    scale: Any = {"type": "log"} if is_log else {"type": "linear", "zero": False}
    y = alt.Y("value:Q", title=PANELS[key][1], scale=alt.Scale(nice=False, **scale))
    return x, y.axis(format=".3~g", tickCount=6)


def _marks(key: str, curves: Mapping[str, Curve], axes: Mapping[str, Row]) -> Iterator[Any]:
    """A dashed line at each restart, and in the panel of the loss a dot for each validation; none
    without data.
    """
    restarts, held_out = list[Row](), list[Row]()
    for name, curve in curves.items():
        for r in curve.restarts:
            row = {"run": name, "log": plain(r.log), "first": r.iteration, "again": r.redone}
            restarts.append({**row, **places(axes[name], r.iteration)})
        for row in curve.validation.to_dict("records") if key == "loss" else ():
            held_out.append(
                {"run": name, "value": row["lm_loss"], **places(axes[name], row["iteration"])}
            )
    titles = {
        "run": "training",
        "first": "resumed at iteration",
        "again": "lines trained again",
        "log": "log",
    }
    for rows in filter(None, (restarts, held_out)):  # Vega-Lite warns of layers without data
        base = (
            chart(rows).transform_filter(alt.param("only")).transform_calculate(at="datum[across]")
        )
        base = base.encode(x="at:Q", color="run:N")
        if rows is restarts:
            yield base.mark_rule(strokeDash=[4, 3]).encode(tooltip=tooltips(titles))
        else:
            yield base.mark_line(strokeDash=[2, 2], strokeWidth=1, tooltip=None).encode(y="value:Q")
            numbers = {"iterations": "iterations", "value": "validation loss"}
            dots = base.mark_point(filled=True, size=40, stroke="black", strokeWidth=0.7)
            yield dots.encode(y="value:Q", tooltip=tooltips({"run": "training"}, numbers))


def _text(curves: Mapping[str, Curve], rows: Sequence[Row]) -> str:
    """What is drawn, and of how many lines, for who cannot see it."""
    losses = {name: c.table["lm_loss"].dropna() for name, c in [*curves.items()][:6]}
    ends = "; ".join(
        f"{name} {loss.iloc[0]:.4g} to {loss.iloc[-1]:.4g}" for name, loss in losses.items()
    )
    resumed, lines = (
        sum(len(c.restarts) for c in curves.values()),
        sum(row["lines"] for row in rows),
    )
    text = (
        f"Loss of {len(curves)} trainings, first to last: {ends}. {resumed} restarts are marked. "
    )
    return f"{text}Of {lines:,} lines {sum(len(row['iterations']) for row in rows):,} are drawn."
