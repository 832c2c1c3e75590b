"""Request: what is asked of the calendar, checked at birth, and the certain costs that follow from it."""

import dataclasses
import math
from dataclasses import dataclass, field
from datetime import date

from trilane.config.batch_rampup import Phase, Ramp
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.forecasting.capacity import Capacity
from trilane.forecasting.failures import EVALUATION, JOB_ENDS, SAVING, FailureModel
from trilane.forecasting.schedule import phases_of
from trilane.forecasting.simulation import Doubt
from trilane.forecasting.throughput import require_divisible
from trilane.utils.validation import require, require_integer, require_positive
from trilane.workspace.checkpoints import checkpoint_bytes

MOST_TOKENS = 1e16  # a thousand times what has been trained


CHUNKS = 24  # pieces of the constant phase, so that its course can be drawn and cut by dates


MOST_CELLS = 30_000_000  # runs x pieces of the course: 240 MB for each of about eight arrays of them


Z90 = 1.6449  # standard deviations of a normal distribution's 90 % interval, on each side


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """A plan, its tokens and ramp, the capacity from which day on, what may go wrong, and what must not be passed.

    `day_worth` None keeps the plan's topology wherever it fits; a number of GPU-hours that a day is worth lets DP,
    microbatch and nodes follow the batch size (0: the cheapest way, pace.SOONEST: the fastest), and with `reshape` TP
    and PP too. Raises ValueError for tokens below one batch, a ramp that the topology cannot divide, a deadline before
    the start, an allocation that is no positive number.
    """

    plan: Plan
    calibration: Calibration
    tokens: float
    ramp: Ramp
    capacity: Capacity
    start: date
    deadline: date | None = None
    allocation: float | None = None
    risks: FailureModel = field(default_factory=FailureModel)
    day_worth: float | None = None
    reshape: bool = False
    runs: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        t, ramp = self.plan.topology, self.ramp
        require_positive("tokens", self.tokens)
        first = (ramp.start if ramp.samples else t.gbs) * self.plan.shape.seq_length
        require(self.tokens >= first, "tokens", f"{self.tokens:g}", f"below one batch of {first}")
        require(self.tokens <= MOST_TOKENS, "tokens", f"{self.tokens:g}", f"must be at most {MOST_TOKENS:g}")
        require_integer("runs", self.runs, 100)
        worth = self.day_worth
        require(worth is None or 0 <= worth < math.inf, "day-worth", worth, "must be zero or a number above")
        rule = "needs --adapt days, --adapt gpu_hours or --day-worth"
        require(not self.reshape or worth is not None, "reshape", True, rule)
        if self.day_worth is None:
            require_divisible(ramp, t)
        if self.deadline is not None:
            require(
                self.deadline >= self.start, "deadline", self.deadline, f"must not be before the start, {self.start}"
            )
        if self.allocation is not None:
            require_positive("allocation", self.allocation)
        pieces = len(self.phases) - 1 + CHUNKS
        rule = f"must be at most {MOST_CELLS // pieces}, for the memory that {pieces} pieces of this ramp take"
        require(self.runs <= MOST_CELLS // pieces, "runs", self.runs, rule)
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
        return checkpoint_bytes(self.plan.shape) / rate

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
            EVALUATION: forward * r.evaluation_iters / r.evaluation_every,
            SAVING: self.save_s / self.interval_s,
            JOB_ENDS: r.startup_s / (r.job_hours * 3600),
        }


def with_pins(risks: FailureModel, failures_per_node_year: float | None, **pins: float | int | None) -> FailureModel:
    """The risks with what the user knows better; None leaves a field as it is."""
    given = {name: value for name, value in pins.items() if value is not None}
    changed = dataclasses.replace(risks, **given) if given else risks  # type: ignore[arg-type]
    return changed if failures_per_node_year is None else changed.with_failures(failures_per_node_year)
