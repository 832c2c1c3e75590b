"""ForecastRequest: what a forecast depends on, checked at birth: plan, tokens, phases, limits,
fixed costs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property, partial
from typing import Any

import numpy as np

from trilane.config.batch_rampup import Phase, Ramp, parse_ramp
from trilane.config.options import check, option
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.fit import Z90
from trilane.costmodel.predict import Prediction, predict
from trilane.costmodel.shipped import constants_of
from trilane.forecasting.failures import NODE_FAILURE, Cause, FailureModel, evaluation_s
from trilane.forecasting.schedule import SOONEST
from trilane.forecasting.simulation import Uncertainty
from trilane.utils import validation
from trilane.utils.tables import Record, as_json
from trilane.utils.validation import read_json, require
from trilane.workspace.checkpoints import checkpoint_bytes

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022, arXiv:2203.15556


def parse_day(field: str, text: object) -> date:
    """The date of "2026-03-11"; ValueError names `field` otherwise."""
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"{field}={text}: must be a date such as 2026-03-11") from None


@dataclass(frozen=True, kw_only=True)
class ForecastRequest(Record):
    """A plan, its tokens and ramp, the risks, and the limits that must be kept.

    Where a text is given it is read as commands and notebooks give it; "" and None stand for the
    default. With `adapt` DP, microbatch and nodes follow the batch size; without, the plan's
    topology is kept wherever it fits. ValueError names the field that is wrong.
    """

    plan: Plan = option(cli=False)
    tokens: float = option(
        None, "tokens of the whole run: 341B, 3.41e11; default: 20 for each parameter"
    )
    ramp: Ramp = option(
        "", "the batch size's ramp; default: the plan's", metavar="START,INCREMENT,SAMPLES"
    )
    start: date = option("", "default: today (UTC)", metavar="DATE")
    deadline: date | None = option("", "the last day, such as 2026-07-11", metavar="DATE")
    allocation: float | None = option(None, "GPU-hours that are granted", metavar="GPU_HOURS")
    adapt: str = option(
        "no", "let DP, MBS, nodes follow the batch", choices=("no", "days", "gpu_hours")
    )
    failures_per_node_year: float | None = option(
        None, "default: 1.8, uncertain by a factor of 2.2"
    )
    checkpoint_minutes: float | None = option(None, "between checkpoints; default: Daly's optimum")
    spare_nodes: int | None = option(
        None, "nodes in reserve (default: 4, or what the jobs leave free)"
    )
    job_hours: float | None = option(None, "the longest job that the queue takes (default: 20)")
    evaluation_iters: int | None = option(
        None, "per 1000 iterations (default: 100, as Megatron-LM)"
    )
    risks: FailureModel = option("", "fields of FailureModel that you know better", metavar="JSON")
    price: float | None = option(
        None, "price of one GPU-hour, in your currency", metavar="PER_GPU_HOUR"
    )
    watts: float | None = option(None, "of one GPU with its share of the node", metavar="PER_GPU")
    calibration: Calibration = option(
        "", "constants: a study, a JSON file or a software stack", metavar="SOURCE"
    )
    # of 140 pieces, a ramp of 116 sizes, each of some eight arrays takes 110 MB
    runs: int = option(10_000, "simulated runs", minimum=100, maximum=100_000)
    seed: int = option(0, "of the simulation", minimum=0)

    def __post_init__(self) -> None:
        t, plan = self.plan.topology, self.plan
        self._read("ramp", parse_ramp, plan.run.ramp)
        self._read("start", lambda text: parse_day("start", text), datetime.now(UTC).date())
        self._read("deadline", lambda text: parse_day("deadline", text), None)
        self._read(
            "tokens",
            partial(validation.parse_count, "tokens"),
            TOKENS_PER_PARAMETER * plan.shape.parameters,
        )
        object.__setattr__(self, "calibration", self.calibration or constants_of(plan))
        self._read("calibration", lambda source: constants_of(plan, source), None)
        object.__setattr__(self, "risks", self._risks())
        self._check_options()
        first = (self.ramp.start if self.ramp.samples else t.gbs) * plan.shape.seq_length
        require(self.tokens >= first, "tokens", f"{self.tokens:g}", f"below one batch of {first}")
        # a thousand times what has been trained
        require(self.tokens <= 1e16, "tokens", f"{self.tokens:g}", "must be at most 1e+16")
        if self.worth is None:
            self.ramp.require_whole(t, also="--adapt days")

    def _read(self, name: str, read: Callable[[str], Any], default: Any) -> None:
        """Replace the text of a field by what it says, and nothing by the default."""
        value = getattr(self, name)
        value = f"{value:%Y-%m-%d}" if isinstance(value, datetime) else value  # as pandas has dates
        if not value or isinstance(value, str):
            object.__setattr__(self, name, read(value) if value else default)

    def _risks(self) -> FailureModel:
        """The risks, with the single values that are given; without either, evaluations are those
        of the plan.
        """
        run, given = self.plan.run, self.risks
        names = ("spare_nodes", "job_hours", "evaluation_iters")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if run.eval_interval and not given and self.evaluation_iters is None:
            values |= {"evaluation_every": run.eval_interval, "evaluation_iters": run.eval_iters}
        if (minutes := self.checkpoint_minutes) is not None:
            validation.require_positive("checkpoint_minutes", minutes)
            values["checkpoint_s"] = minutes * 60
        if isinstance(given, str) and given:
            given = validation.from_mapping(FailureModel, read_json(given, "risks"), "risks")
        model = replace(given or FailureModel(), **values).measured(self.plan.cluster)
        if (rate := self.failures_per_node_year) is None:
            return model
        validation.require_not_negative("failures_per_node_year", rate)
        known: dict[str, Any] = {"per_node_year": rate, "spread": 0.0, "source": "given"}
        return replace(
            model,
            stops=tuple(replace(s, **known) if s.name == NODE_FAILURE else s for s in model.stops),
        )

    def _check_options(self) -> None:
        check(self)
        validation.require_positive("tokens", self.tokens)
        for name in ("price", "watts"):
            validation.require_not_negative(name, getattr(self, name) or 0.0)
        if self.allocation is not None:
            validation.require_positive("allocation", self.allocation)
        rule = f"must not be before the start, {self.start}"
        require((self.deadline or date.max) >= self.start, "deadline", self.deadline, rule)

    def kept(self) -> dict[str, Any]:
        """The request as JSON, without the plan and its constants, as from_mapping() reads it.
        Single values that were given stand in `risks`.
        """
        names = (
            "tokens",
            "ramp",
            "start",
            "deadline",
            "allocation",
            "adapt",
            "risks",
            "price",
            "watts",
        )
        return {name: as_json(getattr(self, name)) for name in (*names, "runs", "seed")}

    @property
    def worth(self) -> float | None:
        """What a day is worth in GPU-hours, 0 where only these count; None keeps the plan's
        topology.
        """
        return {"no": None, "days": SOONEST, "gpu_hours": 0.0}[self.adapt]

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
        # the last phase is cut into 24, so that its progress can be drawn and cut at dates
        last, cuts = (
            len(self.phases) - 1,
            np.diff(np.linspace(0, self.phases[-1].iterations, 24 + 1)),
        )
        iterations = np.concatenate([[p.iterations for p in self.phases[:-1]], cuts])
        return iterations, np.concatenate([np.arange(last), np.full(len(cuts), last)]).astype(int)

    @cached_property
    def prediction(self) -> Prediction:
        """The plan's prediction at its full batch size."""
        return predict(self.plan, self.calibration)

    @property
    def uncertainty(self) -> Uncertainty:
        """The interval of the plan's prediction, split into a part common to all batch sizes and
        one for each.
        """
        r, deviation = (
            self.risks,
            math.log(self.prediction.sec_hi / self.prediction.sec_per_it) / Z90,
        )
        both = math.hypot(deviation * math.sqrt(r.common), r.slowdown_spread)
        return Uncertainty(
            common=both, independent=deviation * math.sqrt(1 - r.common), slowdown=r.slowdown
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
        r, (save_s, interval_s) = self.risks, self.saving
        evaluation = evaluation_s(self.plan.topology, r.evaluation_iters, 1.0) / r.evaluation_every
        ends = r.startup_s / (r.job_hours * 3600)
        return {
            Cause.EVALUATION: evaluation,
            Cause.SAVING: save_s / interval_s,
            Cause.JOB_ENDS: ends,
        }
