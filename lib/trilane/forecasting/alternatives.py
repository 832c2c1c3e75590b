"""What else could run than a forecast's plan, and what if: each case by its own simulated runs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from typing import Any

from trilane.config.engines import ENGINES, default_attention, untrainable_reason
from trilane.config.plan import Plan
from trilane.costmodel.predict import SAFE
from trilane.forecasting.forecast import ALLOCATION, DEADLINE, MEMORY, Forecast, Json
from trilane.forecasting.request import ForecastRequest
from trilane.planning.search import search
from trilane.utils.numbers import amount
from trilane.utils.tables import DataFrame, Record, Table, displayed

SIZES = "TP {t.tp} × PP {t.pp} × DP {t.dp}"  # of a topology t, in a case's name
# what a search varies only where it is asked to
HELD = [
    "precision",
    "attention",
    "fp32_gradients",
    "cp",
    "adam",
    "buckets",
    "offload",
    "overlap_tp",
]
LEAST = 0.001  # of the GPU-hours: a lever that moves less is none


@dataclass(frozen=True, kw_only=True)
class Case(Record):
    """A plan and circumstances under which it runs, simulated."""

    name: str
    forecast: Forecast
    note: str = ""

    @property
    def is_safe(self) -> bool:
        """Whether it can be started: it runs out of memory with a probability of SAFE at most."""
        return self.forecast.fullest.oom_probability <= SAFE

    def hours(self) -> float:
        """GPU-hours, the median of its simulated runs."""
        return self.forecast.gpu_hours(0.5)

    def difference(self, base: Forecast) -> str:
        """Its GPU-hours relative to those of a forecast: "12,000 GPU-hours (1.3 %) more"."""
        hours = self.hours() - base.gpu_hours(0.5)
        share = abs(100 * hours / base.gpu_hours(0.5))
        word = "less" if hours < 0 else "more"
        return f"{amount(abs(hours), 2)} GPU-hours ({share:.1f} %) {word}"


@dataclass(frozen=True, kw_only=True)
class Cases(Table):
    """Cases by kind, each forecast by as many simulated runs from one seed; `failed` names what
    cannot run, and why.
    """

    kinds: dict[str, tuple[Case, ...]]
    failed: dict[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()  # columns that this table does not show

    def to_frame(self) -> DataFrame:
        """A row for each case: its kind, its name, and the numbers of Forecast.figures()."""
        import pandas as pd

        rows = list[Json]()
        for kind, cases in self.kinds.items():
            rows += [{"kind": kind, "case": c.name, **c.forecast.figures()} for c in cases]
        return pd.DataFrame(rows)

    def view(self) -> DataFrame:
        """The facts of each case, without topology and evidence; then what cannot run."""
        import pandas as pd

        rows = list[dict[str, str]]()
        for cases in self.kinds.values():
            rows += [
                {"case": c.name, **c.forecast.facts(brief=True), "note": c.note} for c in cases
            ]
        rows += [{"case": name, "note": reason} for name, reason in self.failed.items()]
        hidden = ["topology", "days", "seconds an iteration", "nearest measured run", *self.hidden]
        return displayed(pd.DataFrame(rows).drop(columns=hidden, errors="ignore").fillna(""))


def simulated(name: str, request: ForecastRequest, note: str = "", **changes: Any) -> Case:
    """The request with these changes; ValueError where it cannot run."""
    changed = Forecast(request=replace(request, **changes))
    changed.finish(0.95)  # what cannot be simulated is refused here
    return Case(name=name, note=note, forecast=changed)


def searched(
    found: Forecast, name: str = "{label}", safe: bool = True, **changes: Any
) -> Iterator[Case]:
    """Other topologies of the plan's GPUs, or what changes of its choices allow: the fastest that
    are safe to start, or the fastest TP x PP x DP.
    """
    r = found.request
    t = r.plan.topology
    asked: Json = {choice: getattr(t, choice) for choice in HELD}
    asked |= {"gpus": t.gpus, "gbs": t.gbs, "engine": r.plan.engine, "calibration": r.calibration}
    asked |= changes
    result = search(r.plan.shape, r.plan.cluster, top=5, distinct=True, **asked)
    # a variant that takes less memory is slower than the best of its TP x PP x DP, but on the front
    # of both
    candidates = result.pareto if safe else result.candidates
    for candidate in candidates:
        if safe and candidate.prediction.oom_probability > SAFE:
            continue
        with contextlib.suppress(ValueError):  # another engine trains no layer of one's own
            plan = replace(candidate.plan, layer=r.plan.layer)
            if plan.id != r.plan.id:
                case = on_plan(r, plan, name)
            else:
                case = None
            if case and (case.is_safe or not safe):
                yield case


def on_plan(request: ForecastRequest, plan: Plan, name: str = "{label}") -> Case | None:
    """The request for another plan, named by its topology of the full batch; None where that cannot
    run.

    Where a batch size of the ramp is no multiple of its mbs x dp, DP and microbatch follow the
    batch.
    """
    adapt = request.adapt
    note = untrainable_reason(plan.topology) or ""
    try:
        request.ramp.require_whole(plan.topology)
    except ValueError:
        if adapt == "no":
            adapt = "days"
        note = note or "DP or microbatch follow the ramp"
    try:
        case = simulated("", request, note, plan=plan, adapt=adapt)
    except ValueError:
        return None
    return replace(case, name=name.format(t=case.forecast.last.topology, label=plan.label))


def alternatives(found: Forecast) -> Cases:
    """The plan, schedules in which DP, microbatch and nodes follow the batch, and the fastest other
    topologies.

    alternatives(forecast(plan, tokens=341e9)).to_frame()
    """
    ways: dict[str, Json] = {
        "fastest at each batch size": {"adapt": "days"},
        "cheapest at each batch size": {"adapt": "gpu_hours"},
    }
    schedules, failed = _tried(found.request, ways)
    plan = Case(name=found.request.plan.label, forecast=found)
    others = [*islice(searched(found), 1), *islice(searched(found, safe=False), 4)]
    by_name = {case.name: case for case in others}
    kinds = {"plan": (plan,), "schedule": schedules, "topology": tuple(by_name.values())}
    return Cases(kinds=kinds, failed=failed)


def _tried(
    request: ForecastRequest, tries: dict[str, Json]
) -> tuple[tuple[Case, ...], dict[str, str]]:
    """The request with each of these changes, and why some cannot run."""
    cases = list[Case]()
    failed = dict[str, str]()
    for name, changes in tries.items():
        try:
            cases.append(simulated(name, request, **changes))
        except ValueError as error:
            failed[name] = str(error)
    return tuple(cases), failed


def what_ifs(found: Forecast) -> Cases:
    """The plan under other circumstances; on two thirds of the GPUs the best topology of a search,
    in whole nodes.

    what_ifs(forecast("plan.json", tokens=341e9)).to_frame()[["case", "days_p50", "gpu_hours_p50"]]
    """
    r = found.request
    stops = tuple(
        replace(s, per_node_year=2 * s.per_node_year, per_year=2 * s.per_year)
        for s in r.risks.stops
    )
    more_stops = {"risks": replace(r.risks, stops=stops), "failures_per_node_year": None}
    slower = replace(r.risks, slowdown=1.1 * r.risks.slowdown)
    later = r.start + timedelta(days=30)
    tries: dict[str, Json] = {
        "tokens × 1.3": {"tokens": 1.3 * r.tokens},
        "failures × 2": more_stops,
        "the plan 10 % slower": {"risks": slower},
        f"start a month later, {later}": {"start": later},
    }
    cases, failed = _tried(r, tries)
    most = int(0.67 * found.last.topology.gpus)
    node = r.plan.cluster.gpus_per_node
    if most <= node:
        node = 1
    few = tuple[Case, ...]()
    # in whole nodes, of which up to three fewer may divide better
    if counts := [*range(most // node * node, 0, -node)][:4]:
        few = tuple(islice(searched(found, f"GPUs × 0.67: {{t.gpus}}, {SIZES}", gpus=counts), 1))
    if not few:
        failed["GPUs × 0.67"] = f"found no plan on {most} GPUs that is safe to start"
    return Cases(kinds={"what if": (*few, *cases)}, failed=failed, hidden=("memory", MEMORY))


def levers(found: Forecast) -> Cases:
    """What a search holds fixed, changed one by one: the best plan that is safe to start with each
    other choice.

    Its price is relative to the cheapest safe plan by the choices that are held. Left out is what
    changes the GPU-hours by less than one in a thousand, such as fp16 for bf16; all of it on CPUs.

        levers(forecast("plan.json", tokens=341e9)).to_frame()[["case", "gpu_hours_p50"]]
    """
    plan = found.request.plan
    t = plan.topology
    base = Case(name=plan.label, forecast=found)
    cases = list[Case]()
    if plan.cluster.gpu.kind == "cuda":
        base = min([base, *islice(searched(found), 1)], key=Case.hours)
        own = {"engine": plan.engine, "attention": t.attention, "precision": t.precision}
        # fused, where there is such a kernel
        able = default_attention(plan.shape, plan.cluster, t.precision, plan.engine)
        values = {
            "engine": ENGINES,
            "attention": ("scores", able),
            "precision": ("fp16", "bf16", "fp8"),
        }
        for choice, used in own.items():
            for value in sorted({*values[choice]} - {used}):
                name = f"{choice} {value} instead of {used}: {SIZES}"
                change: Json = {choice: value}
                with contextlib.suppress(ValueError):  # the card has no such precision
                    cases += islice(searched(found, name, **change), 1)
    noted = list[Case]()
    for case in sorted(cases, key=Case.hours):
        if abs(case.hours() / base.hours() - 1) > LEAST:
            if base.forecast is found:
                than = ""
            else:
                than = f" than {base.name}, the best as held"
            notes = [f"{case.difference(base.forecast)}{than}", case.note]
            noted.append(replace(case, note="; ".join(filter(None, notes))))
    failed = dict[str, str]()
    if not noted:
        failed["none"] = (
            "no other engine, attention kernel or precision has a safe plan that differs"
        )
    hidden = ("19 of 20 runs by", "money", "memory", DEADLINE, ALLOCATION)
    return Cases(kinds={"held fixed": tuple(noted)}, failed=failed, hidden=hidden)
