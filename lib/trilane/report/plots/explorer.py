"""The explorer of a search: its plans by speed and memory; the picked one next to two others, and
its schedule.
"""

import base64
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from PIL import Image

from trilane.costmodel.iteration import IterationTime
from trilane.costmodel.memory import StageMemory
from trilane.costmodel.pipeline import PipelineSchedule, pipeline_schedule
from trilane.costmodel.predict import SAFE
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.search_result import Candidate, SearchResult
from trilane.report.plots.style import COLORS, INK, LIMIT, MIME, VERSION, plain
from trilane.utils.numbers import amount, chance, size_text, with_bounds
from trilane.utils.tables import as_json, grouped
from trilane.utils.validation import shipped_json

# probability of running out of memory
RISKS = (f"up to {SAFE:.0%}", f"above {SAFE:.0%}")
TIMES = [field.name.replace("_", " ") for field in fields(IterationTime)]
MEMORY = [field.name.replace("_", " ") for field in fields(StageMemory)]
# One meaning a colour in all panels: blue computes, green is sent, orange are gradients, grey waits
HUES: dict[str, str] = shipped_json("report/figures")["hues"]
PICKED = "#00a3c4"
SHOWN = ["picked", "A", "B"]
BEST, FRONT, RISKIEST = 24, 10, 6  # about how many plans of each kind are drawn
PASSES = ("forward", "backward", "data parallel", "optimizer", "bubble")
# pixels a second, in Vega's expressions
SCALE = "(scale('schedule_x', 1) - scale('schedule_x', 0))"
# A run of passes on a stage: its first microbatch, how many, and seconds of the first start, a
# pass, and between starts
RUN = ("on", "kind", "chunk", "first", "count", "start", "length", "step")
Row = dict[str, Any]


class Interactive:
    """A figure with tooltips, selections and controls. `text`, for screen readers: what is drawn,
    and the result.

    `data`: rows by the name that the chart has for them; those in the chart itself are copied at
    each step of it.
    """

    def __init__(self, chart: Any, text: str, **data: Sequence[Mapping[str, Any]]):
        with alt.data_transformers.disable_max_rows():
            spec = chart.to_dict()
        # Altair writes 5.20, of which JupyterLab's 5.6 warns on the console
        spec["$schema"] = "https://vega.github.io/schema/vega-lite/v5.json"
        own = spec.get("config", {})
        own.pop("view", None)
        config = shipped_json("report/figures")["config"]
        spec["config"] = {**config, "range": {"category": list(COLORS)}, **own}
        spec |= {"description": text, "datasets": data}
        self.spec: dict[str, Any] = as_json(spec)
        self.text = text

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as it is before anybody picks, on white."""
        config = {**self.spec["config"], "background": "white"}
        options: Any = {"vl_version": VERSION, "allowed_base_urls": [], "scale": 2}
        drawn = vl_convert.vegalite_to_png({**self.spec, "config": config}, **options)
        picture = Image.open(io.BytesIO(drawn)).convert("RGB")
        small = io.BytesIO()
        # with a palette it takes 23 kB instead of 336
        picture.quantize(256).save(small, "PNG", optimize=True)
        return small.getvalue()

    def savefig(self, path: Path, **options: Any) -> None:
        """Write the picture; the options that matplotlib's figures take change nothing."""
        path.write_bytes(self.png)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {
            MIME: self.spec,
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": self.text,
        }


def tooltips(titles: Mapping[str, str]) -> list[Any]:
    """A line of the tooltip for each field: its title."""
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items()]


def explorer(found: SearchResult, tokens: float = 0.0) -> Interactive:
    """The best plan of each TP x PP x DP, the front of speed and memory, and what risks the memory,
    some 40 in all.

    A click shows a plan in full, next to two that are pinned as A and B: at first the fastest, and
    the fastest that may be recommended. `tokens`: of the run whose days are given, 0 for 20 a
    parameter. Raises ValueError where the search has no safe plan.
    """
    rows = [plan_row(candidate, tokens) for candidate in shown_plans(found)]
    best = rows[0]
    safe = [row for row in rows if row["risk"] == RISKS[0]]
    frugal = min(safe, key=lambda row: row["gib"])
    labels = [f"{row['s']} s, {row['label']}" for row in rows]
    boxes: Any = {"options": [row["id"] for row in rows], "labels": labels}
    pick = alt.selection_point(
        "plan",
        fields=["id"],
        value=[{"id": best["id"]}],
        bind=alt.binding_select(name="picked ", **boxes),
        # without `nearest`, whose tooltips have no words in Vega-Lite 6.4; axes have no id
        on="click[event.item && event.item.datum.id]",
        clear=False,
        empty=False,
    )
    memory = _bars("Fullest stage's memory (GiB)", "memory", MEMORY)
    card = found.rows[0].plan.cluster.gpu.memory_bytes / 2**30
    if card < 2 * max(row["gib"] for row in rows):
        row = {"gib": card, "what": f"memory of the card: {card:.4g} GiB"}
        limit = alt.Chart(alt.Data(values=[row]))
        limit = limit.mark_rule(color=LIMIT).encode(x="gib:Q", tooltip="what:N")
        memory = alt.layer(memory, limit)
    times = _bars("Time by part (s an iteration)", "times", TIMES)
    apart: Any = dict.fromkeys(("color", "opacity", "size"), "independent")
    panels = alt.concat(_speed(pick), _numbers(rows), times, memory, columns=2, spacing=20)
    both = [panels.resolve_scale(**apart), _schedule()]
    figure = alt.concat(*both, columns=1, spacing=20, data=alt.NamedData("plans"))
    figure = figure.resolve_scale(**apart)
    figure = figure.configure_legend(columns=4, labelFontSize=11, labelLimit=260)
    for name, row in (("a", rows[min(1, len(rows) - 1)]), ("b", frugal)):
        box = alt.binding_select(name=f"{name.upper()} ", **boxes)
        figure = figure.add_params(alt.param(name, value=row["id"], bind=box))
    count = f"{len(rows)} of {found.runnable:,} topologies that can run"
    text = f"{count}, by seconds and memory. The best: {labels[0]}, {best['gib']} GiB."
    return Interactive(figure, text, plans=rows)


def shown_plans(found: SearchResult) -> list[Candidate]:
    """The plans of the explorer, the best first, those that risk the memory last."""
    best = found.best(BEST).rows
    front = found.pareto  # of thousands it is thinned evenly: its fastest and smallest plan stay
    thinned = [*front[:: len(front) // FRONT + 1], *front[-1:]]
    risky = found.risky[:RISKIEST]
    unique = {candidate.plan.id: candidate for candidate in (*best, *thinned, *risky)}
    return sorted(unique.values(), key=lambda c: (c.prediction.is_risky, c.prediction.sec_per_it))


def plan_row(c: Candidate, tokens: float = 0.0) -> Row:
    """All that the panels show of a plan; lists have a value for each part, or run of passes."""
    p = c.prediction
    schedule = pipeline_schedule(c.topology, p)
    fullest = max(p.stages, key=lambda stage: stage.total)
    numbers = numbers_of(c, tokens or TOKENS_PER_PARAMETER * c.plan.shape.parameters)
    row: Row = {
        "id": c.plan.id,
        "label": plain(c.label),
        "evidence": p.support.words,
        "gpus": c.topology.gpus,
        "number": [*numbers],
        "text": [*numbers.values()],
        "s": p.sec_per_it,
        "lo": p.sec_lo,
        "hi": p.sec_hi,
        "gib": p.memory_bytes / 2**30,
        "oom": chance(p.oom_probability),
        "risk": RISKS[p.is_risky],
        "whole": schedule.end,
        "times": [*vars(p.time).values()],
        "memory": [size / 2**30 for size in vars(fullest).values()],
    }
    row |= dict(zip(RUN, zip(*runs_of(schedule), strict=True), strict=True))
    # five significant digits: a screen shows no more, and a report stays small
    return json.loads(json.dumps(row), parse_float=lambda number: float(f"{float(number):.5g}"))


def numbers_of(c: Candidate, tokens: float) -> dict[str, str]:
    """What is written about a plan, each by its name, on at most two lines, so narrow that three
    stand on a phone.
    """
    p = c.prediction
    t = c.topology
    interval = (p.sec_per_it, p.sec_lo, p.sec_hi)
    iterations = tokens / t.gbs / c.plan.shape.seq_length
    days = [iterations * seconds / 86400 for seconds in interval]
    return {
        "TP x CP x PP x DP; id": f"{t.tp} x {t.cp} x {t.pp} x {t.dp}\n{c.plan.id}",
        "ZeRO; recompute": f"{t.zero}; {t.recompute}",
        "microbatches": f"{t.microbatches} of {t.mbs}",
        "seconds (90 %)": on_two_lines(*interval),
        "GiB": f"{p.memory_bytes / 2**30:.3g}",
        "P(out of memory)": chance(p.oom_probability),
        f"days of iterations, {size_text(tokens)} tokens": on_two_lines(*days),
        "GPU-hours of these": amount(24 * days[0] * t.gpus),
        "bubble": f"{p.time.bubble / p.sec_per_it:.1%}",
    }


def on_two_lines(value: float, low: float, high: float) -> str:
    """A number, and below it its interval."""
    number, _, interval = with_bounds(value, low, high).partition(" ")
    return f"{number}\n{interval.strip('()')}"


def runs_of(schedule: PipelineSchedule) -> Iterator[tuple[Any, ...]]:
    """A whole schedule, as RUN: passes of one kind on one stage that follow each other at one
    distance are one run.
    """
    end = schedule.pipeline_end
    stages = grouped(schedule.passes, lambda p: (p.stage, p.is_forward, p.chunk))
    for (stage, is_forward, chunk), passes in stages.items():
        kind = "forward" if is_forward else "backward"
        length = passes[0].end - passes[0].start
        starts = np.array([one.start for one in passes])
        first = 1
        changes = np.flatnonzero(np.abs(np.diff(starts, 2)) > 1e-5 * end)
        # the pass after a change of distance begins another run
        for run in np.split(starts, changes + 2):
            step = float(run[1] - run[0]) if len(run) > 1 else length
            yield stage, kind, chunk, first, len(run), float(run[0]), length, step
            first += len(run)
    ending = {"data parallel": schedule.data_parallel, "optimizer": schedule.optimizer}
    for kind, seconds in ending.items():
        for stage in range(len(schedule.stage_seconds) if seconds > 0 else 0):
            yield stage, kind, 0, 0, 1, end, seconds, seconds
        end += seconds


def _speed(pick: Any) -> Any:
    """Seconds over memory, a point a plan with its interval, the pins by their letters."""
    whole: Any = {"nice": False, "zero": False, "padding": 12}
    x = alt.X("gib:Q", title="GiB on the fullest stage", scale=alt.Scale(**whole))
    y: Any = {"title": "seconds an iteration (bars: 90 %)", "scale": alt.Scale(**whole)}
    legend = alt.Legend(orient="top", title="P(OOM)", titleOrient="left", symbolOpacity=1)
    colors = alt.Scale(domain=RISKS, range=[INK, LIMIT])
    color = alt.Color("risk:N", scale=colors, legend=legend)
    base = (
        alt.Chart()
        .properties(width=470, height=255, title="Speed and memory: pick a plan")
        .encode(x=x)
    )
    bars = base.mark_rule(opacity=0.5).encode(y=alt.Y("lo:Q", **y), y2="hi:Q", color=color)
    titles = {"label": "plan", "id": "id", "gpus": "GPUs", "s": "seconds", "lo": "90 % from"}
    titles |= {"hi": "to", "gib": "GiB", "oom": "P(out of memory)"}
    points = base.mark_point(filled=True, opacity=1, strokeWidth=2.5).encode(
        y=alt.Y("s:Q", **y),
        color=color,
        tooltip=tooltips(titles),
        size=alt.condition(pick, alt.value(260), alt.value(90)),
        stroke=alt.condition(pick, alt.value(PICKED), alt.value("transparent")),
    )
    pins = base.transform_calculate(pin="(datum.id == a ? 'A' : '') + (datum.id == b ? 'B' : '')")
    pins = pins.mark_text(dx=13, dy=-9, fontSize=13, fontWeight="bold")
    pins = pins.encode(y=alt.Y("s:Q", **y), text="pin:N")
    return alt.layer(bars, points.add_params(pick), pins)


def _three(**properties: Any) -> Any:
    """A chart of the rows of the picked plan and of the pins, each as often as it is
    one of them.
    """
    base = (
        alt.Chart()
        .properties(**properties)
        .transform_calculate(which=repr(SHOWN))
        .transform_flatten(["which"])
    )
    return base.transform_filter("{picked: plan_id, A: a, B: b}[datum.which] == datum.id")


def _numbers(rows: Sequence[Row]) -> Any:
    """The numbers of the picked plan and of the pins."""
    names = rows[0]["number"]
    bare: Any = {"domain": False, "ticks": False, "labelFontSize": 11}
    top = alt.Axis(orient="top", labelAngle=0, labelFontWeight="bold", **bare)
    text = _three(width=400, height=24 * len(names)).transform_flatten(["number", "text"])
    text = text.mark_text(lineBreak="\n", lineHeight=11, fontSize=11, baseline="middle")
    return text.encode(
        x=alt.X("which:N", title=None, sort=SHOWN, axis=top),
        y=alt.Y("number:N", title=None, sort=names, axis=alt.Axis(**bare)),
        text="text:N",
        tooltip=tooltips({"label": "plan", "evidence": "evidence"}),
    )


def _bars(title: str, field: str, names: Sequence[str]) -> Any:
    """The parts of the picked plan and of the pins, one after another."""
    place = f"indexof({[*names]!r}, datum.part)"
    base = _three(title=title, width=400, height=66).transform_calculate(part=repr([*names]))
    base = base.transform_flatten(["part", field]).transform_filter(f"datum.{field} > 0")
    titles = {"which": "", "label": "plan", "part": "part", field: title}
    return (
        base.transform_calculate(place=place)
        .mark_bar()
        .encode(
            x=alt.X(f"{field}:Q", title=None, axis=alt.Axis(tickCount=5)),
            y=alt.Y("which:N", title=None, sort=SHOWN),
            color=_hue("part", names),
            order="place:Q",
            tooltip=tooltips(titles),
        )
    )


def _hue(field: str, names: Sequence[str]) -> Any:
    scale = alt.Scale(domain=[*names], range=[HUES[name] for name in names])
    legend = alt.Legend(orient="bottom", symbolStrokeWidth=9)
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=legend)


def _schedule() -> Any:
    """The passes of each stage of the picked plan to scale: a dashed line is a run of them, so that
    all are drawn.
    """
    base = alt.Chart().transform_filter("datum.id == plan_id").transform_flatten([*RUN])
    base = base.transform_calculate(
        end="datum.start + datum.step * (datum.count - 1) + datum.length",
        microbatches="datum.first ? datum.first + ' to ' + (datum.first + datum.count - 1) : 'all'",
        shade="1 - 0.5 * datum.chunk / (1 + datum.chunk)",
    )
    # a gap of 0.7 pixels at most
    dash = f"{SCALE} * max(0.8 * datum.length, datum.length - 0.7 / {SCALE})"
    dashes: Any = alt.expr(f"[{dash}, {SCALE} * datum.step - {dash}]")
    width: Any = alt.expr("0.86 * bandwidth('schedule_y')")
    titles = {"on": "stage", "kind": "pass", "microbatches": "microbatches", "chunk": "model chunk"}
    titles |= {"length": "seconds of a pass"}
    lines = base.mark_rule(strokeDash=dashes, strokeWidth=width, clip=True).encode(
        x=alt.X("start:Q", title="seconds since the iteration began", scale=alt.Scale(nice=False)),
        x2="end:Q",
        y=alt.Y("on:O", title=None, axis=alt.Axis(labelOverlap=True)),
        color=_hue("kind", PASSES),
        opacity=alt.Opacity("shade:Q", scale=None, legend=None),
        tooltip=tooltips(titles),
    )
    zoom = alt.selection_interval(name="zoom", encodings=["x"], bind="scales")
    look: Any = {"name": "schedule", "width": 900, "height": 190, "view": {"fill": HUES["bubble"]}}
    return alt.layer(lines.add_params(zoom)).properties(title="Pipeline schedule, picked", **look)
