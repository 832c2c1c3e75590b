"""Forecast: from tokens, a ramp and risks to a finish date, GPU-hours, and the chances to fail a
limit.
"""

import math
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from functools import cached_property
from itertools import pairwise
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

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the simulated runs
JOB = (
    "tp",
    "pp",
    "dp",
    "mbs",
    "nodes",
    "gpus",
    "recompute",
)  # what a job cannot change without a restart
# What a page calls the probabilities of failing a limit.
DEADLINE, ALLOCATION, MEMORY = "P(deadline missed)", "P(allocation overrun)", "P(out of memory)"
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
        asked, most = self.request.risks.spare_nodes, self._free_nodes
        rule = f"must be at most {most}, the nodes that the jobs leave free"
        require(asked is None or asked <= most, "spare_nodes", asked, rule)

    @cached_property
    def schedule(self) -> Schedule:
        """The topology of each batch size."""
        r = self.request
        adapts, worth = r.worth is not None, SOONEST if r.worth is None else r.worth
        return schedule_on(r.plan, r.phases, r.calibration, r.risks.startup_s, adapts, worth)

    @property
    def _free_nodes(self) -> int:
        """The nodes of the cluster that the jobs leave free."""
        return max(
            0,
            self.request.plan.cluster.max_nodes - max(step.choice.nodes for step in self.schedule),
        )

    @cached_property
    def work(self) -> Work:
        """The pieces as the simulation takes them: seconds, GPUs and nodes of each."""
        iterations, same = self.request.pieces
        steps = [self.schedule[i] for i in same]
        seconds, nodes = (
            np.array([float(getattr(s.choice, n)) for s in steps]) for n in ("seconds", "nodes")
        )
        gpus = np.array([float(s.choice.topology.gpus) for s in steps])
        # a restart is paid once, in the first of the pieces of its phase
        pauses = np.array([step.pause_s for step in steps]) * np.diff(same, prepend=-1)
        spares = self.request.risks.spares_of(self._free_nodes)
        return Work(
            same=same,
            seconds=iterations * seconds + pauses,
            gpus=gpus,
            nodes=nodes,
            spare_nodes=spares,
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
        spans, found = (
            pairwise([0.0, *(self.expected.reached_s[0] / 86400).tolist()]),
            list[Json](),
        )
        for (begin, end), phase in zip(spans, self.request.pieces[1], strict=True):
            choice, gbs = self.schedule[phase].choice, self.schedule[phase].phase.gbs
            sizes = {**vars(choice.topology), "gpus": choice.topology.gpus, "nodes": choice.nodes}
            new: Json = {
                "from_day": begin,
                "to_day": end,
                "gbs": [gbs, gbs],
                "jobs": 0,
                **{n: sizes[n] for n in JOB},
            }
            if found and all(found[-1][n] == new[n] for n in JOB):
                old = found.pop()
                new |= {"from_day": old["from_day"], "gbs": [old["gbs"][0], gbs]}
            found.append(new)
        longest = self.request.risks.job_hours / 24
        return [
            {**one, "jobs": math.ceil((one["to_day"] - one["from_day"]) / longest)} for one in found
        ]

    @property
    def _ramp(self) -> Json:
        """The batch size's ramp: its iterations, sizes and days, restarts included; a run may end
        inside it.
        """
        t, phases = self.request.plan.topology, self.request.phases
        count = sum(phase.gbs < t.gbs for phase in phases)
        last = -1 if count == len(phases) else count - 1
        end = float(self.ideal.reached_s[0, last]) if count else 0.0
        iterations = sum(phase.iterations for phase in phases[:count])
        return {"iterations": iterations, "days": end / 86400, "batch_sizes": count}

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

    @property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Batch size and iterations of each piece whose end `reached_s` dates."""
        iterations, same = self.request.pieces
        return np.array([phase.gbs for phase in self.request.phases])[same], iterations

    @property
    def lost_days(self) -> dict[str, float]:
        """Mean days lost to each cause, the largest first."""
        means = {
            str(name): float(seconds.mean()) / 86400
            for name, seconds in self.outcomes.lost_s.items()
        }
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))

    @property
    def gpu_hours_by_cause(self) -> dict[str, float]:
        """Mean GPU-hours: the iterations at their predicted speed, the slowdown, the mean error of
        the prediction, and what each charged cause adds.

        The causes share the rest in proportion to the time that they take.
        """
        u, work = self.request.uncertainty, float(self.ideal.gpu_s[0]) / 3600
        free = {stop.name for stop in self.request.risks.stops if not stop.charged} | {Cause.QUEUE}
        days = {name: d for name, d in self.lost_days.items() if name not in free}
        rest = float(self.outcomes.gpu_s.mean()) / 3600 - work
        slower, both = (min(max(factor - 1, 0) * work, rest) for factor in (u.slowdown, u.mean))
        share = (rest - both) / (sum(days.values()) or 1)
        found = {Cause.ITERATIONS: work, Cause.SLOWDOWN: slower, Cause.PREDICTION: both - slower}
        return {
            **{str(name): hours for name, hours in found.items()},
            **{name: d * share for name, d in days.items()},
        }

    @property
    def dangers(self) -> list[Json]:
        """The causes of delay: mean days, and the days that one run in twenty exceeds; the worst
        first.
        """
        high = {
            name: float(np.quantile(seconds, 0.95)) / 86400
            for name, seconds in self.outcomes.lost_s.items()
        }
        rows = [(name, mean, high[name]) for name, mean in self.lost_days.items() if high[name] > 0]
        u, ideal = self.request.uncertainty, float(self.ideal.wall_s[0]) / 86400
        slow = u.slowdown * float(np.exp(Z90 * np.hypot(u.common, u.independent)))
        rows.append((Cause.PREDICTION, ideal * (u.mean - 1), ideal * (slow - 1)))
        return [
            {"what": name, "mean_days": mean, "days_95": d}
            for name, mean, d in sorted(rows, key=lambda r: -r[2])
        ]

    @property
    def fan(self) -> Json:
        """Billions of tokens, rising, and for each the days after which QUANTILES of the simulated
        runs have them.
        """
        gbs, iterations = self.pieces
        tokens = (
            np.concatenate([[0.0], (gbs * iterations).cumsum()])
            * self.request.plan.shape.seq_length
            / 1e9
        )
        days = np.quantile(self.outcomes.reached_s, QUANTILES, axis=0).T / 86400  # (J, 5)
        days = np.concatenate([np.zeros((1, len(QUANTILES))), days])
        rows = np.unique(
            np.linspace(0, len(tokens) - 1, 41).astype(int)
        )  # as many as a figure shows apart
        return {"tokens": tokens[rows].tolist(), "days": days[rows].tolist()}

    def to_json(self) -> Json:
        """Days, GPU-hours, ISO dates, probabilities, jobs, and the assumptions behind them."""
        r, known, missed, overrun = self.request, shipped_json("risks"), None, None
        if r.deadline:
            end = (r.deadline - r.start).total_seconds() + 86400
            missed = float((self.outcomes.wall_s > end).mean())
        if r.allocation:
            overrun = float((self.outcomes.gpu_s / 3600 > r.allocation).mean())
        hours, days = ([of(q) for q in (0.5, 0.05, 0.95)] for of in (self.gpu_hours, self.days))
        watts = known["energy"]["node_watts_per_gpu"].get(r.plan.cluster.gpu.name.partition("-")[0])
        watts, building = watts if r.watts is None else r.watts, known["energy"]["building"]
        energy = [None if watts is None else h * watts * building / 1000 for h in hours]
        cost = [None if r.price is None else r.price * h for h in hours]
        risks = replace(r.risks, spare_nodes=r.risks.spares_of(self._free_nodes))
        names, usual = ("per_node_year", "per_year", "source"), FailureModel()
        assumed: list[Json] = [
            {"what": s.name, **{name: getattr(s, name) for name in names}} for s in risks.stops
        ]
        sources = {
            n: s if getattr(r.risks, n) == getattr(usual, n) else "given"
            for n, s in known["sources"].items()
        }
        sources |= {"write_bytes_per_s": r.risks.storage} if r.risks.write_nodes else {}
        assumed += [
            {"what": name, "value": getattr(risks, name), "source": text}
            for name, text in sources.items()
        ]
        return {
            **{"plan": r.plan.label, "plan_id": r.plan.id, "prediction": r.prediction.to_json()},
            **{"start": r.start.isoformat(), "tokens": r.tokens, "samples": r.samples},
            **{"iterations": sum(phase.iterations for phase in r.phases), "ramp": self._ramp},
            **{
                "days": days[0],
                "days_interval": days[1:],
                "gpu_hours": hours[0],
                "gpu_hours_interval": hours[1:],
            },
            "ideal": {
                "days": float(self.ideal.wall_s[0]) / 86400,
                "gpu_hours": float(self.ideal.gpu_s[0]) / 3600,
            },
            "finish": {
                f"p{round(100 * q):02}": self.finish(q).isoformat(timespec="minutes")
                for q in QUANTILES
            },
            **{"deadline": r.deadline and r.deadline.isoformat(), "p_miss_deadline": missed},
            **{"allocation": r.allocation, "p_overrun_allocation": overrun},
            **{
                "cost": cost[0],
                "cost_interval": cost[1:],
                "energy_kwh": energy[0],
                "energy_interval": energy[1:],
            },
            "checkpoint": {"interval_s": r.saving[1], "save_s": r.saving[0]},
            **{"lost_days": self.lost_days, "schedule": self.chains()},
            **{"assumptions": assumed, "meaning": known["meaning"]},
        }

    @cached_property
    def record(self) -> Json:
        """to_json(), what describes the plan, and what figures draw."""
        plan = self.request.plan
        parts = {
            "shape": vars(plan.shape),
            "topology": vars(plan.topology),
            "cluster": plan.cluster.name,
        }
        parts["replaced"] = replaced(plan, self.request.calibration)
        drawn = {
            "fan": self.fan,
            "gpu_hours_by_cause": self.gpu_hours_by_cause,
            "dangers": self.dangers,
        }
        return {**self.to_json(), **parts, "parameters": plan.shape.parameters, **drawn}

    def summary(self) -> Text:
        """When the run is finished, what it costs, how likely it fails a limit; its plan, and what
        that rests on.
        """
        r, s, facts = self.record, self.record["shape"], self.facts(brief=True)
        lines = [f"By other constants: {line}." for line in r["replaced"]]
        return Text.of(
            "Done by **{}** (19 of 20 runs by {}), after **{} days** and **{} GPU-hours**; {}.\n\n{:,.4g} billion "
            "tokens, {} layers × {} ({:.4g} B parameters, {} heads), as {:code}: {}, on {:code}: {}. {}",
            *(
                facts["done by"],
                facts["19 of 20 runs by"],
                facts["days"],
                facts["GPU-hours"],
                self.risks(),
            ),
            *(
                r["tokens"] / 1e9,
                s["num_layers"],
                s["hidden_size"],
                r["parameters"] / 1e9,
                s["num_attention_heads"],
            ),
            *(
                r["plan"],
                facts["topology"],
                r["cluster"],
                r["prediction"]["support"]["words"],
                Text.joined(" ", lines),
            ),
        )

    def risks(self) -> str:
        """How likely each limit that was given fails."""
        r, facts = self.request, self.facts()
        of = {
            DEADLINE: f"miss the deadline {r.deadline}",
            ALLOCATION: f"overrun {r.allocation or 0:,.0f} GPU-hours",
        }
        known = [f"{facts[name]} risk to {what}" for name, what in of.items() if name in facts]
        return ", ".join(known) or "no deadline and no allocation to fail"

    @property
    def delays(self) -> Columns:
        """The causes of delay, the worst first: mean days, and the days that one run in twenty
        exceeds.
        """
        names = {"cause": "what", "mean_days": "mean_days", "days_95": "days_95"}
        return Columns(
            {head: [row[name] for row in self.record["dangers"]] for head, name in names.items()},
            digits=1,
        )

    def facts(self, brief: bool = False) -> dict[str, str]:
        """The run as a person reads it: topology, dates, cost, risks, memory, seconds and what
        these rest on, where there is such a limit or price; `brief` without intervals.
        """
        r, t, full, nearest = (
            self.record,
            self.last.topology,
            self.fullest,
            self.request.prediction.support.nearest,
        )
        costs = {"days": "days", "GPU-hours": "gpu_hours", "money": "cost"}
        texts = {
            name: with_interval(r[key], *r[f"{key}_interval"])
            for name, key in costs.items()
            if r[key]
        }
        risks = {
            DEADLINE: r["p_miss_deadline"],
            ALLOCATION: r["p_overrun_allocation"],
            MEMORY: full.oom_probability,
        }
        context = f"CP {t.cp} × " * (t.cp > 1)
        few = f", on {t.gpus} GPU{'s' * (t.gpus > 1)}" * (
            t.gpus != self.request.plan.topology.gpus
        )  # where DP follows the batch
        found = {"topology": f"TP {t.tp} × {context}PP {t.pp} × DP {t.dp}, microbatch {t.mbs}{few}"}
        found |= {"done by": r["finish"]["p50"][:10], "19 of 20 runs by": r["finish"]["p95"][:10]}
        found |= {
            name: mid if brief else f"{mid} ({low} to {high})"
            for name, (mid, low, high) in texts.items()
        }
        card = self.request.plan.cluster.gpu.memory_bytes / 2**30
        found |= {"memory": f"{full.memory_bytes / 2**30:.1f} of {card:.3g} GiB"}
        runs = {
            DEADLINE: self.request.runs,
            ALLOCATION: self.request.runs,
        }  # of memory it is a formula's
        found |= {
            name: chance(p, runs.get(name, 10_000)) for name, p in risks.items() if p is not None
        }
        found |= {"seconds an iteration": with_bounds(*self.seconds)}
        return found | {
            "nearest measured run": "{}, distance {:.1f}".format(*nearest[0]) if nearest else "none"
        }

    def figures(self) -> Json:
        """The numbers of facts(), units in their names: p50 is the median of the simulated runs,
        p95 what one run in twenty exceeds; NaN where nothing was asked for.
        """
        r, t, (mid, low, high) = self.record, self.last.topology, self.seconds
        found: Json = {name: getattr(t, name) for name in ("tp", "pp", "dp", "mbs", "gpus")}
        for unit, name in {"days": "days", "gpu_hours": "gpu_hours", "cost": "money"}.items():
            few, many = r[f"{unit}_interval"]
            found |= {f"{name}_p05": few, f"{name}_p50": r[unit], f"{name}_p95": many}
        found |= {name: r[name] for name in ("p_miss_deadline", "p_overrun_allocation")}
        found |= {
            "memory_gib": self.fullest.memory_bytes / 2**30,
            "oom_probability": self.fullest.oom_probability,
        }
        found |= {"sec_per_it": mid, "sec_lo": low, "sec_hi": high}
        found |= {"distance": self.request.prediction.support.distance}
        return {name: math.nan if number is None else number for name, number in found.items()}

    @property
    def last(self) -> ScheduledTopology:
        """The topology of the full batch size."""
        return self.schedule[-1].choice

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of an iteration of the full batch size, and their 90 % interval."""
        p = self.request.prediction
        scale = (
            self.last.seconds / p.sec_per_it
        )  # 1, unless the schedule has another DP or microbatch than the plan
        return scale * p.sec_per_it, scale * p.sec_lo, scale * p.sec_hi

    @property
    def fullest(self) -> ScheduledTopology:
        """The topology that takes the most memory, of all batch sizes."""
        return max((step.choice for step in self.schedule), key=lambda choice: choice.memory_bytes)

    def rows(self) -> dict[str, str]:
        """The facts, then the energy, the ramp, a run without stops, and the interval between
        checkpoints.
        """
        r, ramp, found = self.record, self.record["ramp"], self.facts()
        if r["energy_kwh"]:
            found["energy (kWh)"] = with_bounds(r["energy_kwh"], *r["energy_interval"])
        if ramp["days"]:
            found["ramp"] = f"{ramp['iterations']:,} iterations, {ramp['days']:.3g} days of work"
        # as many digits as those of the whole run
        calm = [
            with_interval(of, *(of + x - r[n] for x in r[f"{n}_interval"]))[0]
            for n, of in r["ideal"].items()
        ]
        found["without stops"] = "{} days, {} GPU-hours".format(*calm)
        return found | {
            "checkpoints": f"every {amount(r['checkpoint']['interval_s'] / 60, 2)} minutes"
        }

    def to_frame(self) -> DataFrame:
        """A row for each simulated run: days, gpu_hours, money where a price is known, days lost to
        each cause.
        """
        import pandas as pd

        run, price = self.outcomes, self.request.price
        found = {"days": run.wall_s / 86400, "gpu_hours": run.gpu_s / 3600}
        found |= {} if price is None else {"money": price * found["gpu_hours"]}
        lost = {
            f"lost_days_{name.replace(' ', '_')}": seconds / 86400
            for name, seconds in run.lost_s.items()
        }
        return pd.DataFrame(found | lost)

    def view(self) -> DataFrame:
        """The rows as a table."""
        return Columns.of_rows(
            ("", "median (5 % to 95 % of the runs)"), [*self.rows().items()]
        ).view()

    def as_text(self) -> str:
        """The forecast as `trilane plan calendar` prints it."""
        r = self.record
        lost = ", ".join(
            f"{name} {lost:.1f}" for name, lost in r["lost_days"].items() if lost >= 0.05
        )
        rows = {**self.rows(), "lost days": lost, "support": r["prediction"]["support"]["words"]}
        head = (
            f"{r['plan']}: {r['tokens']:g} tokens, {r['iterations']} iterations from {r['start']}"
        )
        return "\n".join([head, *(f"{name:21} {text}" for name, text in rows.items())])

    @property
    def assumptions(self) -> Columns:
        """Every assumption with its source; an interval of 0 s between checkpoints is Daly's
        optimum.
        """
        rows = self.record["assumptions"]
        names = {"per_node_year": " a node and year", "per_year": " a year", "value": ""}
        values = [
            " and ".join(f"{amount(a[n])}{per}" for n, per in names.items() if a.get(n)) or "0"
            for a in rows
        ]
        return Columns(
            {
                "what": [a["what"] for a in rows],
                "value": values,
                "source": [a["source"] for a in rows],
            }
        )


def forecast(plan: Plan | Path | str, **asked: Any) -> Forecast:
    """The forecast of a plan; `asked` are the other fields of ForecastRequest.

    forecast(read_plan("plan.json"), tokens=341e9, start="2027-01-04").finish(0.5)
    """
    found = Forecast(request=ForecastRequest(plan=read_plan(plan), **asked))
    found.finish(0.95)  # what cannot be simulated is refused here
    return found
