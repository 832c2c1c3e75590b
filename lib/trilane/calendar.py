"""Calendar: from tokens, a ramp, capacity and stops to a finish date, GPU-hours, and the risk of missing either."""

import dataclasses
import math
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta

import numpy as np

from trilane.calibration import Calibration
from trilane.capacity import Capacity, Window
from trilane.checks import require, require_integer, require_positive
from trilane.montecarlo import Doubt, Outcomes, Stretch, simulate
from trilane.pace import OBJECTIVES, require_divisible, schedule_on
from trilane.plan import Plan
from trilane.ramp import Phase, Ramp
from trilane.schedule import Schedule, phases_of
from trilane.stops import Risks

Z90 = 1.6449  # standard deviations of a normal distribution's 90 % interval, on each side
CHUNKS = 24  # pieces of the constant phase, so that its course can be drawn and cut by dates
# What a checkpoint holds per parameter: 16-bit weights 2, fp32 masters 4, Adam's two moments 8 (the chronicles' 18
# bytes less the gradients).
CHECKPOINT_BYTES = 14
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A plan, its tokens and ramp, the capacity from which day on, what may go wrong, and what must not be passed.

    `adapt` "no" keeps the plan's topology wherever it fits; "days" and "gpu_hours" choose DP, microbatch and nodes for
    each batch size. Raises ValueError for tokens below one batch, a ramp that the topology cannot divide, a deadline
    before the start, an allocation that is no positive number.
    """

    plan: Plan
    calibration: Calibration
    tokens: float
    ramp: Ramp
    capacity: Capacity
    start: date
    deadline: date | None = None
    allocation: float | None = None
    risks: Risks = field(default_factory=Risks)
    adapt: str = "no"
    runs: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        t, ramp = self.plan.topology, self.ramp
        require_positive("tokens", self.tokens)
        first = (ramp.start if ramp.samples else t.gbs) * self.plan.shape.seq_length
        require(self.tokens >= first, "tokens", f"{self.tokens:g}", f"below one batch of {first}")
        require_integer("runs", self.runs, 100)
        if self.adapt == "no":
            require_divisible(ramp, t)
        if self.deadline is not None:
            require(
                self.deadline >= self.start, "deadline", self.deadline, f"must not be before the start, {self.start}"
            )
        if self.allocation is not None:
            require_positive("allocation", self.allocation)
        replica = t.tp * t.pp
        most = max(step.gpus for step in self.capacity.steps)
        require(most >= replica, "capacity.gpus", most, f"one replica of {t.label} takes {replica}")
        last = self.capacity.steps[-1].gpus
        require(last >= replica, "capacity.gpus", last, f"the last step never ends, and one replica takes {replica}")

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        return math.ceil(self.tokens / self.plan.shape.seq_length)

    @property
    def phases(self) -> list[Phase]:
        """The ramp's phases and the constant one."""
        return phases_of(self.ramp, self.plan.topology.gbs, self.samples)

    @property
    def doubt(self) -> Doubt:
        """The calibration's interval, split into what all batch sizes share and what each has alone."""
        deviation, common = self.calibration.half_width / Z90, self.risks.common
        both = math.hypot(deviation * math.sqrt(common), self.risks.slowdown_spread)
        return Doubt(common=both, alone=deviation * math.sqrt(1 - common), slowdown=self.risks.slowdown)

    @property
    def save_s(self) -> float:
        """Seconds of one checkpoint: all nodes of the plan write their share."""
        nodes = self.plan.topology.gpus / self.plan.cluster.gpus_per_node
        rate = max(nodes, 1.0) * self.risks.write_bytes_per_s
        return CHECKPOINT_BYTES * self.plan.shape.parameters / rate

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints, on the plan's nodes."""
        nodes = self.plan.topology.gpus / self.plan.cluster.gpus_per_node
        return self.risks.checkpoint_interval_s(self.save_s, nodes)

    @property
    def shares(self) -> dict[str, float]:
        """Certain extra time per second of work.

        An evaluation is a forward pass: a quarter of an iteration with full recomputation, else a third.
        """
        r = self.risks
        forward = 1 / 4 if self.plan.topology.recompute == "full" else 1 / 3
        return {
            "evaluation": forward * r.evaluation_iters / r.evaluation_every,
            "saving": self.save_s / self.interval_s,
            "ends of jobs": r.startup_s / (r.job_hours * 3600),
        }


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What comes out: the schedule of every window, the run of average luck, and thousands of runs of any luck."""

    request: Request
    phases: tuple[Phase, ...]
    schedules: tuple[tuple[Window, Schedule | None], ...]
    usual: Outcomes
    outcomes: Outcomes

    @property
    def ramp_phases(self) -> int:
        """Phases before the constant one."""
        return sum(phase.gbs < self.request.plan.topology.gbs for phase in self.phases)

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
        """The time by which this share of the runs has ended."""
        return datetime.combine(self.request.start, time()) + timedelta(days=self.days(quantile))

    @property
    def ramp_days(self) -> float:
        """Days of the ramp's iterations alone, at the predicted seconds of each batch size."""
        return sum(step.seconds for step in self.best_schedule.steps[: self.ramp_phases]) / 86400

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
    def lost_days(self) -> dict[str, float]:
        """Mean days lost to each cause, the largest first."""
        means = {name: float(seconds.mean()) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))


def forecast(request: Request) -> Forecast:
    """The forecast of a request. ValueError where a batch size of the ramp fits nothing that the capacity allows."""
    r = request
    phases, day_worth = r.phases, OBJECTIVES.get(r.adapt, OBJECTIVES["days"])
    schedules: dict[int, Schedule | None] = {}
    windows = r.capacity.windows(r.start)
    for gpus in {window.gpus for window in windows}:
        schedules[gpus] = schedule_on(
            r.plan, phases, gpus, r.calibration, r.risks.startup_s, r.adapt != "no", day_worth
        )
    pieces, same = _pieces(phases)
    stretches = [_stretch(window, schedules[window.gpus], pieces, same) for window in windows]
    given = (stretches, same, r.doubt, r.risks, r.shares, r.interval_s)
    return Forecast(
        request=r,
        phases=tuple(phases),
        schedules=tuple((window, schedules[window.gpus]) for window in windows),
        usual=simulate(*given, 1, None),
        outcomes=simulate(*given, r.runs, np.random.default_rng(r.seed)),
    )


def _pieces(phases: list[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """Iterations of each piece and the phase that it belongs to; the last phase is cut into CHUNKS."""
    last = len(phases) - 1
    cuts = np.diff(np.linspace(0, phases[-1].iterations, CHUNKS + 1))
    iterations = np.concatenate([[p.iterations for p in phases[:-1]], cuts])
    return iterations, np.concatenate([np.arange(last), np.full(CHUNKS, last)]).astype(int)


def _stretch(window: Window, schedule: Schedule | None, iterations: np.ndarray, same: np.ndarray) -> Stretch:
    if schedule is None:
        none = np.zeros(0)
        return Stretch(window=window, seconds=none, gpus=none, nodes=none)
    steps = [schedule.steps[i] for i in same]
    seconds = iterations * np.array([step.choice.seconds for step in steps])
    first = np.concatenate([[True], np.diff(same) > 0])
    seconds += np.array([step.restart * schedule.restart_s for step in steps]) * first
    return Stretch(
        window=window,
        seconds=seconds,
        gpus=np.array([float(step.choice.gpus) for step in steps]),
        nodes=np.array([float(step.choice.nodes) for step in steps]),
    )


def with_pins(risks: Risks, failures_per_node_year: float | None, **pins: float | int | None) -> Risks:
    """The risks with what the user knows better; None leaves a field as it is."""
    given = {name: value for name, value in pins.items() if value is not None}
    changed = dataclasses.replace(risks, **given) if given else risks  # type: ignore[arg-type]
    return changed if failures_per_node_year is None else changed.with_failures(failures_per_node_year)
