"""StudyParts: what one study holds and lacks: its choices, plans, runs and forecasts, as a comparison needs them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.analysis.collect import MeasuredRuns, measure_runs
from trilane.analysis.measure import Measurement
from trilane.utils.numbers import amount, percent, with_bounds, with_interval
from trilane.utils.tables import middle, one_line
from trilane.utils.validation import read_object
from trilane.workspace.study import Study

FILES = {"sizing.json": "01_sizing", "plans.json": "02_topology", "calendar.json": "07_calendar"}
FILES |= {"decision.json": "08_decision"}
RUN_PARTS = ("engine", "data", "optimizer", "dropout", "run")  # of the plans of runs: what the search leaves open
LEFT_OUT = ("sources", "folder")  # where numbers come from, and where data lies: no choice of the study
NUMBERS = ("cluster", "planner's constants")  # parts with numbers that nobody chose
Facts = dict[str, dict[str, str]]  # part -> name -> value
MANY = 1e5  # from here on without decimals
UNITS = {"bytes_per_s": (1e9, "GB/s"), "flops_per_s": (1e12, "TFLOP/s"), "bytes": (2**30, "GiB")}


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """What one study holds: its result files by name, measured runs, parameters by notebook; and what it lacks."""

    name: str
    files: Mapping[str, dict[str, Any]]
    runs: MeasuredRuns | None
    parameters: Mapping[str, dict[str, Any]]
    lacks: tuple[str, ...]

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The plans of the search, best first, as plans.json has them."""
        return list(self.files.get("plans.json", {}).get("plans", []))

    def facts(self) -> Facts:
        """Everything that was chosen, by part and name; a part that the study lacks is not there."""
        chosen = self.files.get("plans.json") or self.files.get("sizing.json") or {}
        found: Facts = {"model": _flat(chosen.get("shape", {}))}
        found["batch and machine"] = _flat({k: chosen[k] for k in ("cluster", "gpus", "gbs") if k in chosen})
        if best := next(iter(self.plans), None):
            found["best plan"] = _flat(best["topology"])
            found["cluster"] = _flat(best["cluster"])
            found["planner's constants"] = _flat(best.get("calibration", {}).get("constants", {}))
        found["training"] = self._training()
        found |= {f"parameters of {name}": _flat(given) for name, given in self.parameters.items()}
        return {part: values for part, values in found.items() if values}

    def _training(self) -> dict[str, str]:
        """How its runs trained; several values where they differ."""
        values: dict[str, dict[str, None]] = {}
        for plan in [m.plan.to_json() for m in self.runs.runs if m.plan] if self.runs else []:
            for name, text in _flat({part: plan[part] for part in RUN_PARTS}).items():
                values.setdefault(name, {})[text] = None
        return {name: middle(", ".join(texts), 60) for name, texts in values.items()}

    @property
    def recommended(self) -> str:
        """The verdict of 08_decision; "" without one."""
        found = self.files.get("decision.json", {}).get("recommendation")
        return one_line(str(found.get("verdict", ""))) if isinstance(found, dict) else ""

    @property
    def timed(self) -> list[Measurement]:
        """Its runs with a time of an iteration, the fastest first."""
        found = [m for m in self.runs.timed if m.sec_per_it > 0] if self.runs else []
        return sorted(found, key=lambda m: m.sec_per_it)

    def of_plan(self, key: str) -> list[Measurement]:
        """Its timed runs of the plan with that id."""
        return [m for m in self.timed if m.plan and m.plan.id == key]


def study_parts(study: Study) -> StudyParts:
    """What the study holds; each part that it lacks, or that is damaged, is named."""
    files, lacks, runs = {}, list[str](), None
    for name, made_by in FILES.items():
        try:
            files[name] = _checked(name, study.load(name, made_by))
        except ValueError as error:
            lacks.append(str(error) if (study.folder / name).exists() else f"{name} ({made_by})")
    try:
        runs = measure_runs(study)
    except ValueError as error:
        lacks.append(str(error) if study.run_folders() else "runs (03_launch)")
    executed = sorted(study.folder.glob("[0-9]*.ipynb"))
    parameters = {path.stem: given for path in executed if (given := _parameters(path)) is not None}
    return StudyParts(name=study.name, files=files, runs=runs, parameters=parameters, lacks=tuple(lacks))


def _checked(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a result file, if what is read of it is there; ValueError otherwise."""
    try:
        if name == "plans.json":
            assert all(plan_point(plan) and isinstance(plan["cluster"], dict) for plan in values["plans"])
        if name == "calendar.json":
            forecast_cells(values)
        return values
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, AssertionError):
        raise ValueError(f"study file={name}: is damaged") from None


def plan_point(plan: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of plans.json in a table's and a figure's numbers; tokens a second with their 90 % interval."""
    t, p = plan["topology"], plan["prediction"]
    seconds, low, high = with_interval(p["sec_per_it"], p["sec_lo"], p["sec_hi"])
    tokens = t["gbs"] * plan["shape"]["seq_length"]
    return {
        "plan": one_line(plan["label"]),
        "id": one_line(plan["id"]),
        "gpus": t["tp"] * t["pp"] * t["dp"] * t.get("cp", 1),
        "seconds": seconds,
        "interval": f"{low} to {high}",
        "tokens_per_s": float(f"{tokens / p['sec_per_it']:.4g}"),
        "low": float(f"{tokens / p['sec_hi']:.4g}"),
        "high": float(f"{tokens / p['sec_lo']:.4g}"),
        "gib": float(f"{p['memory_bytes'] / 2**30:.4g}"),
        "oom": percent(p["oom_probability"]),
    }


def forecast_cells(calendar: Mapping[str, Any]) -> dict[str, str]:
    """A calendar.json in a table's words; intervals are 5 % to 95 % of the simulated runs."""
    late, overrun = (calendar[name] for name in ("p_miss_deadline", "p_overrun_allocation"))
    return {
        "plan": one_line(calendar["plan"]),
        "tokens (billions)": amount(calendar["tokens"] / 1e9),
        "days": with_bounds(calendar["days"], *calendar["days_interval"]),
        "GPU-hours": with_bounds(calendar["gpu_hours"], *calendar["gpu_hours_interval"]),
        "finished": calendar["finish"]["p50"][:10],
        "P(late)": "no deadline" if late is None else percent(late),
        "P(overrun)": "no limit" if overrun is None else percent(overrun),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values by their path, as text: {"ramp": {"start": 8}} -> {"ramp.start": "8"}."""
    found: dict[str, str] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.") if name not in LEFT_OUT else {}
        elif name not in LEFT_OUT:
            found[f"{prefix}{name}"] = _words(name, value)
    return found


def _words(name: str, value: Any) -> str:
    """A value as a person reads it, with the unit that ends its name; six digits, so that what differs looks it."""
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), None)
    if not isinstance(value, float):
        text = str(value)
        return "/".join(text.split("/")[-2:]) if text.startswith("/") else text  # a path of this machine says little
    scaled = value / unit[0] if unit else value
    text = f"{scaled:,.0f}" if abs(scaled) >= MANY else f"{scaled:.6g}"
    return f"{text} {unit[1]}" if unit else text


def _parameters(path: Path) -> dict[str, Any] | None:
    """The parameters with which papermill executed a notebook, without the study; None where they are not recorded."""
    try:
        made = read_object(path, "notebook", metadata=dict)["metadata"]["papermill"]["parameters"]
        return {name: value for name, value in dict(made).items() if name != "study"}
    except (ValueError, KeyError, TypeError):
        return None
