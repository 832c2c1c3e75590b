"""The plan that a forecast is about and the file it comes from; what calendar.json records of both."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, plan_from_json, read_plan_values
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.measured_rows import MeasuredRow, read_rows, shipped_rows
from trilane.costmodel.predict import SAFE
from trilane.costmodel.shipped import calibration_of
from trilane.forecasting.alternatives import FIGURES, Alternative
from trilane.forecasting.forecast import Forecast, forecast
from trilane.forecasting.record import Record
from trilane.utils.validation import require
from trilane.workspace.study import Study

NOT_RECORDED = ("adam", "buckets")  # choices that measured rows leave open


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """The file that a plan comes from, what made it (empty: not recorded), its prediction, and the constants to use."""

    file: str
    made_by: Record = field(default_factory=dict)
    prediction: Record = field(default_factory=dict)
    calibration: Calibration | None = None


def study_plan(study: Study, name: str = "", calibration: str = "") -> tuple[Plan, PlanSource]:
    """A plan and its source: a file, or one of the study's plans.json by id or label ("": the best).

    Its constants are those that predicted it, or those that `calibration` names (see calibration_for).
    """
    if name.endswith(".json"):
        entry = read_plan_values(name)
        plan = plan_from_json(entry)
        known = calibration_of(entry, plan.cluster, calibration)
        return plan, PlanSource(file=name, prediction=entry.get("prediction") or {}, calibration=known)
    found = study.load("plans.json", "02_topology")
    listed = found["plans"] + (found.get("risky", []) if name else [])  # the best plan is a safe one
    rule = f"no plan of study {study.name} has this id or label; nor is it a .json file"
    found_by = [p for p in listed if name in ("", p["id"], p["label"])]
    require(bool(found_by), "plan", name, rule)
    entry = found_by[0]
    plan = plan_from_json(entry)
    known = calibration_of(entry, plan.cluster, calibration)
    source = PlanSource(file="plans.json", made_by=found["made_by"], prediction=entry["prediction"], calibration=known)
    return plan, source


def calendar_record(found: Forecast, source: PlanSource) -> Record:
    """What calendar.json holds: the forecast, its plan with prediction and source, alternatives, causes of delay."""
    r, p = found.request, found.prediction
    return {
        **found.record,
        "plan_id": r.plan.id,
        "plan_json": r.plan.to_json(),
        "prediction": p.to_json(),
        "source": {"file": source.file, "made_by": source.made_by, "prediction": source.prediction},
        "sec_per_it": p.sec_per_it,
        "sec_interval": [p.sec_lo, p.sec_hi],
        "memory_bytes": p.memory_bytes,
        "card_bytes": r.plan.cluster.gpu.memory_bytes,
        "oom_probability": p.oom_probability,
        "fitted_rows": r.calibration.rows,
        "half_width": r.calibration.half_width,
        "measured": [{"row": row.row_id, "seconds": row.seconds} for row in measured_like(r.plan)],
        "schedules": [alternative_record(other) for other in found.alternatives.schedules],
        "rivals": [alternative_record(other) for other in found.alternatives.topologies],
    }


def alternative_record(other: Alternative) -> Record:
    """An alternative with its own forecast, where it can run and is safe to start; None where not."""
    values, simulated = {name: v for name, v in vars(other).items() if name != "request"}, None
    if other.request and other.oom_probability <= SAFE:
        with contextlib.suppress(ValueError):  # interruptions may leave it no progress
            made = forecast(other.request).to_json()
            simulated = {name: made[name] for name in FIGURES}
    return {**values, "forecast": simulated}


def measured_like(plan: Plan) -> list[MeasuredRow]:
    """The shipped rows of the plan's model and topology on the same GPU, but for what no row records."""
    if plan.cluster.gpu.kind == "cpu":
        return []
    rows, _ = read_rows(Path(shipped_rows()).with_name("scored.csv"))
    wanted = _identity(plan.shape, plan.topology, plan.cluster.gpu.name)
    same = (r for r in rows if _identity(r.case.shape, r.case.topology, r.case.cluster.gpu.name) == wanted)
    return [r for r in same if r.seconds == r.seconds]  # a row without a time has nan


def _identity(shape: ModelShape, topology: Topology, gpu: str) -> tuple[Any, ...]:
    sizes = (shape.num_layers, shape.hidden_size, shape.num_attention_heads, shape.seq_length)
    choices = {name: value for name, value in vars(topology).items() if name not in NOT_RECORDED}
    return sizes, choices, gpu
