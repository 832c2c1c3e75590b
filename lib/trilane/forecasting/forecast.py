"""Forecast: from tokens, a ramp, capacity and risks to a finish date, GPU-hours, and the chances to fail a limit."""

from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from trilane.config.plan import Plan
from trilane.costmodel.shipped import replaced
from trilane.costmodel.uncertainty import Z90
from trilane.forecasting.failures import Cause
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.schedule import SOONEST, Schedule, ScheduledTopology, schedule_on
from trilane.forecasting.simulation import CapacityWindow, Outcomes, Simulation, Stretch, Uncertainty
from trilane.utils.numbers import amount, with_interval
from trilane.utils.tables import Columns, DataFrame, Table, Text
from trilane.utils.validation import require, shipped_json

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the simulated runs
Record = dict[str, Any]  # a JSON object


def chance(p: float) -> str:
    """A probability in words; some thousand simulated runs resolve nothing below one in a thousand."""
    return f"{p:.1%}" if p >= 0.001 else "under 0.1 %"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of one topology, in seconds after the start, and the batch sizes that it trains."""

    start_s: float
    end_s: float
    choice: ScheduledTopology
    first_gbs: int
    last_gbs: int


class Described(Table):
    """The sentences and tables of a forecast's JSON, `record`: of a Forecast, and of a study's calendar.json."""

    record: Record

    def summary(self) -> Text:
        """The plan, when it is finished, what it costs, and how likely it fails either limit."""
        r, s, t, end = self.record, self.record["shape"], self.record["topology"], Text()
        for limit, fact in self.limits().items():
            end = Text.of("{}; the {} {}", end, limit, fact)
        for line in r.get("replaced", ()):
            end = Text.of("{}. By other constants: {}", end, line)
        if self.unlike:
            end = Text.of("{}. The prediction has {}", end, self.unlike)
        return Text.of(
            "**{} layers × {}** ({:.4g} B parameters, {} heads) as {:code}: TP {} × PP {} × DP {}, microbatch {}, on "
            "{:code}. {:,.4g} billion tokens are trained by **{}** ({} to {} in nine of ten runs), after **{} days** "
            "and **{} GPU-hours**{}.",
            *(s["num_layers"], s["hidden_size"], r["parameters"] / 1e9, s["num_attention_heads"], r["plan"]),
            *(t["tp"], t["pp"], t["dp"], t["mbs"], r["cluster"], r["tokens"] / 1e9),
            *(r["finish"][name][:10] for name in ("p50", "p05", "p95")),
            *(with_interval(r[key], *r[f"{key}_interval"])[0] for key in ("days", "gpu_hours")),
            end,
        )

    def limits(self) -> dict[str, str]:
        """How likely each limit that was given fails."""
        r, found = self.record, {}
        if (p := r["p_miss_deadline"]) is not None:
            found["deadline"] = f"{r['deadline']}: missed with probability {chance(p)}"
        if (p := r["p_overrun_allocation"]) is not None:
            found["allocation"] = f"{r['allocation']:,.0f} GPU-hours: overrun with probability {chance(p)}"
        return found

    @property
    def unlike(self) -> str:
        """What the plan's prediction rests on, where no measured run is near it, else ""."""
        words = str(self.record["prediction"].get("support", {}).get("words", ""))
        return words if words.startswith("no measured run") else ""

    def brief(self) -> str:
        r = self.record
        return f"{r['plan']}, {r['finish']['p50'][:10]}, {r['gpu_hours']:,.0f} GPU-hours"

    @property
    def delays(self) -> Columns:
        """The causes of delay, the worst first: mean days, and the days that one run in twenty exceeds."""
        names = {"cause": "what", "mean_days": "mean_days", "days_95": "days_95"}
        return Columns({head: [row[name] for row in self.record["dangers"]] for head, name in names.items()}, digits=2)


@dataclass(frozen=True, kw_only=True)
class Forecast(Described):
    """What follows from a request; it shows itself as a table of date, days, GPU-hours, energy and money.

    ValueError where a batch size of the ramp fits nothing that the capacity allows, or where more spare nodes are asked
    for than the jobs leave free; of what is simulated, where interruptions leave no progress.
    """

    request: ForecastRequest

    def __post_init__(self) -> None:
        asked, most = self.request.risks.spare_nodes, max(self._free_nodes)
        rule = f"must be at most {most}, the nodes that the jobs leave free"
        require(asked is None or asked <= most, "spare_nodes", asked, rule)

    @cached_property
    def schedules(self) -> tuple[tuple[CapacityWindow, Schedule | None], ...]:
        """Each window of the capacity with its schedule; None where nothing can run."""
        r, windows = self.request, self.request.windows
        adapts, worth = r.worth is not None, SOONEST if r.worth is None else r.worth
        given = (r.calibration, r.risks.startup_s, adapts, worth)
        found = {gpus: schedule_on(r.plan, r.phases, gpus, *given) for gpus in {window.gpus for window in windows}}
        rule = "the last step never ends, and no replica on so few GPUs fits the card's memory at every batch size"
        require(found[windows[-1].gpus] is not None, "capacity.gpus", windows[-1].gpus, rule)
        return tuple((window, found[window.gpus]) for window in windows)

    @property
    def _free_nodes(self) -> list[int]:
        """The nodes, of the stated capacity or of the whole cluster, that the jobs leave free in each busy window."""
        cluster, found = self.request.plan.cluster, list[int]()
        for window, schedule in self.schedules:
            stated = window.gpus // cluster.gpus_per_node if self.request.capacity else cluster.max_nodes
            if schedule:
                found.append(max(0, min(stated, cluster.max_nodes) - max(step.choice.nodes for step in schedule)))
        return found

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The windows as the simulation takes them: seconds, GPUs and nodes of each piece."""
        (iterations, same), risks, free = self.request.pieces, self.request.risks, iter(self._free_nodes)
        found = [Stretch(window=window) for window, _ in self.schedules]
        for place, (window, schedule) in enumerate(self.schedules):
            if not schedule:
                continue
            steps = [schedule[i] for i in same]
            seconds, gpus, nodes = (
                np.array([float(getattr(s.choice, n)) for s in steps]) for n in ("seconds", "gpus", "nodes")
            )
            # a restart is paid once, in the first of the pieces of its phase
            pauses = np.array([step.pause_s for step in steps]) * np.diff(same, prepend=-1)
            found[place] = Stretch(
                **{"window": window, "seconds": iterations * seconds + pauses, "gpus": gpus, "nodes": nodes},
                queue_share=window.shared * risks.queue_s / (risks.job_hours * 3600),
                spare_nodes=risks.spares_of(next(free)),
            )
        return found

    @cached_property
    def ideal(self) -> Outcomes:
        """The run without interruptions: its iterations, the restarts of its schedules, days without GPUs."""
        calm = [replace(stretch, queue_share=0.0) for stretch in self.stretches]
        risks = replace(self.request.risks, stops=(), startup_s=0.0, queue_s=0.0)
        sure = Uncertainty(common=0, independent=0)
        return Simulation(self.request.pieces[1], sure, risks, {}, 1.0, 1, None).run(calm)

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
        return Simulation(r.pieces[1], r.uncertainty, r.risks, r.shares, r.saving[1], runs, rng).run(self.stretches)

    def jobs(self, run: Outcomes | None = None) -> list[Job]:
        """The jobs of a run, by default of the expected one, each with one capacity and topology."""
        spans, found = list(pairwise([0.0, *(run or self.expected).reached_s[0].tolist()])), list[Job]()
        for window, schedule in self.schedules:
            for (begin, end), phase in zip(spans, self.request.pieces[1], strict=True) if schedule else ():
                if end <= window.start_s or begin >= window.end_s:
                    continue
                step = schedule[phase]  # type: ignore[index]
                times = {"start_s": max(begin, window.start_s), "end_s": min(end, window.end_s)}
                new = Job(choice=step.choice, first_gbs=step.phase.gbs, last_gbs=step.phase.gbs, **times)
                if found and found[-1].choice.job == step.choice.job and found[-1].end_s >= new.start_s:
                    new = replace(new, start_s=found[-1].start_s, first_gbs=found.pop().first_gbs)
                found.append(new)
        return found

    @property
    def _ramp(self) -> Record:
        """The batch size's ramp: its iterations, sizes and days.

        Days are those of the iterations at the predicted seconds of each size, and of the restarts, on the capacity
        that there is; days on which nothing can run do not count. A run may end inside its ramp.
        """
        t, phases = self.request.plan.topology, self.request.phases
        count = sum(phase.gbs < t.gbs for phase in phases)
        last = -1 if count == len(phases) else count - 1
        end = float(self.ideal.reached_s[0, last]) if count else 0.0
        idle = [min(w.end_s, end) - w.start_s for w, schedule in self.schedules if schedule is None and w.start_s < end]
        return {
            **{"iterations": sum(phase.iterations for phase in phases[:count]), "days": (end - sum(idle)) / 86400},
            "batch_sizes": count,
        }

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
        means = {str(name): float(seconds.mean()) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))

    @property
    def gpu_hours_by_cause(self) -> dict[str, float]:
        """Mean GPU-hours: the iterations at their predicted speed, the slowdown, and what each charged cause adds.

        The causes share the rest in proportion to the time that they take.
        """
        risks, work = self.request.risks, float(self.ideal.gpu_s[0]) / 3600
        free = {stop.name for stop in risks.stops if not stop.charged} | {Cause.QUEUE}
        days = {name: d for name, d in self.lost_days.items() if name not in free}
        rest = float(self.outcomes.gpu_s.mean()) / 3600 - work
        slower = min(max(risks.slowdown - 1, 0) * work, rest)
        share = (rest - slower) / (sum(days.values()) or 1)
        return {Cause.ITERATIONS: work, Cause.SLOWDOWN: slower, **{name: d * share for name, d in days.items()}}

    @property
    def dangers(self) -> list[Record]:
        """The causes of delay: mean days, and the days that one run in twenty exceeds; the worst first."""
        high = {name: float(np.quantile(seconds, 0.95)) / 86400 for name, seconds in self.outcomes.lost_s.items()}
        rows = [(name, mean, high[name]) for name, mean in self.lost_days.items() if high[name] > 0]
        u, ideal = self.request.uncertainty, float(self.ideal.wall_s[0]) / 86400
        slow = u.slowdown * float(np.exp(Z90 * np.hypot(u.common, u.independent)))
        rows.append((Cause.PREDICTION, ideal * (u.slowdown - 1), ideal * (slow - 1)))
        return [{"what": name, "mean_days": mean, "days_95": d} for name, mean, d in sorted(rows, key=lambda r: -r[2])]

    @property
    def fan(self) -> Record:
        """Billions of tokens, rising, and for each the days after which QUANTILES of the simulated runs have them."""
        gbs, iterations = self.pieces
        tokens = np.concatenate([[0.0], (gbs * iterations).cumsum()]) * self.request.plan.shape.seq_length / 1e9
        days = np.quantile(self.outcomes.reached_s, QUANTILES, axis=0).T / 86400  # (J, 5)
        days = np.concatenate([np.zeros((1, len(QUANTILES))), days])
        rows = np.unique(np.linspace(0, len(tokens) - 1, 41).astype(int))  # as many as a figure shows apart
        return {"tokens": tokens[rows].tolist(), "days": days[rows].tolist()}

    def to_json(self) -> Record:
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
        sizes, jobs = ("tp", "pp", "dp", "mbs", "nodes", "gpus", "recompute"), list[Record]()
        for job in self.jobs():
            span = {"from_day": job.start_s / 86400, "to_day": job.end_s / 86400, "gbs": [job.first_gbs, job.last_gbs]}
            jobs.append({**span, **{name: getattr(job.choice, name) for name in sizes}})
        risks = replace(r.risks, spare_nodes=r.risks.spares_of(min(self._free_nodes)))
        names = ("per_node_year", "per_year", "source")
        assumed: list[Record] = [{"what": s.name, **{name: getattr(s, name) for name in names}} for s in risks.stops]
        assumed += [{"what": n, "value": getattr(risks, n), "source": text} for n, text in known["sources"].items()]
        return {
            **{"plan": r.plan.label, "plan_id": r.plan.id, "prediction": r.prediction.to_json()},
            **{"start": r.start.isoformat(), "tokens": r.tokens, "samples": r.samples},
            **{"iterations": sum(phase.iterations for phase in r.phases), "ramp": self._ramp},
            **{"days": days[0], "days_interval": days[1:], "gpu_hours": hours[0], "gpu_hours_interval": hours[1:]},
            "ideal": {"days": float(self.ideal.wall_s[0]) / 86400, "gpu_hours": float(self.ideal.gpu_s[0]) / 3600},
            "finish": {f"p{round(100 * q):02}": self.finish(q).isoformat(timespec="minutes") for q in QUANTILES},
            **{"deadline": r.deadline and r.deadline.isoformat(), "p_miss_deadline": missed},
            **{"allocation": r.allocation, "p_overrun_allocation": overrun},
            **{"cost": cost[0], "cost_interval": cost[1:], "energy_kwh": energy[0], "energy_interval": energy[1:]},
            "checkpoint": {"interval_s": r.saving[1], "save_s": r.saving[0]},
            **{"lost_days": self.lost_days, "schedule": jobs, "assumptions": assumed, "meaning": known["meaning"]},
        }

    @cached_property
    def record(self) -> Record:  # type: ignore[override]
        """to_json(), what describes the plan, and what figures draw."""
        plan = self.request.plan
        parts = {"shape": vars(plan.shape), "topology": vars(plan.topology), "cluster": plan.cluster.name}
        parts["replaced"] = replaced(plan, self.request.calibration)
        drawn = {"fan": self.fan, "gpu_hours_by_cause": self.gpu_hours_by_cause, "dangers": self.dangers}
        return {**self.to_json(), **parts, "parameters": plan.shape.parameters, **drawn}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Finish date, days, GPU-hours, energy and money: median, 5 % and 95 % of the simulated runs; then the ramp, a
        run without stops, the interval between checkpoints, and the limits.
        """
        r, ramp = self.record, self.record["ramp"]
        units = {"days": "days", "gpu_hours": "GPU-hours", "energy_kwh": "energy (kWh)", "cost": "money"}
        found = [("finish", *(r["finish"][name][:10] for name in ("p50", "p05", "p95")))]
        for key, name in units.items():
            if r[key]:
                found.append((name, *with_interval(r[key], *r[f"{key.removesuffix('_kwh')}_interval"])))
        facts = {"ramp": f"{ramp['iterations']:,} iterations, {ramp['days']:.3g} days of work"}
        facts["without stops"] = f"{r['ideal']['days']:.1f} days, {amount(r['ideal']['gpu_hours'])} GPU-hours"
        facts["checkpoints"] = f"every {amount(r['checkpoint']['interval_s'] / 60)} minutes"
        return found + [(name, fact, "", "") for name, fact in (facts | self.limits()).items()]

    def to_frame(self) -> DataFrame:
        """A row for each of five quantiles of the simulated runs: finish (time), days, gpu_hours, energy_kwh, cost."""
        import pandas as pd

        frame = pd.DataFrame({"quantile": QUANTILES, "finish": map(self.finish, QUANTILES)})
        frame["days"], hours = [*map(self.days, QUANTILES)], pd.Series([*map(self.gpu_hours, QUANTILES)])
        kwh, cost = (self.record[name] or np.nan for name in ("energy_kwh", "cost"))
        median = self.record["gpu_hours"]
        return frame.assign(gpu_hours=hours, energy_kwh=hours * kwh / median, cost=hours * cost / median)

    def view(self) -> DataFrame:
        """The rows as a table."""
        return Columns.of_rows(("", "median", "5 % below", "95 % below"), self.rows()).view()

    def as_text(self) -> str:
        """The forecast as `trilane plan calendar` prints it."""
        r = self.record
        lost = ", ".join(f"{name} {lost:.1f}" for name, lost in r["lost_days"].items() if lost >= 0.05)
        rows = [*self.rows(), ("lost days", lost, "", ""), ("support", r["prediction"]["support"]["words"], "", "")]
        head = f"{r['plan']}: {r['tokens']:g} tokens, {r['iterations']} iterations from {r['start']}"
        spans = (f" ({low} to {high})" if low else "" for _, _, low, high in rows)
        return "\n".join([head, *(f"{row[0]:17} {row[1]}{span}" for row, span in zip(rows, spans, strict=True))])

    @property
    def assumptions(self) -> Columns:
        """Every assumption with its source; an interval of 0 s between checkpoints is Daly's optimum."""
        rows = self.record["assumptions"]
        names = {"per_node_year": " a node and year", "per_year": " a year", "value": ""}
        values = [" and ".join(f"{amount(a[n])}{per}" for n, per in names.items() if a.get(n)) or "0" for a in rows]
        return Columns({"what": [a["what"] for a in rows], "value": values, "source": [a["source"] for a in rows]})


def forecast(plan: Plan, **asked: Any) -> Forecast:
    """The forecast of a plan; `asked` are the other fields of ForecastRequest.

    forecast(read_plan("plan.json"), tokens=341e9, start="2027-01-04").finish(0.5)
    """
    found = Forecast(request=ForecastRequest(plan=plan, **asked))
    found.finish(0.95)  # what cannot be simulated is refused here
    return found
