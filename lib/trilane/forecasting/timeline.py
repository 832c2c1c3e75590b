"""The schedule in each window of the capacity, the jobs that follow from it, and the run without interruptions."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trilane.config.batch_rampup import Phase
from trilane.forecasting.capacity import CapacityWindow
from trilane.forecasting.request import CHUNKS, ForecastRequest
from trilane.forecasting.schedule import SOONEST, Schedule, ScheduledTopology, schedule_on
from trilane.forecasting.simulation import Outcomes, Simulation, Stretch, Uncertainty
from trilane.utils.validation import require

# Each window of the capacity with its schedule; None where nothing can run.
Schedules = tuple[tuple[CapacityWindow, Schedule | None], ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of one topology, in seconds after the start, and the batch sizes that it trains."""

    start_s: float
    end_s: float
    choice: ScheduledTopology
    first_gbs: int
    last_gbs: int

    def to_json(self) -> dict[str, Any]:
        """The job as a JSON object, its times in days."""
        names = ("tp", "pp", "dp", "mbs", "nodes", "gpus", "recompute")
        days = {"from_day": self.start_s / 86400, "to_day": self.end_s / 86400}
        return {**days, "gbs": [self.first_gbs, self.last_gbs], **{n: getattr(self.choice, n) for n in names}}


def schedules_of(request: ForecastRequest) -> Schedules:
    """The schedule in every window; ValueError where the last one, which never ends, can run nothing."""
    r, windows = request, request.windows
    worth = SOONEST if r.day_worth is None else r.day_worth
    reshape_s = r.risks.reshape_s if r.reshape else None
    given = (r.calibration, r.risks.startup_s, r.day_worth is not None, worth, reshape_s)
    found = {gpus: schedule_on(r.plan, r.phases, gpus, *given) for gpus in {window.gpus for window in windows}}
    rule = "the last step never ends, and no replica on so few GPUs fits the card's memory at every batch size"
    require(found[windows[-1].gpus] is not None, "capacity.gpus", windows[-1].gpus, rule)
    return tuple((window, found[window.gpus]) for window in windows)


def undisturbed(request: ForecastRequest, schedules: Schedules) -> Outcomes:
    """The run without interruptions: its iterations, the restarts of its schedules, days without GPUs."""
    stretches, same = stretches_of(request, schedules)
    calm = [dataclasses.replace(stretch, queue_share=0.0) for stretch in stretches]
    risks = dataclasses.replace(request.risks, stops=(), startup_s=0.0, queue_s=0.0)
    return Simulation(same, Uncertainty(common=0, independent=0), risks, {}, 1.0, 1, None).run(calm)


def jobs_of(request: ForecastRequest, schedules: Schedules, reached_s: np.ndarray) -> list[Job]:
    """The jobs of a run, each with one capacity and topology; `reached_s` (J,) dates the ends of the pieces."""
    _, same = pieces_of(request.phases)
    found: list[Job] = []
    for window, schedule in schedules:
        inside = [i for i, (a, b) in enumerate(pairwise([0.0, *reached_s])) if b > window.start_s and a < window.end_s]
        for i in inside if schedule else []:
            assert schedule is not None
            step, begin = schedule[same[i]], reached_s[i - 1] if i else 0.0
            times = {"start_s": float(max(begin, window.start_s)), "end_s": float(min(reached_s[i], window.end_s))}
            new = Job(choice=step.choice, first_gbs=step.phase.gbs, last_gbs=step.phase.gbs, **times)
            if found and found[-1].choice.job == step.choice.job and found[-1].end_s >= new.start_s:
                new = dataclasses.replace(new, start_s=found[-1].start_s, first_gbs=found.pop().first_gbs)
            found.append(new)
    return found


def spare_nodes(request: ForecastRequest, schedules: Schedules) -> int:
    """Nodes in reserve, the fewest of all windows; ValueError where more are asked for than any window leaves free."""
    free = [_free_nodes(request, window, schedule) for window, schedule in schedules if schedule]
    asked = request.risks.spare_nodes
    rule = f"must be at most {max(free)}, the nodes that the jobs leave free"
    require(asked is None or asked <= max(free), "spare_nodes", asked, rule)
    return request.risks.spares_of(min(free))


def stretches_of(request: ForecastRequest, schedules: Schedules) -> tuple[list[Stretch], np.ndarray]:
    """The windows as the simulation takes them, and the phase (J,) of each piece."""
    return [_stretch(request, window, schedule) for window, schedule in schedules], pieces_of(request.phases)[1]


def pieces_of(phases: list[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """Iterations of each piece and the phase that it belongs to; the last phase is cut into CHUNKS pieces."""
    last = len(phases) - 1
    cuts = np.diff(np.linspace(0, phases[-1].iterations, CHUNKS + 1))
    iterations = np.concatenate([[p.iterations for p in phases[:-1]], cuts])
    return iterations, np.concatenate([np.arange(last), np.full(CHUNKS, last)]).astype(int)


def _free_nodes(request: ForecastRequest, window: CapacityWindow, schedule: Schedule) -> int:
    return max(0, request.nodes_in(window) - max(step.choice.nodes for step in schedule))


def _stretch(request: ForecastRequest, window: CapacityWindow, schedule: Schedule | None) -> Stretch:
    if schedule is None:
        return Stretch(window=window)
    iterations, same = pieces_of(request.phases)
    steps, risks = [schedule[i] for i in same], request.risks
    seconds = iterations * np.array([step.choice.seconds for step in steps])
    first = np.concatenate([[True], np.diff(same) > 0])
    seconds += np.array([step.pause_s for step in steps]) * first
    gpus, nodes = (np.array([float(getattr(step.choice, name)) for step in steps]) for name in ("gpus", "nodes"))
    queue_share = window.shared * risks.queue_s / (risks.job_hours * 3600)
    spares = risks.spares_of(_free_nodes(request, window, schedule))
    return Stretch(window=window, seconds=seconds, gpus=gpus, nodes=nodes, queue_share=queue_share, spare_nodes=spares)
