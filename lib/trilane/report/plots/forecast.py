"""Figures of a forecast to explore: the tokens trained over the dates with their spread, and what costs GPU-hours."""

import textwrap
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import altair as alt

from trilane.forecasting.record import Described, Record
from trilane.report.plots.interactive import CONFIG, Interactive
from trilane.report.plots.style import COLORS, INK, LIMIT
from trilane.utils.numbers import amount
from trilane.utils.tables import Text
from trilane.utils.validation import shipped_json

WIDTH = 640
CHARS = 46  # of a line of text in a figure
EARLIER = Text("calendar.json is of an earlier version: run 07_calendar again for its figures.")
MEASURES = {"hours": "GPU-hours", "mean": "days on average", "high": "days that one run in 20 exceeds"}
UTC_AXIS: dict[str, Any] = {"type": "temporal", "scale": alt.Scale(type="utc", nice=False)}
DATES = alt.Axis(format="%Y-%m-%d", tickCount=5, labelOverlap=True)
HOURS = alt.Axis(format="%d, %H:%M", tickCount=5, labelOverlap=True)


def milliseconds(start: str, seconds: float) -> float:
    """Milliseconds since 1970, which Vega draws, of seconds after midnight (UTC) of the first day."""
    begin = datetime.combine(date.fromisoformat(start), time(), UTC)
    return round((begin.timestamp() + seconds) * 1000)


def day(start: str, days: float, exact: bool) -> str:
    """That day as a person reads it, with the time where the run is short."""
    moment = datetime.combine(date.fromisoformat(start), time()) + timedelta(days=days)
    return moment.strftime("%Y-%m-%d %H:%M" if exact else "%Y-%m-%d")


def deadline(record: Record) -> list[Any]:
    """The end of the deadline's day as a line, none where there is no deadline."""
    if not record["deadline"]:
        return []
    values = [{"end": milliseconds(record["deadline"], 86400), "deadline": record["deadline"]}]
    rule = alt.Chart(alt.Data(values=values)).mark_rule(color=LIMIT, strokeWidth=1.6)
    return [rule.encode(x=alt.X("end", **UTC_AXIS), tooltip="deadline:N")]


def card(data: Any, picked: Any, lines: int) -> Any:
    """What was picked, in words."""
    words = (
        alt.Chart(data)
        .transform_filter(picked)
        .mark_text(align="left", baseline="top", lineBreak="\n", fontSize=12, lineHeight=16, tooltip=None)
    )
    return words.encode(x=alt.value(0), y=alt.value(4), text="card:N").properties(width=400, height=16 * lines + 8)


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, CHARS) or [""]


def fan(found: Described, width: int = WIDTH, height: int = 240) -> Interactive | Text:
    """Tokens trained over the dates: the median, 50 % and 90 % of the simulated runs, and the deadline."""
    record = found.record
    if "fan" not in record:
        return EARLIER
    finish = {name: day[:10] for name, day in record["finish"].items()}
    text = (
        f"Tokens trained over the dates: all by {finish['p50']}, by {finish['p05']} to {finish['p95']} in 9 of 10 runs"
    )
    limit = f"; the deadline is {record['deadline']}" if record["deadline"] else ""
    return Interactive(_fan(record).properties(width=width, height=height), f"{text}{limit}.")


def _fan(record: Record) -> Any:
    """Bands from quantile to quantile; the tooltip of a row has the dates of its tokens."""
    start, exact, values = record["start"], record["days"] < 3, list[Record]()
    for tokens, days in zip(record["fan"]["tokens"], record["fan"]["days"], strict=True):
        ends = {f"q{i}": milliseconds(start, 86400 * d) for i, d in enumerate(days)}
        at = [day(start, d, exact) for d in days]
        words = {"nine": f"{at[0]} to {at[4]}", "half": f"{at[1]} to {at[3]}", "median": at[2]}
        values.append({"tokens": float(f"{tokens:.6g}"), **ends, **words})
    base = alt.Chart(alt.Data(values=values)).encode(y=alt.Y("tokens:Q", title="billion tokens"))
    bands = [
        base.mark_area(orient="horizontal", color=COLORS[0], opacity=opacity, tooltip=None).encode(
            x=alt.X(a, title="date (UTC)", axis=HOURS if exact else DATES, **UTC_AXIS), x2=b
        )
        for a, b, opacity in (("q0", "q4", 0.2), ("q1", "q3", 0.35))
    ]
    middle = base.mark_line(color=COLORS[0], tooltip=None).encode(x=alt.X("q2", **UTC_AXIS), order="tokens:Q")
    near = alt.selection_point(name="near", fields=["tokens"], on="pointerover", clear="pointerout", empty=False)
    titles = {
        "tokens": "billion tokens",
        "median": "half of the runs by",
        "half": "50 % of them",
        "nine": "90 % of them",
    }
    rows = base.mark_rule(strokeWidth=8, color=COLORS[1]).encode(
        x=alt.X("q0", **UTC_AXIS),
        x2="q4",
        opacity=alt.condition(near, alt.value(0.6), alt.value(0)),
        tooltip=[alt.Tooltip(f"{name}:N", title=words) for name, words in titles.items()],
    )
    ideal = {"at": milliseconds(start, 86400 * record["ideal"]["days"]), "tokens": values[-1]["tokens"]}
    ideal["without interruptions"] = day(start, record["ideal"]["days"], exact)
    dot = alt.Chart(alt.Data(values=[ideal])).mark_point(filled=True, size=70, color=COLORS[2])
    dot = dot.encode(x=alt.X("at", **UTC_AXIS), y="tokens:Q", tooltip="without interruptions:N")
    return alt.layer(*bands, middle, rows.add_params(near), dot, *deadline(record))


def causes(found: Described) -> Interactive | Text:
    """What a run costs beyond its iterations, by cause: a click on one tells what it is and what helps.

    Above, the GPU-hours of the whole: the median and 90 % of the simulated runs, and the allocation. Bars are means.
    """
    record = found.record
    if "gpu_hours_by_cause" not in record:
        return EARLIER
    values = _causes(record)
    picked = alt.selection_point(name="cause", fields=["cause"], value=[{"cause": values[0]["cause"]}], empty=False)
    options, labels = list(MEASURES), list(MEASURES.values())
    pick = alt.binding_radio(options=options, labels=labels, name="by ")
    measure = alt.param(name="measure", value="hours", bind=pick)
    axis = alt.Axis(labelAlign="left", labelOffset=-13, labelPadding=-4, labelLimit=380, ticks=False, domain=False)
    order = alt.EncodingSortField("shown", op="max", order="descending")
    title = f"measure == 'hours' ? '{labels[0]}' : measure == 'mean' ? '{labels[1]}' : '{labels[2]}'"
    bars = (
        alt.Chart(alt.Data(values=values))
        .transform_calculate(shown="datum[measure]")
        .mark_bar(height=12, color=COLORS[0], cursor="pointer")
        .encode(
            x=alt.X("shown:Q", title=None, axis=alt.Axis(tickCount=5, format=",.6~r")),
            y=alt.Y("cause:N", title=None, sort=order, axis=axis),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.45)),
            tooltip=[
                alt.Tooltip("cause:N"),
                *(alt.Tooltip(f"{n}:Q", title=w, format=",.3~r") for n, w in MEASURES.items()),
            ],
        )
        .add_params(measure, picked)
        .properties(
            width=WIDTH,
            height=alt.Step(34),
            title=alt.TitleParams(alt.expr(title), orient="bottom", anchor="middle", fontSize=11),
        )
    )
    panels = [_total(record).properties(width=WIDTH, height=50), bars, card(alt.Data(values=values), picked, 8)]
    most = ", ".join(f"{v['cause']} {amount(v['hours'])}" for v in values[:3])
    text = f"GPU-hours: {amount(record['gpu_hours'])} in the median run. Beyond the iterations most go to {most}."
    return Interactive(alt.concat(*panels, columns=1), text)


def _causes(record: Record) -> list[Record]:
    """The causes but the iterations themselves, with GPU-hours, days, and words; most GPU-hours first."""
    hours = dict(record["gpu_hours_by_cause"])
    # one cause: its mean is the slowdown of a long run, its bad case the prediction's interval too
    hours["slower than predicted"] = hours.pop("slower than a benchmark", 0.0)
    days = {d["what"]: d for d in record["dangers"]}
    sources = {a["what"]: a["source"] for a in record["assumptions"]}
    remedies, found = shipped_json("risks")["remedies"], list[Record]()
    for cause in dict.fromkeys([*hours, *days]):
        if cause == "iterations":
            continue
        mean, high = (days.get(cause, {}).get(name, 0.0) for name in ("mean_days", "days_95"))
        spent = hours.get(cause, 0.0)
        lines = [
            f"{cause[0].upper()}{cause[1:]}: {amount(spent)} GPU-hours, {amount(mean)} days on average; "
            f"one run in 20 loses more than {amount(high)} days to it.",
            *([f"What helps: {remedies[cause]}."] if cause in remedies else []),
            *([f"Assumed rate: {sources[cause]}."] if cause in sources else []),
        ]
        words = "\n".join(part for line in lines for part in wrapped(line))
        numbers = {"hours": spent, "mean": mean, "high": high}
        found.append({"cause": cause, "card": words, **{n: float(f"{v:.5g}") for n, v in numbers.items()}})
    return sorted(found, key=lambda row: (-row["hours"], -row["mean"]))


def _total(record: Record) -> Any:
    """GPU-hours of the whole run: iterations, the rest up to the median, 90 % of the runs, and the allocation."""
    low, high = record["gpu_hours_interval"]
    work = min(record["gpu_hours_by_cause"]["iterations"], record["gpu_hours"])
    parts = [
        {"from": 0, "to": work, "what": "iterations"},
        {"from": work, "to": record["gpu_hours"], "what": "the rest"},
    ]
    texts = [{**part, "GPU-hours": amount(part["to"] - part["from"])} for part in parts]
    palette = alt.Scale(domain=["iterations", "the rest"], range=[COLORS[0], COLORS[1]])
    bars = alt.Chart(alt.Data(values=texts)).mark_bar(height=16)
    bars = bars.encode(
        x=alt.X("from:Q", title="GPU-hours", axis=alt.Axis(format=",.6~r", tickCount=6)),
        x2="to",
        color=alt.Color("what:N", scale=palette, title=None),
        tooltip=["what:N", "GPU-hours:N"],
    )
    span = {"low": low, "high": high, "9 of 10 runs": f"{amount(low)} to {amount(high)}"}
    whisker = alt.Chart(alt.Data(values=[span])).mark_rule(strokeWidth=3, color=INK)
    whisker = whisker.encode(x="low:Q", x2="high", tooltip="9 of 10 runs:N", y=alt.value(6))
    limit = record["allocation"]
    rule = alt.Chart(alt.Data(values=[{"at": limit, "allocation": amount(limit or 0)}])).mark_rule(
        color=LIMIT, strokeWidth=2
    )
    return alt.layer(bars, whisker, *([rule.encode(x="at:Q", tooltip="allocation:N")] if limit else []))


def page(found: Described) -> Interactive | Text:
    """For the page of who decides: the fan of finish dates next to the GPU-hours, small enough for a printed page."""
    record = found.record
    if "fan" not in record or "gpu_hours_by_cause" not in record:
        return EARLIER
    top = [row for row in _causes(record) if row["hours"] > 0][:4]
    axis = alt.Axis(labelAlign="left", labelOffset=-11, labelPadding=-3, labelLimit=280, ticks=False, domain=False)
    bars = alt.Chart(alt.Data(values=top)).mark_bar(height=7, color=COLORS[1])
    bars = bars.encode(
        x=alt.X("hours:Q", title="GPU-hours beyond the iterations", axis=alt.Axis(format=",.6~r", tickCount=4)),
        y=alt.Y("cause:N", title=None, sort=None, axis=axis),
        tooltip=[
            alt.Tooltip("cause:N"),
            *(alt.Tooltip(f"{n}:Q", title=w, format=",.3~r") for n, w in MEASURES.items()),
        ],
    )
    sized = {"width": 310, "height": 96}
    chart = alt.concat(_fan(record).properties(**sized), bars.properties(**sized), columns=2)
    chart = chart.configure_axis(**CONFIG["axis"], labelFontSize=11, titleFontSize=11)  # 8 pt on the page
    finish = {name: day[:10] for name, day in record["finish"].items()}
    text = (
        f"All tokens by {finish['p50']} ({finish['p05']} to {finish['p95']} in 9 of 10 runs). Beyond the iterations: "
    )
    return Interactive(chart, text + ", ".join(f"{v['cause']} {amount(v['hours'])} GPU-hours" for v in top) + ".")
