"""Figures of a forecast to explore: its jobs, the tokens trained over the dates, and what costs GPU-hours."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np

from trilane.forecasting.forecast import Described, Forecast, Job
from trilane.report.plots.interactive import CONFIG, Interactive, card, chart, names_above, rounded, tooltips, wrapped
from trilane.report.plots.style import COLORS, INK, LIMIT
from trilane.utils.numbers import amount
from trilane.utils.validation import shipped_json

# What a cause costs, by name, as a reader picks it.
MEASURES = {"hours": "GPU-hours", "mean": "days on average", "high": "days that one run in 20 exceeds"}
Record = Mapping[str, Any]


def moment(record: Record, seconds: float) -> float:
    """Milliseconds since 1970, which Vega draws, of seconds after midnight (UTC) of the first day."""
    return round((datetime.combine(date.fromisoformat(record["start"]), time(), UTC).timestamp() + seconds) * 1000)


def day(record: Record, seconds: float) -> str:
    """That moment as a person reads it, with the time where the run is short."""
    at = datetime.combine(date.fromisoformat(record["start"]), time()) + timedelta(seconds=seconds)
    return f"{at:%Y-%m-%d %H:%M}" if record["days"] < 3 else f"{at:%Y-%m-%d}"


def dates(record: Record, field: str) -> Any:
    """The x axis of dates."""
    axis = alt.Axis(format="%d, %H:%M" if record["days"] < 3 else "%Y-%m-%d", tickCount=5, labelOverlap=True)
    return alt.X(f"{field}:T", title="date (UTC)", axis=axis, scale=alt.Scale(type="utc", nice=False))


def deadline(record: Record) -> list[Any]:
    """The end of the deadline's day as a line, none where there is no deadline."""
    if not record["deadline"]:
        return []
    end = (date.fromisoformat(record["deadline"]) - date.fromisoformat(record["start"])).days + 1
    rule = chart([{"end": moment(record, 86400 * end), "deadline": record["deadline"]}]).mark_rule(color=LIMIT)
    return [rule.encode(x=dates(record, "end"), tooltip="deadline:N")]


def gantt(found: Forecast, most: int = 400) -> Interactive:
    """The first jobs of the expected run over the dates: batch size above, nodes below, under the dashed capacity.

    A click on a job shows below the figure which iterations it trains, when, on what, and why it had to start.
    """
    record, jobs = found.record, found.jobs()
    rows = [_job(found, number, *pair) for number, pair in enumerate(pairwise([None, *jobs[:most]]), 1)]
    longest = max(rows, key=lambda row: row["end"] - row["begin"])
    picked = alt.selection_point("job", fields=["number"], value=[{"number": longest["number"]}], empty=False)
    ends = zip([0.0, *found.expected.reached_s[0]], [*found.pieces[0], found.pieces[0][-1]], strict=True)
    sizes = chart(({"at": moment(record, end), "gbs": int(gbs)} for end, gbs in ends), width=640, height=130)
    sizes = sizes.mark_line(interpolate="step-after", color=COLORS[0], tooltip=None)
    above = sizes.encode(x=dates(record, "at"), y=alt.Y("gbs:Q", title="batch size (sequences)"))
    x = dates(record, "begin")
    bars = (
        chart(width=640, height=150)
        .mark_rect(stroke="white", strokeWidth=0.4, cursor="pointer")
        .encode(
            x=x,
            x2="end:T",
            y=alt.Y("nodes:Q", title="nodes", scale=alt.Scale(zero=True)),
            y2=alt.datum(0),
            color=alt.Color("kind:N", sort=None, title="DP, microbatch"),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.55)),
            tooltip=tooltips({name: name for name in ("job", "dates", "iterations", "batch", "topology", "cause")}),
        )
    )
    last, each = float(found.expected.wall_s[0]), found.request.plan.cluster.gpus_per_node
    windows = [window for window, _ in found.schedules if window.start_s < last]
    limits = [{"begin": moment(record, w.start_s), "end": moment(record, min(w.end_s, last))} for w in windows]
    limits = [{**row, "nodes": -(-w.gpus // each)} for row, w in zip(limits, windows, strict=True)]
    capacity = chart(limits).mark_rule(color=LIMIT, strokeDash=[4, 3], strokeWidth=1.4)
    capacity = capacity.encode(x=x, x2="end:T", y="nodes:Q", tooltip=tooltips({"nodes": "nodes of the capacity"}))
    below = alt.layer(bars.add_params(picked), capacity, *deadline(record))
    whole = alt.concat(above, below, card(chart(), picked, 7, width=640), columns=1, data=alt.Data(values=rows))
    whole = whole.resolve_scale(x="shared")
    text = f"{len(jobs)} jobs of the expected run from {record['start']}, {len(rows)} of them drawn. The longest: "
    return Interactive(whole, text + longest["card"].replace("\n", " "))


def _job(found: Forecast, number: int, before: Job | None, job: Job | None) -> dict[str, Any]:
    """The row of a job."""
    assert job is not None
    record, c, jobs = found.record, job.choice, len(found.jobs())
    done = np.concatenate([[0.0], found.pieces[1].cumsum()])
    first, last = np.interp([job.start_s, job.end_s], [0.0, *found.expected.reached_s[0]], done).tolist()
    words = {
        "job": f"{number} of {jobs}",
        "dates": f"{day(record, job.start_s)} to {day(record, job.end_s)}",
        "iterations": f"about {first + 1:,.0f} to {last:,.0f}",
        "batch": f"{job.first_gbs:,} to {job.last_gbs:,} sequences",
        "topology": f"TP {c.tp} × PP {c.pp} × DP {c.dp}, microbatch {c.mbs}, {c.gpus} GPUs, {c.nodes} nodes",
        "cause": _cause(before, job) if before else "starts the run",
    }
    row = {"begin": moment(record, job.start_s), "end": moment(record, job.end_s), "nodes": c.nodes, "number": number}
    lines = wrapped(f"{name}: {value}" for name, value in words.items())
    return {**words, **row, "kind": f"DP {c.dp}, MBS {c.mbs}", "card": lines}


def _cause(before: Job, job: Job) -> str:
    """Why the job had to start, and what it changes."""
    paused, reason = (job.start_s - before.end_s) / 86400, "the capacity changed"
    if paused > 0.001:
        reason = f"nothing could run for {paused:.3g} days"
    elif job.first_gbs > before.last_gbs:
        reason = f"the batch size reached {job.first_gbs:,}"
    names = ("tp", "pp", "dp", "mbs", "recompute")
    pairs = [(name, getattr(before.choice, name), getattr(job.choice, name)) for name in names]
    return "; ".join([reason, *(f"{name} {a} → {b}" for name, a, b in pairs if a != b)])


def fan(found: Described) -> Interactive:
    """Tokens trained over the dates: the median, 50 % and 90 % of the simulated runs, and the deadline."""
    return Interactive(_fan(found.record).properties(width=640, height=240), _dates_text(found.record))


def _causes_text(record: Record) -> str:
    most = ", ".join(f"{row['cause']} {amount(row['hours'])}" for row in _causes(record)[:4])
    return f"GPU-hours beyond the iterations: {most}."


def _dates_text(record: Record) -> str:
    finish = {name: end[:10] for name, end in record["finish"].items()}
    return f"All tokens are trained by {finish['p50']}, by {finish['p05']} to {finish['p95']} in 9 of 10 runs."


def _fan(record: Record) -> Any:
    """Bands from quantile to quantile; the tooltip of a row has the dates of its tokens."""
    rows = []
    for tokens, days in zip(record["fan"]["tokens"], record["fan"]["days"], strict=True):
        at = [day(record, 86400 * d) for d in days]
        row = {"nine": f"{at[0]} to {at[4]}", "half": f"{at[1]} to {at[3]}", "median": at[2]}
        rows.append(
            {**row, "tokens": rounded(tokens, 6), **{f"q{i}": moment(record, 86400 * d) for i, d in enumerate(days)}}
        )
    base = chart(rows).encode(y=alt.Y("tokens:Q", title="billion tokens"))
    area = base.mark_area(orient="horizontal", color=COLORS[0], opacity=0.25, tooltip=None)
    bands = [area.encode(x=dates(record, low), x2=f"{high}:T") for low, high in (("q0", "q4"), ("q1", "q3"))]
    middle = base.mark_line(color=COLORS[0], tooltip=None).encode(x=dates(record, "q2"), order="tokens:Q")
    titles = {"tokens": "billion tokens", "median": "half of the runs by", "half": "50 % of them"}
    # rows to point at, which are not seen
    lines = base.mark_rule(strokeWidth=8, opacity=0).encode(x=dates(record, "q0"), x2="q4:T")
    lines = lines.encode(tooltip=tooltips({**titles, "nine": "90 % of them"}))
    ideal = 86400 * record["ideal"]["days"]
    dot = chart([{"at": moment(record, ideal), "tokens": rows[-1]["tokens"], "day": day(record, ideal)}])
    dot = dot.mark_point(filled=True, size=70, color=COLORS[2]).encode(x=dates(record, "at"), y="tokens:Q")
    dot = dot.encode(tooltip=tooltips({"day": "without interruptions"}))
    return alt.layer(*bands, middle, lines, dot, *deadline(record))


def causes(found: Described) -> Interactive:
    """What a run costs beyond its iterations, by cause, on average: a click on one shows what it is and what helps.

    Above, the GPU-hours of the whole: the median, the line of nine in ten simulated runs, and the allocation.
    """
    record = found.record
    rows = _causes(record)
    picked = alt.selection_point("cause", fields=["cause"], value=[{"cause": rows[0]["cause"]}], empty=False)
    bars = _bars(12).properties(width=640, height=alt.Step(34)).add_params(picked)
    bars = bars.encode(opacity=alt.condition(picked, alt.value(1), alt.value(0.45)))
    whole = alt.concat(_total(record), bars, card(chart(), picked, 8), columns=1, data=alt.Data(values=rows))
    return Interactive(whole, f"{amount(record['gpu_hours'])} GPU-hours in the median run. {_causes_text(record)}")


def _total(record: Record) -> Any:
    """GPU-hours of the whole run: iterations, the rest up to the median, 90 % of the runs, and the allocation."""
    (low, high), median, limit = record["gpu_hours_interval"], record["gpu_hours"], record["allocation"]
    work = min(record["gpu_hours_by_cause"]["iterations"], median)
    words = tooltips({"what": "of the run"}, {"from": "GPU-hours from", "to": "to"})
    bars = chart([{"from": 0, "to": work, "what": "iterations"}, {"from": work, "to": median, "what": "the rest"}])
    x = alt.X("from:Q", title="GPU-hours", axis=alt.Axis(format=",.6~r", tickCount=6))
    color = alt.Color("what:N", sort=None, title=None)
    bars = bars.mark_bar(height=16).encode(x=x, x2="to:Q", color=color, tooltip=words)
    span = chart([{"from": low, "to": high, "what": "9 of 10 runs"}]).mark_rule(strokeWidth=3, color=INK)
    rule = chart([{"allocation": limit}]).mark_rule(color=LIMIT, strokeWidth=2).encode(x="allocation:Q")
    span = span.encode(x=x, x2="to:Q", y=alt.value(6), tooltip=words)
    return alt.layer(bars, span, *[rule] * bool(limit)).properties(width=640, height=50)


def _bars(height: int, rows: Any = None) -> Any:
    x = alt.X("hours:Q", title="GPU-hours beyond the iterations", axis=alt.Axis(format=",.6~r", tickCount=4))
    bars = chart(rows).mark_bar(height=height, color=COLORS[1], cursor="pointer")
    y = alt.Y("cause:N", title=None, sort=None, axis=names_above(height + 1))
    return bars.encode(x=x, y=y, tooltip=tooltips({"cause": "cause"}, MEASURES))


def _causes(record: Record) -> list[dict[str, Any]]:
    """The causes but the iterations themselves, with GPU-hours, days, and words; most GPU-hours first."""
    hours = dict(record["gpu_hours_by_cause"])
    del hours["iterations"]
    # one cause: its mean is the slowdown of a long run, its bad case the prediction's interval too
    hours["slower than predicted"] = hours.pop("slower than a benchmark", 0.0)
    days = {d["what"]: d for d in record["dangers"]}
    sources = {a["what"]: a["source"] for a in record["assumptions"]}
    remedies, rows = shipped_json("risks")["remedies"], []
    for cause in dict.fromkeys([*hours, *days]):
        lost = days.get(cause, {"mean_days": 0.0, "days_95": 0.0})
        numbers = {"hours": hours.get(cause, 0.0), "mean": lost["mean_days"], "high": lost["days_95"]}
        words = [f"{title}: {amount(numbers[name])}" for name, title in MEASURES.items()]
        words += [f"What helps: {remedies.get(cause)}."] * (cause in remedies)
        words += [f"Assumed rate: {sources.get(cause)}."] * (cause in sources)
        rows.append({"cause": cause, "card": wrapped([cause, *words]), **{n: rounded(v) for n, v in numbers.items()}})
    return sorted(rows, key=lambda row: (-row["hours"], -row["mean"]))


def page(found: Described) -> Interactive:
    """For the page of who decides: the fan of finish dates next to the GPU-hours, small enough for a printed page."""
    record = found.record
    top = [row for row in _causes(record) if row["hours"] > 0][:4]
    both = [part.properties(width=310, height=96) for part in (_fan(record), _bars(7, top))]
    # 8 pt on the page
    small = alt.concat(*both, columns=2).configure_axis(**CONFIG["axis"], labelFontSize=11, titleFontSize=11)
    return Interactive(small, f"{_dates_text(record)} {_causes_text(record)}")
