"""Forecast: from tokens, a ramp and risks to a finish date, GPU-hours, and the chances to fail a
limit.
"""

import math
from datetime import datetime, time, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config.plan import Plan, read_plan
from trilane.costmodel.fit import Z90
from trilane.forecasting.failures import Cause, FailureModel
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.simulation import Outcomes, Work, simulate
from trilane.utils.frozen import frozen
from trilane.utils.numbers import amount, chance, with_bounds
from trilane.utils.tables import Columns, DataFrame, Json, Table, Text, as_json
from trilane.utils.validation import require, shipped_json

HOUR = 3600.0
DAY = 86400.0
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the simulated runs
# What a page calls the probabilities of failing a limit.
DEADLINE = "P(deadline missed)"
ALLOCATION = "P(allocation overrun)"
MEMORY = "P(out of memory)"


@frozen
class Forecast(Table):
    """What follows from a request; it shows itself as a table of date, days, GPU-hours and money.

    ValueError where more spare nodes are asked for than the jobs leave free; of what is simulated,
    where interruptions leave no progress.
    """

    request: ForecastRequest

    def __post_init__(self) -> None:
        plan = self.request.plan
        plan.cluster.require_spares(self.request.risks.spare_nodes, plan.topology.gpus)

    @cached_property
    def work(self) -> Work:
        """The pieces as the simulation takes them."""
        r = self.request
        iterations, same = r.pieces
        gpus = r.plan.topology.gpus
        cluster = r.plan.cluster
        return Work(
            same=same,
            seconds=iterations * r.seconds[same],
            gpus=gpus,
            nodes=math.ceil(gpus / cluster.gpus_per_node),
            spare_nodes=r.risks.spares_of(cluster.free_nodes(gpus)),
        )

    @property
    def work_s(self) -> float:
        """Seconds of the iterations alone, with nothing going wrong."""
        return float(self.work.seconds.sum())

    @cached_property
    def outcomes(self) -> Outcomes:
        """The simulated runs."""
        r = self.request
        rng = np.random.default_rng(r.seed)
        return simulate(self.work, r.uncertainty, r.risks, r.shares, r.saving[1], r.runs, rng)

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
    def lost_days(self) -> dict[str, float]:
        """Mean days lost to each cause, the largest first."""
        lost = self.outcomes.lost_s
        means = {str(name): float(seconds.mean()) / DAY for name, seconds in lost.items()}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))

    @property
    def delays(self) -> Columns:
        """The causes of delay: mean days, and the days that one run in twenty exceeds; the worst
        first.
        """
        rows = []
        for name, mean in self.lost_days.items():
            high = float(np.quantile(self.outcomes.lost_s[name], 0.95)) / DAY
            if high > 0:
                rows.append((name, mean, high))
        u = self.request.uncertainty
        days = self.work_s / DAY
        slow = u.slowdown * math.exp(Z90 * math.hypot(u.common, u.independent))
        rows.append((str(Cause.PREDICTION), days * (u.mean - 1), days * (slow - 1)))
        rows.sort(key=lambda row: -row[2])
        return Columns.of_rows(("cause", "mean_days", "days_95"), rows)

    @property
    def fan(self) -> tuple[np.ndarray, np.ndarray]:
        """Billions of tokens, rising, and for each the days after which QUANTILES of the simulated
        runs have them.
        """
        iterations, same = self.request.pieces
        sizes = np.array([phase.gbs for phase in self.request.phases])[same]
        tokens = (sizes * iterations).cumsum() * self.request.plan.shape.seq_length / 1e9
        days = np.quantile(self.outcomes.reached_s, QUANTILES, axis=0).T / DAY  # (J, 5)
        return np.insert(tokens, 0, 0.0), np.insert(days, 0, 0.0, axis=0)

    def to_json(self) -> Json:
        """The figures, ISO dates, jobs, and the assumptions behind them; null for what nobody
        asked for.
        """
        r = self.request
        finish = {
            f"p{round(100 * q):02}": self.finish(q).isoformat(timespec="minutes") for q in QUANTILES
        }
        ramp = [phase.iterations for phase in r.phases if phase.gbs < r.plan.topology.gbs]
        ramp_s = float(np.dot(ramp, r.seconds[: len(ramp)]))
        values = {
            "plan": r.plan.label,
            "plan_id": r.plan.id,
            "prediction": r.prediction.to_json(),
            "start": r.start,
            "tokens": r.tokens,
            "samples": r.samples,
            "iterations": sum(phase.iterations for phase in r.phases),
            "ramp": {"iterations": sum(ramp), "days": ramp_s / DAY, "batch_sizes": len(ramp)},
            **self.figures(),
            "ideal": {
                "days": self.work_s / DAY,
                "gpu_hours": self.work_s * self.work.gpus / HOUR,
            },
            "finish": finish,
            "deadline": r.deadline,
            "allocation": r.allocation,
            "checkpoint": {"interval_s": r.saving[1], "save_s": r.saving[0]},
            "lost_days": self.lost_days,
            "nodes": self.work.nodes,
            "jobs": math.ceil(self.days(0.5) * 24 / r.risks.job_hours),
            "assumptions": self._assumed(),
        }
        return as_json(values)

    def _assumed(self) -> list[Json]:
        """Every rate of interruptions and field of the risks with its source."""
        risks = self.request.risks
        rows = []
        for stop in risks.stops:
            rates = {"node and year": stop.per_node_year, "year": stop.per_year}
            for unit, rate in rates.items():
                if rate:
                    what = f"{stop.name}, a {unit}"
                    rows.append({"what": what, "value": rate, "source": stop.source})
        usual = FailureModel()
        for name, source in shipped_json("risks")["sources"].items():
            value = getattr(risks, name)
            if value != getattr(usual, name):
                source = "given or measured"
            if name == "spare_nodes":
                value = self.work.spare_nodes
            rows.append({"what": name, "value": value, "source": source})
        return rows

    @cached_property
    def record(self) -> Json:
        """to_json(), made once."""
        return self.to_json()

    def summary(self) -> Text:
        """When the run is finished, what it costs, how likely it fails a limit; by which constants,
        and what these rest on.
        """
        r = self.request
        facts = self.facts()
        return Text.of(
            "Done by **{}** (19 of 20 runs by {}), after **{} days** and **{} GPU-hours**; {}; {}.",
            facts["done by"],
            facts["19 of 20 runs by"],
            facts["days"],
            facts["GPU-hours"],
            self.risks(),
            r.prediction.support.words,
        )

    def risks(self) -> str:
        """How likely each limit that was given fails."""
        facts = self.facts()
        words = [f"{name} {facts[name]}" for name in (DEADLINE, ALLOCATION) if name in facts]
        return ", ".join(words) or "no deadline and no allocation to fail"

    def facts(self) -> dict[str, str]:
        """The run as a person reads it: topology, dates, cost, risks, memory and seconds, where
        there is such a limit or price; intervals in parentheses.
        """
        r = self.record
        plan = self.request.plan
        p = self.request.prediction
        facts = {
            "topology": plan.topology.label,
            "done by": r["finish"]["p50"][:10],
            "19 of 20 runs by": r["finish"]["p95"][:10],
        }
        for name, key in {"days": "days", "GPU-hours": "gpu_hours", "money": "money"}.items():
            if r[f"{key}_p50"]:
                facts[name] = with_bounds(*[r[f"{key}_{end}"] for end in ("p50", "p05", "p95")])
        card = plan.cluster.gpu.memory_bytes / 2**30
        facts["memory"] = f"{p.memory_bytes / 2**30:.1f} of {card:.3g} GiB"
        for name, key in {DEADLINE: "p_miss_deadline", ALLOCATION: "p_overrun_allocation"}.items():
            if r[key] is not None:
                facts[name] = chance(r[key], self.request.runs)
        facts[MEMORY] = chance(p.oom_probability)
        facts["seconds an iteration"] = with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)
        return facts

    def figures(self) -> Json:
        """The numbers of facts(), units in their names: p50 is the median of the simulated runs,
        p95 what one run in twenty exceeds; NaN where nothing was asked for.
        """
        r = self.request
        p = r.prediction
        t = r.plan.topology
        figures: Json = {"tp": t.tp, "pp": t.pp, "dp": t.dp, "mbs": t.mbs, "gpus": t.gpus}
        for name, quantile in {"p05": 0.05, "p50": 0.5, "p95": 0.95}.items():
            hours = self.gpu_hours(quantile)
            figures[f"days_{name}"] = self.days(quantile)
            figures[f"gpu_hours_{name}"] = hours
            figures[f"money_{name}"] = math.nan if r.price is None else r.price * hours
        figures |= {"p_miss_deadline": math.nan, "p_overrun_allocation": math.nan}
        if r.deadline:
            end_s = ((r.deadline - r.start).days + 1) * DAY
            figures["p_miss_deadline"] = float((self.outcomes.wall_s > end_s).mean())
        if r.allocation:
            over = self.outcomes.gpu_s / HOUR > r.allocation
            figures["p_overrun_allocation"] = float(over.mean())
        for name in ("memory_gib", "oom_probability", "sec_per_it", "sec_lo", "sec_hi"):
            figures[name] = p.numbers[name]
        return figures

    def rows(self) -> dict[str, str]:
        """The facts, then the jobs, a run without stops, and the interval between
        checkpoints.
        """
        r = self.record
        rows = self.facts()
        hours = amount(self.request.risks.job_hours)
        rows["jobs"] = f"{r['jobs']} of at most {hours} hours on {r['nodes']} nodes"
        days, hours = (amount(value) for value in r["ideal"].values())
        rows["without stops"] = f"{days} days, {hours} GPU-hours"
        plan = self.request.plan
        free = plan.cluster.free_nodes(plan.topology.gpus)
        rows["in reserve"] = self.request.risks.spares_text(free)
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
        words = shipped_json("risks")["words"]
        rows = [
            (words.get(row["what"], row["what"]), amount(row["value"]), row["source"])
            for row in self._assumed()
        ]
        return Columns.of_rows(("what", "value", "source"), rows)


def forecast(plan: Plan | Path | str, **asked: Any) -> Forecast:
    """The forecast of a plan; `asked` are the other fields of ForecastRequest.

    forecast(read_plan("plan.json"), tokens=341e9, start="2027-01-04").finish(0.5)
    """
    made = Forecast(request=ForecastRequest(plan=read_plan(plan), **asked))
    made.finish(0.95)  # what cannot be simulated is refused here
    return made
