"""A forecast as one JSON object, and the sentences and tables that show such an object: in 07, 08 and the command."""

import dataclasses
import html
from typing import Any

from trilane.forecasting.energy import energy_text, energy_unit
from trilane.forecasting.failures import SOURCES
from trilane.forecasting.request import ForecastRequest
from trilane.utils.tables import Columns, Text

Record = dict[str, Any]
MEANING = {
    "p_miss_deadline": "probability of MISSING the deadline (ending after that day); null without --deadline",
    "p_overrun_allocation": "probability of OVERRUNNING the allocation of GPU-hours; null without --allocation",
    "intervals": "5 % and 95 % of the simulated runs",
    "ramp.days": "the ramp's iterations at the predicted seconds of each batch size alone; the interval has all",
}
MOST_LINES = 12  # changes of topology that are printed


def assumptions(request: ForecastRequest, spare_nodes: int) -> list[Record]:
    """Every assumption: a name, a value, a source. `spare_nodes` are those that the jobs leave."""
    r = dataclasses.replace(request.risks, spare_nodes=spare_nodes)
    stops = [
        {"what": s.name, "per_node_year": s.per_node_year, "per_year": s.per_year, "source": s.source} for s in r.stops
    ]
    names = [f.name for f in dataclasses.fields(r) if f.name != "stops"]
    return stops + [{"what": name, "value": getattr(r, name), "source": SOURCES[name]} for name in names]


def probability_text(probability: float) -> str:
    """A share of simulated runs; a few thousand runs resolve nothing below one in a thousand."""
    return "under 0.1 %" if probability < 0.001 else f"{probability:.1%}"


def headline(record: Record) -> Text:
    """The plan, when it is finished, what it costs, and how likely it fails either limit."""
    s, t = record["shape"], record["topology"]
    low, high = (day[:10] for day in (record["finish"]["p05"], record["finish"]["p95"]))
    text = (
        f"**{s['num_layers']} layers × {s['hidden_size']}** ({record['parameters'] / 1e9:.4g} B parameters, "
        f"{s['num_attention_heads']} heads) as `{html.escape(record['plan'])}`: "
        f"TP {t['tp']} × PP {t['pp']} × DP {t['dp']}, "
        f"microbatch {t['mbs']}, {t['tp'] * t['pp'] * t['dp']} GPUs of `{record['cluster']}`. "
        f"{record['tokens'] / 1e9:,.4g} billion tokens are trained by **{record['finish']['p50'][:10]}** "
        f"({low} to {high} in nine of ten runs), after **{record['days']:,.4g} days** and "
        f"**{record['gpu_hours']:,.0f} GPU-hours**"
    )
    if (p := record["p_overrun_allocation"]) is not None:
        text += f" of {record['allocation']:,.0f}: overrun with probability **{probability_text(p)}**"
    if (p := record["p_miss_deadline"]) is not None:
        text += f"; the deadline {record['deadline']} is missed with probability **{probability_text(p)}**"
    return Text(text + ".")


def ramp_text(record: Record) -> Text:
    """What the ramp takes, and from which batch size on every pipeline stage is at work."""
    ramp = record["ramp"]
    return Text(
        f"The ramp takes **{ramp['iterations']:,}** of {record['iterations']:,} iterations and **{ramp['days']:.3g} "
        f"days** of work, at the predicted seconds of each of its {ramp['batch_sizes']} batch sizes. From "
        f"{ramp['first_full_gbs']} sequences on every pipeline stage has a microbatch."
    )


def checkpoint_text(record: Record) -> Text:
    """How often the run saves, and why."""
    every, save_s = record["checkpoint"]["interval_s"] / 60, record["checkpoint"]["save_s"]
    daly = next(a["value"] for a in record["assumptions"] if a["what"] == "checkpoint_s") == 0
    reason = f"Daly's optimum for these interruptions and {save_s:.0f} s a save" if daly else "as given"
    return Text(f"A checkpoint every **{every:.0f} minutes**: {reason}.")


def costs(record: Record) -> Columns:
    """GPU-hours, energy and money: median, 5 % and 95 % of the simulated runs. Unknown rows are left out."""
    energy = [record["energy_kwh"], *record["energy_interval"]]
    unit, kwh = energy_unit(energy[0])
    rows = {
        "GPU-hours": [record["gpu_hours"], *record["gpu_hours_interval"]],
        f"energy ({unit})": [e / kwh if e else None for e in energy],
        "money": [record["cost"], *record["cost_interval"]],
    }
    known = {name: row for name, row in rows.items() if row[0] is not None}
    heads = ("median", "5 % below", "95 % below")
    return Columns({"": list(known), **{h: [row[i] for row in known.values()] for i, h in enumerate(heads)}}, digits=1)


def delays(rows: list[Record], **columns: Any) -> Columns:
    """The causes of delay (`dangers` of a record): mean days, and the days that one run in twenty exceeds."""
    return Columns(
        {
            "cause": [row["what"] for row in rows],
            "days on average": [row["mean_days"] for row in rows],
            "one run in 20 loses more than": [row["days_95"] for row in rows],
            **columns,
        },
        digits=2,
    )


def assumption_table(record: Record) -> Columns:
    """Every assumption with its source."""
    rows = record["assumptions"]
    return Columns(
        {
            "what": [a["what"] for a in rows],
            "value": [str(a.get("value", a.get("per_node_year") or a.get("per_year"))) for a in rows],
            "per": ["node and year" if a.get("per_node_year") else "year" if a.get("per_year") else "" for a in rows],
            "source": [a["source"] for a in rows],
        }
    )


def as_text(record: Record) -> str:
    """The forecast as `trilane plan calendar` prints it."""
    ramp, ideal = record["ramp"], record["ideal"]
    batches = f"{ramp['batch_sizes']} batch sizes"
    days, hours = record["days_interval"], record["gpu_hours_interval"]
    finish = {name: day[:10] for name, day in record["finish"].items()}
    lines = [
        f"{record['plan']}: {record['tokens']:g} tokens, {record['iterations']} iterations from {record['start']}",
        f"ramp      {ramp['iterations']} iterations, {batches}, {ramp['days']:.2f} days of work",
        f"days      {record['days']:.1f} ({days[0]:.1f} to {days[1]:.1f}); {ideal['days']:.1f} without interruptions",
        f"GPU-hours {record['gpu_hours']:,.0f} ({hours[0]:,.0f} to {hours[1]:,.0f}); {ideal['gpu_hours']:,.0f} of work",
        f"finish    {finish['p50']} ({finish['p05']} to {finish['p95']})",
    ]
    if record["p_miss_deadline"] is not None:
        lines.append(f"deadline  {record['deadline']}: missed with probability {record['p_miss_deadline']:.1%}")
    if (p := record["p_overrun_allocation"]) is not None:
        lines.append(f"allocation {record['allocation']:,.0f} GPU-hours: overrun with probability {p:.1%}")
    if record["energy_kwh"] is not None:
        money = f", money {record['cost']:,.0f}" if record["cost"] else ""
        lines.append(f"energy    {energy_text(record['energy_kwh'])}{money}")
    lines.append("lost days " + ", ".join(f"{name} {days:.1f}" for name, days in record["lost_days"].items()))
    jobs = [
        f"  day {j['from_day']:5.1f} to {j['to_day']:5.1f}: gbs {j['gbs'][0]} to {j['gbs'][1]} on {j['nodes']} nodes, "
        f"tp {j['tp']} pp {j['pp']} dp {j['dp']} mbs {j['mbs']} recompute {j['recompute']}"
        for j in record["schedule"]
    ]
    more = [f"  and {len(jobs) - MOST_LINES} more (--json shows all)"] if len(jobs) > MOST_LINES else []
    return "\n".join([*lines, *jobs[:MOST_LINES], *more])
