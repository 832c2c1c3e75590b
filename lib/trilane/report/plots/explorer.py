"""The explorer of a search: its plans by speed and memory; the picked one next to two others, and
its schedule.
"""

import base64
import copy
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert
from PIL import Image

from trilane.costmodel.pipeline import PipelineSchedule, pipeline_schedule
from trilane.costmodel.predict import SAFE
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.planning.search_result import Candidate, SearchResult
from trilane.report.plots.style import MIME, VERSION, plain
from trilane.utils.numbers import amount, chance, size_text, with_bounds
from trilane.utils.tables import Json, as_json, grouped
from trilane.utils.validation import shipped_json

# probability of running out of memory
RISKS = (f"up to {SAFE:.0%}", f"above {SAFE:.0%}")
PLANS = ("plan", "a", "b")  # the parameters that are plans
# so many plans stand first, and have their schedule: of an interleaved one it takes 30 kB
WHOLE = 12
# A run of passes on a stage: its first microbatch, how many, and seconds of the first start, a
# pass, and between starts
RUN = ("on", "kind", "chunk", "first", "count", "start", "length", "step")


class Interactive:
    """A figure with tooltips, selections and controls, from a specification of Vega-Lite. `text`,
    for screen readers: what is drawn, and the result.

    `data`: rows by the name that the specification has for them.
    """

    def __init__(self, spec: Json, text: str, **data: Sequence[Json]):
        self.spec: Json = as_json({**spec, "description": text, "datasets": data})

    def bound(self, rows: Sequence[Json], elements: Mapping[str, str]) -> Json:
        """The specification with other plans, whose parameters are the values of elements of the
        page: their CSS selectors.
        """
        params = []
        for param in self.spec["params"]:
            if param["name"] in elements:
                bind = {"element": elements[param["name"]], "event": "change"}
                param = {**param, "bind": bind}
                del param["value"]
            params.append(param)
        return {**self.spec, "params": params, "datasets": {**self.spec["datasets"], "plans": rows}}

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

    def _repr_mimebundle_(self, **options: Any) -> Json:
        return {
            MIME: self.spec,
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": self.spec["description"],
        }


def explorer(plans: Sequence[Candidate], tokens: float = 0.0) -> Interactive:
    """The plans, such as shown_plans() of a search; the first WHOLE of them with their schedule.

    A click shows a plan in full, next to two that are pinned as A and B: at first the runner-up,
    and the one with the least memory. `tokens`: of the run whose days are given, 0 for 20 a
    parameter.
    """
    rows = [plan_row(c, tokens, number < WHOLE) for number, c in enumerate(plans)]
    names = [row["key"] for row in rows]
    frugal = min(rows, key=lambda row: (row["risk"] != RISKS[0], row["gib"]))
    values = {
        "plan": [{"key": names[0]}],
        "a": names[:2][-1],
        "b": frugal["key"],
        "numbers": [*numbers_of(plans[0], tokens)],
    }
    spec = copy.deepcopy(shipped_json("report/explorer"))
    for param in spec["params"]:
        name = param["name"]
        if name in values:
            param["value"] = values[name]
        if name.startswith("only_"):
            param["bind"]["options"] = ["all", *sorted({row[name[5:]] for row in rows})]
        elif name in PLANS:
            param["bind"]["options"] = names
    card = plans[0].plan.cluster.gpu.memory_bytes / 2**30
    limit = {"gib": card, "what": f"memory of the card: {card:.4g} GiB"}
    if card > 2 * max(row["gib"] for row in rows):
        limit["gib"] = 0  # where it is not drawn
    text = f"Plans by seconds and memory: {len(rows)}. The best: {names[0]}, {rows[0]['gib']} GiB."
    return Interactive(spec, text, plans=rows, limits=[limit])


def shown_plans(found: SearchResult) -> list[Candidate]:
    """The plans of a search that its explorer shows, each once: the best of each TP x PP x DP, then
    of each the fastest by ZeRO stage, recomputation and risk. Raises ValueError where no plan is
    safe.
    """
    return [*{c.plan.id: c for c in [*found.best(WHOLE), *found.kinds()]}.values()]


def plan_row(c: Candidate, tokens: float = 0.0, is_whole: bool = True) -> Json:
    """All that the panels show of a plan, the whole with its schedule; lists have a value for each
    part, or run of passes.
    """
    p = c.prediction
    t = c.topology
    fullest = max(p.stages, key=lambda stage: stage.total)
    row = {
        "key": f"{p.sec_per_it:.5g} s, {plain(c.label)} ({c.plan.id})",
        "id": c.plan.id,
        "label": plain(c.label),
        "tp": t.tp,
        "pp": t.pp,
        "zero": t.zero,
        "recompute": t.recompute,
        "evidence": p.support.words,
        "text": [*numbers_of(c, tokens).values()],
        "s": p.sec_per_it,
        "lo": p.sec_lo,
        "hi": p.sec_hi,
        "gib": p.memory_bytes / 2**30,
        "oom": chance(p.oom_probability),
        "risk": RISKS[p.is_risky],
        "times": [*vars(p.time).values()],
        "memory": [size / 2**30 for size in vars(fullest).values()],
    }
    if is_whole:
        schedule = pipeline_schedule(t, p)
        row["whole"] = schedule.end
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
    tokens = tokens or TOKENS_PER_PARAMETER * c.plan.shape.active_parameters
    iterations = tokens / t.gbs / c.plan.shape.seq_length
    days = [iterations * seconds / 86400 for seconds in interval]
    shown = "under 0.01"  # more digits do not fit
    if days[2] >= 0.01:
        shown = with_bounds(*days).replace(" (", "\n").rstrip(")")
    return {
        "TP x CP x PP x DP; id": f"{t.tp} x {t.cp} x {t.pp} x {t.dp}\n{c.plan.id}",
        "ZeRO; recompute": f"{t.zero}; {t.recompute}",
        "microbatches": f"{t.microbatches} of {t.mbs}",
        "seconds (90 %)": with_bounds(*interval).replace(" (", "\n").rstrip(")"),
        "GiB": f"{p.memory_bytes / 2**30:.3g}",
        "P(out of memory)": chance(p.oom_probability),
        f"days, {size_text(tokens)} tokens": shown,
        "GPU-hours of these": amount(24 * days[0] * t.gpus),
    }


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
