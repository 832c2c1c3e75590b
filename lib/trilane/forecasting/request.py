"""ForecastRequest: what a forecast depends on, validated; its fixed costs (evaluation, saving, ends of jobs)."""

import dataclasses
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from trilane.config.batch_rampup import Phase, Ramp, parse_ramp
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import calibration_for
from trilane.forecasting.capacity import Capacity, CapacityWindow, capacity_of, constant, parse_day
from trilane.forecasting.failures import EVALUATION, JOB_ENDS, SAVING, FailureModel, evaluation_s
from trilane.forecasting.schedule import SOONEST, phases_of, require_divisible
from trilane.forecasting.simulation import Uncertainty
from trilane.utils.validation import (
    from_mapping,
    read_json,
    require,
    require_integer,
    require_known,
    require_not_negative,
    require_positive,
)
from trilane.workspace.checkpoints import checkpoint_bytes

MOST_TOKENS = 1e16  # a thousand times what has been trained
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022, arXiv:2203.15556
CHUNKS = 24  # pieces of the constant phase, so that its progress can be drawn and cut at dates
MOST_CELLS = 30_000_000  # runs x pieces: 240 MB for each of about eight arrays
Z90 = 1.6449  # standard deviations of a normal distribution's 90 % interval, on each side
# Maximum watts of a node per GPU, from the data sheets: DGX-1 V100 3.5 kW / 8, DGX A100 6.5 kW / 8, DGX H100 and H200
# 10.2 kW / 8. A node in training draws less than its maximum, so these are upper bounds.
NODE_WATTS_PER_GPU = {"V100": 3500 / 8, "A100": 6500 / 8, "H100": 10200 / 8, "H200": 10200 / 8}
# Power usage effectiveness: cooling and supply of the building. Assumed; large centres report 1.1 to 1.6.
PUE = 1.2
ADAPT = {"no": None, "days": SOONEST, "gpu_hours": 0.0}  # what a day is worth, in GPU-hours


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a GPU-hour costs in money (any currency) and a GPU draws in power; None where not given."""

    per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("price", self.per_gpu_hour), ("watts", self.watts_per_gpu)):
            if value is not None:
                require_not_negative(name, value)

    def cost(self, gpu_hours: float) -> float | None:
        """Money for so many GPU-hours; None without a price."""
        return None if self.per_gpu_hour is None else self.per_gpu_hour * gpu_hours

    def energy_kwh(self, gpu_hours: float, gpu: str) -> float | None:
        """Kilowatt-hours, the building's overhead included; None where the GPU's power is neither known nor given."""
        known = NODE_WATTS_PER_GPU.get(gpu.partition("-")[0])
        watts = known if self.watts_per_gpu is None else self.watts_per_gpu
        return None if watts is None else gpu_hours * watts * PUE / 1000


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """A plan, its tokens and ramp, the capacity over time, the risks, and the limits that must be kept.

    `capacity` None: the plan's GPUs from the first day on, with the cluster's other nodes as spares. `day_worth` None
    keeps the plan's topology wherever it fits; a number of GPU-hours that a day is worth lets DP, microbatch and nodes
    follow the batch size (0: the cheapest way, SOONEST: the fastest), and with `reshape` TP and PP too. Raises
    ValueError for tokens below one batch, a ramp that the topology cannot divide, a deadline before the start, an
    allocation that is no positive number.
    """

    plan: Plan
    calibration: Calibration
    tokens: float
    ramp: Ramp
    start: date
    capacity: Capacity | None = None
    deadline: date | None = None
    allocation: float | None = None
    risks: FailureModel = field(default_factory=FailureModel)
    price: Price = field(default_factory=Price)
    day_worth: float | None = None
    reshape: bool = False
    runs: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        t, ramp, worth = self.plan.topology, self.ramp, self.day_worth
        require_positive("tokens", self.tokens)
        first = (ramp.start if ramp.samples else t.gbs) * self.plan.shape.seq_length
        require(self.tokens >= first, "tokens", f"{self.tokens:g}", f"below one batch of {first}")
        require(self.tokens <= MOST_TOKENS, "tokens", f"{self.tokens:g}", f"must be at most {MOST_TOKENS:g}")
        require_integer("runs", self.runs, 100)
        require(self.seed >= 0, "seed", self.seed, "must not be negative")
        require(worth is None or 0 <= worth < math.inf, "day-worth", worth, "must be zero or a number above")
        rule = "needs --adapt days, --adapt gpu_hours or --day-worth"
        require(not self.reshape or worth is not None, "reshape", True, rule)
        if worth is None:
            require_divisible(ramp, t)
        if self.deadline is not None:
            rule = f"must not be before the start, {self.start}"
            require(self.deadline >= self.start, "deadline", self.deadline, rule)
        if self.allocation is not None:
            require_positive("allocation", self.allocation)
        pieces = len(self.phases) - 1 + CHUNKS
        rule = f"must be at most {MOST_CELLS // pieces}, for the memory that {pieces} pieces of this ramp take"
        require(self.runs <= MOST_CELLS // pieces, "runs", self.runs, rule)
        replica, gpus = t.tp * t.pp, [step.gpus for step in self.capacity.steps] if self.capacity else [t.gpus]
        require(max(gpus) >= replica, "capacity.gpus", max(gpus), f"one replica of {t.label} takes {replica}")
        rule = f"the last step never ends, and one replica takes {replica}"
        require(gpus[-1] >= replica, "capacity.gpus", gpus[-1], rule)

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        return math.ceil(self.tokens / self.plan.shape.seq_length)

    @property
    def phases(self) -> list[Phase]:
        """The ramp's phases and the constant one."""
        return phases_of(self.ramp, self.plan.topology.gbs, self.samples)

    @property
    def windows(self) -> list[CapacityWindow]:
        """The capacity from the start on."""
        return (self.capacity or constant(self.plan.topology.gpus, self.start)).windows(self.start)

    def nodes_in(self, window: CapacityWindow) -> int:
        """Whole nodes for jobs and spares: those of the stated capacity, or without one the whole cluster."""
        cluster = self.plan.cluster
        stated = window.gpus // cluster.gpus_per_node if self.capacity else cluster.max_nodes
        return min(stated, cluster.max_nodes)

    @property
    def uncertainty(self) -> Uncertainty:
        """The interval of the plan's prediction, split into a part common to all batch sizes and one for each."""
        prediction, common = predict(self.plan, self.calibration), self.risks.common
        deviation = math.log(prediction.sec_hi / prediction.sec_per_it) / Z90
        both = math.hypot(deviation * math.sqrt(common), self.risks.slowdown_spread)
        return Uncertainty(common=both, independent=deviation * math.sqrt(1 - common), slowdown=self.risks.slowdown)

    @property
    def _nodes(self) -> float:
        return self.plan.topology.gpus / self.plan.cluster.gpus_per_node

    @property
    def save_s(self) -> float:
        """Seconds of one checkpoint, written by all nodes of the plan."""
        return self.risks.save_s(checkpoint_bytes(self.plan.shape), self._nodes)

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints, on the plan's nodes."""
        return self.risks.checkpoint_interval_s(self.save_s, self._nodes)

    @property
    def shares(self) -> dict[str, float]:
        """Certain extra time per second of work."""
        r = self.risks
        return {
            EVALUATION: evaluation_s(self.plan.topology, r.evaluation_iters, 1.0) / r.evaluation_every,
            SAVING: self.save_s / self.interval_s,
            JOB_ENDS: r.startup_s / (r.job_hours * 3600),
        }


def forecast_request(
    plan: Plan,
    *,
    tokens: float | None = None,
    ramp: str | None = None,
    capacity: str | None = None,
    start: str | None = None,
    deadline: str | None = None,
    adapt: str = "no",
    day_worth: float | None = None,
    calibration: Calibration | str | None = None,
    risks: str | None = None,
    failures_per_node_year: float | None = None,
    checkpoint_minutes: float | None = None,
    spare_nodes: int | None = None,
    job_hours: float | None = None,
    evaluation_iters: int | None = None,
    price: float | None = None,
    watts: float | None = None,
    **others: Any,
) -> ForecastRequest:
    """The request of a command's options or a notebook's parameters; None or "" stands for the default.

    tokens        default: 20 per parameter (Hoffmann et al. 2022)
    ramp          "START,INCREMENT,SAMPLES"; default: the plan's
    capacity      a JSON file of GPUs from day to day; default: the plan's GPUs, not shared
    start         the first day, default today (UTC); `deadline` the last one
    adapt         "days" or "gpu_hours" lets DP, microbatch and nodes follow the batch size; `day_worth` in between
    calibration   constants, or where to take them from (calibration_for); default: those that ship for the cluster
    risks         a JSON file with fields of FailureModel; the arguments after it replace single ones. Without either,
                  evaluations are those of the plan, where it has any
    price, watts  money of a GPU-hour, power of a GPU
    others        fields of ForecastRequest as they are

    ValueError names the argument that is wrong.
    """
    require_known("adapt", adapt, ADAPT)
    first = parse_day("start", start) if start else datetime.now(UTC).date()
    given = {"spare_nodes": spare_nodes, "job_hours": job_hours, "evaluation_iters": evaluation_iters}
    if plan.run.eval_interval and not risks and evaluation_iters is None:
        given |= {"evaluation_every": plan.run.eval_interval, "evaluation_iters": plan.run.eval_iters}
    model = _failure_model(risks, checkpoint_minutes, failures_per_node_year, given)
    return ForecastRequest(
        plan=plan,
        calibration=calibration
        if isinstance(calibration, Calibration)
        else calibration_for(plan.cluster, calibration or ""),
        tokens=TOKENS_PER_PARAMETER * plan.shape.parameters if tokens is None else tokens,
        ramp=parse_ramp(ramp) if ramp else plan.run.ramp,
        start=first,
        capacity=capacity_of(read_json(capacity, "capacity")) if capacity else None,
        deadline=parse_day("deadline", deadline) if deadline else None,
        risks=model,
        price=Price(per_gpu_hour=price, watts_per_gpu=watts),
        day_worth=ADAPT[adapt] if day_worth is None else day_worth,
        **others,
    )


def _failure_model(
    risks: str | None, checkpoint_minutes: float | None, failures_per_node_year: float | None, given: dict[str, Any]
) -> FailureModel:
    """The failure model of a JSON file, or the default one, with the values that are given."""
    minutes = checkpoint_minutes
    require(minutes is None or minutes > 0, "checkpoint-minutes", minutes, "must be above zero")
    model = from_mapping(FailureModel, read_json(risks, "risks"), "risks") if risks else FailureModel()
    given = {**given, "checkpoint_s": minutes * 60 if minutes else None}
    model = dataclasses.replace(model, **{name: value for name, value in given.items() if value is not None})
    return model if failures_per_node_year is None else model.with_failures(failures_per_node_year)
