"""Decision: what a person needs who says yes or no to a run, each figure with where it comes from."""

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.engines import ENGINES, unsupported_reason
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.measured_rows import MeasuredRow, read_rows, shipped_rows
from trilane.costmodel.predict import predict
from trilane.forecasting.alternatives import other_schedules, other_topologies
from trilane.forecasting.energy import energy_words
from trilane.forecasting.forecast import Forecast

KINDS = ("given", "computed", "measured", "fitted", "published", "assumed", "simulated")


REMEDIES = {
    "node failure": "spare nodes; a job that restarts itself",
    "hang or software crash": "somebody, or a watchdog, that looks at night",
    "rollback after a loss spike": "checkpoints kept, data that can be skipped",
    "outage of the machine": "days to spare before the deadline",
    "slower than predicted": "a benchmark of one replica on these very nodes before the start",
    "queue between jobs": "a reservation; longer jobs",
    "change of capacity": "the same GPUs from the first day",
    "evaluation": "fewer iterations of it",
    "ends of jobs": "longer jobs",
    "saving": "faster storage; fewer checkpoints",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure, what kind of knowledge it is (KINDS), where it comes from, and the notebook that made it."""

    what: str
    value: str
    kind: str
    source: str
    notebook: str = ""


def record(found: Forecast, said: dict[str, Any]) -> dict[str, Any]:
    """What calendar.json holds: the forecast `said` as JSON, the plan, its prediction, its rivals and its dangers."""
    r = found.request
    p = predict(r.plan.shape, r.plan.topology, r.plan.cluster, r.calibration)
    near = measured_like(r.plan)
    return {
        **said,
        "shape": vars(r.plan.shape),
        "topology": vars(r.plan.topology),
        "cluster": r.plan.cluster.name,
        "sec_per_it": p.sec_per_it,
        "sec_interval": [p.sec_lo, p.sec_hi],
        "memory_bytes": p.memory_bytes,
        "card_bytes": r.plan.cluster.gpu.memory_bytes,
        "oom_probability": p.oom_probability,
        "fitted_rows": r.calibration.rows,
        "half_width": r.calibration.half_width,
        "parameters": r.plan.shape.parameters,
        "measured": [{"row": row.row_id, "seconds": row.seconds} for row in near],
        "schedules": [rival.to_json() for rival in other_schedules(r)],
        "rivals": [rival.to_json() for rival in other_topologies(r)],
        "dangers": [{"what": name, "mean_days": mean, "days_95": high} for name, mean, high in found.dangers],
    }


def engine_for(shape: dict[str, Any], topology: dict[str, Any]) -> str:
    """The first engine that can train it; the plan of a calendar need not be launched by us."""
    takes = (e for e in ENGINES if unsupported_reason(e, ModelShape(**shape), Topology(**topology)) is None)
    return next(takes, ENGINES[0])


def close_ones(made: dict[str, Any], sizing: dict[str, Any], count: int = 3) -> dict[str, list[Any]]:
    """Close shapes (where 01_sizing proposed some), topologies and schedules: their days beside the recommended.

    Shapes are not equally large: theirs are days per parameter.
    """
    days = made["schedules"][0]["days"] if made["schedules"] else made["ideal"]["days"]
    proposals = sizing.get("proposals", [])
    own = (made["shape"]["num_layers"], made["shape"]["hidden_size"])
    costs = {(p["layers"], p["hidden"]): p["cost_beside_best"] for p in proposals}
    asked = own in costs  # else they were proposed for another model
    rows = [
        (
            "shape",
            f"{p['layers']} × {p['hidden']}, {p['params'] / 1e9:.4g} B, {p['label']}",
            p["cost_beside_best"] / costs[own] - 1,
        )
        for p in proposals
        if asked and own != (p["layers"], p["hidden"])
    ][:count]
    rows += [("topology", r["name"], r["days"] / days - 1) for r in made["rivals"][:count] if r["days"]]
    rows += [("schedule", r["name"], r["days"] / days - 1) for r in made["schedules"][1:] if r["days"]]
    return {
        "what": [kind for kind, _, _ in rows],
        "alternative": [html.escape(name) for _, name, _ in rows],
        "cost beside": [f"{beside:+.1%}" for _, _, beside in rows],
    }


def measured_like(plan: Plan) -> list[MeasuredRow]:
    """The shipped rows of the plan's very layers, hidden size, heads, tp, pp, dp, mbs and gbs, on the same card."""
    if plan.cluster.gpu.kind == "cpu":
        return []
    rows, _ = read_rows(Path(shipped_rows()).with_name("scored.csv"))
    wanted = _identity(plan.shape, plan.topology, plan.cluster.gpu.name)
    same = (r for r in rows if _identity(r.case.shape, r.case.topology, r.case.cluster.gpu.name) == wanted)
    return [r for r in same if r.seconds == r.seconds]  # a row without a time has nan there


def _identity(shape: Any, topology: Any, gpu: str) -> tuple[Any, ...]:
    s, t = shape, topology
    sizes = (s.num_layers, s.hidden_size, s.num_attention_heads, s.seq_length)
    return (*sizes, t.tp, t.pp, t.dp, t.mbs, t.gbs, gpu)


def chance(probability: float) -> str:
    """A share of simulated runs for eyes; a few thousand runs tell nothing below one in a thousand."""
    return "under 0.1 %" if probability < 0.001 else f"{probability:.1%}"


def plain(text: str) -> str:
    """Anybody's text as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_\[\]|~$#+.-])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def headline(made: dict[str, Any]) -> str:
    """One sentence of Markdown: what is recommended, when it ends, what it costs, and how likely either fails."""
    s, t = made["shape"], made["topology"]
    low, high = (day[:10] for day in (made["finish"]["p05"], made["finish"]["p95"]))
    words = [
        f"**{s['num_layers']} layers × {s['hidden_size']}** ({made['parameters'] / 1e9:.4g} B parameters, "
        f"{s['num_attention_heads']} heads) as `{html.escape(made['plan'])}`: "
        f"TP {t['tp']} × PP {t['pp']} × DP {t['dp']}, "
        f"microbatch {t['mbs']}, {t['tp'] * t['pp'] * t['dp']} GPUs of `{made['cluster']}`. "
        f"{made['tokens'] / 1e9:,.4g} billion tokens are done on **{made['finish']['p50'][:10]}** "
        f"({low} to {high} in nine of ten runs), after **{made['days']:,.4g} days** and "
        f"**{made['gpu_hours']:,.0f} GPU-hours**"
    ]
    if made["p_allocation"] is not None:
        words.append(f" of {made['allocation']:,.0f}: overrun with probability **{chance(made['p_allocation'])}**")
    if made["p_deadline"] is not None:
        words.append(f"; the deadline {made['deadline']} is missed with probability **{chance(made['p_deadline'])}**")
    return "".join(words) + "."


def facts(made: dict[str, Any], has_backtest: float | None = None) -> list[Fact]:
    """Every figure of the page with its provenance. `has_backtest` is the median error that 06_backtest found."""
    seconds, (low, high) = made["sec_per_it"], made["sec_interval"]
    fitted = f"constants fitted to {made['fitted_rows']} measured rows" if made["fitted_rows"] else "unfitted constants"
    kind = "fitted" if made["fitted_rows"] else "assumed"
    hours, days = made["gpu_hours_interval"], made["days_interval"]
    free = made["card_bytes"] - made["memory_bytes"]
    said = [
        Fact(
            what="tokens, start, ramp, capacity",
            value=f"{made['tokens'] / 1e9:,.4g} billion tokens",
            kind="given",
            source="the request",
        ),
        Fact(what="iterations", value=f"{made['iterations']:,}", kind="computed", source="Megatron-LM's ramp rule"),
        Fact(
            what="seconds an iteration",
            value=f"{seconds:.4g} ({low:.4g} to {high:.4g})",
            kind=kind,
            source=f"{fitted}, 90 % interval {low / seconds - 1:+.1%} to {high / seconds - 1:+.1%}",
            notebook="02_topology",
        ),
        *[
            Fact(
                what="the same run, measured",
                value=f"{m['seconds']:.4g} s, predicted / measured {made['sec_per_it'] / m['seconds']:.3f}",
                kind="measured",
                source=f"row {m['row']} of the public documents",
                notebook="06_backtest",
            )
            for m in made["measured"][:2]
        ],
        Fact(
            what="memory headroom",
            value=f"{free / 2**30:.3g} of {made['card_bytes'] / 2**30:.3g} GiB, P(out) {made['oom_probability']:.1%}",
            kind="fitted",
            source="the fullest stage; docs/planner.md",
            notebook="02_topology",
        ),
        Fact(
            what="days",
            value=f"{made['days']:.4g} ({days[0]:.4g} to {days[1]:.4g})",
            kind="simulated",
            source=f"{made['ideal']['days']:.4g} if nothing goes wrong; the rest below",
            notebook="07_calendar",
        ),
        Fact(
            what="GPU-hours",
            value=f"{made['gpu_hours']:,.0f} ({hours[0]:,.0f} to {hours[1]:,.0f})",
            kind="simulated",
            source=f"{made['ideal']['gpu_hours']:,.0f} of iterations",
            notebook="07_calendar",
        ),
        Fact(
            what="stops, restarts, evaluation, saving",
            value=f"{sum(made['lost_days'].values()):.3g} days",
            kind="assumed",
            source="rates of published runs, waits assumed (docs/calendar.md)",
            notebook="07_calendar",
        ),
    ]
    if made.get("energy_kwh"):
        text = "node's data sheet at its most, building 1.2: an upper end"
        said.append(Fact(what="energy", value=energy_words(made["energy_kwh"]), kind="assumed", source=text))
    if made.get("cost"):
        said.append(
            Fact(what="money", value=f"{made['cost']:,.0f}", kind="given", source="GPU-hours at the price given")
        )
    if has_backtest is not None:
        text = "rows that the constants had not seen"
        new = Fact(what="error of predicted time", value=f"{has_backtest:.1%} (median)", kind="measured", source=text)
        said.append(Fact(**{**vars(new), "notebook": "06_backtest"}))
    return said


def facts_table(said: list[Fact], present: set[str]) -> dict[str, list[str]]:
    """The facts as columns; a notebook's name leads to its report where that is `present` in the study."""

    def link(name: str) -> str:
        return f'<a href="{name}.html">{name}</a>' if name in present else name

    return {
        "": [html.escape(f.what) for f in said],
        "value": [html.escape(f.value) for f in said],
        "kind": [f.kind for f in said],
        "from": [html.escape(f.source) for f in said],
        "made by": [link(f.notebook) for f in said],
    }
