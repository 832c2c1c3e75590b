"""Rivals: what else was close to a plan, by the days and GPU-hours of the same tokens and ramp."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from trilane.config.engines import ENGINES, unsupported_reason
from trilane.config.plan import Run
from trilane.forecasting.forecast import bars_of, schedules_of, untroubled
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.throughput import SOONEST
from trilane.planning.search import Candidate, search_space
from trilane.planning.space import space_around

SEEN = 60  # topologies that the search keeps, to find a few lanes that differ


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to run the same tokens on the same capacity, if nothing goes wrong; why it cannot, or ""."""

    name: str
    days: float
    gpu_hours: float
    memory_bytes: float
    restarts: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)


def other_schedules(request: ForecastRequest) -> list[Alternative]:
    """The plan as it is, and with DP, microbatch and nodes following the batch size: the fastest, the cheapest."""
    ways: list[tuple[str, float | None, bool]] = [
        ("the plan as it is", None, False),
        ("fastest at each batch size", SOONEST, False),
        ("the same, TP and PP may change too", SOONEST, True),
        ("cheapest at each batch size", 0.0, False),
    ]
    return [_scheduled(request, name, worth, reshape) for name, worth, reshape in ways]


def _scheduled(request: ForecastRequest, name: str, day_worth: float | None, reshape: bool) -> Alternative:
    try:
        asked = dataclasses.replace(request, day_worth=day_worth, reshape=reshape)
        return _rival(name, asked, 0.0)
    except ValueError as error:
        return Alternative(name=name, days=0, gpu_hours=0, memory_bytes=0, restarts=0, reason=str(error))


def other_topologies(request: ForecastRequest, count: int = 4) -> list[Alternative]:
    """The fastest other tp x pp x dp of the plan's GPUs at its full batch size, on the same ramp."""
    r, t = request, request.plan.topology
    space = space_around(t, [t.gpus], [t.gbs], (1, 2, 4, 8))
    best = search_space(r.plan.shape, r.plan.cluster, space, r.calibration, top=SEEN).best_lanes(count + 1)
    others = [c for c in best if (c.topology.tp, c.topology.pp, c.topology.dp) != (t.tp, t.pp, t.dp)][:count]
    return [rival for candidate in others if (rival := _moved(r, candidate))]


def _moved(request: ForecastRequest, candidate: Candidate) -> Alternative | None:
    """The plan on another topology; None where some batch size of the ramp fits nothing there."""
    r, other = request, candidate.topology
    failing = r.ramp.failing(other.gbs, other.mbs * other.dp)
    engine = next((e for e in ENGINES if unsupported_reason(e, r.plan.shape, other) is None), r.plan.engine)
    try:
        plan = dataclasses.replace(r.plan, topology=other, engine=engine, label=other.label, run=Run())
        asked = dataclasses.replace(r, plan=plan, day_worth=SOONEST if failing else None, reshape=False)
        rival = _rival(other.label, asked, candidate.prediction.memory_bytes)
    except ValueError:
        return None
    reason = f"{len(failing)} batch sizes of the ramp need another mbs or dp" if failing else ""
    return dataclasses.replace(rival, reason=reason)


def _rival(name: str, asked: ForecastRequest, memory_bytes: float) -> Alternative:
    schedules = schedules_of(asked)
    course = untroubled(asked, schedules)
    return Alternative(
        name=name,
        days=float(course.wall_s[0]) / 86400,
        gpu_hours=float(course.gpu_s[0]) / 3600,
        memory_bytes=memory_bytes,
        restarts=len(bars_of(asked, schedules, course.reached_s[0])) - 1,
    )
