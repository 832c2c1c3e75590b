"""What else could run the same tokens and ramp: other schedules of the plan and other topologies, in days and cost."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trilane.config.training import Run
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.schedule import SOONEST
from trilane.forecasting.timeline import jobs_of, schedules_of, undisturbed
from trilane.planning.search import search
from trilane.planning.search_result import Candidate
from trilane.utils.tables import Table, short

if TYPE_CHECKING:
    import pandas as pd

SEARCHED = 60  # topologies that the search keeps, to find a few that differ in tp, pp or dp


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The same tokens on the same capacity, without interruptions; `reason` says why not, or what must change.

    `gpu_hours` is the cost; `days` 0 where it cannot run.
    """

    name: str
    days: float
    gpu_hours: float
    memory_bytes: float = 0.0
    restarts: int = 0
    reason: str = ""


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
        money = {} if self.price is None else {"money": [round(r.gpu_hours * self.price) or None for r in rows]}
        columns = {
            "what": [r.name for r in rows],
            "days": [r.days or None for r in rows],
            "GPU-hours": [round(r.gpu_hours) or None for r in rows],
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
    return dataclasses.replace(found, reason=reason, memory_bytes=candidate.prediction.memory_bytes)


def _undisturbed(name: str, request: ForecastRequest) -> Alternative:
    schedules = schedules_of(request)
    run = undisturbed(request, schedules)
    days, gpu_hours = float(run.wall_s[0]) / 86400, float(run.gpu_s[0]) / 3600
    restarts = len(jobs_of(request, schedules, run.reached_s[0])) - 1
    return Alternative(name=name, days=days, gpu_hours=gpu_hours, restarts=restarts)
