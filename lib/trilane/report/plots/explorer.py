"""The explorer of a search: its plans by speed and memory, and the picked one with its parts, stages and schedule."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import altair as alt

from trilane.costmodel.memory import StageMemory
from trilane.costmodel.pipeline import PipelineSchedule, pipeline_schedule
from trilane.costmodel.predict import RISKY, SAFE
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.search_result import Candidate, SearchResult
from trilane.planning.sizing import training_days
from trilane.report.plots.interactive import Interactive, chart, rounded, tooltips
from trilane.report.plots.style import COLORS, INK, LIMIT, plain
from trilane.utils.numbers import amount, with_bounds

RISKS = (f"up to {SAFE:.0%}", f"{SAFE:.0%} to {RISKY:.0%}", f"above {RISKY:.0%}")  # of running out of memory
Row = dict[str, Any]


def explorer(found: SearchResult, tokens: float = 0.0) -> Interactive:
    """The best plan of each TP x PP x DP, the front of speed and memory, and what risks the memory, 40 in all.

    A click on a cell of the heat map leaves its plans in the first panel; a click on a plan shows its numbers, time by
    part, memory and time by stage, and its schedule. `tokens`: of the run whose days are given, 0 for 20 a parameter.
    Raises ValueError where the search has no safe plan.
    """
    shown = shown_plans(found)
    tokens = tokens or TOKENS_PER_PARAMETER * shown[0].plan.shape.parameters
    table = found.best_per_sizes(40).view()
    rank = dict(zip(table["id"], table["rank"], strict=True))
    schedules = [Drawn(c) for c in shown]
    rows = [plan_row(c, rank.get(c.plan.id, ""), tokens, d) for c, d in zip(shown, schedules, strict=True)]
    labels = [f"{row['s']} s, {row['label']}" for row in rows]
    box = alt.binding_select(options=[row["id"] for row in rows], labels=labels, name="Plan ")
    # Without `nearest`, whose tooltips have no words in Vega-Lite 6.4; the limit's line has no id and is no pick.
    on, first = "click[event.item && event.item.datum.id]", [{"id": rows[0]["id"]}]
    pick = alt.selection_point("plan", fields=["id"], value=first, bind=box, on=on, clear=False, empty=False)
    cell = alt.selection_point("cell", fields=["tp", "pp"])
    limit = shown[0].plan.cluster.gpu.memory_bytes / 2**30
    panels = [_speed(rows, pick, cell, limit), _heat(cell), _words(pick), _time(rows, pick)]
    panels += [_memory(rows, pick, limit), _pace(pick)]
    apart: Any = dict.fromkeys(("color", "opacity", "shape", "size"), "independent")
    grid = alt.concat(*panels, columns=2, spacing=26).resolve_scale(**apart)
    whole = alt.concat(grid, _schedule(schedules, pick), columns=1, data=alt.Data(values=rows))
    text = f"{len(shown)} of {found.runnable:,} topologies that can run, the best by seconds and memory"
    best = f"{labels[0]}, {rows[0]['gib']} GiB, of which the parts and the pipeline schedule are shown"
    return Interactive(whole.resolve_scale(**apart), f"{text}. The best: {best}.")


def shown_plans(found: SearchResult, most: int = 40) -> list[Candidate]:
    """The plans of the explorer, the best first: three quarters of `most` by speed, then of the front and the risky."""
    chosen = {c.plan.id: c for c in found.best(3 * most // 4).rows}
    risky = found.best_per_sizes(most, risky=True).rows
    free = most - len(chosen)
    # a front of thousands is thinned evenly: its fastest and its smallest plan stay
    for c in [*spread(found.pareto, free - min(len(risky), free // 3)), *risky]:
        if len(chosen) < most:
            chosen.setdefault(c.plan.id, c)
    return sorted(chosen.values(), key=lambda c: (c.prediction.is_risky, c.prediction.sec_per_it))


def spread(values: Iterable[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly chosen, the first and the last among them."""
    every = list(values)
    count = min(most, len(every))
    return [every[round(i * (len(every) - 1) / max(count - 1, 1))] for i in range(count)]


class Drawn:
    """The part of a plan's schedule that is drawn: some of its microbatches, on some of its stages."""

    def __init__(self, candidate: Candidate, passes: int = 500, stages: int = 16):
        t = candidate.topology
        self.id, self.of, self.chunks = candidate.plan.id, t.microbatches, t.interleaving
        # twice the stages show how the pipeline fills, its steady state, and how it drains; the rest repeats the middle
        self.microbatches = min(self.of, max(2 * t.pp, 8))
        if 2 * t.pp * self.microbatches * t.interleaving > passes:
            self.microbatches = min(self.of, max(t.pp, 4))
        if t.interleaving > 1:
            self.microbatches -= self.microbatches % t.pp  # an interleaved schedule has rounds of pp
        self.made: PipelineSchedule = pipeline_schedule(t, candidate.prediction, self.microbatches)
        most = max(min(passes // (2 * self.microbatches * t.interleaving), stages), 2)
        self.stages = sorted({*spread(range(t.pp), most), self.made.slowest})

    def rows(self) -> Iterator[Row]:
        """A row for each stage, kind and model chunk, with the start of each pass in seconds; then what follows."""
        groups: dict[tuple[int, bool, int], Row] = {}
        for p in (p for p in self.made.passes if p.stage in self.stages):
            row = {"id": self.id, "stage": p.stage, "kind": "forward" if p.is_forward else "backward", "start": []}
            row |= {"chunk": p.chunk, "length": rounded(p.end - p.start, 4), "shade": 1 - 0.6 * p.chunk / self.chunks}
            groups.setdefault((p.stage, p.is_forward, p.chunk), row)["start"].append(rounded(p.start, 4))
        yield from groups.values()
        start = self.made.pipeline_end
        for kind, seconds in (("gradients", self.made.data_parallel), ("optimizer", self.made.optimizer)):
            row = {"id": self.id, "kind": kind, "start": [rounded(start, 4)], "length": rounded(seconds, 4), "shade": 1}
            yield from ({**row, "stage": stage, "chunk": ""} for stage in self.stages * (seconds > 0))
            start += seconds


def plan_row(c: Candidate, rank: str, tokens: float, drawn: Drawn) -> Row:
    """All that the panels show of a plan but its schedule; lists have a value for each part or stage."""
    p, t, seconds = c.prediction, c.topology, drawn.made.stage_seconds
    # 46 characters of 12 pixels have the width of a telephone
    words = [part for line in lines(c, tokens, drawn) for part in textwrap.wrap(line, 46, subsequent_indent="   ")]
    row: Row = {"id": c.plan.id, "label": plain(c.label), "gpus": t.gpus, "tp": t.tp, "pp": t.pp, "dp": t.dp}
    row |= {"rank": rank, "oom": f"{p.oom_probability:.1%}", "card": "\n".join(words)}
    row |= {name: rounded(v, 4) for name, v in (("s", p.sec_per_it), ("lo", p.sec_lo), ("hi", p.sec_hi))}
    row |= {"gib": rounded(p.memory_bytes / 2**30, 4)}
    row |= {"risk": RISKS[(p.oom_probability > SAFE) + (p.oom_probability > RISKY)]}
    parts = {name.replace("_", " "): v for name, v in vars(p.time).items()}
    row |= {"part": [*parts], "part_s": [rounded(v, 4) for v in parts.values()]}
    row |= {"share": [f"{v / p.time.total:.1%}" for v in parts.values()]}
    stages = sorted({*spread(range(t.pp), 32), drawn.made.slowest})
    row |= {"stage": stages, "ms": [rounded(1e3 * seconds[i], 4) for i in stages]}
    memory = {name: [rounded(getattr(p.stages[i], name) / 2**30, 4) for i in stages] for name in vars(p.stages[0])}
    return {**row, "slow": [seconds[i] > 0.999 * max(seconds) for i in stages], **memory}


def lines(c: Candidate, tokens: float, drawn: Drawn) -> Iterator[str]:
    """What is written about a plan, line by line."""
    p, t, made = c.prediction, c.topology, drawn.made
    days = [training_days(c.plan.shape, t, seconds, tokens) for seconds in (p.sec_per_it, p.sec_lo, p.sec_hi)]
    yield plain(c.label)
    sizes = f"TP {t.tp}{f' x CP {t.cp}' * (t.cp > 1)} x PP {t.pp} x DP {t.dp}"
    yield f"{t.gpus} GPU{'s' * (t.gpus > 1)} = {sizes}; id {c.plan.id}"
    yield f"{t.gbs} sequences an iteration: {t.microbatches} microbatch{'es' * (t.microbatches > 1)} of {t.mbs}"
    yield f"{with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)} s an iteration (90 %)"
    yield f"{p.memory_bytes / 2**30:.3g} GiB on the fullest stage, out of memory with {p.oom_probability:.1%}"
    yield f"{amount(tokens / 1e9)} billion tokens: {with_bounds(*days)} days, no interruptions"
    slowest = made.stage_seconds[made.slowest] * len(made.stage_seconds) / sum(made.stage_seconds) - 1
    yield f"Bubble {p.time.bubble / p.sec_per_it:.1%}; stage {made.slowest} is {slowest:.1%} slower than the mean"
    yield f"Drawn: {drawn.microbatches} of {drawn.of} microbatches, {len(drawn.stages)} of {t.pp} stages"
    yield f"Evidence: {p.support.words}"


def _speed(rows: Sequence[Row], pick: Any, cell: Any, limit: float) -> Any:
    """Seconds over memory, a point a plan with its interval; the ring is the plan that the other panels show."""
    x = alt.X("gib:Q", title="GiB on the fullest stage", scale=alt.Scale(zero=False, nice=False, padding=12))
    up: Any = {"title": "seconds an iteration (bars: 90 %)", "scale": alt.Scale(zero=False, padding=8)}
    below, scale = alt.Legend(orient="bottom"), alt.Scale(domain=RISKS, range=[COLORS[0], COLORS[5], LIMIT])
    color = alt.Color("risk:N", title="out of memory", scale=scale, legend=below)
    base = chart(title="Speed and memory: pick a plan", width=380, height=230).transform_filter(cell).encode(x=x)
    titles = {"label": "plan", "rank": "rank", "id": "id", "gpus": "GPUs", "s": "seconds", "lo": "90 % from"}
    titles |= {"hi": "to", "gib": "GiB", "oom": "P(out of memory)"}
    points = base.mark_point(filled=True, opacity=1, strokeWidth=2.5).encode(
        y=alt.Y("s:Q", **up),
        color=color,
        tooltip=tooltips(titles),
        size=alt.condition(pick, alt.value(230), alt.value(90)),
        stroke=alt.condition(pick, alt.value(INK), alt.value("transparent")),
    )
    if len({row["gpus"] for row in rows}) > 1:
        points = points.encode(shape=alt.Shape("gpus:N", title="GPUs", legend=below))
    bars = base.mark_rule().encode(y=alt.Y("lo:Q", **up), y2="hi:Q", color=color)
    line = chart([{"gib": limit, "what": f"memory of the card: {limit:.4g} GiB"}]).mark_rule(color=LIMIT)
    near = limit < 1.5 * max(row["gib"] for row in rows)
    return alt.layer(bars, points.add_params(pick), *[line.encode(x=x, tooltip="what:N")] * near)


def _heat(cell: Any) -> Any:
    """The best plan of each TP and PP; a click leaves its plans in the first panel."""
    base = chart(title="Best seconds: pick a cell", width=380, height=230)
    # the rows stand in their order, the safe ones first, the fastest first
    base = base.transform_window(nth="row_number()", groupby=["tp", "pp"]).transform_filter("datum.nth == 1")
    x = alt.X("tp:O", title="tensor parallel (TP)", axis=alt.Axis(labelAngle=0))
    base = base.encode(x=x, y=alt.Y("pp:O", title="pipeline stages (PP)"))
    titles = {"tp": "TP", "pp": "PP", "label": "plan", "s": "seconds", "gib": "GiB", "risk": "out of memory"}
    rect = base.mark_rect(strokeWidth=3).encode(
        color=alt.Color("s:Q", scale=alt.Scale(range=["#5fa3c9", "#eef5f9"], type="log"), legend=None),
        stroke=alt.condition(cell, alt.value(INK), alt.value("transparent"), empty=False),
        tooltip=tooltips(titles),
    )
    return alt.layer(rect.add_params(cell), base.mark_text(color="#10202c", fontSize=11).encode(text="s:Q"))


def _words(pick: Any) -> Any:
    """The lines of the picked plan."""
    text = chart(title="The picked plan", width=380, height=280).transform_filter(pick)
    text = text.mark_text(align="left", baseline="top", lineBreak="\n", lineHeight=16)
    return text.encode(x=alt.value(0), y=alt.value(4), text="card:N", tooltip=alt.value(None))


def _time(rows: Sequence[Row], pick: Any) -> Any:
    """Seconds of an iteration by part, the picked plan's."""
    base = chart(title="Time by part", width=380, height=230).transform_filter(pick)
    base = base.transform_flatten(["part", "part_s", "share"]).transform_filter("datum.part_s > 0")
    return base.mark_bar().encode(
        x=alt.X("part_s:Q", title="seconds an iteration", axis=alt.Axis(tickCount=5)),
        y=alt.Y("part:N", title=None, axis=alt.Axis(labelFontSize=9), scale=alt.Scale(domain=rows[0]["part"])),
        color=alt.condition("datum.part == 'bubble'", alt.value(COLORS[1]), alt.value(COLORS[0])),
        tooltip=tooltips({"part": "part", "part_s": "seconds", "share": "of the iteration"}),
    )


def _by_stage(pick: Any, title: str, fields: Sequence[str]) -> Any:
    """A bar for each stage of the picked plan."""
    x = alt.X("stage:O", title="pipeline stage", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    base = chart(title=title, width=380, height=230).transform_filter(pick).transform_flatten(["stage", *fields])
    return base.mark_bar().encode(x=x)


def _memory(rows: Sequence[Row], pick: Any, limit: float) -> Any:
    """What fills a GPU of each stage, against the card."""
    names = [f.name for f in fields(StageMemory) if any(any(row[f.name]) for row in rows)]
    below = alt.Legend(orient="bottom", columns=3)
    base = _by_stage(pick, "Memory by stage (line: the card)", names).transform_fold(names, as_=["part", "gib"])
    bars = base.encode(
        y=alt.Y("gib:Q", title="GiB on a GPU"),
        color=alt.Color("part:N", title=None, scale=alt.Scale(domain=names), legend=below),
        tooltip=tooltips({"stage": "stage", "part": "part", "gib": "GiB"}),
    )
    line = chart([{"gib": limit}]).mark_rule(color=LIMIT, strokeWidth=1.5).encode(y="gib:Q", tooltip=alt.value(None))
    return alt.layer(bars, *[line] * (limit < 2 * max(row["gib"] for row in rows)))


def _pace(pick: Any) -> Any:
    """Milliseconds that a microbatch takes on each stage; the slowest sets the pace."""
    return _by_stage(pick, "Time by stage (orange: slowest)", ["ms", "slow"]).encode(
        y=alt.Y("ms:Q", title="ms a microbatch"),
        color=alt.condition("datum.slow", alt.value(COLORS[1]), alt.value(COLORS[0])),
        tooltip=tooltips({"stage": "stage", "ms": "ms, forward and backward"}),
    )


def _schedule(drawn: Iterable[Drawn], pick: Any) -> Any:
    """The passes of each stage from the predicted times, to scale; what is white is the bubble."""
    kinds = {"forward": COLORS[0], "backward": COLORS[2], "gradients": COLORS[1], "optimizer": COLORS[3]}
    titles = {"stage": "stage", "kind": "pass", "number": "microbatch", "chunk": "model chunk", "length": "seconds"}
    scale = alt.Scale(domain=[*kinds], range=[*kinds.values()])
    rows = (row for d in drawn for row in d.rows())
    base = chart(rows, title="Pipeline schedule (gaps: bubble)", width=850, height=280).transform_filter(pick)
    base = base.transform_flatten(["start"]).transform_window(number="row_number()", groupby=["stage", "kind", "chunk"])
    base = base.transform_calculate(end="datum.start + datum.length", number="datum.chunk === '' ? '' : datum.number")
    return base.mark_bar(stroke="white", strokeWidth=0.3).encode(
        x=alt.X("start:Q", title="seconds since the iteration began", scale=alt.Scale(nice=False)),
        x2="end:Q",
        y=alt.Y("stage:O", title="pipeline stage"),
        color=alt.Color("kind:N", title=None, scale=scale, legend=alt.Legend(orient="bottom")),
        opacity=alt.Opacity("shade:Q", scale=None, legend=None),
        tooltip=tooltips(titles),
    )
