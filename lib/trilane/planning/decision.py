"""Whether to start a forecast's plan or an alternative, and the page for whoever decides."""

from dataclasses import field, replace
from functools import cached_property

from trilane.config.plan import Plan, read_plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import BALANCED, SAFE
from trilane.costmodel.shipped import constants_of
from trilane.forecasting.forecast import MEMORY, Forecast
from trilane.forecasting.request import ForecastRequest
from trilane.planning.alternatives import (
    Case,
    Cases,
    alternatives,
    levers,
    what_ifs,
)
from trilane.planning.search_result import TIE
from trilane.utils.frozen import frozen
from trilane.utils.numbers import amount, chance, with_bounds
from trilane.utils.tables import Columns, DataFrame, Json, Lines, Table, Text, as_json, displayed
from trilane.utils.validation import from_mapping, shipped_json
from trilane.workspace.study import Study

# a limit is kept where at most one simulated run in five fails it: a choice, not a measurement
MOST_RISK = 0.2
FASTEST = "fastest of a search"
SHOWN = (
    "kind case gpus days_p50 gpu_hours_p50 money_p50 memory_gib oom_probability p_miss_deadline "
    "p_overrun_allocation note"
)
MOST_DAYS = 1.1  # of those of the plan: a change that takes longer is another plan


def study_plan(
    study: Study, name: str = "", calibration: str = ""
) -> tuple[Plan, Calibration, Json]:
    """A plan, the constants to use, and the file it comes from: a file's plan, or one of the
    study's plans.json by id or label ("": the best). The constants are those that predicted it, or
    what `calibration` names (calibration_for).

        plan, known, source = study_plan(Study.open("demo"))
    """
    source = {"file": name, "made_by": {}}
    if not name.endswith(".json"):
        made_by = study.load("plans.json", "02_topology")["made_by"]
        source = {"file": "plans.json", "made_by": made_by}
        name = f"{study.folder / 'plans.json'}:{name}"
    plan = read_plan(name)
    return plan, constants_of(plan, calibration), source


def calendar_record(found: Forecast, source: Json) -> Json:
    """What calendar.json holds: the forecast, its request, its plan with prediction and source.

    calendar_record(found, {"file": "plan.json", "made_by": {}})
    """
    r = found.request
    plan = replace(r.plan, calibration=r.calibration.kept())
    request = {"request": r.kept(), "plan_json": plan.to_json()}
    return {**found.record, **request, "source": source}


@frozen
class Decision(Table):
    """The page for whoever decides on a forecast: Decision(asked=forecast(plan, tokens=341e9)).

    `source` is the file that the plan comes from with what made it, `is_stale` whether that was
    written again since, `ifs` are cases that were asked for (alternatives.asked_case).
    """

    asked: Forecast
    title: str = ""
    source: Json = field(default_factory=dict)
    is_stale: bool = False
    ifs: tuple[str, ...] = ()

    @cached_property
    def alternatives(self) -> Cases:
        return alternatives(self.asked)

    @cached_property
    def levers(self) -> Cases:
        return levers(self.forecast)

    @cached_property
    def what_ifs(self) -> Cases:
        return what_ifs(self.forecast, self.ifs)

    @property
    def plan(self) -> Case:
        """The plan as asked."""
        return self.alternatives.rows[0]

    @cached_property
    def best(self) -> Case:
        """The fastest of the plan and of a search by its choices."""
        cases = self.alternatives.rows
        return min(cases, key=lambda case: case.forecast.request.prediction.sec_per_it)

    @cached_property
    def chosen(self) -> Case:
        """The plan, or what keeps a limit that the plan does not, or saves GPU-hours without more
        days.

        It saves where the difference is above TIE, by its own simulated runs. What a search ranks
        runs out of memory with SAFE probability at most, and has the plan's GPUs and batch.
        """
        failed, _, hours, days = self._rank(self.plan)
        better = []
        for other in self.alternatives.rows[1:]:
            rank = self._rank(other)
            saves = rank[0] == failed and rank[2] < (1 - TIE) * hours and rank[3] <= days
            if rank[0] < failed or saves:
                better.append(other)
        return min(better, key=self._rank, default=self.plan)

    @property
    def forecast(self) -> Forecast:
        """That of the chosen plan."""
        return self.chosen.forecast

    def _rank(self, case: Case) -> tuple[float, ...]:
        """Failed limits, memory among them; whether it takes a tenth more days than the plan;
        GPU-hours; days.
        """
        days = case.forecast.days(0.5)
        is_slow = days > MOST_DAYS * self.asked.days(0.5)
        return len(_failures(case)), is_slow, case.hours(), days

    @property
    def recommendation(self) -> Json:
        """Whether to start the chosen plan, the change that it is, why, and what would change that;
        the `figures` of that plan (Forecast.figures()), empty where none is to start.
        """
        verdict = "Start"
        change = ""
        if self.chosen is not self.plan:
            verdict = "Start, with one change"
            change = self.chosen.name
        figures = self.forecast.figures()
        if _failures(self.chosen):
            verdict = "Do not start it as planned"
            figures = {}
        reasons = {"reasons": self.reasons, "turns": self.turns}
        return {"verdict": verdict, "change": change, **reasons, "figures": figures}

    @property
    def reasons(self) -> Lines:
        """What the plan fails, what the fastest of a search fails where it is not chosen, what the
        change costs.
        """
        lines = []
        if self.is_stale:
            lines.append("plans.json was written again since this forecast: run 07_calendar again")
        asked = "the plan asked for"
        if self.best is self.plan:
            asked += f", the {FASTEST},"
        lines += [f"{asked} {failure}" for failure in _failures(self.plan)]
        if self.best.name not in (self.plan.name, self.chosen.name):
            usual = "saves too little, or takes longer"
            why = " and ".join(_failures(self.best)) or usual
            need = f"{self.best.difference(self.forecast)} relative to the chosen plan"
            lines.append(f"{self.best.name}, the {FASTEST}, {why}; {need}")
        if self.chosen is not self.plan:
            more = self.chosen.difference(self.asked)
            lines.append(f"{self.chosen.name}: {more} relative to the plan asked for, predicted")
        usual = f"the plan keeps every limit; no other topology saves {chance(TIE)}"
        lines = lines or [usual]
        for lever in self.levers.rows[:1]:
            if lever.hours() < (1 - TIE) * self.chosen.hours():
                lines.append(f"the largest lever: {lever.name}, {lever.note}")
        return Lines(lines)

    @property
    def turns(self) -> Lines:
        """How far the chosen plan's seconds may be off before it fails a limit, or must be before
        it keeps one.
        """
        r = self.forecast.request
        lines = []
        if r.deadline:
            until = (r.deadline - r.start).days + 1  # the whole last day
            lines.append(_margin("deadline", until / self.forecast.days(1 - MOST_RISK) - 1))
        if r.allocation:
            spent = self.forecast.gpu_hours(1 - MOST_RISK)
            lines.append(_margin("allocation", r.allocation / spent - 1))
        if self.chosen is not self.plan:
            name = self.chosen.name
            lines.append(f"a benchmark of {name} before the start: its advantage is only predicted")
        if _failures(self.chosen):
            able = [case for case in self.levers.rows if not _failures(case)]
            lines += [f"{case.name}, which keeps every limit" for case in able[:1]]
        return Lines(lines or ["a benchmark that contradicts the prediction"])

    def verdict(self) -> Text:
        """What to start when, with its date, cost, risks and memory, in one sentence."""
        facts = self.forecast.facts()
        r = self.asked.request
        start = "Start on {} with {}"
        if _failures(self.chosen):
            start = "Do not start on {} as planned: at best {}"
        return Text.of(
            "{}**{}**: done by **{}** (the median; 19 of 20 runs by {}), **{} GPU-hours**{}, {}, "
            "{} of memory with {} risk to run out of it.",
            Text.of("{}: ", self.title) if self.title else "",
            Text.of(start, r.start, facts["topology"]),
            facts["done by"],
            facts["19 of 20 runs by"],
            facts["GPU-hours"],
            f", money {facts['money']}" if "money" in facts else "",
            self.forecast.risks(),
            facts["memory"],
            facts[MEMORY],
        )

    def columns(self) -> Columns:
        """The plan as recommended, as asked, and the fastest of a search; one column a plan."""
        if _failures(self.chosen):
            advised = "best that was tried"
        else:
            advised = "recommended"
        cases = {advised: self.chosen, "as asked": self.plan, FASTEST: self.best}
        heads: dict[str, str] = {}  # of each plan, one column
        for head, case in cases.items():
            heads[case.name] = ", ".join(filter(None, [heads.get(case.name), head]))
        columns = {"": ["plan", *self.asked.facts()]}
        for case in cases.values():
            columns[heads[case.name]] = [case.name, *case.forecast.facts().values()]
        # the plan's label has its topology
        return Columns({head: [cells[0], *cells[2:]] for head, cells in columns.items()})

    def dangers(self) -> Columns:
        """The largest causes of delay of the chosen plan with what helps."""
        remedies = shipped_json("risks")["remedies"]
        worst = {name: cells[:3] for name, cells in self.forecast.delays.columns.items()}
        worst["what helps"] = [remedies.get(cause, "") for cause in worst["cause"]]
        return Columns(worst)

    @property
    def evidence(self) -> Lines:
        """What was measured, what was fitted to it, and what is assumed."""
        r = self.forecast.request
        p = r.prediction
        known = p.calibration
        rows = "no rows of its own"
        if known.rows:
            rows = f"{known.rows} rows of {'your own' if known.own else 'others'}"
        seconds = f"{with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi)} seconds an iteration"
        lines = [
            f"measured: {p.support.words}",
            f"fitted to {rows} ({known.name}): {seconds}",
        ]
        if r.plan.layer:
            takes = "takes the seconds and memory of megatron-core's layer"
            lines.append(f"assumed: {r.plan.layer} {takes}")
        if r.risks.write_nodes:
            lines.append(f"measured: a checkpoint is written at {r.risks.storage}")
        stops = [stop for stop in r.risks.stops if "assumed" in stop.source]
        idle = ", ".join(f"{stop.name} {stop.idle_hours:g}" for stop in stops)
        start = f"minutes to start a job: {r.risks.startup_s / 60:g}"
        slower = f"iterations {100 * (r.risks.slowdown - 1):.3g} % slower than in a benchmark"
        lines.append(
            f"assumed: hours lost by each {idle}; {start}; {slower}; sources are in 07_calendar"
        )
        return Lines(lines)

    def notes(self) -> Text:
        """The plan and the file that the figures come from."""
        made_by = self.source.get("made_by")
        origin = self.source.get("file", "none")
        if made_by:
            origin += f", made by {made_by['notebook']} on {made_by['time'][:10]}"
        plan = self.asked.request.plan
        routing = BALANCED if plan.shape.experts else ""
        return Text.of("Asked for: plan {:code} of {}. {}", plan.id, origin, routing)

    def to_frame(self) -> DataFrame:
        """A row for each case on the page: its kind, its name, and the numbers of
        Forecast.figures().
        """
        first = replace(self.chosen, kind="recommended"), replace(self.best, kind="fastest")
        others = (*self.alternatives.rows, *self.levers.rows, *self.what_ifs.rows)
        return Cases(rows=(*first, *others)).to_frame()

    def view(self) -> DataFrame:
        """The three columns."""
        return self.columns().view()

    def summary(self) -> str:
        return f"{self.recommendation['verdict']}: {self.chosen.name}"

    def to_json(self) -> Json:
        """What decision.json holds."""
        return {
            "headline": self.verdict().plain,
            "recommendation": as_json(self.recommendation),
            "plan_id": self.asked.request.plan.id,
            "recommended_id": self.forecast.request.plan.id,
            "is_stale": self.is_stale,
            "cases": as_json(self.to_frame().to_dict("records")),
        }


def _failures(case: Case) -> list[str]:
    """Which limits a case fails, memory among them."""
    r = case.forecast.record
    limits = {
        "misses the deadline": r["p_miss_deadline"] or 0,
        "overruns the allocation": r["p_overrun_allocation"] or 0,
    }
    runs = case.forecast.request.runs
    lines = [
        f"{what} with {chance(p, runs)} probability, above {chance(MOST_RISK)}"
        for what, p in limits.items()
        if p > MOST_RISK
    ]
    prediction = case.forecast.request.prediction
    if prediction.is_risky:
        risk = chance(prediction.oom_probability)
        lines.append(f"runs out of memory with {risk} probability, above {chance(SAFE)}")
    return lines


def _margin(limit: str, slower: float) -> str:
    """How much longer an iteration may be for all but MOST_RISK of the runs: what interrupts a run
    grows with its work.
    """
    share = f"{abs(100 * slower):.0f} %"
    kept = f"four runs of five keep the {limit}"
    if slower < 0:
        return f"a benchmark at least {share} faster than predicted: then {kept}"
    return f"a benchmark more than {share} slower than predicted: then fewer than {kept}"


def decision_text(values: Json) -> str:
    """What decision.json holds, for a terminal: the verdict, its reasons, every other case."""
    import pandas as pd

    lines = [values["headline"], *[f"- {reason}" for reason in values["recommendation"]["reasons"]]]
    frame = pd.DataFrame(values["cases"])
    table = displayed(frame[~frame["kind"].isin(["plan", "fastest"])], SHOWN)
    lines.append(table.to_string(index=False, float_format=amount, na_rep=""))
    return "\n".join(lines)


def decide(study: Study, title: str = "", ifs: str = "") -> Decision:
    """The decision on the study's forecast; ValueError where 07_calendar was not run yet. `ifs` are
    further cases, such as "gpus=256 tokens=+30%".

    decide(Study.open("demo")).verdict()
    """
    record = study.load("calendar.json", "07_calendar", request=dict, plan_json=dict, source=dict)
    request = {**record["request"], "plan": record["plan_json"]}
    asked = Forecast(request=from_mapping(ForecastRequest, request, "request"))
    before = record["made_by"]["read"].get("plans.json")
    if before and (study.folder / "plans.json").is_file():
        study.values("plans.json", "02_topology")  # study.read has its hash of today
    is_stale = bool(before) and study.read.get("plans.json") != before
    return Decision(
        asked=asked,
        title=title,
        source=record["source"],
        is_stale=is_stale,
        ifs=tuple(ifs.split()),
    )
