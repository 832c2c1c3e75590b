"""The explorer of a search: its plans by speed and memory; the picked one next to two others, and
its schedule.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from trilane.config.options import label_words
from trilane.costmodel.iteration import IterationTime
from trilane.costmodel.memory import StageMemory
from trilane.costmodel.pipeline import PipelineSchedule, pipeline_schedule
from trilane.costmodel.predict import RISKY, SAFE
from trilane.costmodel.trace import Trace, trace_of
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.search_result import Candidate, SearchResult
from trilane.planning.sizing import training_days
from trilane.report.plots.interactive import Interactive, chart, rounded, tooltips
from trilane.report.plots.style import INK, LIMIT, plain
from trilane.utils.numbers import chance, size_text, with_interval
from trilane.utils.tables import grouped
from trilane.utils.validation import shipped_json

RISKS = (
    f"up to {SAFE:.0%}",
    f"{SAFE:.0%} to {RISKY:.0%}",
    f"above {RISKY:.0%}",
)  # of running out of memory
TIMES, MEMORY = (
    [f.name.replace("_", " ") for f in fields(kind)] for kind in (IterationTime, StageMemory)
)
# One meaning a colour in all panels: blue computes, green is sent, orange are gradients, grey waits
HUES: dict[str, str] = shipped_json("report/figures")["hues"]
PICKED, SHOWN, FILTERS = "#00a3c4", ("picked", "A", "B"), ("tp", "pp", "recompute", "zero", "gpus")
TIME = ("Time by part (s an iteration)", "times", TIMES)
SCALE = (
    "(scale('schedule_x', 1) - scale('schedule_x', 0))"  # pixels a second, in Vega's expressions
)
# A run of passes on a stage: its first microbatch, how many, and seconds of the first start, a
# pass, and between starts
RUN = ("on", "kind", "chunk", "first", "count", "start", "length", "step")
PASS = {"on": "stage", "kind": "pass", "microbatch": "microbatch", "chunk": "model chunk"}
SECONDS = {"length": "seconds", "start": "from second"}
Row = dict[str, Any]


def explorer(found: SearchResult, tokens: float = 0.0, folder: Path | None = None) -> Interactive:
    """The best plan of each TP x PP x DP, the front of speed and memory, and what risks the memory,
    40 in all.

    A click shows a plan in full, next to two that are pinned as A and B: at
    first the fastest, and the fastest that may be recommended. `tokens`: of the run whose days are
    given, 0 for 20 a parameter. `folder`: of the study, where traces of plans lie. Raises
    ValueError where the search has no safe plan.
    """
    shown, table = shown_plans(found), found.best_per_sizes(40).view()
    rank = dict(zip(table["id"], table["rank"], strict=True))
    traces = {c.plan.id: trace_of(c.plan, folder / "plans.json") for c in shown} if folder else {}
    rows = [plan_row(c, rank.get(c.plan.id, "none"), tokens, traces.get(c.plan.id)) for c in shown]
    safe = next((row for row in rows if row["risk"] == RISKS[0]), rows[-1])
    boxes = {
        "options": [row["id"] for row in rows],
        "labels": [f"{row['s']} s, {row['label']}" for row in rows],
    }
    pick, *pins = (alt.binding_select(name=f"{name} ", **boxes) for name in SHOWN)
    # Without `nearest`, whose tooltips have no words in Vega-Lite 6.4; the limit's line has no id
    # and is no pick.
    on: Any = {
        "on": "click[event.item && event.item.datum.id]",
        "clear": False,
        "empty": False,
        "bind": pick,
    }
    point = alt.selection_point("plan", fields=["id"], value=[{"id": rows[0]["id"]}], **on)
    first = zip(("a", "b"), (rows[0], safe), pins, strict=True)
    limits, memory = _limits(shown), _bars("Fullest stage's memory (GiB)", "memory", MEMORY)
    lines = [[_speed(rows, point), _numbers(rows)], [_bars(*TIME), alt.layer(memory, *limits)]]
    made = panels([*lines, [alt.layer(*_stages(rows), *limits), _schedule()]])
    made = made.add_params(
        *(alt.param(name, value=row["id"], bind=box) for name, row, box in first), *_filters(rows)
    )
    text = f"{len(shown)} of {found.runnable:,} topologies that can run, the best by seconds and memory. The best:"
    return Interactive(
        made, f"{text} {rows[0]['s']} s, {rows[0]['label']}, {rows[0]['gib']} GiB.", plans=rows
    )


def compared(first: Candidate) -> Interactive:
    """The time, memory and schedule of a plan, next to the time of the first one as A; svg_of()
    draws others.
    """
    made = panels([[_bars(*TIME)], [alt.layer(*_stages([]), *_limits([first])), _schedule()]])
    ids = {"plan_id": first.plan.id, "a": first.plan.id, "b": ""}
    made = made.add_params(*(alt.param(name, value=id) for name, id in ids.items()))
    return Interactive(made, first.label, plans=[plan_row(first)])


def svg_of(figure: Interactive, *plans: Candidate) -> bytes:
    """The figure that compared() made of the last of the plans, of the first."""
    rows = {c.plan.id: plan_row(c) for c in plans}
    return figure.svg({"plan_id": plans[0].plan.id}, plans=[*rows.values()])


def shown_plans(found: SearchResult, most: int = 40) -> list[Candidate]:
    """The plans of the explorer, the best first: three quarters of `most` by speed, then of the
    front and the risky.
    """
    chosen = {c.plan.id: c for c in found.best(3 * most // 4).rows}
    risky = found.best_per_sizes(most, risky=True).rows
    free = most - len(chosen)
    # a front of thousands is thinned evenly: its fastest and its smallest plan stay
    for c in [*spread(found.pareto, free - min(len(risky), free // 3)), *risky]:
        if len(chosen) < most:
            chosen.setdefault(c.plan.id, c)
    return sorted(chosen.values(), key=lambda c: (c.prediction.is_risky, c.prediction.sec_per_it))


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly chosen, the first and the last among them."""
    return [
        values[i]
        for i in np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    ]


def plan_row(c: Candidate, rank: str = "", tokens: float = 0.0, trace: Trace | None = None) -> Row:
    """All that the panels show of a plan; lists have a value for each number, part, stage, or run
    of passes.
    """
    p, t = c.prediction, c.topology
    row: Row = {"id": c.plan.id, "label": plain(c.label), "rank": rank, "evidence": p.support.words}
    row |= {name: getattr(t, name) for name in ("gpus", "tp", "pp", "dp", "recompute", "zero")}
    row |= {
        name: rounded(v, 4) for name, v in (("s", p.sec_per_it), ("lo", p.sec_lo), ("hi", p.sec_hi))
    }
    row |= {"gib": rounded(p.memory_bytes / 2**30, 4), "oom": chance(p.oom_probability)}
    row |= {"risk": RISKS[(p.oom_probability > SAFE) + (p.oom_probability > RISKY)]}
    made = pipeline_schedule(t, p)
    numbers = numbers_of(c, made, tokens or TOKENS_PER_PARAMETER * c.plan.shape.parameters)
    numbers |= {"GiB, tensors traced": f"{trace.peak.peak_bytes / 2**30:.3g}"} if trace else {}
    row |= {"number": [*numbers], "text": [*numbers.values()], "whole": rounded(made.end)}
    fullest = max(p.stages, key=lambda stage: stage.total)
    row |= {
        "memory": [rounded(v / 2**30, 4) for v in vars(fullest).values()],
        "stage": [*range(t.pp)],
    }
    peaks = (
        {stage.stage: rounded(stage.peak_bytes / 2**30, 4) for stage in trace.stages}
        if trace
        else {}
    )
    row |= {
        "times": [rounded(v, 4) for v in vars(p.time).values()],
        "traced": [peaks.get(s) for s in range(t.pp)],
    }
    row |= {name: [rounded(vars(stage)[name] / 2**30, 4) for stage in p.stages] for name in MEMORY}
    runs = [*runs_of(made)]
    return row | {
        name: [rounded(r[i], 7) if i > 3 else r[i] for r in runs] for i, name in enumerate(RUN)
    }


def numbers_of(c: Candidate, made: PipelineSchedule, tokens: float) -> dict[str, str]:
    """What is written about a plan, each by its name, on at most two lines, so narrow that three
    stand on a phone.
    """
    p, t, stages = c.prediction, c.topology, made.stage_seconds
    days = [
        training_days(c.plan.shape, t, seconds, tokens)
        for seconds in (p.sec_per_it, p.sec_lo, p.sec_hi)
    ]
    others = [word for word in label_words(t) if word not in (f"zero{t.zero}", t.recompute)]
    row, distance = (p.support.nearest or (("none", float("inf")),))[0]
    return {
        "TP x PP x DP; id": f"{t.tp} x {f'{t.cp} (CP) x ' * (t.cp > 1)}{t.pp} x {t.dp}\n{c.plan.id}",
        "ZeRO; recompute": f"{t.zero}; {t.recompute}",
        "other choices": "\n".join(textwrap.wrap(" ".join(others), 13)[:2]) or "none",
        "microbatches": f"{t.microbatches} of {t.mbs}",
        "seconds (90 %)": "{}\n{} to {}".format(*with_interval(p.sec_per_it, p.sec_lo, p.sec_hi)),
        f"GiB, of {c.plan.cluster.gpu.memory_bytes / 2**30:.3g}": f"{p.memory_bytes / 2**30:.3g}",
        "P(out of memory)": chance(p.oom_probability),
        f"days, {size_text(tokens)} tokens": "{}\n{} to {}".format(*with_interval(*days)),
        "bubble": f"{p.time.bubble / p.sec_per_it:.1%}",
        "slowest stage": f"{made.slowest}: {max(stages) * t.pp / sum(stages) - 1:+.1%}",
        "nearest measured": f"{row}\ndistance {distance:.1f}",
    }


def runs_of(made: PipelineSchedule) -> Iterator[tuple[Any, ...]]:
    """A whole schedule, as RUN: passes of one kind on one stage that follow each other at one
    distance are one run.
    """
    every, end = grouped(made.passes, lambda p: (p.stage, p.is_forward, p.chunk)), made.pipeline_end
    for (stage, is_forward, chunk), own in every.items():
        starts, at, length = [p.start for p in own], 0, own[0].end - own[0].start
        while at < len(starts):
            count = evenly(starts[at:], 1e-5 * end)
            step = (starts[at + count - 1] - starts[at]) / (count - 1) if count > 1 else length
            yield (
                stage,
                "forward" if is_forward else "backward",
                chunk,
                at + 1,
                count,
                starts[at],
                length,
                step,
            )
            at += count
    for kind, seconds in (("data parallel", made.data_parallel), ("optimizer", made.optimizer)):
        yield from (
            (i, kind, 0, 0, 1, end, seconds, seconds)
            for i in range(len(made.stage_seconds))
            if seconds > 0
        )
        end += seconds


def evenly(values: Sequence[float], tolerance: float) -> int:
    """How many of the values from the first on lie at one distance from each other."""
    step = values[1] - values[0] if len(values) > 1 else 0.0
    rest = enumerate(values)
    return next((n for n, v in rest if abs(v - values[0] - n * step) > tolerance), len(values))


def panels(lines: Sequence[Sequence[Any]]) -> Any:
    """Lines of panels of the data `plans`, about three of them whose ids are the parameters
    plan_id, a and b.
    """
    apart: Any = dict.fromkeys(("color", "opacity", "shape", "size"), "independent")
    grid = [
        alt.concat(*line, columns=len(line), spacing=24).resolve_scale(**apart) for line in lines
    ]
    whole = alt.concat(*grid, columns=1, spacing=12, data=alt.NamedData("plans")).resolve_scale(
        **apart
    )
    return whole.configure_legend(columns=5, labelFontSize=11, labelLimit=260)


def _limits(plans: Sequence[Candidate]) -> list[Any]:
    """A line at the card's memory, where a plan is near it."""
    limit = plans[0].plan.cluster.gpu.memory_bytes
    line = chart([{"gib": limit / 2**30, "what": f"memory of the card: {limit / 2**30:.4g} GiB"}])
    near = limit < 2 * max(c.prediction.memory_bytes for c in plans)
    return [line.mark_rule(color=LIMIT, strokeWidth=1.5).encode(x="gib:Q", tooltip="what:N")] * near


def _filters(rows: Sequence[Row]) -> Iterator[Any]:
    """A control for each choice that leaves its plans in the first panel, and one for the most
    memory.
    """
    for name, title in zip(FILTERS, ("TP ", "PP ", "recompute ", "ZeRO ", "GPUs "), strict=True):
        options = ["all", *sorted({row[name] for row in rows})]
        yield alt.param(name, value="all", bind=alt.binding_select(options=options, name=title))
    low, high = min(row["gib"] for row in rows), max(row["gib"] for row in rows)
    step = rounded(max(high - low, 1e-3) / 50, 1)
    top = rounded(high + step, 4)
    yield alt.param(
        "most",
        value=top,
        bind=alt.binding_range(min=low, max=top, step=step, name="memory up to (GiB) "),
    )


def _speed(rows: Sequence[Row], pick: Any) -> Any:
    """Seconds over memory, a point a plan with its interval, and the line of what no other plan
    beats in both.
    """
    # of all plans: a filter leaves the axes as they are, and no plan at all has an axis too
    ends = [
        (min(row[low] for row in rows), max(row[high] for row in rows))
        for low, high in (("gib", "gib"), ("lo", "hi"))
    ]
    across, along = (
        alt.Scale(domain=domain, nice=False, zero=False, padding=12) for domain in ends
    )
    x = alt.X("gib:Q", title="GiB on the fullest stage", scale=across)
    up: Any = {"title": "seconds an iteration (bars: 90 %)", "scale": along}
    chosen = " && ".join(
        [*(f"({n} == 'all' || datum.{n} == {n})" for n in FILTERS), "datum.gib <= most"]
    )
    base = chart(width=470, height=255).transform_filter(chosen).encode(x=x)
    below = alt.Legend(orient="top", title="P(OOM)", titleOrient="left", symbolOpacity=1)
    shapes = alt.Scale(domain=RISKS, range=["circle", "diamond", "triangle-up"])
    color = alt.Color(
        "risk:N", scale=alt.Scale(domain=RISKS, range=[INK, "#7b8a97", LIMIT]), legend=below
    )
    titles = {
        "label": "plan",
        "rank": "rank",
        "id": "id",
        "gpus": "GPUs",
        "s": "seconds",
        "lo": "90 % from",
    }
    titles |= {"hi": "to", "gib": "GiB", "oom": "P(out of memory)"}
    points = base.mark_point(filled=True, opacity=1, strokeWidth=2.5).encode(
        y=alt.Y("s:Q", **up),
        color=color,
        shape=alt.Shape("risk:N", scale=shapes, legend=below),
        tooltip=tooltips(titles),
        size=alt.condition(pick, alt.value(260), alt.value(90)),
        stroke=alt.condition(pick, alt.value(PICKED), alt.value("transparent")),
    )
    bars = base.mark_rule(opacity=0.5).encode(y=alt.Y("lo:Q", **up), y2="hi:Q", color=color)
    front = base.transform_filter(f"datum.risk != '{RISKS[2]}'")
    front = front.transform_window(least="min(s)", sort=[{"field": "gib"}]).transform_filter(
        "datum.s == datum.least"
    )
    front = front.mark_line(interpolate="step-after", color=INK, strokeDash=[5, 3]).encode(
        y=alt.Y("s:Q", **up)
    )
    pins = base.transform_calculate(pin="(datum.id == a ? 'A' : '') + (datum.id == b ? 'B' : '')")
    pins = pins.mark_text(dx=13, dy=-9, fontSize=13, fontWeight="bold").encode(
        y=alt.Y("s:Q", **up), text="pin:N"
    )
    title = "Speed and memory: pick a plan"
    return alt.layer(
        bars, front.encode(tooltip=alt.value(None)), points.add_params(pick), pins
    ).properties(title=title)


def _three(**properties: Any) -> Any:
    """A chart of the rows of the picked plan and of the pins, each as often as it is one of them."""
    base = chart(**properties).transform_filter(
        "datum.id == plan_id || datum.id == a || datum.id == b"
    )
    base = base.transform_calculate(which=repr([*SHOWN])).transform_flatten(["which"])
    return base.transform_filter("{picked: plan_id, A: a, B: b}[datum.which] == datum.id")


def _numbers(rows: Sequence[Row]) -> Any:
    """The numbers of the picked plan and of the pins."""
    names = max((row["number"] for row in rows), key=len)
    bare: Any = {"domain": False, "ticks": False, "labelFontSize": 11}
    x = alt.X(
        "which:N",
        title=None,
        sort=SHOWN,
        axis=alt.Axis(orient="top", labelAngle=0, labelFontWeight="bold", **bare),
    )
    y = alt.Y("number:N", title=None, sort=names, axis=alt.Axis(**bare))
    base = _three(width=400, height=24 * len(names)).transform_flatten(["number", "text"])
    text = base.mark_text(lineBreak="\n", lineHeight=11, fontSize=11, baseline="middle")
    return text.encode(
        x=x, y=y, text="text:N", tooltip=tooltips({"label": "plan", "evidence": "evidence"})
    )


def _bars(title: str, field: str, names: Sequence[str]) -> Any:
    """The parts of the picked plan and of the pins, one after another."""
    base = _three(title=title, width=430, height=66).transform_calculate(part=repr([*names]))
    x = alt.X(f"{field}:Q", title=None, axis=alt.Axis(tickCount=5))
    bars = _stack(
        base.transform_flatten(["part", field]).transform_filter(f"datum.{field} > 0"), names, x
    )
    titles = {
        "which": "",
        "label": "plan",
        "part": "part",
        field: title.rpartition("(")[2].rstrip(")"),
    }
    return bars.encode(y=alt.Y("which:N", title=None, sort=SHOWN), tooltip=tooltips(titles))


def _stages(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """What fills a GPU of each stage of the picked plan; a tick where its tensors were traced, if
    any of `rows` was.
    """
    base = chart(title="Memory by stage, picked", width=220, height=190).transform_filter(
        "datum.id == plan_id"
    )
    base = base.transform_flatten(["stage", "traced", *MEMORY])
    parts, x = base.transform_fold(MEMORY, as_=["part", "gib"]), alt.Axis(tickCount=4)
    bars = _stack(parts, MEMORY, alt.X("gib:Q", title="GiB on a GPU", axis=x), legend=None)
    y = alt.Y("stage:O", title="pipeline stage", axis=alt.Axis(labelOverlap=True))
    ticks = base.transform_filter("isValid(datum.traced)").mark_tick(color=INK, thickness=2)
    ticks = ticks.encode(
        x="traced:Q", y=y, tooltip=tooltips({"stage": "stage", "traced": "GiB of tensors, traced"})
    )
    bars = bars.encode(y=y, tooltip=tooltips({"stage": "stage", "part": "part", "gib": "GiB"}))
    # an axis over no value at all is a warning of Vega's on the reader's console
    return [bars, *[ticks] * any(value is not None for row in rows for value in row["traced"])]


def _stack(base: Any, names: Sequence[str], x: Any, **look: Any) -> Any:
    """Bars of parts in the order of their names."""
    base = base.transform_calculate(place=f"indexof({[*names]!r}, datum.part)")
    return base.mark_bar().encode(x=x, color=_hue("part", names, **look), order="place:Q")


def _hue(field: str, names: Sequence[str], **look: Any) -> Any:
    scale = alt.Scale(domain=[*names], range=[HUES[name] for name in names])
    look = {"legend": alt.Legend(orient="bottom", symbolStrokeWidth=9), **look}
    return alt.Color(f"{field}:N", title=None, scale=scale, **look)


def _schedule() -> Any:
    """The passes of each stage of the picked plan to scale: a dashed line is a run of them, so that
    all are drawn.
    """
    zoom = alt.selection_interval(name="zoom", encodings=["x"], bind="scales")
    base = chart().transform_filter("datum.id == plan_id").transform_flatten([*RUN])
    base = base.transform_calculate(
        end="datum.start + datum.step * (datum.count - 1) + datum.length",
        microbatch="datum.first ? datum.first + ' to ' + (datum.first + datum.count - 1) : 'all'",
        shade="1 - 0.5 * datum.chunk / (1 + datum.chunk)",
    )
    y = alt.Y("on:O", title=None, axis=alt.Axis(labelOverlap=True))
    # a gap of 0.7 pixels at most
    dash = f"{SCALE} * max(0.8 * datum.length, datum.length - 0.7 / {SCALE})"
    look: Any = {"strokeWidth": alt.expr("0.86 * bandwidth('schedule_y')"), "clip": True}
    lines = base.mark_rule(
        strokeDash=alt.expr(f"[{dash}, {SCALE} * datum.step - {dash}]"), **look
    ).encode(
        x=alt.X("start:Q", title="seconds since the iteration began", scale=alt.Scale(nice=False)),
        x2="end:Q",
        y=y,
        color=_hue("kind", ("forward", "backward", "data parallel", "optimizer", "bubble")),
        opacity=alt.Opacity("shade:Q", scale=None, legend=None),
        tooltip=tooltips(PASS, SECONDS),
    )
    look = {"name": "schedule", "width": 640, "height": 190, "view": {"fill": HUES["bubble"]}}
    return alt.layer(lines.add_params(zoom), _passes(base, y)).properties(
        title="Pipeline schedule, picked", **look
    )


def _passes(base: Any, y: Any) -> Any:
    """The number of each microbatch, where its pass is wide enough; under the mouse the words of
    one pass.
    """
    base = base.transform_calculate(
        low="zoom_start ? zoom_start[0] : 0", high="zoom_start ? zoom_start[1] : datum.whole"
    )
    base = base.transform_filter(
        "datum.first && datum.pp < 16 && datum.length > 0.025 * (datum.high - datum.low)"
    )
    last = "min(datum.count, floor((datum.high - datum.start) / datum.step) + 1)"
    base = base.transform_calculate(
        k=f"sequence(max(0, ceil((datum.low - datum.start) / datum.step)), {last})"
    )
    base = base.transform_flatten(["k"]).transform_calculate(
        microbatch="datum.first + datum.k", start="datum.start + datum.k * datum.step"
    )
    # a field would warn of an empty domain where no pass is wide enough
    middle = alt.expr("scale('schedule_x', datum.start + datum.length / 2)")
    color = alt.condition("datum.kind == 'forward'", alt.value("white"), alt.value("black"))
    text = base.mark_text(clip=True, fontSize=11, x=middle)
    return text.encode(y=y, text="microbatch:N", tooltip=tooltips(PASS, SECONDS), color=color)
