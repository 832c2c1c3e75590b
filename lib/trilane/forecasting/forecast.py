"""Forecast: from tokens, a ramp, capacity and risks to a finish date, GPU-hours, and the chances to fail a limit."""

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from functools import cached_property

import numpy as np

from trilane.config.batch_rampup import Phase
from trilane.costmodel.predict import Prediction, predict
from trilane.forecasting import timeline
from trilane.forecasting.alternatives import Alternatives, alternatives
from trilane.forecasting.failures import QUEUE
from trilane.forecasting.record import MEANING, Described, Record, assumptions_of
from trilane.forecasting.request import Z90, ForecastRequest
from trilane.forecasting.schedule import first_full_gbs
from trilane.forecasting.simulation import Outcomes, Simulation
from trilane.utils.validation import require

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FAN_ROWS = 41


@dataclass(frozen=True, kw_only=True)
class Forecast(Described):
    """The schedule of every window, the run without interruptions, the expected run, and the simulated ones.

    `ideal` has no interruptions, `expected` every random number at its mean.
    """

    request: ForecastRequest
    phases: tuple[Phase, ...]
    schedules: timeline.Schedules
    spare_nodes: int
    ideal: Outcomes
    expected: Outcomes
    outcomes: Outcomes

    @property
    def ramp_phases(self) -> int:
        """Phases before the constant one."""
        return sum(phase.gbs < self.request.plan.topology.gbs for phase in self.phases)

    @property
    def ramp_end(self) -> int:
        """Index of the piece in `reached_s` that ends the ramp; -1 where the run ends inside the ramp."""
        return -1 if self.ramp_phases == len(self.phases) else self.ramp_phases - 1

    def days(self, quantile: float) -> float:
        """Days from start to end; this share of the runs takes at most as long."""
        return float(np.quantile(self.outcomes.wall_s, quantile)) / 86400

    def gpu_hours(self, quantile: float) -> float:
        """GPU-hours; this share of the runs takes at most as many."""
        return float(np.quantile(self.outcomes.gpu_s, quantile)) / 3600

    def finish(self, quantile: float) -> datetime:
        """The time by which this share of the runs has ended; ValueError after the year 9999."""
        begin, days = datetime.combine(self.request.start, time()), self.days(quantile)
        rule = f"would end after {datetime.max.year}: more GPUs, or fewer tokens"
        require(days < (datetime.max - begin).days, "days", f"{days:.0f}", rule)
        return begin + timedelta(days=days)

    def jobs(self) -> list[timeline.Job]:
        """The jobs of the expected run."""
        return timeline.jobs_of(self.request, self.schedules, self.expected.reached_s[0])

    @property
    def ramp_days(self) -> float:
        """Days of the ramp's iterations at the predicted seconds of each batch size, and of its restarts.

        Where the capacity changes meanwhile, on what there is; days on which nothing can run are left out.
        """
        end = float(self.ideal.reached_s[0, self.ramp_end]) if self.ramp_phases else 0.0
        idle = [w for w, schedule in self.schedules if schedule is None and w.start_s < end]
        return (end - sum(min(w.end_s, end) - w.start_s for w in idle)) / 86400

    @property
    def p_miss_deadline(self) -> float | None:
        """Probability of ending after the deadline's day; None without a deadline."""
        if self.request.deadline is None:
            return None
        end = (self.request.deadline - self.request.start).total_seconds() + 86400
        return float((self.outcomes.wall_s > end).mean())

    @property
    def p_overrun_allocation(self) -> float | None:
        """Probability of using more GPU-hours than the allocation; None without one."""
        limit = self.request.allocation
        return None if limit is None else float((self.outcomes.gpu_s / 3600 > limit).mean())

    @property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Batch size and iterations of each piece whose end `reached_s` dates."""
        iterations, same = timeline.pieces_of(list(self.phases))
        return np.array([phase.gbs for phase in self.phases])[same], iterations

    @property
    def lost_days(self) -> dict[str, float]:
        """Mean days lost to each cause, the largest first."""
        means = {name: float(seconds.mean()) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))

    @property
    def gpu_hours_by_cause(self) -> dict[str, float]:
        """Mean GPU-hours: the iterations at their predicted speed, the slowdown, and what each charged cause adds.

        The causes share the rest in proportion to the time that they take.
        """
        r, work = self.request, float(self.ideal.gpu_s[0]) / 3600
        free = {stop.name for stop in r.risks.stops if not stop.charged} | {QUEUE}
        days = {name: d for name, d in self.lost_days.items() if name not in free}
        rest = float(self.outcomes.gpu_s.mean()) / 3600 - work
        slower = min(max(r.risks.slowdown - 1, 0) * work, rest)
        share = (rest - slower) / (sum(days.values()) or 1)
        return {"iterations": work, "slower than a benchmark": slower, **{name: d * share for name, d in days.items()}}

    @property
    def fan(self) -> Record:
        """Billions of tokens, rising, and for each the days after which QUANTILES of the simulated runs have them.

        At most FAN_ROWS of the ends of pieces, the last among them.
        """
        gbs, iterations = self.pieces
        tokens = np.concatenate([[0.0], (gbs * iterations).cumsum()]) * self.request.plan.shape.seq_length / 1e9
        days = np.quantile(self.outcomes.reached_s, QUANTILES, axis=0).T / 86400  # (J, 5)
        rows = np.unique(np.linspace(0, len(tokens) - 1, FAN_ROWS).astype(int))
        days = np.concatenate([np.zeros((1, len(QUANTILES))), days])
        return {"tokens": tokens[rows].tolist(), "days": days[rows].tolist()}

    @property
    def dangers(self) -> list[Record]:
        """The causes of delay: mean days, and the days that one run in twenty exceeds; the worst first."""
        high = {name: float(np.quantile(seconds, 0.95)) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        rows = [(name, mean, high[name]) for name, mean in self.lost_days.items() if high[name] > 0]
        u, ideal = self.request.uncertainty, float(self.ideal.wall_s[0]) / 86400
        slow = u.slowdown * np.exp(Z90 * np.hypot(u.common, u.independent))
        rows.append(("slower than predicted", ideal * (u.slowdown - 1), ideal * (slow - 1)))
        rows.sort(key=lambda row: -row[2])
        return [{"what": name, "mean_days": mean, "days_95": float(days)} for name, mean, days in rows]

    @cached_property
    def prediction(self) -> Prediction:
        """The plan's prediction at its full batch size."""
        return predict(self.request.plan, self.request.calibration)

    @cached_property
    def alternatives(self) -> Alternatives:
        """Other schedules and topologies for the same tokens, a table."""
        return alternatives(self.request)

    def to_json(self) -> Record:
        """Days, GPU-hours, ISO dates, probabilities, jobs, and the assumptions behind them."""
        r, price = self.request, self.request.price
        hours = [self.gpu_hours(q) for q in (0.5, 0.05, 0.95)]
        energy = [price.energy_kwh(h, r.plan.cluster.gpu.name) for h in hours]
        return {
            "plan": r.plan.label,
            "plan_id": r.plan.id,
            "prediction": self.prediction.to_json(),
            "start": r.start.isoformat(),
            "tokens": r.tokens,
            "samples": r.samples,
            "iterations": sum(phase.iterations for phase in self.phases),
            "ramp": self._ramp_json(),
            "days": self.days(0.5),
            "days_interval": [self.days(0.05), self.days(0.95)],
            "gpu_hours": hours[0],
            "gpu_hours_interval": hours[1:],
            "ideal": {"days": float(self.ideal.wall_s[0]) / 86400, "gpu_hours": float(self.ideal.gpu_s[0]) / 3600},
            "finish": {f"p{round(100 * q):02}": self.finish(q).isoformat(timespec="minutes") for q in QUANTILES},
            "deadline": r.deadline.isoformat() if r.deadline else None,
            "p_miss_deadline": self.p_miss_deadline,
            "allocation": r.allocation,
            "p_overrun_allocation": self.p_overrun_allocation,
            "cost": price.cost(hours[0]),
            "cost_interval": [price.cost(h) for h in hours[1:]],
            "energy_kwh": energy[0],
            "energy_interval": energy[1:],
            "checkpoint": {"interval_s": r.interval_s, "save_s": r.save_s},
            "lost_days": self.lost_days,
            "schedule": [job.to_json() for job in self.jobs()],
            "assumptions": assumptions_of(r, self.spare_nodes),
            "meaning": MEANING,
        }

    def _ramp_json(self) -> Record:
        """The batch size's ramp: its iterations, days and sizes."""
        ends = self.outcomes.reached_s[:, self.ramp_end] if self.ramp_phases else self.outcomes.wall_s * 0
        return {
            "iterations": sum(phase.iterations for phase in self.phases[: self.ramp_phases]),
            "days": self.ramp_days,
            "days_interval": (np.nanquantile(ends, (0.05, 0.95)) / 86400).tolist(),
            "batch_sizes": self.ramp_phases,
            "first_full_gbs": first_full_gbs(self.request.plan.topology),
        }

    @cached_property
    def record(self) -> Record:  # type: ignore[override]
        """to_json() and what describes the plan."""
        plan = self.request.plan
        parts = {"shape": vars(plan.shape), "topology": vars(plan.topology), "cluster": plan.cluster.name}
        drawn = {"fan": self.fan, "gpu_hours_by_cause": self.gpu_hours_by_cause, "dangers": self.dangers}
        return {**self.to_json(), **parts, "parameters": plan.shape.parameters, **drawn}


def forecast(request: ForecastRequest) -> Forecast:
    """Forecast a request.

    ValueError where a batch size of the ramp fits nothing that the capacity allows, where the interruptions leave no
    progress, and where more spare nodes are asked for than the jobs leave free.
    """
    r, schedules = request, timeline.schedules_of(request)
    stretches, same = timeline.stretches_of(r, schedules)
    given = (same, r.uncertainty, r.risks, r.shares, r.interval_s)
    return Forecast(
        request=r,
        phases=tuple(r.phases),
        schedules=schedules,
        spare_nodes=timeline.spare_nodes(r, schedules),
        ideal=timeline.undisturbed(r, schedules),
        expected=Simulation(*given, 1, None).run(stretches),
        outcomes=Simulation(*given, r.runs, np.random.default_rng(r.seed)).run(stretches),
    )
