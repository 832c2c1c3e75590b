"""ForecastRequest: what a forecast depends on, checked at birth: plan, tokens, phases, limits,
fixed costs.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any

import numpy as np

from trilane.config.batch_rampup import Phase, Ramp, parse_ramp
from trilane.config.options import check, option
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.fit import Z90
from trilane.costmodel.iteration import iteration_columns
from trilane.costmodel.predict import Prediction, predict
from trilane.costmodel.shipped import constants_of
from trilane.forecasting.failures import NODE_FAILURE, Cause, FailureModel, evaluation_s
from trilane.forecasting.simulation import Uncertainty
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, Record, as_json
from trilane.utils.validation import (
    from_mapping,
    parse_count,
    read_json,
    require,
)
from trilane.workspace.checkpoints import checkpoint_bytes

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022, arXiv:2203.15556
CUTS = 24  # pieces of the phase at the full batch size


def parse_day(field: str, text: object) -> date:
    """The date of "2026-03-11"; ValueError names `field` otherwise."""
    try:
        day = date.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"{field}={text}: must be a date such as 2026-03-11") from None
    require(1990 < day.year < 2200, field, text, "must lie between 1990 and 2200")
    return day


@frozen
class ForecastRequest(Record):
    """A plan, its tokens and ramp, the risks, and the limits that must be kept.

    Where a text is given it is read as commands and notebooks give it; "" and None stand for the
    default. ValueError names the field that is wrong.
    """

    plan: Plan = option(cli=False)
    # at most a thousand times what has been trained
    tokens: float = option(
        None,
        "tokens of the whole run: 341B, 3.41e11; default: 20 for each parameter",
        above=0,
        maximum=1e16,
    )
    ramp: Ramp = option(
        "", "the batch size's ramp; default: the plan's", metavar="START,INCREMENT,SAMPLES"
    )
    start: date = option("", "default: today (UTC)", metavar="DATE")
    deadline: date | None = option("", "the last day, such as 2026-07-11", metavar="DATE")
    allocation: float | None = option(
        None, "GPU-hours that are granted", metavar="GPU_HOURS", above=0
    )
    failures_per_node_year: float | None = option(
        None, "default: 1.8, uncertain by a factor of 2.2"
    )
    checkpoint_minutes: float | None = option(
        None, "between checkpoints; default: Daly's optimum", above=0, maximum=525_600
    )
    spare_nodes: int | None = option(
        None, "nodes in reserve (default: 4, or what the jobs leave free)"
    )
    job_hours: float | None = option(
        None, "the longest job that the queue takes (default: 20)", above=0
    )
    risks: FailureModel = option("", "fields of FailureModel that you know better", metavar="JSON")
    price: float | None = option(
        None, "price of one GPU-hour, in your currency", metavar="PER_GPU_HOUR"
    )
    calibration: Calibration = option(
        "", "constants: a study, a JSON file or a software stack", metavar="SOURCE"
    )
    # of 140 pieces, a ramp of 116 sizes, each of some eight arrays takes 110 MB
    runs: int = option(10_000, "simulated runs", minimum=100, maximum=100_000)
    seed: int = option(0, "of the simulation")

    def __post_init__(self) -> None:
        plan = self.plan
        self._read("tokens", parse_count, TOKENS_PER_PARAMETER * plan.shape.active_parameters)
        self._read("ramp", lambda _, text: parse_ramp(text), plan.run.ramp)
        self._read("start", parse_day, datetime.now(UTC).date())
        self._read("deadline", parse_day, None)
        object.__setattr__(self, "calibration", constants_of(plan, self.calibration or ""))
        check(self)
        object.__setattr__(self, "risks", self._risks())
        first = (
            self.ramp.start if self.ramp.samples else plan.topology.gbs
        ) * plan.shape.seq_length
        require(self.tokens >= first, "tokens", f"{self.tokens:g}", f"below one batch of {first}")
        rule = f"must not be before the start, {self.start}"
        require((self.deadline or date.max) >= self.start, "deadline", self.deadline, rule)
        self.ramp.require_whole(plan.topology, self.phases)

    def _read(self, name: str, read: Callable[[str, str], Any], default: Any) -> None:
        """Replace the text of a field by what it means, and nothing by the default."""
        value = getattr(self, name)
        if not value:
            object.__setattr__(self, name, default)
        elif isinstance(value, str):
            object.__setattr__(self, name, read(name, value))

    def _risks(self) -> FailureModel:
        """The risks, with the single values that are given; without either, evaluations are those
        of the plan.
        """
        run = self.plan.run
        model = self.risks or FailureModel()
        if isinstance(model, str):
            model = from_mapping(FailureModel, read_json(model, "risks"), "risks")
        elif run.eval_interval and not self.risks:
            every = run.eval_interval
            model = replace(model, evaluation_every=every, evaluation_iters=run.eval_iters)
        changes: dict[str, Any] = {"spare_nodes": self.spare_nodes, "job_hours": self.job_hours}
        if self.checkpoint_minutes is not None:
            changes["checkpoint_s"] = self.checkpoint_minutes * 60
        if self.failures_per_node_year is not None:
            given: dict[str, Any] = {"per_node_year": self.failures_per_node_year}
            given |= {"spread": 0.0, "source": "given"}
            changes["stops"] = tuple(
                replace(stop, **given) if stop.name == NODE_FAILURE else stop
                for stop in model.stops
            )
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(model, **changes).measured(self.plan.cluster)

    def kept(self) -> Json:
        """The request as JSON, without the plan and its constants, as from_mapping() reads it.
        Single values that were given stand in `risks`.
        """
        names = "tokens ramp start deadline allocation risks price runs seed"
        return {name: as_json(getattr(self, name)) for name in names.split()}

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        return math.ceil(self.tokens / self.plan.shape.seq_length)

    @cached_property
    def phases(self) -> list[Phase]:
        """The ramp's phases and the constant one."""
        gbs = self.plan.topology.gbs
        return self.ramp.between(gbs, 0, self.ramp.iterations(self.samples, gbs))

    @cached_property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Iterations of each piece and the phase that it belongs to."""
        *ramp, full = [phase.iterations for phase in self.phases]
        # the last phase is cut, so that its progress can be drawn and cut at dates
        cuts = np.diff(np.linspace(0, full, CUTS + 1))
        same = [*range(len(ramp)), *[len(ramp)] * CUTS]
        return np.concatenate([ramp, cuts]), np.array(same)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Predicted seconds of an iteration of each phase."""
        plan = self.plan
        sizes = np.array([float(phase.gbs) for phase in self.phases])
        columns = columns_of(plan.shape, plan.topology, plan.engine).changed(gbs=sizes)
        return iteration_columns(columns, plan.cluster, self.calibration).total

    @cached_property
    def prediction(self) -> Prediction:
        """The plan's prediction at its full batch size."""
        return predict(self.plan, self.calibration)

    @property
    def uncertainty(self) -> Uncertainty:
        """The interval of the plan's prediction, split into a part common to all batch sizes and
        one for each.
        """
        r = self.risks
        deviation = math.log(self.prediction.sec_hi / self.prediction.sec_per_it) / Z90
        return Uncertainty(
            common=math.hypot(deviation * math.sqrt(r.common), r.slowdown_spread),
            independent=deviation * math.sqrt(1 - r.common),
            slowdown=r.slowdown,
        )

    @property
    def saving(self) -> tuple[float, float]:
        """Seconds of one checkpoint, written by all nodes of the plan, and from one to the next."""
        nodes = self.plan.topology.gpus / self.plan.cluster.gpus_per_node
        save_s = self.risks.save_s(checkpoint_bytes(self.plan.shape), nodes)
        return save_s, self.risks.checkpoint_interval_s(save_s, nodes)

    @property
    def shares(self) -> dict[str, float]:
        """Certain extra time per second of work."""
        r = self.risks
        save_s, interval_s = self.saving
        evaluation = evaluation_s(self.plan.topology, r.evaluation_iters, 1.0) / r.evaluation_every
        return {
            Cause.EVALUATION: evaluation,
            Cause.SAVING: save_s / interval_s,
            Cause.JOB_ENDS: r.startup_s / (r.job_hours * 3600),
        }
