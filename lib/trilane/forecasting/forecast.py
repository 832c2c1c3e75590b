"""Forecast: from tokens, a ramp and risks to a finish date, GPU-hours, and the chances to fail a
limit.
"""

import math
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config.plan import Plan, read_plan
from trilane.costmodel.fit import Z90
from trilane.costmodel.shipped import replaced
from trilane.forecasting.failures import Cause, FailureModel
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.schedule import SOONEST, Schedule, ScheduledTopology, schedule_on
from trilane.forecasting.simulation import Outcomes, Uncertainty, Work, simulate
from trilane.utils.numbers import amount, chance, with_bounds, with_interval
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require, shipped_json

HOUR = 3600.0
DAY = 86400.0
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the simulated runs
FAN_ROWS = 41  # as many as a figure shows apart
# What a page calls the probabilities of failing a limit.
DEADLINE = "P(deadline missed)"
ALLOCATION = "P(allocation overrun)"
MEMORY = "P(out of memory)"
Json = dict[str, Any]  # a JSON object


@dataclass(frozen=True, kw_only=True)
class Forecast(Table):
    """What follows from a request; it shows itself as a table of date, days, GPU-hours, energy and
    money.

    ValueError where a batch size of the ramp fits nothing, or where more spare nodes are asked for
    than the jobs leave free; of what is simulated, where interruptions leave no progress.
    """

    request: ForecastRequest

    def __post_init__(self) -> None:
        asked = self.request.risks.spare_nodes or 0
        rule = f"must be at most {self._free_nodes}, the nodes that the jobs leave free"
        require(asked <= self._free_nodes, "spare_nodes", asked, rule)

    @cached_property
    def schedule(self) -> Schedule:
        """The topology of each batch size."""
        r = self.request
        adapts = r.worth is not None
        worth = SOONEST if r.worth is None else r.worth
        return schedule_on(r.plan, r.phases, r.calibration, r.risks.startup_s, adapts, worth)

    @cached_property
    def _free_nodes(self) -> int:
        """The nodes of the cluster that the jobs leave free."""
        most = max(step.choice.nodes for step in self.schedule)
        return max(0, self.request.plan.cluster.max_nodes - most)

    @cached_property
    def work(self) -> Work:
        """The pieces as the simulation takes them: seconds, GPUs and nodes of each."""
        iterations, same = self.request.pieces
        steps = [self.schedule[i] for i in same]
        seconds = np.array([step.choice.seconds for step in steps])
        # a restart is paid once, in the first of the pieces of its phase
        pauses = np.array([step.pause_s for step in steps]) * np.diff(same, prepend=-1)
        return Work(
            same=same,
            seconds=iterations * seconds + pauses,
            gpus=np.array([float(step.choice.topology.gpus) for step in steps]),
            nodes=np.array([float(step.choice.nodes) for step in steps]),
            spare_nodes=self.request.risks.spares_of(self._free_nodes),
        )

    @cached_property
    def ideal(self) -> Outcomes:
        """The run without interruptions: its iterations and the restarts of its schedule."""
        risks = replace(self.request.risks, stops=(), startup_s=0.0, queue_s=0.0)
        return simulate(self.work, Uncertainty(common=0, independent=0), risks, {}, 1.0, 1, None)

    @cached_property
    def expected(self) -> Outcomes:
        """The run with every random number at its mean."""
        return self._simulated(1, None)

    @cached_property
    def outcomes(self) -> Outcomes:
        """The simulated runs."""
        return self._simulated(self.request.runs, np.random.default_rng(self.request.seed))

    def _simulated(self, runs: int, rng: np.random.Generator | None) -> Outcomes:
        r = self.request
        return simulate(self.work, r.uncertainty, r.risks, r.shares, r.saving[1], runs, rng)

    def chains(self) -> list[Json]:
        """The expected run's chains of jobs, each of one topology: its days, batch sizes, sizes and
        nodes, and in how many jobs of at most the longest time it runs.
        """
        chains = list[Json]()
        begin = 0.0
        ends = (self.expected.reached_s[0] / DAY).tolist()
        for end, phase in zip(ends, self.request.pieces[1], strict=True):
            step = self.schedule[phase]
            t = step.choice.topology
            # what a job cannot change without a restart
            job = {"tp": t.tp, "pp": t.pp, "dp": t.dp, "mbs": t.mbs, "nodes": step.choice.nodes}
            job |= {"gpus": t.gpus, "recompute": t.recompute}
            if chains and job.items() <= chains[-1].items():
                chains[-1]["gbs"] = [chains[-1]["gbs"][0], step.phase.gbs]
            else:
                chains.append({"from_day": begin, "gbs": [step.phase.gbs, step.phase.gbs], **job})
            chains[-1]["to_day"] = end
            begin = end
        for chain in chains:
            days = chain["to_day"] - chain["from_day"]
            chain["jobs"] = math.ceil(days / (self.request.risks.job_hours / 24))
        return chains

    @property
    def _ramp(self) -> Json:
        """The batch size's ramp: its iterations, sizes and days, restarts included; a run may end
        inside it.
        """
        full = self.request.plan.topology.gbs
        ramp = [phase for phase in self.request.phases if phase.gbs < full]
        if len(ramp) == len(self.request.phases):
            last = -1
        else:
            last = len(ramp) - 1
        if ramp:
            days = float(self.ideal.reached_s[0, last]) / DAY
        else:
            days = 0.0
        iterations = sum(phase.iterations for phase in ramp)
        return {"iterations": iterations, "days": days, "batch_sizes": len(ramp)}

    def days(self, quantile: float) -> float:
        """Days from start to end; this share of the runs takes at most as long."""
        return float(np.quantile(self.outcomes.wall_s, quantile)) / DAY

    def gpu_hours(self, quantile: float) -> float:
        """GPU-hours; this share of the runs takes at most as many."""
        return float(np.quantile(self.outcomes.gpu_s, quantile)) / HOUR

    def finish(self, quantile: float) -> datetime:
        """The time by which this share of the runs has ended; ValueError after the year 9999."""
        begin = datetime.combine(self.request.start, time())
        days = self.days(quantile)
        rule = f"would end after {datetime.max.year}: more GPUs, or fewer tokens"
        require(days < (datetime.max - begin).days, "days", f"{days:.0f}", rule)
        return begin + timedelta(days=days)

    @property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Batch size and iterations of each piece whose end `reached_s` dates."""
        iterations, same = self.request.pieces
        return np.array([phase.gbs for phase in self.request.phases])[same], iterations

    @property
    def lost_days(self) -> dict[str, float]:
        """Mean days lost to each cause, the largest first."""
        lost = self.outcomes.lost_s
        means = {str(name): float(seconds.mean()) / DAY for name, seconds in lost.items()}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))

    @property
    def gpu_hours_by_cause(self) -> dict[str, float]:
        """Mean GPU-hours: the iterations at their predicted speed, the slowdown, the mean error of
        the prediction, and what each charged cause adds.

        The causes share the rest in proportion to the time that they take.
        """
        u = self.request.uncertainty
        work = float(self.ideal.gpu_s[0]) / HOUR
        rest = float(self.outcomes.gpu_s.mean()) / HOUR - work
        slower = min(max(u.slowdown - 1, 0) * work, rest)
        both = min(max(u.mean - 1, 0) * work, rest)
        free = {stop.name for stop in self.request.risks.stops if not stop.charged} | {Cause.QUEUE}
        days = {name: lost for name, lost in self.lost_days.items() if name not in free}
        share = (rest - both) / (sum(days.values()) or 1)
        causes = {Cause.ITERATIONS: work, Cause.SLOWDOWN: slower, Cause.PREDICTION: both - slower}
        return {str(name): hours for name, hours in causes.items()} | {
            name: lost * share for name, lost in days.items()
        }

    @property
    def dangers(self) -> list[Json]:
        """The causes of delay: mean days, and the days that one run in twenty exceeds; the worst
        first.
        """
        rows = list[Json]()
        for name, mean in self.lost_days.items():
            high = float(np.quantile(self.outcomes.lost_s[name], 0.95)) / DAY
            if high > 0:
                rows.append({"what": name, "mean_days": mean, "days_95": high})
        u = self.request.uncertainty
        ideal = float(self.ideal.wall_s[0]) / DAY
        slow = u.slowdown * math.exp(Z90 * math.hypot(u.common, u.independent))
        error = {"mean_days": ideal * (u.mean - 1), "days_95": ideal * (slow - 1)}
        rows.append({"what": Cause.PREDICTION, **error})
        return sorted(rows, key=lambda row: -row["days_95"])

    @property
    def fan(self) -> Json:
        """Billions of tokens, rising, and for each the days after which QUANTILES of the simulated
        runs have them.
        """
        gbs, iterations = self.pieces
        samples = np.concatenate([[0.0], (gbs * iterations).cumsum()])
        tokens = samples * self.request.plan.shape.seq_length / 1e9
        days = np.quantile(self.outcomes.reached_s, QUANTILES, axis=0).T / DAY  # (J, 5)
        days = np.concatenate([np.zeros((1, len(QUANTILES))), days])
        rows = np.unique(np.linspace(0, len(tokens) - 1, FAN_ROWS).astype(int))
        return {"tokens": tokens[rows].tolist(), "days": days[rows].tolist()}

    def to_json(self) -> Json:
        """Days, GPU-hours, ISO dates, probabilities, jobs, and the assumptions behind them."""
        r = self.request
        known = shipped_json("risks")
        missed = overrun = None
        if r.deadline:
            end_s = ((r.deadline - r.start).days + 1) * DAY
            missed = float((self.outcomes.wall_s > end_s).mean())
        if r.allocation:
            overrun = float((self.outcomes.gpu_s / HOUR > r.allocation).mean())
        middle_and_interval = (0.5, 0.05, 0.95)
        days = [self.days(q) for q in middle_and_interval]
        hours = [self.gpu_hours(q) for q in middle_and_interval]
        watts = r.watts
        if watts is None:
            card = r.plan.cluster.gpu.name.partition("-")[0]
            watts = known["energy"]["node_watts_per_gpu"].get(card)
        if watts is None:
            kw = None
        else:
            kw = watts * known["energy"]["building"] / 1000
        energy = [None if kw is None else kw * h for h in hours]
        cost = [None if r.price is None else r.price * h for h in hours]
        finish = {
            f"p{round(100 * q):02}": self.finish(q).isoformat(timespec="minutes") for q in QUANTILES
        }
        return {
            "plan": r.plan.label,
            "plan_id": r.plan.id,
            "prediction": r.prediction.to_json(),
            "start": r.start.isoformat(),
            "tokens": r.tokens,
            "samples": r.samples,
            "iterations": sum(phase.iterations for phase in r.phases),
            "ramp": self._ramp,
            "days": days[0],
            "days_interval": days[1:],
            "gpu_hours": hours[0],
            "gpu_hours_interval": hours[1:],
            "ideal": {
                "days": float(self.ideal.wall_s[0]) / DAY,
                "gpu_hours": float(self.ideal.gpu_s[0]) / HOUR,
            },
            "finish": finish,
            "deadline": r.deadline and r.deadline.isoformat(),
            "p_miss_deadline": missed,
            "allocation": r.allocation,
            "p_overrun_allocation": overrun,
            "cost": cost[0],
            "cost_interval": cost[1:],
            "energy_kwh": energy[0],
            "energy_interval": energy[1:],
            "checkpoint": {"interval_s": r.saving[1], "save_s": r.saving[0]},
            "lost_days": self.lost_days,
            "schedule": self.chains(),
            "assumptions": self._assumed(known["sources"]),
            "meaning": known["meaning"],
        }

    def _assumed(self, sources: dict[str, str]) -> list[Json]:
        """Every interruption and field of the risks with its source."""
        risks = self.request.risks
        rows = list[Json]()
        for stop in risks.stops:
            rates = {"per_node_year": stop.per_node_year, "per_year": stop.per_year}
            rows.append({"what": stop.name, **rates, "source": stop.source})
        usual = FailureModel()
        for name, source in sources.items():
            value = getattr(risks, name)
            if value != getattr(usual, name):
                source = "given"
            if name == "write_bytes_per_s" and risks.write_nodes:
                source = risks.storage
            if name == "spare_nodes":
                value = risks.spares_of(self._free_nodes)
            rows.append({"what": name, "value": value, "source": source})
        return rows

    @cached_property
    def record(self) -> Json:
        """to_json(), what describes the plan, and what figures draw."""
        plan = self.request.plan
        return {
            **self.to_json(),
            "shape": vars(plan.shape),
            "topology": vars(plan.topology),
            "cluster": plan.cluster.name,
            "replaced": replaced(plan, self.request.calibration),
            "parameters": plan.shape.parameters,
            "fan": self.fan,
            "gpu_hours_by_cause": self.gpu_hours_by_cause,
            "dangers": self.dangers,
        }

    def summary(self) -> Text:
        """When the run is finished, what it costs, how likely it fails a limit; by which constants,
        and what these rest on.
        """
        facts = self.facts(brief=True)
        support = self.record["prediction"]["support"]["words"]
        others = [f"by other constants: {line}" for line in self.record["replaced"]]
        return Text.of(
            "Done by **{}** (19 of 20 runs by {}), after **{} days** and **{} GPU-hours**; {}; {}.",
            facts["done by"],
            facts["19 of 20 runs by"],
            facts["days"],
            facts["GPU-hours"],
            self.risks(),
            "; ".join([support, *others]),
        )

    def risks(self) -> str:
        """How likely each limit that was given fails."""
        r = self.request
        facts = self.facts()
        words = list[str]()
        if DEADLINE in facts:
            words.append(f"{facts[DEADLINE]} risk to miss the deadline {r.deadline}")
        if ALLOCATION in facts:
            words.append(f"{facts[ALLOCATION]} risk to overrun {r.allocation:,.0f} GPU-hours")
        return ", ".join(words) or "no deadline and no allocation to fail"

    @property
    def delays(self) -> Columns:
        """The causes of delay, the worst first: mean days, and the days that one run in twenty
        exceeds.
        """
        columns = {"cause": "what", "mean_days": "mean_days", "days_95": "days_95"}
        rows = self.record["dangers"]
        return Columns({head: [r[key] for r in rows] for head, key in columns.items()}, digits=1)

    def facts(self, brief: bool = False) -> dict[str, str]:
        """The run as a person reads it: topology, dates, cost, risks, memory, seconds and what
        these rest on, where there is such a limit or price; `brief` without intervals.
        """
        r = self.record
        plan = self.request.plan
        t = self.last.topology
        context = f"CP {t.cp} × " if t.cp > 1 else ""
        sizes = f"TP {t.tp} × {context}PP {t.pp} × DP {t.dp}, microbatch {t.mbs}"
        if t.gpus != plan.topology.gpus:  # where DP follows the batch
            sizes += f", on {t.gpus} GPUs"
        facts = {
            "topology": sizes,
            "done by": r["finish"]["p50"][:10],
            "19 of 20 runs by": r["finish"]["p95"][:10],
        }
        for name, key in {"days": "days", "GPU-hours": "gpu_hours", "money": "cost"}.items():
            if r[key]:
                middle, low, high = with_interval(r[key], *r[f"{key}_interval"])
                facts[name] = middle if brief else f"{middle} ({low} to {high})"
        card = plan.cluster.gpu.memory_bytes / 2**30
        facts["memory"] = f"{self.fullest.memory_bytes / 2**30:.1f} of {card:.3g} GiB"
        for name, key in {DEADLINE: "p_miss_deadline", ALLOCATION: "p_overrun_allocation"}.items():
            if r[key] is not None:
                facts[name] = chance(r[key], self.request.runs)
        facts[MEMORY] = chance(self.fullest.oom_probability)
        facts["seconds an iteration"] = with_bounds(*self.seconds)
        nearest = self.request.prediction.support.nearest
        if nearest:
            words = "{}, distance {:.1f}".format(*nearest[0])
        else:
            words = "none"
        return facts | {"nearest measured run": words}

    def figures(self) -> Json:
        """The numbers of facts(), units in their names: p50 is the median of the simulated runs,
        p95 what one run in twenty exceeds; NaN where nothing was asked for.
        """
        r = self.record
        t = self.last.topology
        seconds, low_s, high_s = self.seconds
        figures: Json = {"tp": t.tp, "pp": t.pp, "dp": t.dp, "mbs": t.mbs, "gpus": t.gpus}
        for name, key in {"days": "days", "gpu_hours": "gpu_hours", "money": "cost"}.items():
            low, high = r[f"{key}_interval"]
            figures |= {f"{name}_p05": low, f"{name}_p50": r[key], f"{name}_p95": high}
        figures |= {
            "p_miss_deadline": r["p_miss_deadline"],
            "p_overrun_allocation": r["p_overrun_allocation"],
            "memory_gib": self.fullest.memory_bytes / 2**30,
            "oom_probability": self.fullest.oom_probability,
            "sec_per_it": seconds,
            "sec_lo": low_s,
            "sec_hi": high_s,
            "distance": self.request.prediction.support.distance,
        }
        return {name: math.nan if value is None else value for name, value in figures.items()}

    @property
    def last(self) -> ScheduledTopology:
        """The topology of the full batch size."""
        return self.schedule[-1].choice

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of an iteration of the full batch size, and their 90 % interval."""
        p = self.request.prediction
        # 1, unless the schedule has another DP or microbatch than the plan
        scale = self.last.seconds / p.sec_per_it
        return scale * p.sec_per_it, scale * p.sec_lo, scale * p.sec_hi

    @property
    def fullest(self) -> ScheduledTopology:
        """The topology that takes the most memory, of all batch sizes."""
        return max((step.choice for step in self.schedule), key=lambda choice: choice.memory_bytes)

    def rows(self) -> dict[str, str]:
        """The facts, then the energy, the ramp, a run without stops, and the interval between
        checkpoints.
        """
        r = self.record
        rows = self.facts()
        if r["energy_kwh"]:
            rows["energy (kWh)"] = with_bounds(r["energy_kwh"], *r["energy_interval"])
        ramp = r["ramp"]
        if ramp["days"]:
            rows["ramp"] = f"{ramp['iterations']:,} iterations, {ramp['days']:.3g} days of work"
        calm = list[str]()
        for name, value in r["ideal"].items():  # with as many digits as those of the whole run
            low, high = r[f"{name}_interval"]
            calm.append(with_interval(value, low + value - r[name], high + value - r[name])[0])
        rows["without stops"] = f"{calm[0]} days, {calm[1]} GPU-hours"
        rows["checkpoints"] = f"every {amount(r['checkpoint']['interval_s'] / 60, 2)} minutes"
        return rows

    def to_frame(self) -> DataFrame:
        """A row for each simulated run: days, gpu_hours, money where a price is known, days lost to
        each cause.
        """
        import pandas as pd

        run = self.outcomes
        columns = {"days": run.wall_s / DAY, "gpu_hours": run.gpu_s / HOUR}
        if self.request.price is not None:
            columns["money"] = self.request.price * columns["gpu_hours"]
        for name, seconds in run.lost_s.items():
            columns[f"lost_days_{name.replace(' ', '_')}"] = seconds / DAY
        return pd.DataFrame(columns)

    def view(self) -> DataFrame:
        """The rows as a table."""
        rows = list(self.rows().items())
        return Columns.of_rows(("", "median (5 % to 95 % of the runs)"), rows).to_frame()

    @property
    def assumptions(self) -> Columns:
        """Every assumption with its source; an interval of 0 s between checkpoints is Daly's
        optimum.
        """
        units = {"per_node_year": " a node and year", "per_year": " a year", "value": ""}
        rows = list[tuple[str, str, str]]()
        for row in self.record["assumptions"]:
            values = [f"{amount(row[key])}{unit}" for key, unit in units.items() if row.get(key)]
            rows.append((row["what"], " and ".join(values) or "0", row["source"]))
        return Columns.of_rows(("what", "value", "source"), rows)


def forecast(plan: Plan | Path | str, **asked: Any) -> Forecast:
    """The forecast of a plan; `asked` are the other fields of ForecastRequest.

    forecast(read_plan("plan.json"), tokens=341e9, start="2027-01-04").finish(0.5)
    """
    found = Forecast(request=ForecastRequest(plan=read_plan(plan), **asked))
    found.finish(0.95)  # what cannot be simulated is refused here
    return found
