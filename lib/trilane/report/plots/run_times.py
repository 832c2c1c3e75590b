"""Figures of what an iteration takes: by phase as measured, by part as predicted, and one relative to the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from trilane.analysis.measure import Measurement
from trilane.analysis.phase_times import ORDER, phases
from trilane.analysis.recalibrate import NOTHING, Recalibration
from trilane.report.plots.interactive import Interactive
from trilane.report.plots.style import COLORS, INK, plain
from trilane.utils.numbers import with_bounds
from trilane.utils.tables import Text

UNTIMED = "covered by no timer"
IN_TIME = (
    "data",
    *(name for name in ORDER if name != "data"),
)  # the phases in the order in which an iteration begins them
WIDTH, ROW = 640, 46  # pixels: of the figure, and of a run in it
NAMED = 6  # runs that the text for screen readers names
# Names stand above their rows: next to them they would take the width of a phone.
ABOVE: dict[str, Any] = {
    "labelAlign": "left",
    "labelOffset": -17,
    "labelPadding": -4,
    "labelLimit": 420,
    "ticks": False,
}
ABOVE |= {"domain": False, "grid": False}


def phases_measured(measurements: Sequence[Measurement]) -> Interactive | Text:
    """An iteration of each run along its time by the log's own timers; what is left is covered by no timer.

    Each phase is the sum over the microbatches, which in truth alternate; they stand in the order of their beginnings.
    """
    timed = [(m.name, found, m.sec_per_it) for m in measurements if (found := phases(m.log, m.window))]
    if not timed:
        return Text("No log has timers of an iteration, so only the prediction splits it (below).")
    rows = [(name, {**found, UNTIMED: max(whole - sum(found.values()), 0.0)}) for name, found, whole in timed]
    return _timeline(rows, [*IN_TIME, UNTIMED], "phase (timers of the printing rank)", "Measured time of an iteration")


def phases_predicted(recalibration: Recalibration) -> Interactive | Text:
    """An iteration of each run by the parts of its prediction after calibration."""
    if not recalibration:
        return NOTHING
    pairs = zip(recalibration.runs, recalibration.after, strict=True)
    rows = [(m.name, vars(p.time)) for m, p in pairs]
    return _timeline(rows, list(rows[0][1]), "part", "Predicted time of an iteration, after calibration")


def _timeline(
    rows: Sequence[tuple[str, Mapping[str, float]]], order: list[str], legend: str, words: str
) -> Interactive:
    """A bar a run of its parts in that order, as percent of an iteration or in seconds."""
    values, names = list[dict[str, Any]](), [name for name in order if any(row.get(name) for _, row in rows)]
    for number, (run, parts) in enumerate(rows):
        whole, begin = sum(parts.values()), 0.0
        label = f"{plain(run)}, {whole:.3g} s"
        for name in (name for name in names if parts.get(name)):
            end = begin + parts[name]
            seconds = {"begin": begin, "end": end, "seconds": parts[name]}
            part = {"row": number, "run": label, "part": _words(name), "share": parts[name] / whole, "whole": whole}
            values.append({**part, **{key: float(f"{s:.6g}") for key, s in seconds.items()}})
            begin = end
    palette = alt.Scale(domain=[_words(name) for name in names], range=[*COLORS, "#b9c3cb"][: len(names)])
    percent = alt.param(name="percent", value=True, bind=alt.binding_checkbox(name="percent of an iteration "))
    picked = alt.selection_point(name="picked", fields=["part"], bind="legend")
    chart = (
        alt.Chart(alt.Data(values=values))
        .transform_calculate(
            a="percent ? 100 * datum.begin / datum.whole : datum.begin",
            b="percent ? 100 * datum.end / datum.whole : datum.end",
        )
        .mark_bar(height=18)
        .encode(
            x=alt.X("a:Q", title=None, scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=8)),
            x2="b:Q",
            y=alt.Y("run:N", title=None, sort=alt.EncodingSortField("row", op="min"), axis=alt.Axis(**ABOVE)),
            color=alt.Color("part:N", scale=palette, title=f"{legend}; a click picks it"),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.15)),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("part:N"),
                alt.Tooltip("seconds:Q", format=".3~g"),
                alt.Tooltip("share:Q", title="share of the iteration", format=".1%"),
            ],
        )
        .add_params(percent, picked)
        .properties(width=WIDTH, height=alt.Step(ROW), title=_axis_name("percent ? '% of an iteration' : 'seconds'"))
    )
    largest = [(run, max(parts, key=lambda name: parts[name])) for run, parts in rows[:NAMED]]
    most = "; ".join(f"{plain(run)}: {_words(name)}" for run, name in largest)
    return Interactive(chart, f"{words} of {len(rows)} runs by {legend}. The largest: {most}.")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _axis_name(expression: str) -> Any:
    """The name of the x axis where it depends on a choice: an axis has a fixed title, a figure need not."""
    return alt.TitleParams(alt.expr(expression), orient="bottom", anchor="middle", fontSize=11)


def predicted_over_measured(recalibration: Recalibration) -> Interactive | Text:
    """Predicted / measured seconds per iteration with its 90 % interval, a row a run, before and after calibration.

    On the dashed line a prediction is exact.
    """
    if not recalibration:
        return NOTHING
    when = {"before these runs": recalibration.before, "after them": recalibration.after}
    values = list[dict[str, Any]]()
    for number, m in enumerate(recalibration.runs):
        for name, found in when.items():
            p = found[number]
            ratios = {"ratio": p.sec_per_it, "low": p.sec_lo, "high": p.sec_hi}
            inside = "yes" if p.sec_lo <= m.sec_per_it <= p.sec_hi else "no"
            given = {"row": number, "run": f"{plain(m.name)}, {m.sec_per_it:.3g} s", "when": name, "inside": inside}
            seconds = f"{with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)} s"
            given |= {"predicted": seconds, "measured": f"{m.sec_per_it:.3g} s"}
            values.append({**given, **{key: float(f"{s / m.sec_per_it:.5g}") for key, s in ratios.items()}})
    text = "Predicted over measured seconds of {} runs: {}. Before them {} of {} lay inside the 90 % interval."
    spans = [f"{name} {min(v):.3g} to {max(v):.3g}" for name, v in _ratios(values).items()]
    return Interactive(
        _ratio_chart(values, list(when)),
        text.format(len(recalibration.runs), ", ".join(spans), recalibration.inside, len(recalibration.runs)),
    )


def _ratios(values: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    names = dict.fromkeys(v["when"] for v in values)
    return {name: [v["ratio"] for v in values if v["when"] == name] for name in names}


def _ratio_chart(values: list[dict[str, Any]], names: list[str]) -> Any:
    """The intervals as bars with a dot, the exact ratio as a dashed line; a diamond lies outside."""
    picked = alt.selection_point(name="picked", fields=["when"], bind="legend")
    rows = alt.Y("run:N", title=None, sort=alt.EncodingSortField("row", op="min"), axis=alt.Axis(**ABOVE))
    palette = alt.Scale(domain=names, range=[COLORS[4], COLORS[0]])
    fields = ("run", "when", "predicted", "measured", "ratio", "inside")
    titles = {"ratio": "predicted / measured", "inside": "measured is inside the 90 % interval"}
    kinds: dict[str, Any] = {"ratio": "quantitative"}
    tooltips = [alt.Tooltip(f, title=titles.get(f, f), type=kinds.get(f, "nominal")) for f in fields]
    base = alt.Chart(alt.Data(values=values)).encode(
        y=rows,
        yOffset=alt.YOffset("when:N", sort=names),
        color=alt.Color("when:N", scale=palette, title="prediction; a click picks it"),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.12)),
        tooltip=tooltips,
    )
    x = alt.X("low:Q", title="predicted / measured (bars: 90 % interval)", scale=alt.Scale(zero=True))
    bars = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q").add_params(picked)
    dots = base.mark_point(size=70, filled=True, strokeWidth=2).encode(x="ratio:Q")
    shape = alt.Shape("inside:N", scale=alt.Scale(domain=["yes", "no"], range=["circle", "diamond"]), title="inside it")
    exact = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3], color=INK, tooltip=None)
    return alt.layer(exact.encode(x="one:Q"), bars, dots.encode(shape=shape)).properties(
        width=WIDTH, height=alt.Step(ROW, **{"for": "position"})
    )
