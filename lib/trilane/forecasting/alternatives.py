"""What else could run the same tokens and ramp, in days and cost; and whether to start the plan, or one of those."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from trilane.config.training import Run
from trilane.costmodel.predict import SAFE
from trilane.forecasting.record import Record, unlike
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.schedule import SOONEST
from trilane.forecasting.timeline import jobs_of, schedules_of, undisturbed
from trilane.planning.search import search
from trilane.planning.search_result import Candidate
from trilane.utils.numbers import amount
from trilane.utils.tables import Table, short

if TYPE_CHECKING:
    import pandas as pd

MOST_RISK = 0.2  # a limit is kept where at most one simulated run in five fails it: a choice, not a measurement
WORTH = 0.03  # of the GPU-hours: what a change must save; predictions nearer than that are often in the wrong order
SEARCHED = 60  # topologies that the search keeps, to find a few that differ in tp, pp or dp
# What a decision compares of the plan and of each alternative, by the names that a forecast's JSON has.
FIGURES = (
    *("ideal", "finish", "days", "days_interval", "gpu_hours", "gpu_hours_interval", "cost", "energy_kwh"),
    *("p_miss_deadline", "p_overrun_allocation"),
)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The same tokens on the same capacity, without interruptions; `reason` says why not, or what must change.

    `gpu_hours` is the cost; `days` 0 where it cannot run. `memory_bytes` and `oom_probability` are those of the
    fullest GPU at any batch size; `request` is what a forecast of it takes.
    """

    name: str
    days: float
    gpu_hours: float
    memory_bytes: float = 0.0
    oom_probability: float = 0.0
    restarts: int = 0
    reason: str = ""
    request: ForecastRequest | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Alternatives(Table):
    """Schedules, the first of them the plan's own, and topologies; `price` is the money of a GPU-hour, if given."""

    schedules: tuple[Alternative, ...]
    topologies: tuple[Alternative, ...]
    price: float | None = None
    digits = 1

    def to_frame(self) -> "pd.DataFrame":
        """A row for each: days, GPU-hours, money where a price is given, restarts, memory, a note."""
        import pandas as pd

        rows = (*self.schedules, *self.topologies)
        money = {} if self.price is None else {"money": [r.gpu_hours * self.price or None for r in rows]}
        columns = {
            "what": [r.name for r in rows],
            "days": [r.days or None for r in rows],
            "GPU-hours": [r.gpu_hours or None for r in rows],
            **money,
            "restarts": [r.restarts for r in rows],
            "memory (GiB)": [r.memory_bytes / 2**30 or None for r in rows],
            "note": [short(r.reason) for r in rows],
        }
        return pd.DataFrame(columns)


def alternatives(request: ForecastRequest) -> Alternatives:
    """The alternatives to a request's plan on the same capacity."""
    schedules, topologies = tuple(other_schedules(request)), tuple(other_topologies(request))
    return Alternatives(schedules=schedules, topologies=topologies, price=request.price.per_gpu_hour)


def other_schedules(request: ForecastRequest) -> list[Alternative]:
    """The plan as it is, and with DP, microbatch and nodes following the batch size: the fastest, the cheapest."""
    ways: list[tuple[str, float | None, bool]] = [
        ("the plan as it is", None, False),
        ("fastest at each batch size", SOONEST, False),
        ("fastest, TP and PP may change too", SOONEST, True),
        ("cheapest at each batch size", 0.0, False),
    ]
    found = []
    for name, worth, reshape in ways:
        try:
            found.append(_undisturbed(name, dataclasses.replace(request, day_worth=worth, reshape=reshape)))
        except ValueError as error:
            found.append(Alternative(name=name, days=0, gpu_hours=0, reason=str(error)))
    return found


def other_topologies(request: ForecastRequest, count: int = 4) -> list[Alternative]:
    """The fastest other tp x pp x dp of the plan's GPUs at its full batch size, on the same ramp."""
    r, t = request, request.plan.topology
    fixed = {name: getattr(t, name) for name in ("precision", "attention", "fp32_gradients", "offload")}
    sizes: dict[str, Any] = {"gpus": t.gpus, "gbs": t.gbs, "engine": r.plan.engine, **fixed}
    found = search(r.plan.shape, r.plan.cluster, calibration=r.calibration, top=SEARCHED, **sizes)
    best = found.best_per_sizes(count + 1).rows
    others = [c for c in best if (c.topology.tp, c.topology.pp, c.topology.dp) != (t.tp, t.pp, t.dp)][:count]
    return [one for candidate in others if (one := _on_topology(r, candidate))]


def _on_topology(request: ForecastRequest, candidate: Candidate) -> Alternative | None:
    """The plan on another topology; None where some batch size of the ramp fits nothing there."""
    r, other = request, candidate.topology
    failing = r.ramp.failing(other.gbs, other.mbs * other.dp)
    try:
        plan = dataclasses.replace(r.plan, topology=other, label=candidate.label, run=Run())
        asked = dataclasses.replace(r, plan=plan, day_worth=SOONEST if failing else None, reshape=False)
        found = _undisturbed(candidate.label, asked)
    except ValueError:
        return None
    reason = f"{len(failing)} batch sizes of the ramp need another mbs or dp" if failing else ""
    return dataclasses.replace(found, reason=reason)


def _undisturbed(name: str, request: ForecastRequest) -> Alternative:
    schedules = schedules_of(request)
    run = undisturbed(request, schedules)
    days, gpu_hours = float(run.wall_s[0]) / 86400, float(run.gpu_s[0]) / 3600
    restarts = len(jobs_of(request, schedules, run.reached_s[0])) - 1
    made: dict[str, Any] = {"restarts": restarts, "request": request}
    steps = [step.choice for _, schedule in schedules for step in schedule or ()]
    made |= {name: max(getattr(step, name) for step in steps) for name in ("memory_bytes", "oom_probability")}
    return Alternative(name=name, days=days, gpu_hours=gpu_hours, **made)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Whether to start a forecast's plan: the verdict, why, the change that it names, and what would turn it.

    `figures` are those of the plan with that change: date, days, cost, memory and risks; empty where none is to start.
    """

    verdict: str
    reasons: tuple[str, ...]
    change: str = ""
    turns: tuple[str, ...] = ()
    figures: Record = field(default_factory=dict)

    def to_json(self) -> Record:
        return dataclasses.asdict(self)


def recommend(record: Record) -> Recommendation:
    """The recommendation on the forecast whose JSON this is (calendar.json).

    A limit (deadline, allocation) counts as kept where at most MOST_RISK of the simulated runs fail it. An alternative
    is taken where it keeps what the plan does not, or saves WORTH of the GPU-hours without more days, each by its own
    simulated runs. Nothing is recommended that runs out of memory with a probability above SAFE.
    """
    plan, own = _plan_of(record), _failures(record, record)
    ideal, risk = plan["ideal"], plan["oom_probability"]
    if risk > SAFE:
        own.append(f"the plan runs out of memory with a probability of {risk:.0%}")
    changes = []
    for other in _alternatives_of(record):
        days, hours = (other["ideal"][name] - ideal[name] for name in ("days", "gpu_hours"))
        changes.append((len(_failures(record, other)), hours, days, other["name"], other))
    useful = [
        c for c in changes if c[0] < len(own) or (c[1] < -WORTH * ideal["gpu_hours"] and c[2] <= 0 and c[0] <= len(own))
    ]
    best = min(useful, default=None, key=lambda c: c[:4])
    if own and (best is None or best[0]):
        verdict, chosen = "Do not start it as planned", {}
    elif best:
        verdict, chosen = "Start, with one change", best[4]
    else:
        verdict, chosen = "Start", plan
    reasons, change = [*own, *_kept(record)], chosen.get("name", "")
    turns = tuple(_turns(record, chosen or plan))
    if change:
        turns = (f"a benchmark of {change}, which comes first: its advantage is predicted", *turns)
    if best:
        reasons.append(_saved(best[3], best[2], best[1], bool(change)))
    return Recommendation(verdict=verdict, reasons=tuple(reasons), change=change, turns=turns, figures=chosen)


def _plan_of(record: Record) -> Record:
    """The figures of the plan as it is; of its memory the most that it takes at any batch size."""
    figures = {"name": "", **{name: record[name] for name in FIGURES}}
    for name in ("memory_bytes", "oom_probability"):
        figures[name] = max([record[name], *(s.get(name, 0.0) for s in record["schedules"][:1])])
    return figures


def _alternatives_of(record: Record) -> list[Record]:
    """The figures of each alternative that can run, was simulated, and is safe to start."""
    known = [*record["rivals"], *record["schedules"][1:]]
    names = ("name", "memory_bytes", "oom_probability")
    return [
        {**{name: other[name] for name in names}, **other["forecast"]}
        for other in known
        if other.get("forecast") and other["oom_probability"] <= SAFE
    ]


def _kept(record: Record) -> list[str]:
    """The limits that the plan keeps, with their probability; that there is none."""
    chances = {"deadline": record["p_miss_deadline"], "allocation": record["p_overrun_allocation"]}
    given = {limit: chance for limit, chance in chances.items() if chance is not None}
    kept = [
        f"the plan keeps the {limit} with a probability of {1 - p:.0%}" for limit, p in given.items() if p <= MOST_RISK
    ]
    return kept if given else ["no deadline and no allocation were given, so that only memory and cost decide"]


def _saved(name: str, days: float, hours: float, is_taken: bool) -> str:
    fewer = [
        f"{amount(abs(n))} {unit} {'less' if n < 0 else 'more'}" for n, unit in ((hours, "GPU-hours"), (days, "days"))
    ]
    return f"{name} is predicted to need {' and '.join(fewer)}{'' if is_taken else ', which is not enough'}"


def _failures(record: Record, figures: Record) -> list[str]:
    """The limits that runs of these figures fail, a line each."""
    found = []
    for limit, failed, what in (
        ("deadline", "p_miss_deadline", "misses the deadline"),
        ("allocation", "p_overrun_allocation", "needs more than the allocation"),
    ):
        if record[limit] is not None and figures[failed] > MOST_RISK:
            found.append(f"the plan {what} with a probability of {figures[failed]:.0%}")
    return found


def _quantiles(record: Record, limit: str, figures: Record) -> tuple[list[float], list[float], float]:
    """Levels and values of the simulated days or GPU-hours, and how many are allowed."""
    if limit == "allocation":
        low, high = figures["gpu_hours_interval"]
        return [0.05, 0.5, 0.95], [low, figures["gpu_hours"], high], record["allocation"]
    begin = datetime.fromisoformat(record["start"])
    found = {int(name[1:]) / 100: datetime.fromisoformat(at) - begin for name, at in figures["finish"].items()}
    end = datetime.fromisoformat(record["deadline"]) - begin + timedelta(days=1)  # the whole last day
    return list(found), [at / timedelta(days=1) for at in found.values()], end / timedelta(days=1)


def _turns(record: Record, figures: Record) -> Iterator[str]:
    """What would turn the recommendation of a plan with these figures, a line each."""
    for limit, ideal in (("deadline", "days"), ("allocation", "gpu_hours")):
        if record[limit] is None:
            continue
        levels, values, allowed = _quantiles(record, limit, figures)
        reached = float(np.interp(1 - MOST_RISK, levels, values))
        slower = (allowed - reached) / figures["ideal"][ideal]
        if slower <= -1:
            yield f"more GPUs or fewer tokens: no faster iteration alone keeps the {limit}"
            continue
        kept = f"{'up to there' if slower >= 0 else 'from there on'} four runs of five keep the {limit}"
        word = "slower" if slower >= 0 else "faster"
        much = f"{amount(round(1 + slower))} times as long as" if slower > 2 else f"{abs(slower):.0%} {word} than"
        yield f"a benchmark whose iterations are {much} predicted: {kept}"
    if unlike(record):
        yield "any benchmark: no measured run like this stands behind the prediction"
