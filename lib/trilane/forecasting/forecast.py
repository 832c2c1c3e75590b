"""Calendar: from tokens, a ramp, capacity and stops to a finish date, GPU-hours, and the risk of missing either."""

import dataclasses
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from itertools import pairwise

import numpy as np

from trilane.config.batch_rampup import Phase
from trilane.forecasting.capacity import CapacityWindow
from trilane.forecasting.failures import QUEUE
from trilane.forecasting.request import CHUNKS, Z90, ForecastRequest
from trilane.forecasting.schedule import Schedule, ScheduledTopology
from trilane.forecasting.simulation import Doubt, Outcomes, Stretch, simulate
from trilane.forecasting.throughput import SOONEST, schedule_on
from trilane.utils.validation import require

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


Schedules = tuple[
    tuple[CapacityWindow, Schedule | None], ...
]  # of each window of the capacity; None where nothing can run


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A job that stays what it is, in seconds after the start, and the batch sizes that it sees."""

    start_s: float
    end_s: float
    choice: ScheduledTopology
    first_gbs: int
    last_gbs: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What comes out: the schedule of every window, the untroubled run, that of average luck, and thousands."""

    request: ForecastRequest
    phases: tuple[Phase, ...]
    schedules: Schedules
    ideal: Outcomes
    usual: Outcomes
    outcomes: Outcomes

    @property
    def ramp_phases(self) -> int:
        """Phases before the constant one."""
        return sum(phase.gbs < self.request.plan.topology.gbs for phase in self.phases)

    @property
    def ramp_end(self) -> int:
        """Which piece of `reached_s` ends the ramp; where the run ends inside it, its last phase is cut into many."""
        return -1 if self.ramp_phases == len(self.phases) else self.ramp_phases - 1

    @property
    def best_schedule(self) -> Schedule:
        """The schedule on the most GPUs: what the run would be without waiting for any."""
        able = [(w.gpus, s) for w, s in self.schedules if s is not None]
        return max(able, key=lambda pair: pair[0])[1]

    def days(self, quantile: float) -> float:
        """Days from start to end that this share of the runs does not pass."""
        return float(np.quantile(self.outcomes.wall_s, quantile)) / 86400

    def gpu_hours(self, quantile: float) -> float:
        """GPU-hours that this share of the runs does not pass."""
        return float(np.quantile(self.outcomes.gpu_s, quantile)) / 3600

    def finish(self, quantile: float) -> datetime:
        """The time by which this share of the runs has ended; ValueError where no calendar has it."""
        begin, days = datetime.combine(self.request.start, time()), self.days(quantile)
        rule = f"would end after {datetime.max.year}: more GPUs, or fewer tokens"
        require(days < (datetime.max - begin).days, "days", f"{days:.0f}", rule)
        return begin + timedelta(days=days)

    def bars(self) -> list[Bar]:
        """The run of average luck as bars: each stretch of one capacity, DP and microbatch, with its batch sizes."""
        return bars_of(self.request, self.schedules, self.usual.reached_s[0])

    @property
    def ramp_days(self) -> float:
        """Days of the ramp's iterations at the predicted seconds of each batch size, and nothing else.

        Where the capacity changes meanwhile, on what there is, days on which nothing can run left out; restarts that
        changes of topology need are counted.
        """
        end = float(self.ideal.reached_s[0, self.ramp_end]) if self.ramp_phases else 0.0
        idle = [w for w, schedule in self.schedules if schedule is None and w.start_s < end]
        return (end - sum(min(w.end_s, end) - w.start_s for w in idle)) / 86400

    @property
    def p_deadline(self) -> float | None:
        """Probability of MISSING the deadline: of ending after that day. None without one."""
        if self.request.deadline is None:
            return None
        end = (self.request.deadline - self.request.start).total_seconds() + 86400
        return float((self.outcomes.wall_s > end).mean())

    @property
    def p_allocation(self) -> float | None:
        """Probability of OVERRUNNING the allocation. None without one."""
        limit = self.request.allocation
        return None if limit is None else float((self.outcomes.gpu_s / 3600 > limit).mean())

    @property
    def course(self) -> tuple[np.ndarray, np.ndarray]:
        """Batch size and iterations of each piece whose end `reached_s` dates."""
        iterations, same = _pieces(list(self.phases))
        return np.array([phase.gbs for phase in self.phases])[same], iterations

    @property
    def gpu_hours_by_cause(self) -> dict[str, float]:
        """Mean GPU-hours: the iterations at their predicted pace, what each cause adds, and the doubt of the pace.

        Causes share what is charged in the proportion of the time that they take, uncharged ones left out.
        """
        r, work = self.request, float(self.ideal.gpu_s[0]) / 3600
        free = {stop.name for stop in r.risks.stops if not stop.charged} | {QUEUE}
        days = {name: d for name, d in self.lost_days.items() if name not in free}
        rest = float(self.outcomes.gpu_s.mean()) / 3600 - work
        slower = min(max(r.risks.slowdown - 1, 0) * work, rest)
        share = (rest - slower) / (sum(days.values()) or 1)
        return {"iterations": work, "slower than a benchmark": slower, **{name: d * share for name, d in days.items()}}

    @property
    def dangers(self) -> list[tuple[str, float, float]]:
        """What can delay the run: name, mean days, and the days that one run in twenty passes; the worst first."""
        high = {name: float(np.quantile(seconds, 0.95)) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        rows = [(name, mean, high[name]) for name, mean in self.lost_days.items() if high[name] > 0]
        doubt = self.request.doubt
        ideal, spread = float(self.ideal.wall_s[0]) / 86400, float(np.hypot(doubt.common, doubt.alone))
        rows.append(
            ("slower than predicted", ideal * (doubt.slowdown - 1), ideal * (doubt.slowdown * np.exp(Z90 * spread) - 1))
        )
        return sorted(rows, key=lambda row: -row[2])

    @property
    def lost_days(self) -> dict[str, float]:
        """Mean days lost to each cause, the largest first."""
        means = {name: float(seconds.mean()) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))


def forecast(request: ForecastRequest) -> Forecast:
    """The forecast of a request. ValueError where a batch size of the ramp fits nothing that the capacity allows."""
    r, schedules = request, schedules_of(request)
    stretches, same = _stretches(r, schedules)
    given = (stretches, same, r.doubt, r.risks, r.shares, r.interval_s)
    return Forecast(
        request=r,
        phases=tuple(r.phases),
        schedules=schedules,
        ideal=untroubled(r, schedules),
        usual=simulate(*given, 1, None),
        outcomes=simulate(*given, r.runs, np.random.default_rng(r.seed)),
    )


def schedules_of(request: ForecastRequest) -> Schedules:
    """Every window of the capacity with its schedule, None where nothing can run meanwhile; ValueError as forecast."""
    r, windows = request, request.capacity.windows(request.start)
    worth = SOONEST if r.day_worth is None else r.day_worth
    reshape_s = r.risks.reshape_s if r.reshape else None
    given = (r.calibration, r.risks.startup_s, r.day_worth is not None, worth, reshape_s)
    made = {gpus: schedule_on(r.plan, r.phases, gpus, *given) for gpus in {window.gpus for window in windows}}
    rule = "the last step never ends, and no replica on so few GPUs fits the card's memory at every batch size"
    require(made[windows[-1].gpus] is not None, "capacity.gpus", windows[-1].gpus, rule)
    return tuple((window, made[window.gpus]) for window in windows)


def untroubled(request: ForecastRequest, schedules: Schedules) -> Outcomes:
    """The one run in which nothing goes wrong: its iterations, the restarts of its schedules, days without GPUs."""
    stretches, same = _stretches(request, schedules)
    calm = [dataclasses.replace(stretch, queue_share=0.0) for stretch in stretches]
    risks = dataclasses.replace(request.risks, stops=(), startup_s=0.0, queue_s=0.0)
    return simulate(calm, same, Doubt(common=0, alone=0), risks, {}, 1.0, 1, None)


def bars_of(request: ForecastRequest, schedules: Schedules, reached_s: np.ndarray) -> list[Bar]:
    """Each stretch of one capacity, DP and microbatch, with its batch sizes; `reached_s` (J,) dates the pieces."""
    _, same = _pieces(request.phases)
    found: list[Bar] = []
    for window, schedule in schedules:
        inside = [i for i, (a, b) in enumerate(pairwise([0.0, *reached_s])) if b > window.start_s and a < window.end_s]
        for i in inside if schedule else []:
            assert schedule is not None
            step, begin = schedule.steps[same[i]], reached_s[i - 1] if i else 0.0
            new = Bar(
                start_s=float(max(begin, window.start_s)),
                end_s=float(min(reached_s[i], window.end_s)),
                choice=step.choice,
                first_gbs=step.phase.gbs,
                last_gbs=step.phase.gbs,
            )
            if found and found[-1].choice.same_job(step.choice) and found[-1].end_s >= new.start_s:
                new = dataclasses.replace(new, start_s=found[-1].start_s, first_gbs=found.pop().first_gbs)
            found.append(new)
    return found


def _stretches(request: ForecastRequest, schedules: Schedules) -> tuple[list[Stretch], np.ndarray]:
    pieces, same = _pieces(request.phases)
    queue = request.risks.queue_s / (request.risks.job_hours * 3600)
    return [_stretch(window, made, pieces, same, queue * window.shared) for window, made in schedules], same


def _pieces(phases: list[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """Iterations of each piece and the phase that it belongs to; the last phase is cut into CHUNKS."""
    last = len(phases) - 1
    cuts = np.diff(np.linspace(0, phases[-1].iterations, CHUNKS + 1))
    iterations = np.concatenate([[p.iterations for p in phases[:-1]], cuts])
    return iterations, np.concatenate([np.arange(last), np.full(CHUNKS, last)]).astype(int)


def _stretch(
    window: CapacityWindow, schedule: Schedule | None, iterations: np.ndarray, same: np.ndarray, queue_share: float
) -> Stretch:
    if schedule is None:
        none = np.zeros(0)
        return Stretch(window=window, seconds=none, gpus=none, nodes=none)
    steps = [schedule.steps[i] for i in same]
    seconds = iterations * np.array([step.choice.seconds for step in steps])
    first = np.concatenate([[True], np.diff(same) > 0])
    seconds += np.array([step.pause_s for step in steps]) * first
    return Stretch(
        window=window,
        seconds=seconds,
        gpus=np.array([float(step.choice.gpus) for step in steps]),
        nodes=np.array([float(step.choice.nodes) for step in steps]),
        queue_share=queue_share,
    )
