"""Sweep: a table of plans as run folders."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trilane.config.plan import plan_from_json
from trilane.costmodel.predict import predict_on
from trilane.slurm import script
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.validation import read_json, require


def read_plans(path: Path) -> list[dict[str, Any]]:
    """Plans, with predictions if given: of `trilane plan search --json`, of 02_topology's plans.json, or a list."""
    values = read_json(path, "plans")
    plans = values.get("plans") if isinstance(values, dict) else values
    ok = isinstance(plans, list) and bool(plans) and all(isinstance(plan, dict) for plan in plans)
    require(ok, "plans", path, "must be a list of plans, or hold one as `plans`")
    return list(plans or [])


def create(folder: Path, plans: Iterable[Mapping[str, Any]], site: Site, request: JobRequest) -> list[Path]:
    """Write the run folder runs/LABEL of each plan; the folders. ValueError, and nothing is written, where one exists
    or two plans have the same label."""
    made = dict[Path, tuple[Any, ...]]()
    for values in plans:
        plan = plan_from_json(dict(values))
        path = folder / "runs" / plan.label
        require(path not in made, "label", plan.label, "must be unique in a sweep")
        require(not path.exists(), "run folder", path, "exists; take a new one")
        found = values.get("prediction") or predict_on(plan, script.nodes_of(plan, site)).to_json()
        ok = isinstance(found, Mapping) and isinstance(found.get("memory_bytes"), int | float)
        require(ok, "prediction", found, "must be a JSON object with memory_bytes, a number")
        known = {"calibration": values["calibration"]} if values.get("calibration") else {}
        script.render("train", plan, site, request)
        made[path] = (path, plan, site, request, {"prediction": found, **known})
    for run in made.values():
        script.write(*run)
    return list(made)
