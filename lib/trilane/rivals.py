"""Rivals: what else was close to a plan, by the days and GPU-hours of the same tokens and ramp."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from trilane.pace import SOONEST, schedule_on
from trilane.plan import Plan, Run
from trilane.request import Request
from trilane.schedule import Schedule
from trilane.search import Candidate, search_space
from trilane.space import space_around
from trilane.systems import ENGINES, lack

SEEN = 60  # topologies that the search keeps, to find a few lanes that differ


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another way to run the same tokens: its days and GPU-hours if nothing goes wrong; why it cannot, or ""."""

    name: str
    days: float
    gpu_hours: float
    memory_bytes: float
    restarts: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)


def other_schedules(request: Request) -> list[Rival]:
    """The plan as it is, and with DP, microbatch and nodes following the batch size: the fastest, the cheapest."""
    reshape_s = request.risks.reshape_s
    ways: list[tuple[str, float | None, float | None]] = [
        ("the plan as it is", None, None),
        ("fastest at each batch size", SOONEST, None),
        ("the same, TP and PP may change too", SOONEST, reshape_s),
        ("cheapest at each batch size", 0.0, None),
    ]
    return [rival for name, worth, anew in ways if (rival := _scheduled(request, name, worth, anew))]


def _scheduled(request: Request, name: str, day_worth: float | None, reshape_s: float | None) -> Rival | None:
    r, worth = request, SOONEST if day_worth is None else day_worth
    try:
        found = _schedule(r, r.plan, day_worth is not None, worth, reshape_s)
    except ValueError as error:
        return Rival(name=name, days=0, gpu_hours=0, memory_bytes=0, restarts=0, reason=str(error))
    return _rival(name, found, 0.0) if found else None


def other_topologies(request: Request, count: int = 4) -> list[Rival]:
    """The fastest other tp x pp x dp of the plan's GPUs at its full batch size, on the same ramp."""
    r, t = request, request.plan.topology
    space = space_around(t, [t.gpus], [t.gbs], (1, 2, 4, 8))
    best = search_space(r.plan.shape, r.plan.cluster, space, r.calibration, top=SEEN).best_lanes(count + 1)
    others = [c for c in best if (c.topology.tp, c.topology.pp, c.topology.dp) != (t.tp, t.pp, t.dp)][:count]
    return [rival for candidate in others if (rival := _moved(r, candidate))]


def _moved(request: Request, candidate: Candidate) -> Rival | None:
    """The plan on another topology; None where some batch size of the ramp fits nothing there."""
    r, other = request, candidate.topology
    failing = r.ramp.failing(other.gbs, other.mbs * other.dp)
    engine = next((e for e in ENGINES if lack(e, r.plan.shape, other) is None), r.plan.engine)
    try:
        plan = dataclasses.replace(r.plan, topology=other, engine=engine, label=other.label, run=Run())
        schedule = _schedule(r, plan, bool(failing), SOONEST)
    except ValueError:
        return None
    if schedule is None:
        return None
    reason = f"{len(failing)} batch sizes of the ramp need another mbs or dp" if failing else ""
    return dataclasses.replace(_rival(other.label, schedule, candidate.prediction.memory_bytes), reason=reason)


def _schedule(
    request: Request, plan: Plan, adapt: bool, day_worth: float, reshape_s: float | None = None
) -> Schedule | None:
    r = request
    return schedule_on(
        plan, r.phases, plan.topology.gpus, r.calibration, r.risks.startup_s, adapt, day_worth, reshape_s
    )


def _rival(name: str, schedule: Schedule, memory_bytes: float) -> Rival:
    return Rival(
        name=name,
        days=schedule.days,
        gpu_hours=schedule.gpu_hours,
        memory_bytes=memory_bytes,
        restarts=schedule.restarts,
    )
