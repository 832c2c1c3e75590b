"""What a person needs who decides on a run: each figure with its provenance, the largest risks, the alternatives."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trilane.forecasting.alternatives import Recommendation, recommend
from trilane.forecasting.record import Described, Record, energy_text, support_of, unlike
from trilane.utils.numbers import amount, with_bounds, with_interval
from trilane.utils.tables import Columns, Html, Table, Text, show
from trilane.utils.validation import shipped_json
from trilane.workspace.study import Study

if TYPE_CHECKING:
    import pandas as pd


PREDICTED = ("sec_per_it", "memory_bytes")  # what a plan in plans.json and the forecast both predict
SHOWN, OF_A_KIND = 3, 2  # risks, and shapes and topologies each, that the page lists


@dataclass(frozen=True)
class Fact:
    """A figure, its kind, its source, and the notebook that computed it ("": none).

    Kinds: given, computed, measured, fitted, published, assumed, simulated.
    """

    what: str
    value: str
    kind: str
    source: str
    notebook: str = ""


@dataclass(frozen=True)
class Facts(Table):
    """Facts as a table; a notebook's name links to its report where that is one of `reports`."""

    facts: tuple[Fact, ...]
    reports: frozenset[str] = frozenset()

    def to_frame(self) -> "pd.DataFrame":
        """A row for each fact: value, kind, source, notebook."""
        import pandas as pd

        rows = [(f.what, f.value, f.kind, f.source, f.notebook) for f in self.facts]
        return pd.DataFrame(rows, columns=["", "value", "kind", "from", "computed by"])

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        names = frame["computed by"]
        links = [Html.link(name, f"{name}.html") if name in self.reports else name for name in names]
        return show(frame.assign(**{"computed by": links}))


@dataclass(frozen=True, kw_only=True)
class Decision(Described):
    """A study's calendar.json, and what its other files add: proposed shapes, the backtest, the current plans."""

    record: Record
    plans: Record
    sizing: Record
    backtest_error: float | None = None
    title: str = ""
    reports: frozenset[str] = frozenset()

    def headline(self) -> Text:
        """The title and the forecast's summary."""
        return Text.of("{} {}", self.title, self.summary())

    @property
    def inconsistencies(self) -> list[str]:
        """Files of the study that belong to another plan than the forecast, or predict it differently."""
        source, file, plan = self.record["source"], self.record["source"]["file"], self.record["plan_id"]
        given, entry, found = source["prediction"], self._entry, []
        if source["made_by"] and entry is None:
            found.append(f"{file} was written again and no longer holds plan {plan}; run 07_calendar again")
        elif source["made_by"] and entry and any(entry["prediction"][n] != given[n] for n in PREDICTED):
            found.append(f"{file} was written again and predicts plan {plan} differently; run 07_calendar again")
        if not self._agrees:
            numbers = " and ".join(f"{name}={given[name]:.6g}" for name in PREDICTED if name in given)
            found.append(f"{file} predicts {numbers} for plan {plan}, with another calibration")
        return found

    def notes(self) -> Text:
        """The plan and the file that the figures come from, and what in the study belongs to another plan."""
        source, by = self.record["source"], self.record["source"]["made_by"]
        origin = f", made by {by['notebook']} on {by['time']}" if by else ""
        text = [Text.of("Plan {:code} of {}{}.", self.record["plan_id"], source["file"], origin)]
        if not by and self.plans and self._entry is None:
            other = "The plans of {} in this study are other ones; none of these figures is theirs."
            text.append(Text.of(other, "02_topology"))
        return Text.joined("\n\n", [*text, *(Text.of("**Attention:** {}.", note) for note in self.inconsistencies)])

    @property
    def _entry(self) -> Record | None:
        """The forecast's plan in plans.json as it is now."""
        plan = self.record["plan_id"]
        listed = self.plans.get("plans", []) + self.plans.get("risky", [])
        return next((p for p in listed if p["id"] == plan), None)

    @property
    def _agrees(self) -> bool:
        """Whether the plan's file predicts exactly what the forecast uses."""
        given = self.record["source"]["prediction"]
        return all(name not in given or given[name] == self.record[name] for name in PREDICTED)

    @property
    def _proposals(self) -> list[Record]:
        """The shapes that 01_sizing proposed, the plan's own among them; none where they are for another model."""
        own = (self.record["shape"]["num_layers"], self.record["shape"]["hidden_size"])
        found = self.sizing.get("proposals", [])
        return found if own in [(p["layers"], p["hidden"]) for p in found] else []

    def risks(self) -> Columns:
        """The largest causes of delay, and what helps against each."""
        columns = {head: values[:SHOWN] for head, values in self.delays.columns.items()}
        remedies = shipped_json("risks")["remedies"]
        return Columns({**columns, "what helps": [remedies.get(cause, "") for cause in columns["cause"]]}, digits=1)

    def alternatives(self) -> Columns:
        """Other shapes, topologies and schedules: cost in GPU-hours and days, relative to the plan's.

        OF_A_KIND shapes and topologies; 07_calendar has all. Shapes are not equally large: theirs are per parameter.
        """
        c, s = self.record, self.record["shape"]
        rows: list[tuple[str, str, float, float]] = []
        own = [p for p in self._proposals if (p["layers"], p["hidden"]) == (s["num_layers"], s["hidden_size"])]
        for p in [p for p in self._proposals if p not in own][:OF_A_KIND]:
            name = f"{p['layers']} × {p['hidden']}, {p['params'] / 1e9:.4g} B, {p['label']}"
            rows.append(("shape, per parameter", name, *_relative(p, own[0], own[0]["params"] / p["params"])))
        plan = c["schedules"][0] if c["schedules"] and c["schedules"][0]["days"] else c["ideal"]
        others = [("topology", o) for o in c["rivals"][:OF_A_KIND]] + [("schedule", o) for o in c["schedules"][1:]]
        rows += [(kind, o["name"], *_relative(o, plan)) for kind, o in others if o["days"]]
        columns = {
            "what": [kind for kind, *_ in rows],
            "alternative": [name for _, name, *_ in rows],
            "cost (GPU-hours)": [f"{hours - 1:+.1%}" for *_, hours, _ in rows],
            "days": [f"{days - 1:+.1%}" for *_, days in rows],
        }
        return Columns(columns)

    def options(self) -> Html:
        """The risks and the alternatives next to each other where the page is wide enough."""
        tables = (Html(table._repr_html_()) for table in (self.risks(), self.alternatives()))
        return Html.of('<div class="pair"><div>{}</div><div>{}</div></div>', *tables)

    @property
    def facts(self) -> Facts:
        """Every figure of the page with its provenance."""
        made_by = self.record.get("made_by", {}).get("notebook", "07_calendar")
        planner = (self._agrees and self.record["source"]["made_by"].get("notebook")) or made_by
        found = [*self._predicted(planner), *self._simulated(made_by)]
        if self.backtest_error is not None:
            error, source = f"{self.backtest_error:.1%} (median)", "rows that the constants were not fitted to"
            found.append(Fact("error of predicted time", error, "measured", source, "06_backtest"))
        return Facts(tuple(found), self.reports)

    def _predicted(self, planner: str) -> Iterator[Fact]:
        """The plan and what is predicted for one iteration of it."""
        c, seconds, (low, high) = self.record, self.record["sec_per_it"], self.record["sec_interval"]
        kind, fitted = "assumed", "unfitted constants"
        if c["fitted_rows"]:
            kind, fitted = "fitted", f"constants fitted to {c['fitted_rows']} measured rows"
        source = f"{fitted}, 90 % interval {low / seconds - 1:+.1%} to {high / seconds - 1:+.1%}"
        yield Fact("plan", c["plan_id"], "given", f"{c['source']['file']}: {c['plan']}", planner)
        yield Fact(
            "tokens", f"{c['tokens'] / 1e9:,.4g} billion", "given", "the request, as start, ramp and capacity are"
        )
        yield Fact("iterations", f"{c['iterations']:,}", "computed", "Megatron-LM's ramp rule")
        yield Fact("seconds per iteration", with_bounds(seconds, low, high), kind, source, planner)
        if words := support_of(c):
            words = (
                words.split(":")[0].replace("no measured run like this", "none") if unlike(c) else words
            )  # above it is whole
            yield Fact("measured runs like it", words, "measured", "the rows that ship; docs/planner.md", planner)
        for m in c["measured"][:2]:
            ratio = f"{m['seconds']:.4g} s, predicted / measured {seconds / m['seconds']:.3f}"
            source = f"row {m['row']} of the public documents"
            yield Fact("the same run, measured", ratio, "measured", source, "06_backtest")
        free, card = (c["card_bytes"] - c["memory_bytes"]) / 2**30, c["card_bytes"] / 2**30
        memory = f"{free:.3g} of {card:.3g} GiB, P(out of memory) {c['oom_probability']:.1%}"
        yield Fact("free memory", memory, "fitted", "the fullest stage; docs/planner.md", planner)

    def _simulated(self, made_by: str) -> Iterator[Fact]:
        """What the forecast gives for the whole run."""
        c, ideal = self.record, self.record["ideal"]
        days, hours = c["days_interval"], c["gpu_hours_interval"]
        without, lost = f"{ideal['days']:.4g} without the interruptions below", sum(c["lost_days"].values())
        yield Fact("days", with_bounds(c["days"], *days), "simulated", without, made_by)
        text = with_bounds(c["gpu_hours"], *hours)
        yield Fact("GPU-hours", text, "simulated", f"{amount(ideal['gpu_hours'])} of iterations", made_by)
        text = f"{lost:.3g} days"
        yield Fact("lost beside iterations", text, "assumed", "docs/calendar.md", made_by)
        if c.get("energy_kwh"):
            source = "maximum of the node's data sheet, building 1.2: an upper bound"
            yield Fact("energy", energy_text(c["energy_kwh"]), "assumed", source, made_by)
        if c.get("cost"):
            yield Fact("money", f"{c['cost']:,.0f}", "given", "GPU-hours at the given price", made_by)

    @property
    def recommendation(self) -> Recommendation:
        """Whether to start, why, and what would turn it."""
        return recommend(self.record)

    def advice(self) -> Text:
        """The recommendation as Markdown."""
        found = self.recommendation
        change = Text.of(": **{}**", found.change) if found.change else Text()
        turns = Text.joined("\n- ", ["", *found.turns]) if found.turns else Text("\n- nothing that was counted here")
        lines = (found.verdict, change, Text.joined("\n- ", ["", *found.reasons]), self._recommended(), turns)
        return Text.of("**{}**{}, because\n{}{}\n\nWhat would change this recommendation:\n{}", *lines)

    def _recommended(self) -> Text:
        """Date, cost and memory of the plan that is recommended; nothing where none is."""
        f, card = self.recommendation.figures, self.record["card_bytes"]
        if not f:
            return Text()
        finish = {name: day[:10] for name, day in f["finish"].items()}
        return Text.of(
            "\n\nThat plan is finished by **{}** ({} to {} in nine of ten runs), after {} days and {} GPU-hours{}; it "
            "takes {:.3g} of {:.3g} GiB and runs out of memory with a probability of **{:.1%}**.",
            *(finish["p50"], finish["p05"], finish["p95"]),
            *(with_interval(f[name], *f[f"{name}_interval"])[0] for name in ("days", "gpu_hours")),
            f" ({f['cost']:,.0f} of money)" if f["cost"] else "",
            *(f["memory_bytes"] / 2**30, card / 2**30, f["oom_probability"]),
        )

    def to_json(self) -> Record:
        """What decision.json holds."""
        return {
            "headline": str(self.summary()),
            "recommendation": self.recommendation.to_json(),
            "plan_id": self.record["plan_id"],
            "inconsistencies": self.inconsistencies,
            "facts": [vars(fact) for fact in self.facts.facts],
        }


def _relative(other: Record, plan: Record, share: float = 1.0) -> tuple[float, float]:
    """GPU-hours and days of `other`, relative to the plan's, times `share`."""
    return other["gpu_hours"] / plan["gpu_hours"] * share, other["days"] / plan["days"] * share


def decide(study: Study, title: str = "") -> Decision:
    """The decision on the study's forecast; ValueError where 07_calendar was not run yet."""

    def optional(name: str, made_by: str) -> Record:
        return study.load(name, made_by) if (study.folder / name).exists() else {}

    return Decision(
        record=study.load("calendar.json", "07_calendar"),
        plans=optional("plans.json", "02_topology"),
        sizing=optional("sizing.json", "01_sizing"),
        backtest_error=optional("backtest.json", "06_backtest").get("summary", {}).get("median"),
        title=title,
        reports=frozenset(path.stem for path in study.folder.glob("*.ipynb")),
    )
