"""Whether to start a forecast's plan or an alternative, and the page for whoever decides."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from trilane.config.plan import Plan, plan_from_json, read_plan_values
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import SAFE
from trilane.costmodel.shipped import constants_of
from trilane.forecasting.alternatives import Case, Cases, alternatives, levers, on_plan, what_ifs
from trilane.forecasting.forecast import MEMORY, Forecast, Json
from trilane.forecasting.request import ForecastRequest
from trilane.planning.search_result import TIE
from trilane.utils.numbers import amount, chance, with_bounds
from trilane.utils.tables import Columns, DataFrame, Table, Text, as_json
from trilane.utils.validation import from_mapping, require, shipped_json
from trilane.workspace.study import Study

# a limit is kept where at most one simulated run in five fails it: a choice, not a measurement
MOST_RISK = 0.2


def study_plan(
    study: Study, name: str = "", calibration: str = ""
) -> tuple[Plan, Calibration, Json]:
    """A plan, the constants to use, and the file it comes from: a file's plan, or one of the
    study's plans.json by id or label ("": the best). The constants are those that predicted it, or
    what `calibration` names (calibration_for).

        plan, known, source = study_plan(Study.open("demo"))
    """
    if name.endswith(".json"):
        entry, source = read_plan_values(name), {"file": name, "made_by": {}}
    else:
        found, rule = (
            study.load("plans.json", "02_topology"),
            "has this id or label; nor is it a .json file",
        )
        listed = found["plans"] + (
            found.get("risky", []) if name else []
        )  # the best plan is a safe one
        named = [p for p in listed if name in ("", p["id"], p["label"])]
        require(bool(named), "plan", name, f"no plan of study {study.name} {rule}")
        entry, source = named[0], {"file": "plans.json", "made_by": found["made_by"]}
    plan = plan_from_json(entry)
    return plan, constants_of(plan, calibration), source


def calendar_record(found: Forecast, source: Json) -> Json:
    """What calendar.json holds: the forecast, its request, its plan with prediction and source.

    calendar_record(found, {"file": "plan.json", "made_by": {}})
    """
    used = replace(found.request.plan, calibration=found.request.calibration.kept())
    return {
        **found.record,
        "request": found.request.kept(),
        "plan_json": used.to_json(),
        "source": source,
    }


class Lines(tuple[str, ...]):
    """Sentences that a notebook shows as a list."""

    def _repr_markdown_(self) -> str:
        return Text.joined("\n", [Text.of("- {}", line) for line in self])


@dataclass(frozen=True, kw_only=True)
class Decision(Table):
    """The page for whoever decides on a forecast: Decision(asked=forecast(plan, tokens=341e9)).

    `known` is the first plan of 02_topology, where it is of the same model and cluster; `source`
    the file that the plan comes from with what made it, `is_stale` whether that was written again
    since.
    """

    asked: Forecast
    known: Plan | None = None
    title: str = ""
    source: Json = field(default_factory=dict)
    is_stale: bool = False

    @cached_property
    def alternatives(self) -> Cases:
        return alternatives(self.asked)

    @cached_property
    def levers(self) -> Cases:
        return levers(self.forecast)

    @cached_property
    def what_ifs(self) -> Cases:
        return what_ifs(self.forecast)

    @property
    def plan(self) -> Case:
        """The plan as asked."""
        return self.alternatives.kinds["plan"][0]

    @cached_property
    def best(self) -> Case:
        """The first plan of 02_topology where it can run so, or else the fastest of a search by the
        plan's choices.
        """
        r, rivals = self.asked.request, self.alternatives.kinds["topology"]
        fastest = min(
            (self.plan, *rivals), key=lambda case: case.forecast.request.prediction.sec_per_it
        )
        if self.known and self.known.id == r.plan.id:
            return self.plan
        return next(on_plan(r, self.known) if self.known else iter(()), fastest)

    @property
    def origin(self) -> str:
        """Where the best that is known comes from."""
        is_first = self.known and self.known.id == self.best.forecast.request.plan.id
        return "first of 02_topology" if is_first else "fastest of a search"

    @cached_property
    def chosen(self) -> Case:
        """The plan, or what keeps a limit that the plan does not, or saves GPU-hours without more
        days.

        It saves where the difference is above TIE, by its own simulated runs. Nothing is taken
        instead that runs out of memory with a probability above SAFE, or has other GPUs or batches.
        """
        own, found, kinds = self._rank(self.plan), list[Case](), self.alternatives.kinds
        for other in (self.best, *kinds["schedule"], *kinds["topology"]):
            failed, _, hours, days = self._rank(other)
            saves = failed == own[0] and hours < (1 - TIE) * own[2] and days <= own[3]
            is_fair = _sizes(other) == _sizes(self.plan)
            found += [other] if other.is_safe and is_fair and (failed < own[0] or saves) else []
        return min(found, key=self._rank, default=self.plan)

    @property
    def forecast(self) -> Forecast:
        """That of the chosen plan."""
        return self.chosen.forecast

    def _rank(self, case: Case) -> tuple[float, ...]:
        """Failed limits, memory among them; whether it takes a tenth more days than the plan;
        GPU-hours; days.
        """
        days = case.forecast.days(0.5)
        return (
            len([*_failures(case)]),
            days > 1.1 * self.asked.days(0.5),
            case.forecast.gpu_hours(0.5),
            days,
        )

    @property
    def recommendation(self) -> Json:
        """Whether to start the chosen plan, the change that it is, why, and what would change that;
        the `figures` of that plan (Forecast.figures()), empty where none is to start.
        """
        change, failed = (
            "" if self.chosen is self.plan else self.chosen.name,
            [*_failures(self.chosen)],
        )
        verdict = (
            "Do not start it as planned"
            if failed
            else "Start, with one change"
            if change
            else "Start"
        )
        found: Json = {
            "verdict": verdict,
            "change": change,
            "reasons": self.reasons,
            "turns": self.turns,
        }
        return {**found, "figures": {} if failed else self.forecast.figures()}

    @property
    def reasons(self) -> Lines:
        """What the plan fails, what the best that is known fails where it is not chosen, what the
        change costs.
        """
        asked = (
            f"the plan asked for, the {self.origin},"
            if self.best is self.plan
            else "the plan asked for"
        )
        lines = [
            "plans.json was written again since this forecast: run 07_calendar again"
        ] * self.is_stale
        lines += [f"{asked} {failure}" for failure in _failures(self.plan)]
        if self.best.name not in (self.plan.name, self.chosen.name):
            is_near, gpus, gbs = (
                abs(self.best.hours() / self.chosen.hours() - 1) <= TIE,
                *_sizes(self.best),
            )
            other = f"takes {amount(self.best.forecast.days(0.5), 3)} days on {gpus} GPUs by batches of {gbs}"
            near = (
                f"is within {chance(TIE)}, where the predicted order is often wrong"
                if is_near
                else other
            )
            why, less = (
                " and ".join(_failures(self.best)) or near,
                self.best.difference(self.forecast),
            )
            lines.append(
                f"{self.best.name}, the {self.origin}, {why}; it needs {less} than the chosen plan"
            )
        if self.chosen is not self.plan:
            more = self.chosen.difference(self.asked)
            lines.append(f"{self.chosen.name} is predicted to need {more} than the plan asked for")
        return Lines(
            lines or [f"the plan keeps every limit; nothing that was tried saves {chance(TIE)}"]
        )

    @property
    def turns(self) -> Lines:
        """How far the chosen plan's seconds may be off before it fails a limit, or must be before
        it keeps one.
        """
        r, lines = self.forecast.request, list[str]()
        until = (r.deadline - r.start).days + 1.0 if r.deadline else None  # the whole last day
        limits = {
            "deadline": (until, Forecast.days),
            "allocation": (r.allocation, Forecast.gpu_hours),
        }
        for limit, (allowed, spent) in (
            (name, of) for name, of in limits.items() if of[0] is not None
        ):
            # how much longer each may be for all but MOST_RISK of the runs: what interrupts a run
            # grows with its work
            slower = (allowed or 0.0) / spent(self.forecast, 1 - MOST_RISK) - 1
            share, kept = f"{abs(100 * slower):.0f} %", f"four runs of five keep the {limit}"
            much = f"a benchmark at least {share} faster than predicted: then {kept}"
            if slower >= 0:
                much = (
                    f"a benchmark more than {share} slower than predicted: then fewer than {kept}"
                )
            far = f"more GPUs or fewer tokens: no faster iteration alone keeps the {limit}"
            lines.append(far if slower < -0.5 else much)
        if self.chosen is not self.plan:
            lines.append(
                f"a benchmark of {self.chosen.name} before the start: its advantage is only predicted"
            )
        if [*_failures(self.chosen)]:
            able = [case for case in self.levers.kinds["held fixed"] if not [*_failures(case)]]
            lines += [f"{case.name}, which keeps every limit" for case in able[:1]]
        return Lines(lines or ["a benchmark that contradicts the prediction"])

    def verdict(self) -> Text:
        """What to start when, with its date, cost, risks and memory, in one sentence."""
        facts, r = self.forecast.facts(brief=True), self.asked.request
        start = (
            "Do not start on {} as planned: at best {}"
            if [*_failures(self.chosen)]
            else "Start on {} with {}"
        )
        return Text.of(
            "{}**{}**: done by **{}** (19 of 20 runs by {}), **{} GPU-hours**{}, {}, {} of memory with {} risk to run "
            "out of it.",
            Text.of("{}: ", self.title) if self.title else "",
            Text.of(start, r.start, facts["topology"]),
            *(facts["done by"], facts["19 of 20 runs by"], facts["GPU-hours"]),
            Text.of(" ({} at {:g} each)", facts["money"], r.price) if r.price else "",
            *(self.forecast.risks(), facts["memory"], facts[MEMORY]),
        )

    def columns(self) -> Columns:
        """The plan as asked, as recommended, and the best that is known, each with what its figures
        rest on.
        """
        advised = "best that was tried" if [*_failures(self.chosen)] else "recommended"
        cases = {"as asked": self.plan, advised: self.chosen, self.origin: self.best}
        facts = {head: {"plan": case.name, **case.forecast.facts()} for head, case in cases.items()}
        names = [
            name for name in facts["as asked"] if name != "topology"
        ]  # the plan's label has it
        return Columns(
            {"": names, **{head: [of[name] for name in names] for head, of in facts.items()}}
        )

    def dangers(self) -> Columns:
        """The largest causes of delay of the chosen plan with what helps."""
        delays, remedies = self.forecast.delays.columns, shipped_json("risks")["remedies"]
        helps = [remedies.get(cause, "") for cause in delays["cause"]]
        return Columns(
            {name: of[:3] for name, of in {**delays, "what helps": helps}.items()}, digits=1
        )

    @property
    def evidence(self) -> Lines:
        """What was measured, what was fitted to it, and what is assumed."""
        p, r, risks = (
            self.forecast.request.prediction,
            self.forecast.request,
            self.forecast.request.risks,
        )
        count, seconds = (
            p.calibration.rows,
            f"{with_bounds(*self.forecast.seconds)} seconds an iteration",
        )
        rows = f"{count or 'no'} rows {'of your own' if p.calibration.own else 'of others' if count else 'of its own'}"
        idle = ", ".join(f"{s.name} {s.idle_hours:g}" for s in risks.stops if "assumed" in s.source)
        lines = [
            f"measured: {p.support.words}",
            f"fitted to {rows} ({p.calibration.name}): {seconds}",
        ]
        lines += [
            f"assumed: {r.plan.layer} takes the seconds and memory of megatron-core's layer"
        ] * bool(r.plan.layer)
        lines += [f"measured: a checkpoint is written at {risks.storage}"] * bool(risks.write_nodes)
        start = f"minutes to start a job: {risks.startup_s / 60:g}"
        slower = f"iterations {100 * (risks.slowdown - 1):.3g} % slower than in a benchmark"
        return Lines(
            [
                *lines,
                f"assumed: hours lost by each {idle}; {start}; {slower}; sources are in 07_calendar",
            ]
        )

    def notes(self) -> Text:
        """The plan and the file that the figures come from."""
        by, file = self.source.get("made_by", {}), self.source.get("file", "none")
        origin = f", made by {by['notebook']} on {by['time'][:10]}" if by else ""
        late = Text("\n\n**Attention:** plans.json was written again since; run 07_calendar again.")
        end = late if self.is_stale else Text()
        return Text.of(
            "Asked for: plan {:code} of {}{}.{}", self.asked.request.plan.id, file, origin, end
        )

    def to_frame(self) -> DataFrame:
        """A row for each case on the page: its kind, its name, and the numbers of
        Forecast.figures().
        """
        shown = {
            "recommended": (self.chosen,),
            "best known": (self.best,),
            **self.alternatives.kinds,
        }
        return Cases(kinds={**shown, **self.levers.kinds, **self.what_ifs.kinds}).to_frame()

    def view(self) -> DataFrame:
        """The three columns."""
        return self.columns().view()

    def summary(self) -> str:
        return f"{self.recommendation['verdict']}: {self.chosen.name}"

    def to_json(self) -> Json:
        """What decision.json holds."""
        values = {"headline": str(self.verdict()), "recommendation": as_json(self.recommendation)}
        values |= {
            "plan_id": self.asked.request.plan.id,
            "recommended_id": self.forecast.request.plan.id,
        }
        return {
            **values,
            "is_stale": self.is_stale,
            "cases": as_json(self.to_frame().to_dict("records")),
        }


def _failures(case: Case) -> Iterator[str]:
    """Which limits a case fails, memory among them."""
    f, limits = case.forecast.record, {"misses the deadline": "p_miss_deadline"}
    limits |= {"overruns the allocation": "p_overrun_allocation"}
    for what, p in ((what, f[name] or 0) for what, name in limits.items()):
        if p > MOST_RISK:
            yield f"{what} with {chance(p, case.forecast.request.runs)} probability, above {chance(MOST_RISK)}"
    if not case.is_safe:
        risk = chance(case.forecast.fullest.oom_probability)
        yield f"runs out of memory with {risk} probability, above {chance(SAFE)}"


def _sizes(case: Case) -> tuple[int, int]:
    """GPUs and sequences of an iteration that its plan is for."""
    t = case.forecast.request.plan.topology
    return t.gpus, t.gbs


def decide(study: Study, title: str = "") -> Decision:
    """The decision on the study's forecast; ValueError where 07_calendar was not run yet.

    decide(Study.open("demo")).verdict()
    """
    record = study.load("calendar.json", "07_calendar", request=dict, plan_json=dict, source=dict)
    request = {**record["request"], "plan": record["plan_json"]}
    asked = Forecast(request=from_mapping(ForecastRequest, request, "request"))
    before, plan, known = (
        record["made_by"]["read"].get("plans.json"),
        asked.request.plan,
        list[Plan](),
    )
    if (study.folder / "plans.json").exists():
        known = [p for p in study.plans()[:1] if (p.shape, p.cluster) == (plan.shape, plan.cluster)]
    is_stale = bool(before) and study.read.get("plans.json") != before
    return Decision(
        asked=asked,
        known=next(iter(known), None),
        title=title,
        source=record["source"],
        is_stale=is_stale,
    )
