"""The explorer of a search: its plans by speed and memory, and the picked one with its parts, stages and schedule."""

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import altair as alt

from trilane.costmodel.iteration import IterationTime
from trilane.costmodel.memory import StageMemory
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.search_result import Candidate, SearchResult
from trilane.report.plots.explorer_rows import (
    RISKS,
    STAGES,
    Drawn,
    Row,
    four,
    lines,
    plan_rows,
    ranks_by_id,
    shown_plans,
    spread,
)
from trilane.report.plots.interactive import Interactive
from trilane.report.plots.style import COLORS, GIB, INK, LIMIT
from trilane.utils.numbers import with_bounds

PASSES = 20000  # that are drawn, of all plans together: 5 bytes each
WIDTH, HEIGHT = 380, 230  # pixels of a panel
WIDE = 2 * WIDTH + 90
KINDS = {"forward": COLORS[0], "backward": COLORS[2], "gradients": COLORS[1], "optimizer": COLORS[3]}
TOOLTIPS = {
    "label": "plan",
    "rank": "rank",
    "id": "id",
    "gpus": "GPUs",
    "s": "seconds",
    "lo": "90 % from",
    "hi": "to",
    "gib": "GiB",
}
TOOLTIPS |= {"oom": "P(out of memory)"}


def explorer(found: SearchResult, tokens: float = 0.0) -> Interactive:
    """The best plan of each TP x PP x DP, the front of speed and memory, and what risks the memory, 40 in all.

    A click on a cell of the heat map leaves its plans in the first panel; a click on a plan shows its numbers, time by
    part, memory and time by stage, and its schedule. `tokens`: of the run whose days are given, 0 for 20 a parameter.
    Raises ValueError where the search has no safe plan.
    """
    shown = shown_plans(found)
    tokens = tokens or TOKENS_PER_PARAMETER * shown[0].plan.shape.parameters
    drawn = [Drawn(c, PASSES // len(shown)) for c in shown]
    rows, limit = plan_rows(shown, ranks_by_id(found)), shown[0].plan.cluster.gpu.memory_bytes / GIB
    names = [f"{row['s']} s, {row['label']}" for row in rows]
    box = alt.binding_select(options=[row["id"] for row in rows], labels=names, name="Plan ")
    # without `nearest`, whose tooltips have no words in Vega-Lite 6.4; the limit's line has no id and is no pick
    on = "click[event.item && event.item.datum.id]"
    click: Any = {"fields": ["id"], "bind": box, "on": on, "clear": False, "empty": False}
    pick = alt.selection_point(name="plan", value=[{"id": rows[0]["id"]}], **click)
    cell = alt.selection_point(name="cell", fields=["tp", "pp"])
    panels = [
        _speed(rows, pick, cell, limit),
        _heat(rows, cell),
        _words([line for c, d in zip(shown, drawn, strict=True) for line in lines(c, tokens, d)], pick),
        _time(shown, pick),
        _memory(shown, pick, limit),
        _pace(drawn, pick),
    ]
    apart: Any = dict.fromkeys(("color", "opacity", "shape", "size"), "independent")
    grid = alt.concat(*panels, columns=2, spacing=26).resolve_scale(**apart)
    chart = alt.concat(grid, _schedule(drawn, pick), columns=1).resolve_scale(**apart)
    return Interactive(chart, _text(found, shown))


def _text(found: SearchResult, shown: list[Candidate]) -> str:
    """What is drawn and what it says, for screen readers."""
    p, most = shown[0].prediction, len(found.candidates) + len(found.risky)
    of = f"{len(shown)} of the {most} best of {found.runnable:,} topologies that can run" * (most > len(shown))
    return (
        "The plans of the search by seconds and memory, and one of them with its parts and its pipeline schedule: "
        f"{of or 'all'}. The best, {shown[0].label}, takes {with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)} s "
        f"an iteration and {p.memory_bytes / GIB:.3g} GiB; {p.time.bubble / p.sec_per_it:.1%} is "
        "the bubble."
    )


def _of(rows: Iterable[Row], width: int = WIDTH, height: int = HEIGHT, title: str = "") -> Any:
    return alt.Chart(alt.Data(values=list(rows)), width=width, height=height, title=title)


def _tooltips(names: dict[str, str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in names.items()]


def _speed(rows: list[Row], pick: Any, cell: Any, limit: float) -> Any:
    """Seconds over memory, a point a plan with its interval; the ring is the plan that the other panels show."""
    most = max(r["gib"] for r in rows)
    near = limit < 1.5 * most
    ends = [0.95 * min(r["gib"] for r in rows), 1.05 * max(most, limit * near)]
    x, wide = alt.X("gib:Q", title="GiB on the fullest stage", scale=alt.Scale(domain=ends, nice=False)), ends
    ends = [0.95 * min(r["lo"] for r in rows), 1.02 * max(r["hi"] for r in rows)]
    up: Any = {"title": "seconds an iteration (bars: 90 %)", "scale": alt.Scale(domain=ends, nice=False)}
    scale = alt.Scale(domain=RISKS, range=[COLORS[0], COLORS[5], LIMIT])
    color = alt.Color("risk:N", title="out of memory", scale=scale, legend=alt.Legend(orient="bottom"))
    base = _of(rows, title="Speed and memory: pick a plan").transform_filter(cell).encode(x=x)
    points = base.mark_point(filled=True, opacity=1, strokeWidth=2.5).encode(
        y=alt.Y("s:Q", **up),
        color=color,
        tooltip=_tooltips(TOOLTIPS),
        size=alt.condition(pick, alt.value(230), alt.value(90)),
        stroke=alt.condition(pick, alt.value(INK), alt.value("transparent")),
    )
    if len({r["gpus"] for r in rows}) > 1:
        points = points.encode(shape=alt.Shape("gpus:N", title="GPUs", legend=alt.Legend(orient="bottom")))
    bars = base.mark_rule().encode(y=alt.Y("lo:Q", **up), y2="hi:Q", color=color)
    free = _of([r for r in rows if r["tie"] and not is_covered(r, rows, wide, ends)]).transform_filter(cell).encode(x=x)
    ties = free.mark_text(dx=8, dy=-9, fontSize=10, align="left").encode(y=alt.Y("s:Q", **up), text="tie:N")
    card = _of([{"gib": limit, "what": f"memory of the card: {limit:.4g} GiB"}])
    line = card.mark_rule(color=LIMIT, strokeDash=[5, 3]).encode(x=x, tooltip="what:N")
    return alt.layer(bars, points.add_params(pick), ties, *[line] * near)


def is_covered(row: Row, rows: list[Row], x: list[float], y: list[float]) -> bool:
    """Whether the label of a tie would lie on the dot of another plan; its tooltip and the table have it, too."""

    def place(r: Row) -> tuple[float, float]:
        return WIDTH * (r["gib"] - x[0]) / (x[1] - x[0]), HEIGHT * (y[1] - r["s"]) / (y[1] - y[0])

    left, height = place(row)
    for other in rows:
        across, down = place(other)[0] - left, place(other)[1] - height
        aside = max(8 - across, 0, across - 8 - 6 * len(row["tie"]))  # pixels from the label, and from its lines
        if math.hypot(aside, max(-15 - down, 0, down + 3)) < 8:  # a dot's radius is at most 8.6
            return True
    return False


def _heat(rows: list[Row], cell: Any) -> Any:
    """The fastest plan of each TP and PP; a click leaves its plans in the first panel."""
    best: dict[tuple[int, int], Row] = {}
    for row in rows:  # the safe ones first, each the fastest first
        best.setdefault((row["tp"], row["pp"]), row)
    base = _of(best.values(), title="Best seconds: pick a cell").encode(
        x=alt.X("tp:O", title="tensor parallel (TP)", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("pp:O", title="pipeline stages (PP)"),
    )
    scale = alt.Scale(range=["#5fa3c9", "#eef5f9"], type="log")
    rect = base.mark_rect(strokeWidth=3).encode(
        color=alt.Color("s:Q", scale=scale, legend=None),
        stroke=alt.condition(cell, alt.value(INK), alt.value("transparent"), empty=False),
        tooltip=_tooltips({"tp": "TP", "pp": "PP", **TOOLTIPS, "risk": "out of memory"}),
    )
    return alt.layer(rect.add_params(cell), base.mark_text(color="#10202c", fontSize=11).encode(text="s:Q"))


def _words(rows: list[Row], pick: Any) -> Any:
    """The picked plan in words."""
    chart = (
        _of(rows, height=300, title="The picked plan").transform_filter(pick).mark_text(align="left", baseline="middle")
    )
    return chart.encode(
        size=alt.condition("datum.n == 0", alt.value(13), alt.value(12)),
        x=alt.value(0),
        y=alt.Y("n:O", axis=None, scale=alt.Scale(domain=list(range(1 + max(r["n"] for r in rows))))),
        text="line:N",
    )


def _time(shown: list[Candidate], pick: Any) -> Any:
    """Seconds of an iteration by part, the picked plan's."""
    names, rows = [f.name.replace("_", " ") for f in fields(IterationTime)], list[Row]()
    for c in shown:
        id, total = c.plan.id, c.prediction.time.total
        parts = {name.replace("_", " "): value for name, value in vars(c.prediction.time).items() if value}
        rows += [{"id": id, "part": n, "s": four(v), "share": f"{v / total:.1%}"} for n, v in parts.items()]
    return (
        _of(rows, title="Time by part")
        .transform_filter(pick)
        .mark_bar()
        .encode(
            x=alt.X("s:Q", title="seconds an iteration"),
            y=alt.Y("part:N", title=None, axis=alt.Axis(labelFontSize=9), scale=alt.Scale(domain=names)),
            color=alt.condition("datum.part == 'bubble'", alt.value(COLORS[1]), alt.value(COLORS[0])),
            tooltip=_tooltips({"part": "part", "s": "seconds", "share": "of the iteration"}),
        )
    )


def _memory(shown: list[Candidate], pick: Any, limit: float) -> Any:
    """What fills a GPU of each stage, against the card."""
    names, rows = [f.name for f in fields(StageMemory)], list[Row]()
    for c in shown:
        id, chosen = c.plan.id, spread(range(c.topology.pp), 2 * STAGES)
        for n, name in enumerate(names):
            sizes = [four(getattr(c.prediction.stages[i], name) / GIB) for i in chosen]
            rows += [{"id": id, "n": n, "part": name, "gib": sizes, "stage": chosen}] if any(sizes) else []
    stage = alt.X("stage:O", title="pipeline stage", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    base = _of(rows, title="Memory by stage (line: the card)")
    bars = (
        base.transform_filter(pick)
        .transform_flatten(["gib", "stage"])
        .mark_bar()
        .encode(
            x=stage,
            y=alt.Y("gib:Q", title="GiB on a GPU"),
            color=alt.Color(
                "part:N", title=None, scale=alt.Scale(domain=names), legend=alt.Legend(orient="bottom", columns=3)
            ),
            order=alt.Order("n:Q"),
            tooltip=_tooltips({"stage": "stage", "part": "part", "gib": "GiB"}),
        )
    )
    near = limit < 2 * max(c.prediction.memory_bytes for c in shown) / GIB
    line = _of([{"gib": limit}]).mark_rule(color=LIMIT, strokeWidth=1.5).encode(y="gib:Q")
    return alt.layer(bars, *[line] * near)


def _pace(drawn: list[Drawn], pick: Any) -> Any:
    """Seconds that a microbatch takes on each stage; the slowest sets the pace."""
    rows = list[Row]()
    for d in drawn:
        seconds = d.made.stage_seconds
        chosen = sorted({*spread(range(len(seconds)), 2 * STAGES), d.made.slowest})
        slow = [seconds[i] > 0.999 * max(seconds) for i in chosen]
        rows.append({"id": d.id, "stage": chosen, "ms": [four(1e3 * seconds[i]) for i in chosen], "slow": slow})
    chart = _of(rows, title="Time by stage (orange: slowest)").transform_filter(pick)
    return (
        chart.transform_flatten(["stage", "ms", "slow"])
        .mark_bar()
        .encode(
            x=alt.X("stage:O", title="pipeline stage", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("ms:Q", title="ms a microbatch"),
            color=alt.condition("datum.slow", alt.value(COLORS[1]), alt.value(COLORS[0])),
            tooltip=_tooltips({"stage": "stage", "ms": "ms, forward and backward"}),
        )
    )


def _schedule(drawn: list[Drawn], pick: Any) -> Any:
    """The passes of each stage from the predicted times, to scale; what is white is the bubble."""
    scale = alt.Scale(domain=list(KINDS), range=list(KINDS.values()))
    color = alt.Color("kind:N", title=None, scale=scale, legend=alt.Legend(orient="bottom"))
    x = alt.X("start:Q", title="seconds since the iteration began", scale=alt.Scale(nice=False))
    y = alt.Y("stage:O", title="pipeline stage")
    chart = _of((row for d in drawn for row in d.passes), WIDE, 280, "Pipeline schedule (gaps: bubble)")
    chart = chart.transform_filter(pick).transform_flatten(["start"])
    chart = chart.transform_calculate(end="datum.start + datum.length")
    chart = chart.transform_window(number="row_number()", groupby=["stage", "kind", "chunk"])
    titles = {"stage": "stage", "kind": "pass", "number": "microbatch", "chunk": "model chunk", "length": "seconds"}
    shade = alt.Opacity("shade:Q", scale=None, legend=None)
    bars = chart.mark_bar(stroke="white", strokeWidth=0.3).encode(
        x=x, x2="end:Q", y=y, color=color, tooltip=_tooltips(titles), opacity=shade
    )
    after = _of((row for d in drawn for row in d.after), WIDE, 280).transform_filter(pick).transform_flatten(["stage"])
    titles = {"stage": "stage", "kind": "what", "length": "seconds"}
    tail = after.mark_bar().encode(x=x, x2="end:Q", y=y, color=color, tooltip=_tooltips(titles))
    return alt.layer(bars, tail)
