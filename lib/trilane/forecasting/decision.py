"""The alternatives to a forecast's plan, whether to start it or one of them, and the page for whoever decides."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from trilane.config.plan import Plan, plan_from_json, read_plan_values
from trilane.config.training import Run
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import SAFE
from trilane.costmodel.shipped import constants_of
from trilane.forecasting.forecast import QUANTILES, Described, Forecast, Record, chance
from trilane.forecasting.request import ForecastRequest
from trilane.planning.search import search
from trilane.utils.numbers import amount, with_interval
from trilane.utils.tables import Columns, DataFrame, Html, Table, Text, as_json, frame_of
from trilane.utils.validation import require, shipped_json
from trilane.workspace.study import Study

MOST_RISK = 0.2  # a limit is kept where at most one simulated run in five fails it: a choice, not a measurement
LIMITS = {"deadline": "p_miss_deadline", "allocation": "p_overrun_allocation"}
# What a decision compares of the plan and of each alternative, by the names that a forecast's JSON has.
FIGURES = ("ideal", "finish", "days", "days_interval", "gpu_hours", "gpu_hours_interval", "cost", *LIMITS.values())


@dataclass(frozen=True, kw_only=True)
class Alternatives(Table):
    """Schedules, the first of them the plan's own, and topologies, for the same tokens and ramp on the same capacity.

    Of each the `days` and `gpu_hours` without interruptions (0 where it cannot run), the memory of the fullest GPU at
    any batch size, and the `forecast` of what is safe to start. `reason` says why it cannot run, or what must change.
    """

    schedules: tuple[Record, ...]
    topologies: tuple[Record, ...]
    digits = 1

    def to_frame(self) -> DataFrame:
        """A row for each: name, days, gpu_hours, memory_gib, oom_probability, NaN where it cannot run; restarts, and a
        note, why it cannot, or what must change.
        """
        names = ("name", "days", "gpu_hours", "restarts", "memory_bytes", "oom_probability", "reason")
        columns: Record = {name: itemgetter(name) for name in names}
        table = frame_of((*self.schedules, *self.topologies), columns).rename(columns={"reason": "note"})
        table.insert(4, "memory_gib", table.pop("memory_bytes") / 2**30)
        numbers = ["days", "gpu_hours", "memory_gib", "oom_probability"]
        return table.assign(**{name: table[name].where(table["days"] > 0) for name in numbers})


def alternatives(found: Forecast) -> Alternatives:
    """Schedules in which DP, microbatch and nodes follow the batch, and the fastest other TP x PP x DP of the GPUs.

    alternatives(forecast(plan, tokens=341e9))
    """
    r, plan, t = found.request, found.request.plan, found.request.plan.topology
    ways: dict[str, Record] = {"the plan as it is": {}, "fastest at each batch size": {"adapt": "days"}}
    ways |= {"cheapest at each batch size": {"adapt": "gpu_hours"}}
    schedules = [_alternative(name, r, "", **way) for name, way in ways.items()]
    fixed: Record = {name: getattr(t, name) for name in ("precision", "attention", "fp32_gradients", "offload")}
    fixed |= {"gpus": t.gpus, "gbs": t.gbs, "engine": plan.engine, "calibration": r.calibration}
    best, rivals = search(plan.shape, plan.cluster, top=5, distinct=True, **fixed).candidates, []
    for c in [c for c in best if (c.topology.tp, c.topology.pp, c.topology.dp) != (t.tp, t.pp, t.dp)][:4]:
        failing = r.ramp.failing(t.gbs, c.topology.mbs * c.topology.dp)
        reason = f"{len(failing)} batch sizes of the ramp need another mbs or dp" if failing else ""
        changed = replace(plan, topology=c.topology, label=c.label, run=Run())
        rivals.append(_alternative(c.label, r, reason, plan=changed, adapt="days" if failing else "no"))
    able = tuple(rival for rival in rivals if rival["days"])
    return Alternatives(schedules=tuple(schedules), topologies=able)


def _alternative(name: str, request: ForecastRequest, reason: str, **changes: Any) -> Record:
    """One alternative, simulated where it is safe to start; without days where it cannot run."""
    found: Record = dict.fromkeys(("days", "gpu_hours", "memory_bytes", "oom_probability", "restarts"), 0)
    found |= {"name": name, "reason": reason, "forecast": None}
    try:
        made = Forecast(request=replace(request, **{"adapt": "no", **changes}))
        found |= {"days": float(made.ideal.wall_s[0]) / 86400, "gpu_hours": float(made.ideal.gpu_s[0]) / 3600}
        found |= {"restarts": len(made.jobs(made.ideal)) - 1}
        choices = [step.choice for _, schedule in made.schedules for step in schedule or ()]
        found |= {risk: max(getattr(c, risk) for c in choices) for risk in ("memory_bytes", "oom_probability")}
        if found["oom_probability"] <= SAFE:
            figures = made.to_json()
            found |= {"forecast": {name: figures[name] for name in FIGURES}}
    except ValueError as error:
        found["reason"] = str(error)
    return found


def study_plan(study: Study, name: str = "", calibration: str = "") -> tuple[Plan, Calibration, Record]:
    """A plan, the constants to use, and the file it comes from: a file's plan, or one of the study's plans.json by id
    or label ("": the best). The constants are those that predicted it, or what `calibration` names (calibration_for).

        plan, known, source = study_plan(Study.open("demo"))
    """
    if name.endswith(".json"):
        entry, source = read_plan_values(name), {"file": name, "made_by": {}}
    else:
        found, rule = study.load("plans.json", "02_topology"), "has this id or label; nor is it a .json file"
        listed = found["plans"] + (found.get("risky", []) if name else [])  # the best plan is a safe one
        named = [p for p in listed if name in ("", p["id"], p["label"])]
        require(bool(named), "plan", name, f"no plan of study {study.name} {rule}")
        entry, source = named[0], {"file": "plans.json", "made_by": found["made_by"]}
    plan = plan_from_json(entry)
    return plan, constants_of(plan, calibration), source


def calendar_record(found: Forecast, source: Record, others: Alternatives) -> Record:
    """What calendar.json holds: the forecast, its plan with prediction and source, alternatives, causes of delay.

    calendar_record(found, "plans.json", alternatives(found))
    """
    plan, p = found.request.plan, found.request.prediction
    used = replace(plan, calibration=found.request.calibration.kept())
    values = {**found.record, "plan_json": used.to_json(), "source": source}
    values |= {"card_bytes": plan.cluster.gpu.memory_bytes}
    values |= {name: getattr(p, name) for name in ("sec_per_it", "memory_bytes", "oom_probability")}
    return {**values, "schedules": list(others.schedules), "rivals": list(others.topologies)}


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Whether to start a forecast's plan: the verdict, why, the change that it names, and what would change it.

    `figures` are those of the plan with that change: date, days, cost, memory and risks; empty where none is to start.
    """

    verdict: str
    reasons: tuple[str, ...]
    change: str = ""
    turns: tuple[str, ...] = ()
    figures: Record = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Decision(Described):
    """The page for whoever decides, from a study's calendar.json; `is_stale`: plans.json was written again since."""

    record: Record
    title: str = ""
    is_stale: bool = False

    @cached_property
    def recommendation(self) -> Recommendation:
        """Whether to start the plan, why, and what would change that.

        An alternative is taken where it keeps a limit that the plan does not, or saves 3 % of the GPU-hours
        (predictions nearer than that are often in the wrong order) without more days, each by its own simulated runs.
        Nothing is recommended that runs out of memory with a probability above SAFE.
        """
        r, changes = self.record, []
        plan: Record = {"name": "", **{name: r[name] for name in FIGURES}}
        for risk in ("memory_bytes", "oom_probability"):  # the most at any batch size
            plan[risk] = max([r[risk], *(s[risk] for s in r["schedules"][:1])])
        own = self._failed(plan)
        for other in [*r["rivals"], *r["schedules"][1:]]:
            if other["forecast"] and other["oom_probability"] <= SAFE:
                figures = {**other, **other["forecast"]}
                days, hours = (figures["ideal"][unit] - plan["ideal"][unit] for unit in ("days", "gpu_hours"))
                failed, saves = self._failed(figures), hours < -0.03 * plan["ideal"]["gpu_hours"] and days <= 0
                changes += [(failed, hours, days, figures)] if failed < own or (saves and failed == own) else []
        left, hours, days, best = min(changes, default=(own, 0.0, 0.0, {}), key=lambda change: change[:3])
        reasons, chosen = [*self._limits(plan)], {} if left else best or plan
        verdict = "Do not start it as planned" if left else "Start, with one change" if best else "Start"
        turns = [*self._turns(chosen or plan)]
        if best:
            pairs = ((hours, "GPU-hours"), (days, "days"))
            fewer = [f"{amount(abs(n))} {unit} {'less' if n < 0 else 'more'}" for n, unit in pairs]
            late = ", which is not enough" if left else ""
            reasons.append(f"{best['name']} is predicted to need {' and '.join(fewer)}{late}")
        change = best["name"] if best and not left else ""
        if change:
            turns.insert(0, f"a benchmark of {change}, which comes first: its advantage is predicted")
        figures = {name: chosen[name] for name in (*FIGURES, "memory_bytes", "oom_probability") if chosen}
        found: Record = {"reasons": tuple(reasons), "turns": tuple(turns), "figures": figures}
        return Recommendation(verdict=verdict, change=change, **found)

    def _failed(self, figures: Record) -> int:
        """How many of the limits, and of the memory, a plan of these figures fails."""
        chances = [figures[name] for limit, name in LIMITS.items() if self.record[limit] is not None]
        return sum(p > MOST_RISK for p in chances) + (figures["oom_probability"] > SAFE)

    def _limits(self, figures: Record) -> Iterator[str]:
        """How likely the plan fails each limit, a line each, and its memory where that is likely."""
        given = {limit: figures[name] for limit, name in LIMITS.items() if self.record[limit] is not None}
        yield from (f"the plan fails the {limit} with a probability of {chance(p)}" for limit, p in given.items())
        if not given:
            yield "no deadline and no allocation were given, so that only memory and cost decide"
        if figures["oom_probability"] > SAFE:
            yield f"the plan runs out of memory with a probability of {figures['oom_probability']:.0%}"

    def _turns(self, figures: Record) -> Iterator[str]:
        """What would change the recommendation of a plan with these figures, a line each."""
        begin, (low, high) = datetime.fromisoformat(self.record["start"]), figures["gpu_hours_interval"]
        ends = [(datetime.fromisoformat(at) - begin) / timedelta(days=1) for at in figures["finish"].values()]
        days = float(np.interp(1 - MOST_RISK, QUANTILES, ends))
        hours = float(np.interp(1 - MOST_RISK, (0.05, 0.5, 0.95), (low, figures["gpu_hours"], high)))
        for limit, unit, most in (("deadline", "days", days), ("allocation", "gpu_hours", hours)):
            if (allowed := self.record[limit]) is None:
                continue
            if limit == "deadline":
                allowed = (datetime.fromisoformat(allowed) - begin).days + 1.0  # the whole last day
            slower = (allowed - most) / figures["ideal"][unit]
            side, until = ("slower", "up to") if slower >= 0 else ("faster", "from")
            much = f"a benchmark whose iterations are {abs(slower):.0%} {side} than predicted"
            far = f"more GPUs or fewer tokens: no faster iteration alone keeps the {limit}"
            yield far if slower <= -1 else f"{much}: {until} there four runs of five keep the {limit}"
        if self.unlike:
            yield "any benchmark: no measured run like this stands behind the prediction"

    def headline(self) -> Text:
        """The title and the forecast's summary."""
        return Text.of("{} {}", self.title, self.summary())

    def notes(self) -> Text:
        """The plan and the file that the figures come from."""
        source, by = self.record["source"], self.record["source"]["made_by"]
        origin = f", made by {by['notebook']} on {by['time']}" if by else ""
        late = Text("\n\n**Attention:** plans.json was written again since; run 07_calendar again.")
        end = late if self.is_stale else Text()
        return Text.of("Plan {:code} of {}{}.{}", self.record["plan_id"], source["file"], origin, end)

    def options(self) -> Html:
        """The largest causes of delay with what helps, and the alternatives relative to the plan, side by side."""
        c, remedies = self.record, shipped_json("risks")["remedies"]
        delays = {head: values[:3] for head, values in self.delays.columns.items()}
        risks = Columns({**delays, "what helps": [remedies.get(cause, "") for cause in delays["cause"]]}, digits=1)
        others = [("topology", o) for o in c["rivals"][:2]] + [("schedule", o) for o in c["schedules"][1:]]
        rows = []
        for kind, o in (pair for pair in others if pair[1]["days"]):
            more = [f"{o[unit] / c['ideal'][unit] - 1:+.1%}" for unit in ("gpu_hours", "days")]
            rows.append((kind, o["name"], *more, f"{o['oom_probability']:.1%}"))
        tables = risks, Columns.of_rows(("what", "alternative", "GPU-hours", "days", "P(OOM)"), rows)
        return Html.of('<div class="pair"><div>{}</div><div>{}</div></div>', *(Html(t._repr_html_()) for t in tables))

    def advice(self) -> Text:
        """The recommendation as Markdown, with date, cost and memory of the plan that it names."""
        found, f, numbers = self.recommendation, self.recommendation.figures, Text()
        if f:
            numbers = Text.of(
                "\n\nThat plan is finished by **{}** ({} to {} in nine of ten runs), after {} days and {} GPU-hours{}; "
                "it takes {:.3g} of {:.3g} GiB and runs out of memory with a probability of **{:.1%}**.",
                *(f["finish"][name][:10] for name in ("p50", "p05", "p95")),
                *(with_interval(f[name], *f[f"{name}_interval"])[0] for name in ("days", "gpu_hours")),
                *(f" ({f['cost']:,.0f} of money)" if f["cost"] else "", f["memory_bytes"] / 2**30),
                *(self.record["card_bytes"] / 2**30, f["oom_probability"]),
            )
        change = Text.of(": **{}**", found.change) if found.change else Text()
        why, turns = (Text.joined("\n- ", ["", *lines]) for lines in (found.reasons, found.turns or ["nothing"]))
        lines = (found.verdict, change, why, numbers, turns)
        return Text.of("**{}**{}, because\n{}{}\n\nWhat would change this recommendation:\n{}", *lines)

    def to_json(self) -> Record:
        """What decision.json holds."""
        values = {"headline": str(self.summary()), "recommendation": as_json(self.recommendation)}
        return {**values, "plan_id": self.record["plan_id"], "is_stale": self.is_stale}


def decide(study: Study, title: str = "") -> Decision:
    """The decision on the study's forecast; ValueError where 07_calendar was not run yet.

    decide(Study.open("demo")).advice()
    """
    record = study.load("calendar.json", "07_calendar")
    before = record["made_by"]["read"].get("plans.json")
    if before and (study.folder / "plans.json").exists():
        study.load("plans.json", "02_topology")
    return Decision(record=record, title=title, is_stale=bool(before) and study.read.get("plans.json") != before)
