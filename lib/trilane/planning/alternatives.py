"""What else could run than a forecast's plan, and what if: each case by its own simulated runs."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from itertools import islice
from typing import Any

from trilane.config.engines import ENGINES, default_attention
from trilane.config.options import read_field, read_value
from trilane.config.parallelism import Topology
from trilane.forecasting.forecast import Forecast
from trilane.forecasting.request import ForecastRequest
from trilane.planning import space
from trilane.planning.search import search
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Record, Table
from trilane.utils.validation import require, require_known

# what a search varies only where it is asked to
HELD = ("attention", "fp32_gradients", "cp", "adam", "buckets", *space.HELD)


@frozen
class Case(Record):
    """A plan and circumstances under which it runs, simulated."""

    kind: str
    name: str
    forecast: Forecast
    note: str = ""

    def hours(self) -> float:
        """GPU-hours, the median of its simulated runs."""
        return self.forecast.gpu_hours(0.5)

    def difference(self, base: Forecast) -> str:
        """Its GPU-hours relative to those of a forecast: "+1.3% GPU-hours"."""
        return f"{self.hours() / base.gpu_hours(0.5) - 1:+.1%} GPU-hours"


@frozen
class Cases(Table):
    """Cases, each forecast by as many simulated runs from one seed."""

    shown = (
        "case gpus tp pp dp days_p50 gpu_hours_p50 memory_gib oom_probability p_miss_deadline "
        "p_overrun_allocation note"
    )
    rows: tuple[Case, ...]

    def to_frame(self) -> DataFrame:
        """A row for each case: its kind, its name, the numbers of Forecast.figures() and a note."""
        import pandas as pd

        rows = []
        for case in self.rows:
            names = {"kind": case.kind, "case": case.name}
            rows.append({**names, **case.forecast.figures(), "note": case.note})
        return pd.DataFrame(rows)


def simulated(name: str, request: ForecastRequest, **changes: Any) -> Case:
    """The request with these changes; ValueError where it cannot run."""
    changed = Forecast(request=replace(request, **changes))
    changed.finish(0.95)  # what cannot be simulated is refused here
    return Case(kind="what if", name=name, forecast=changed)


def searched(base: Forecast, name: str = "", **changes: Any) -> Iterator[Case]:
    """Other topologies of the plan's GPUs, or what changes of its choices allow: the fastest TP x
    PP x DP. Without a `name` each is named by its label.
    """
    r = base.request
    t = r.plan.topology
    asked = {choice: getattr(t, choice) for choice in HELD}
    asked |= {"gpus": t.gpus, "gbs": t.gbs, "engine": r.plan.engine, "calibration": r.calibration}
    asked |= changes
    result = search(r.plan.shape, r.plan.cluster, top=5, distinct=True, **asked)
    for candidate in result.rows:
        # another engine trains no layer of one's own, another topology not every size of a ramp
        with contextlib.suppress(ValueError):
            plan = replace(candidate.plan, layer=r.plan.layer)
            if plan.id != r.plan.id:
                yield simulated(name or plan.label, r, plan=plan)


def alternatives(base: Forecast) -> Cases:
    """The plan and the fastest other topologies.

    alternatives(forecast(plan, tokens=341e9)).to_frame()
    """
    plan = Case(kind="plan", name=base.request.plan.label, forecast=base)
    others = [replace(case, kind="topology") for case in islice(searched(base), 4)]
    return Cases(rows=(plan, *others))


def what_ifs(base: Forecast, asked: Sequence[str] = ()) -> Cases:
    """The plan under other circumstances, first those that were `asked` for (asked_case); on two
    thirds of the GPUs, in whole nodes, the best topology of a search. What cannot run is left out.

    what_ifs(forecast("plan.json", tokens=341e9)).to_frame()[["case", "days_p50", "gpu_hours_p50"]]
    """
    r = base.request
    stops = tuple(
        replace(s, per_node_year=2 * s.per_node_year, per_year=2 * s.per_year)
        for s in r.risks.stops
    )
    more_stops = {"risks": replace(r.risks, stops=stops), "failures_per_node_year": None}
    slower = replace(r.risks, slowdown=1.1 * r.risks.slowdown)
    gpus = int(0.67 * base.work.gpus)
    node = r.plan.cluster.gpus_per_node
    if gpus > node:
        gpus -= gpus % node
    cases = [asked_case(base, text) for text in asked]
    for text in (f"gpus={gpus}", "tokens=+30%", f"start={r.start + timedelta(days=30)}"):
        with contextlib.suppress(ValueError):
            cases.append(asked_case(base, text))
    with contextlib.suppress(ValueError):
        cases.append(simulated("failures × 2", r, **more_stops))
        cases.append(simulated("the plan 10 % slower", r, risks=slower))
    return Cases(rows=tuple({case.name: case for case in cases}.values()))


def asked_case(base: Forecast, text: str) -> Case:
    """The case of a text: `tokens=+30%`, `deadline=2027-08-01` or another field of ForecastRequest;
    or of GPUs, an engine or a choice of HELD (`gpus=256`, `attention=scores`) the best plan of a
    search. ValueError where it cannot run.
    """
    name, _, value = text.partition("=")
    r = base.request
    fields_of = {f.name for f in fields(r) if f.metadata.get("cli", True)}
    require_known("if", name, [*sorted(fields_of), "gpus", "engine", *HELD])
    if name in fields_of and value.endswith("%"):
        share = read_value(name, value[:-1], float, {})
        before = getattr(r, name)
        require(isinstance(before, float), "if", text, f"{name} has no number to change")
        require(share > -100, "if", text, "must leave something")
        return simulated(text, r, **{name: before * (1 + share / 100)})
    if name in fields_of:
        return simulated(text, r, **{name: read_field(ForecastRequest, name, value)})
    given = value
    if name == "gpus":
        given = read_value(name, value, int, {"minimum": 1})
    elif name != "engine":
        given = read_field(Topology, name, value)
    for case in searched(base, text, **{name: given}):
        return case
    raise ValueError(f"if={text}: no topology can run so")


def levers(base: Forecast) -> Cases:
    """What a search holds fixed, changed one by one: the best plan that is safe to start with each
    other choice; its price is relative to the plan. None on CPUs.

        levers(forecast("plan.json", tokens=341e9)).to_frame()[["case", "gpu_hours_p50"]]
    """
    plan = base.request.plan
    t = plan.topology
    # fused, where there is such a kernel
    able = default_attention(plan.shape, plan.cluster, t.precision, plan.engine)
    values = {
        "engine": {*ENGINES} - {plan.engine},
        "attention": {"scores", able} - {t.attention},
        "precision": {"fp16", "bf16", "fp8"} - {t.precision},
    }
    cases = []
    if plan.cluster.gpu.kind == "cuda":
        for choice, others in values.items():
            for value in sorted(others):
                with contextlib.suppress(ValueError):  # the card has no such precision
                    cases.append(asked_case(base, f"{choice}={value}"))
    cases = [replace(case, kind="held fixed", note=case.difference(base)) for case in cases]
    cases.sort(key=Case.hours)
    return Cases(rows=tuple(cases))
