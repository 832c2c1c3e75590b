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
from trilane.utils.tables import Columns, DataFrame, Record, Table

SIZES = "TP {t.tp} × PP {t.pp} × DP {t.dp}"  # of a topology t, in a case's name
# what a search varies only where it is asked to
HELD = (
    "precision",
    "attention",
    "fp32_gradients",
    "cp",
    "adam",
    "buckets",
    "offload",
    "overlap_tp",
)


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
        own, hours = base.gpu_hours(0.5), self.hours() - base.gpu_hours(0.5)
        return f"{amount(abs(hours), 2)} GPU-hours ({abs(100 * hours / own):.1f} %) {'less' if hours < 0 else 'more'}"


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

        every = ((kind, case) for kind, cases in self.kinds.items() for case in cases)
        return pd.DataFrame(
            [{"kind": kind, "case": case.name, **case.forecast.figures()} for kind, case in every]
        )

    def view(self) -> DataFrame:
        """The facts of each case, without topology and evidence; then what cannot run."""
        every = [case for cases in self.kinds.values() for case in cases]
        rows = [{"case": c.name, **c.forecast.facts(brief=True), "note": c.note} for c in every]
        rows += [{"case": name, "note": reason} for name, reason in self.failed.items()]
        hidden = {"topology", "days", "seconds an iteration", "nearest measured run", *self.hidden}
        names = dict.fromkeys(name for row in rows for name in row if name not in hidden)
        return Columns({name: [row.get(name, "") for row in rows] for name in names}).view()


def simulated(name: str, request: ForecastRequest, note: str = "", **changes: Any) -> Case:
    """The request with these changes; ValueError where it cannot run."""
    made = Forecast(request=replace(request, **changes))
    made.finish(0.95)  # what cannot be simulated is refused here
    return Case(name=name, note=note, forecast=made)


def searched(
    found: Forecast, name: str = "{label}", safe: bool = True, **changes: Any
) -> Iterator[Case]:
    """Other topologies of the plan's GPUs, or what changes of its choices allow: the fastest that
    are safe to start, or the fastest TP x PP x DP.
    """
    r, t = found.request, found.request.plan.topology
    asked: Json = {choice: getattr(t, choice) for choice in HELD}
    asked |= {
        "gpus": t.gpus,
        "gbs": t.gbs,
        "engine": r.plan.engine,
        "calibration": r.calibration,
    } | changes
    result = search(r.plan.shape, r.plan.cluster, top=5, distinct=True, **asked)
    # a variant that takes less memory is slower than the best of its TP x PP x DP, but on the front
    # of both
    able = (
        [c for c in result.pareto if c.prediction.oom_probability <= SAFE]
        if safe
        else result.candidates
    )
    for c in able:
        with contextlib.suppress(ValueError):  # another engine trains no layer of one's own
            plan = replace(c.plan, layer=r.plan.layer)
            every = on_plan(r, plan, name) if plan.id != r.plan.id else ()
            yield from (made for made in every if made.is_safe or not safe)


def on_plan(request: ForecastRequest, plan: Plan, name: str = "{label}") -> Iterator[Case]:
    """The request for another plan, named by its topology of the full batch; nothing where that
    cannot run.

    Where a batch size of the ramp is no multiple of its mbs x dp, DP and microbatch follow the
    batch.
    """
    adapt, way = request.adapt, ""
    try:
        request.ramp.require_whole(plan.topology)
    except ValueError:
        adapt, way = adapt if adapt != "no" else "days", "DP or microbatch follow the ramp"
    with contextlib.suppress(ValueError):
        made = simulated(
            "", request, untrainable_reason(plan.topology) or way, plan=plan, adapt=adapt
        )
        yield replace(made, name=name.format(t=made.forecast.last.topology, label=plan.label))


def alternatives(found: Forecast) -> Cases:
    """The plan, schedules in which DP, microbatch and nodes follow the batch, and the fastest other
    topologies.

    alternatives(forecast(plan, tokens=341e9)).to_frame()
    """
    ways = {
        "fastest at each batch size": {"adapt": "days"},
        "cheapest at each batch size": {"adapt": "gpu_hours"},
    }
    schedules, failed = _tried(found.request, ways)
    topologies = [*islice(searched(found), 1), *islice(searched(found, safe=False), 4)]
    named, plan = (
        {case.name: case for case in topologies},
        Case(name=found.request.plan.label, forecast=found),
    )
    return Cases(
        kinds={"plan": (plan,), "schedule": schedules, "topology": tuple(named.values())},
        failed=failed,
    )


def _tried(
    request: ForecastRequest, tries: dict[str, Json]
) -> tuple[tuple[Case, ...], dict[str, str]]:
    """The request with each of these changes, and why some cannot run."""
    cases, failed = list[Case](), dict[str, str]()
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
    r, worse, late = found.request, found.request.risks, found.request.start + timedelta(days=30)
    stops = tuple(
        replace(s, per_node_year=2 * s.per_node_year, per_year=2 * s.per_year) for s in worse.stops
    )
    tries: dict[str, Json] = {"tokens × 1.3": {"tokens": 1.3 * r.tokens}}
    tries |= {
        "failures × 2": {"risks": replace(worse, stops=stops), "failures_per_node_year": None}
    }
    tries |= {"the plan 10 % slower": {"risks": replace(worse, slowdown=1.1 * worse.slowdown)}}
    tries |= {f"start a month later, {late}": {"start": late}}
    most, whole, few = (
        int(0.67 * found.last.topology.gpus),
        r.plan.cluster.gpus_per_node,
        tuple[Case, ...](),
    )
    cases, failed = _tried(r, tries)
    node = whole if most > whole else 1
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
    changes the GPU-hours by less than one in a thousand, such as fp16 for bf16.

        levers(forecast("plan.json", tokens=341e9)).to_frame()[["case", "gpu_hours_p50"]]
    """
    plan, cases, is_gpu = (
        found.request.plan,
        list[Case](),
        found.request.plan.cluster.gpu.kind == "cuda",
    )
    own = {
        "engine": plan.engine,
        **{name: getattr(plan.topology, name) for name in ("attention", "precision")},
    }
    able = default_attention(
        plan.shape, plan.cluster, plan.topology.precision, plan.engine
    )  # fused, where there is such a kernel
    values = {
        "engine": ENGINES,
        "attention": ("scores", able),
        "precision": ("fp16", "bf16", "fp8"),
    }
    others = [(n, v) for n in values for v in sorted({*values[n]} - {own[n]}) if is_gpu]
    base = min(
        (Case(name=plan.label, forecast=found), *islice(searched(found), is_gpu)), key=Case.hours
    )
    for name, value in others:
        with contextlib.suppress(ValueError):  # the card has no such precision
            change: Json = {
                "name": f"{name} {value} instead of {own[name]}: {SIZES}",
                name: value,
            }
            cases += islice(searched(found, **change), 1)
    apart = [
        one for one in sorted(cases, key=Case.hours) if abs(one.hours() / base.hours() - 1) > 0.001
    ]
    than = f" than {base.name}, the best as held" * (base.forecast is not found)
    noted = (
        replace(c, note=f"{c.difference(base.forecast)}{than}{'; ' * bool(c.note)}{c.note}")
        for c in apart
    )
    missing = "has a safe plan that differs" if is_gpu else "is compared on CPUs"
    none = {} if apart else {"none": f"no other engine, attention kernel or precision {missing}"}
    hidden = ("19 of 20 runs by", "money", "memory", DEADLINE, ALLOCATION)
    return Cases(kinds={"held fixed": tuple(noted)}, failed=none, hidden=hidden)
