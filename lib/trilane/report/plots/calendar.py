"""The figure of a forecast's jobs: which runs when, on what, at which batch size, and why it had to start."""

from collections.abc import Sequence
from itertools import pairwise

import altair as alt
import numpy as np

from trilane.forecasting.forecast import Forecast
from trilane.forecasting.record import Record
from trilane.forecasting.timeline import Job
from trilane.report.plots.forecast import DATES, HOURS, WIDTH, card, day, deadline, milliseconds, wrapped
from trilane.report.plots.interactive import Interactive
from trilane.report.plots.style import COLORS, LIMIT

MOST_JOBS = 400  # that are drawn


def gantt(found: Forecast) -> Interactive:
    """The jobs of the expected run over the dates: batch size above, nodes below, under the dashed capacity.

    A click on a job shows below the figure which iterations it trains, when, on what, and why it had to start.
    """
    record, jobs = found.record, found.jobs()
    values = _jobs(found, jobs[:MOST_JOBS])
    kinds = list(dict.fromkeys(v["kind"] for v in values))
    longest = max(values, key=lambda v: v["end"] - v["begin"])
    palette = alt.Scale(domain=kinds, range=[COLORS[i % len(COLORS)] for i in range(len(kinds))])
    picked = alt.selection_point(name="job", fields=["number"], value=[{"number": longest["number"]}], empty=False)
    data, last = alt.Data(values=values), milliseconds(record["start"], float(found.expected.wall_s[0]))
    scale, dates = alt.Scale(type="utc", nice=False), HOURS if found.days(0.5) < 3 else DATES
    x, x2 = alt.X("begin:T", title=None, axis=dates, scale=scale), alt.X2("end")
    tooltips = [alt.Tooltip(f"{name}:N") for name in ("job", "dates", "iterations", "batch", "topology", "cause")]
    sizes = alt.Chart(alt.Data(values=_sizes(found))).mark_line(interpolate="step-after", color=COLORS[0], tooltip=None)
    above = sizes.encode(
        x=alt.X("at:T", title=None, axis=dates, scale=scale), y=alt.Y("gbs:Q", title="batch size (sequences)")
    )
    bars = alt.Chart(data).mark_rect(stroke="white", strokeWidth=0.4 if len(values) < 40 else 0, cursor="pointer")
    height = alt.Y("nodes:Q", title="nodes", scale=alt.Scale(zero=True))
    bars = bars.encode(
        x=alt.X("begin:T", title="date (UTC)", axis=dates, scale=scale),
        x2=x2,
        y=height,
        y2=alt.datum(0),
        color=alt.Color("kind:N", scale=palette, title="DP, microbatch: nodes"),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.55)),
        tooltip=tooltips,
    ).add_params(picked)
    span = alt.Chart(data).mark_rect(color=COLORS[1], opacity=0.12, tooltip=None).transform_filter(picked)
    capacity = alt.Chart(alt.Data(values=_capacity(found))).mark_rule(color=LIMIT, strokeDash=[4, 3], strokeWidth=1.4)
    capacity = capacity.encode(x=alt.X("begin:T", scale=scale), x2="end", y="nodes:Q", tooltip="capacity:N")
    within = deadline(record) if record["deadline"] and milliseconds(record["deadline"], 86400) < last else []
    panels = [
        alt.layer(span.encode(x=x, x2=x2), above, *within).properties(width=WIDTH, height=130),
        alt.layer(bars, capacity, *within).properties(width=WIDTH, height=150),
        card(data, picked, 7),
    ]
    more = f" The first {MOST_JOBS} are drawn." if len(jobs) > MOST_JOBS else ""
    text = f"{len(jobs)} jobs of the expected run from {record['start']}. The longest is job {longest['job']}, "
    text += f"{longest['dates']}, with {longest['batch']}: {longest['topology']}."
    return Interactive(alt.concat(*panels, columns=1).resolve_scale(x="independent"), text + more)


def _jobs(found: Forecast, jobs: Sequence[Job]) -> list[Record]:
    """A row for each job."""
    start, reached = found.record["start"], np.concatenate([[0.0], found.expected.reached_s[0]])
    done = np.concatenate([[0.0], found.pieces[1].cumsum()])
    exact, values = found.days(0.5) < 3, list[Record]()
    for number, (before, job) in enumerate(pairwise([None, *jobs]), 1):
        assert job is not None
        c, (first, last) = job.choice, np.interp([job.start_s, job.end_s], reached, done).tolist()
        batch = f"{job.first_gbs:,}" + (f" to {job.last_gbs:,}" if job.last_gbs != job.first_gbs else "")
        words = {
            "job": f"{number} of {len(jobs)}",
            "dates": " to ".join(day(start, s / 86400, exact) for s in (job.start_s, job.end_s)),
            "iterations": f"about {first + 1:,.0f} to {last:,.0f}",
            "batch": f"{batch} sequences",
            "topology": f"TP {c.tp} × PP {c.pp} × DP {c.dp}, microbatch {c.mbs}, {c.gpus} GPUs on {c.nodes} nodes",
            "cause": _cause(before, job),
        }
        lines = [f"Job {words['job']}, {words['dates']}: iterations {words['iterations']}, {words['batch']}"]
        text = "\n".join(part for line in [*lines, words["topology"], words["cause"]] for part in wrapped(line))
        times = {
            "begin": milliseconds(start, job.start_s),
            "end": milliseconds(start, job.end_s),
            "nodes": c.nodes,
            "number": number,
        }
        values.append({**words, **times, "kind": f"DP {c.dp}, MBS {c.mbs}: {c.nodes} nodes", "card": text})
    return values


def _cause(before: Job | None, job: Job) -> str:
    """Why the job had to start."""
    if before is None:
        return "Starts the run."
    old, new = before.choice, job.choice
    names = {"tp": "TP", "pp": "PP", "dp": "DP", "mbs": "microbatch", "recompute": "recomputation"}
    pairs = {words: (getattr(old, n) or "none", getattr(new, n) or "none") for n, words in names.items()}
    changes = ", ".join(f"{words} {a} → {b}" for words, (a, b) in pairs.items() if a != b) or "the same topology again"
    paused = (job.start_s - before.end_s) / 86400
    if paused > 0.001:
        reason = f"nothing could run for {paused:.3g} days"
    elif job.first_gbs > before.last_gbs:
        reason = f"the batch size reached {job.first_gbs:,}"
    else:
        reason = "the capacity changed"
    converted = "; its checkpoint is converted" if (old.tp, old.pp) != (new.tp, new.pp) else ""
    return f"Restarted because {reason}: {changes}{converted}."


def _sizes(found: Forecast) -> list[Record]:
    """The batch size from date to date."""
    gbs, _ = found.pieces
    ends = [0.0, *found.expected.reached_s[0]]
    rows = [(end, int(size)) for end, size in zip(ends, [*gbs, gbs[-1]], strict=True)]
    kept = [row for i, row in enumerate(rows) if i in (0, len(rows) - 1) or row[1] != rows[i - 1][1]]
    return [{"at": milliseconds(found.record["start"], end), "gbs": size} for end, size in kept]


def _capacity(found: Forecast) -> list[Record]:
    """The nodes of the capacity until the run ends; whole nodes, as a job takes them."""
    start, last = found.record["start"], float(found.expected.wall_s[0])
    windows = [window for window, _ in found.schedules if window.start_s < last]
    edges, each = [*(w.start_s for w in windows), last], found.request.plan.cluster.gpus_per_node
    return [
        {
            "begin": milliseconds(start, a),
            "end": milliseconds(start, b),
            "nodes": -(-w.gpus // each),
            "capacity": f"{w.gpus} GPUs",
        }
        for w, (a, b) in zip(windows, pairwise(edges), strict=True)
    ]
