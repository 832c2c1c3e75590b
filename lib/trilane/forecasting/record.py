"""The JSON object of a forecast in sentences and tables: the same ones in 07, in 08 and on the command line."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trilane.forecasting.request import ForecastRequest
from trilane.utils.numbers import amount, with_bounds, with_interval
from trilane.utils.tables import Columns, Table, Text
from trilane.utils.validation import shipped_json

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
MEANING = {
    "p_miss_deadline": "probability of MISSING the deadline (ending after that day); null without --deadline",
    "p_overrun_allocation": "probability of OVERRUNNING the allocation of GPU-hours; null without --allocation",
    "intervals": "5 % and 95 % of the simulated runs",
    "ramp.days": "the ramp's iterations at the predicted seconds of each batch size alone; the interval has all",
}
RATES = {"per_node_year": "node and year", "per_year": "year"}
WORDS = {  # an assumption's field: what it is, the unit of its value as a person writes it, and that unit's size
    "startup_s": ("start of a job, to its first iteration", "minutes", 60.0),
    "reshape_s": ("restart with another TP or PP", "minutes", 60.0),
    "queue_s": ("wait in the queue", "hours", 3600.0),
    "repair_hours": ("repair of a node", "hours", 1.0),
    "spare_nodes": ("spare nodes", "", 1.0),
    "job_hours": ("longest job", "hours", 1.0),
    "evaluation_every": ("iterations from one evaluation to the next", "", 1.0),
    "evaluation_iters": ("iterations of an evaluation", "", 1.0),
    "checkpoint_s": ("time between checkpoints", "minutes", 60.0),
    "write_bytes_per_s": ("writing a checkpoint, per node", "GB/s", 1e9),
    "slowdown": ("a long run's seconds per iteration over a benchmark's", "", 1.0),
    "slowdown_spread": ("its standard deviation", "", 1.0),
    "common": ("correlation of the predictions' errors at two batch sizes", "", 1.0),
}
HEADS = ("median", "5 % below", "95 % below")
MOST_LINES = 12  # changes of topology that are printed


def assumptions_of(request: ForecastRequest, spare_nodes: int) -> list[Record]:
    """Every assumption: a name, a value, a source. `spare_nodes` are those that the jobs leave."""
    r = dataclasses.replace(request.risks, spare_nodes=spare_nodes)
    stops = [
        {"what": s.name, "per_node_year": s.per_node_year, "per_year": s.per_year, "source": s.source} for s in r.stops
    ]
    sources = shipped_json("risks")["sources"].items()
    return stops + [{"what": name, "value": getattr(r, name), "source": source} for name, source in sources]


def support_of(record: Record) -> str:
    """What the plan's prediction rests on, in words; "" in an older record without it."""
    return str(record.get("prediction", {}).get("support", {}).get("words", ""))


def unlike(record: Record) -> str:
    """These words where no measured run is near the plan, else ""."""
    words = support_of(record)
    return words if words.startswith("no measured run") else ""


def energy_unit(kwh: float | None) -> tuple[str, float]:
    """The unit for an amount of energy, and its size in kWh: ("MWh", 1000.0), or ("kWh", 1.0) below one MWh."""
    return ("MWh", 1e3) if kwh is None or kwh >= 1e3 else ("kWh", 1.0)


def energy_text(kwh: float) -> str:
    """ "997 MWh", or "4.58 kWh"."""
    unit, each = energy_unit(kwh)
    return f"{kwh / each:,.3g} {unit}" if kwh < 1e3 else f"{kwh / each:,.0f} {unit}"


def probability_text(probability: float) -> str:
    """A share of simulated runs; a few thousand runs resolve nothing below one in a thousand."""
    return "under 0.1 %" if probability < 0.001 else f"{probability:.1%}"


def _with_intervals(rows: Mapping[str, Sequence[Any]], digits: int = 3) -> Columns:
    """A table of rows with median and interval each."""
    return Columns({"": list(rows), **{h: [row[i] for row in rows.values()] for i, h in enumerate(HEADS)}}, digits)


def _in_words(name: str, value: float) -> str:
    """The value of an assumption with its unit; an interval of 0 between checkpoints is Daly's optimum."""
    if name == "checkpoint_s" and not value:
        return "optimum"
    _, unit, size = WORDS.get(name, (name, "", 1.0))
    return f"{amount(value / size)} {unit}".rstrip()


class Described(Table):
    """The sentences and tables of a forecast, all of them from `record`: its JSON, with plan and `dangers`."""

    record: Record

    def to_frame(self) -> "pd.DataFrame":
        """Finish date, days and GPU-hours: median, 5 % and 95 % of the simulated runs."""
        r = self.record
        rows = {"finish": [r["finish"][name][:10] for name in ("p50", "p05", "p95")]}
        for name, key in (("days", "days"), ("GPU-hours", "gpu_hours")):
            rows[name] = [*with_interval(r[key], *r[f"{key}_interval"])]
        return _with_intervals(rows).to_frame()

    def summary(self) -> Text:
        """The plan, when it is finished, what it costs, and how likely it fails either limit."""
        r, s, t = self.record, self.record["shape"], self.record["topology"]
        finish, gpus = {name: day[:10] for name, day in r["finish"].items()}, t["tp"] * t["pp"] * t["dp"]
        overrun = missed = Text()
        if (p := r["p_overrun_allocation"]) is not None:
            template = " of {}: overrun with probability **{}**"
            overrun = Text.of(template, amount(r["allocation"]), probability_text(p))
        if (p := r["p_miss_deadline"]) is not None:
            template = "; the deadline {} is missed with probability **{}**"
            missed = Text.of(template, r["deadline"], probability_text(p))
        return Text.of(
            "**{} layers × {}** ({:.4g} B parameters, {} heads) as {:code}: TP {} × PP {} × DP {}, microbatch {}, {} "
            "of {:code}. {:,.4g} billion tokens are trained by **{}** ({} to {} in nine of ten runs), after "
            "**{} days** and **{} GPU-hours**{}{}.{}",
            *(s["num_layers"], s["hidden_size"], r["parameters"] / 1e9, s["num_attention_heads"], r["plan"]),
            *(t["tp"], t["pp"], t["dp"], t["mbs"], f"{gpus} GPU{'s' * (gpus > 1)}", r["cluster"], r["tokens"] / 1e9),
            *(finish["p50"], finish["p05"], finish["p95"]),
            *(with_interval(r[key], *r[f"{key}_interval"])[0] for key in ("days", "gpu_hours")),
            *(overrun, missed, Text.of(" The prediction has {}.", words) if (words := unlike(r)) else Text()),
        )

    def ramp_summary(self) -> Text:
        """What the ramp takes, and from which batch size on every pipeline stage is at work."""
        r, ramp = self.record, self.record["ramp"]
        return Text.of(
            "The ramp takes **{:,}** of {:,} iterations and **{:.3g} days** of work, at the predicted seconds of each "
            "of its {} batch sizes. From {} sequences on every pipeline stage has a microbatch.",
            *(ramp["iterations"], r["iterations"], ramp["days"], ramp["batch_sizes"], ramp["first_full_gbs"]),
        )

    def checkpoint_summary(self) -> Text:
        """How often the run saves, and why."""
        every, save_s = self.record["checkpoint"]["interval_s"] / 60, self.record["checkpoint"]["save_s"]
        daly = next(a["value"] for a in self.record["assumptions"] if a["what"] == "checkpoint_s") == 0
        reason = f"Daly's optimum for these interruptions and {save_s:.0f} s a save" if daly else "as given"
        return Text.of("A checkpoint every **{:.0f} minutes**: {}.", every, reason)

    @property
    def costs(self) -> Columns:
        """GPU-hours, energy and money: median, 5 % and 95 % of the simulated runs. Unknown rows are left out."""
        r = self.record
        unit, kwh = energy_unit(r["energy_kwh"])
        energy = [e / kwh if e else None for e in (r["energy_kwh"], *r["energy_interval"])]
        rows = {
            "GPU-hours": [r["gpu_hours"], *r["gpu_hours_interval"]],
            f"energy ({unit})": energy,
            "money": [r["cost"], *r["cost_interval"]],
        }
        return _with_intervals({name: row for name, row in rows.items() if row[0] is not None}, digits=1)

    @property
    def delays(self) -> Columns:
        """The causes of delay, the worst first: mean days, and the days that one run in twenty exceeds."""
        rows = self.record["dangers"]
        names = {"cause": "what", "days on average": "mean_days", "one run in 20 loses more than": "days_95"}
        return Columns({head: [row[name] for row in rows] for head, name in names.items()}, digits=2)

    @property
    def assumptions(self) -> Columns:
        """Every assumption with its source."""
        rows = self.record["assumptions"]
        values = [
            " and ".join(f"{amount(a[name])} a {unit}" for name, unit in RATES.items() if a.get(name))
            or _in_words(a["what"], a.get("value", 0.0))
            for a in rows
        ]
        names = [WORDS[a["what"]][0] if a["what"] in WORDS else a["what"] for a in rows]
        return Columns({"what": names, "value": values, "source": [a["source"] for a in rows]})

    def as_text(self) -> str:
        """The forecast as `trilane plan calendar` prints it."""
        r, ramp, ideal = self.record, self.record["ramp"], self.record["ideal"]
        days, hours, batches = r["days_interval"], r["gpu_hours_interval"], f"{ramp['batch_sizes']} batch sizes"
        finish = {name: day[:10] for name, day in r["finish"].items()}
        lines = [
            f"{r['plan']}: {r['tokens']:g} tokens, {r['iterations']} iterations from {r['start']}",
            f"ramp      {ramp['iterations']} iterations, {batches}, {ramp['days']:.2f} days of work",
            f"days      {with_bounds(r['days'], *days)}; {ideal['days']:.1f} without interruptions",
            f"GPU-hours {with_bounds(r['gpu_hours'], *hours)}; {amount(ideal['gpu_hours'])} of work",
            f"finish    {finish['p50']} ({finish['p05']} to {finish['p95']})",
        ]
        if r["p_miss_deadline"] is not None:
            lines.append(f"deadline  {r['deadline']}: missed with probability {r['p_miss_deadline']:.1%}")
        if (p := r["p_overrun_allocation"]) is not None:
            lines.append(f"allocation {r['allocation']:,.0f} GPU-hours: overrun with probability {p:.1%}")
        if r["energy_kwh"] is not None:
            money = f", money {r['cost']:,.0f}" if r["cost"] else ""
            lines.append(f"energy    {energy_text(r['energy_kwh'])}{money}")
        lines.append("lost days " + ", ".join(f"{name} {lost:.1f}" for name, lost in r["lost_days"].items()))
        lines += [f"support   {words}"] if (words := support_of(r)) else []
        jobs = [
            f"  day {j['from_day']:5.1f} to {j['to_day']:5.1f}: gbs {j['gbs'][0]} to {j['gbs'][1]} on {j['nodes']} "
            f"nodes, tp {j['tp']} pp {j['pp']} dp {j['dp']} mbs {j['mbs']} recompute {j['recompute']}"
            for j in r["schedule"]
        ]
        more = [f"  and {len(jobs) - MOST_LINES} more (--json shows all)"] if len(jobs) > MOST_LINES else []
        return "\n".join([*lines, *jobs[:MOST_LINES], *more])
