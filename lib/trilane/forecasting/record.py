"""A forecast as one JSON object, with its assumptions and what each field means."""

import dataclasses
from typing import Any

from trilane.forecasting.energy import Price, energy_kwh
from trilane.forecasting.failures import SOURCES
from trilane.forecasting.forecast import QUANTILES, Bar, Forecast
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.throughput import first_full_gbs

MEANING = {
    "p_deadline": "probability of MISSING the deadline (ending after that day); null without --deadline",
    "p_allocation": "probability of OVERRUNNING the allocation of GPU-hours; null without --allocation",
    "intervals": "5 % and 95 % of the simulated runs",
    "ramp.days": "the ramp's iterations at the predicted seconds of each batch size alone; the interval has all",
}


def to_json(found: Forecast, price: Price | None = None) -> dict[str, Any]:
    """The forecast as one JSON object: days, GPU-hours, ISO dates, probabilities, and the assumptions behind them."""
    r, ideal, price = found.request, found.ideal, price or Price()
    iterations = sum(phase.iterations for phase in found.phases[: found.ramp_phases])
    hours = [found.gpu_hours(q) for q in (0.5, 0.05, 0.95)]
    energy = [energy_kwh(h, r.plan.cluster.gpu.name, price) for h in hours]
    ramp_ends = found.outcomes.reached_s[:, found.ramp_end] if found.ramp_phases else found.outcomes.wall_s * 0
    return {
        "plan": r.plan.label,
        "start": r.start.isoformat(),
        "tokens": r.tokens,
        "samples": r.samples,
        "iterations": sum(phase.iterations for phase in found.phases),
        "ramp": {
            "iterations": iterations,
            "days": found.ramp_days,
            "days_interval": [float(v) / 86400 for v in _interval(ramp_ends)],
            "batch_sizes": found.ramp_phases,
            "first_full_gbs": first_full_gbs(r.plan.topology),
        },
        "days": found.days(0.5),
        "days_interval": [found.days(0.05), found.days(0.95)],
        "gpu_hours": hours[0],
        "gpu_hours_interval": hours[1:],
        "ideal": {"days": float(ideal.wall_s[0]) / 86400, "gpu_hours": float(ideal.gpu_s[0]) / 3600},
        "finish": {f"p{round(100 * q):02}": found.finish(q).isoformat(timespec="minutes") for q in QUANTILES},
        "deadline": r.deadline.isoformat() if r.deadline else None,
        "p_deadline": found.p_deadline,
        "allocation": r.allocation,
        "p_allocation": found.p_allocation,
        "cost": price.cost(hours[0]),
        "cost_interval": [price.cost(h) for h in hours[1:]],
        "energy_kwh": energy[0],
        "energy_interval": energy[1:],
        "checkpoint": {"interval_s": r.interval_s, "save_s": r.save_s},
        "lost_days": found.lost_days,
        "schedule": [_bar(bar) for bar in found.bars()],
        "assumptions": assumptions(r),
        "meaning": MEANING,
    }


def assumptions(request: ForecastRequest) -> list[dict[str, Any]]:
    """What was taken for granted: a name, a value, a source."""
    r = request.risks
    stops = [
        {"what": s.name, "per_node_year": s.per_node_year, "per_year": s.per_year, "source": s.source} for s in r.stops
    ]
    names = [f.name for f in dataclasses.fields(r) if f.name != "stops"]
    return stops + [{"what": name, "value": getattr(r, name), "source": SOURCES[name]} for name in names]


def _interval(values: Any) -> tuple[float, float]:
    import numpy as np

    return float(np.nanquantile(values, 0.05)), float(np.nanquantile(values, 0.95))


def _bar(bar: Bar) -> dict[str, Any]:
    c = bar.choice
    return {
        "from_day": bar.start_s / 86400,
        "to_day": bar.end_s / 86400,
        "gbs": [bar.first_gbs, bar.last_gbs],
        "tp": c.tp,
        "pp": c.pp,
        "dp": c.dp,
        "mbs": c.mbs,
        "nodes": c.nodes,
        "gpus": c.gpus,
        "recompute": c.recompute,
    }
