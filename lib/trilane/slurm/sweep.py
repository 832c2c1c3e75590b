"""Sweep: many plans as one job array, of which only the failures run again."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.costmodel.predict import predict_on
from trilane.slurm import jobs
from trilane.slurm.jobs import RUNS
from trilane.slurm.script import directives, files, node_count, nodes_of, render
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.files import read_text
from trilane.utils.validation import read_json, require, require_label
from trilane.workspace.run_folder import write_text


def read_plans(path: Path) -> list[dict[str, Any]]:
    """Plans, with predictions if given: of `trilane plan search --json`, of 02_topology's plans.json, or a list."""
    values = read_json(path, "plans")
    plans = values.get("plans") if isinstance(values, dict) else values
    ok = isinstance(plans, list) and bool(plans) and all(isinstance(plan, dict) for plan in plans)
    require(ok, "plans", path, "must be a list of plans, or hold one as `plans`")
    return list(plans or [])


def create(folder: Path, plans: Iterable[Mapping[str, Any]], site: Site, request: JobRequest) -> list[Path]:
    """Write a new sweep: a run folder for each plan, and a script for each shape of a job; the run folders.

    Raises ValueError where the folder holds a sweep already, or two plans have the same label.
    """
    require(not (folder / RUNS).exists(), "sweep", folder, "holds a sweep already; take a new folder")
    texts, plans_of = dict[str, dict[str, str]](), list[Plan]()
    for values in plans:
        plan = plan_from_json(dict(values))
        plans_of.append(plan)
        require(plan.label not in texts, "label", plan.label, "must be unique in a sweep")
        found = values.get("prediction") or predict_on(plan, nodes_of(plan, site)).to_json()
        ok = isinstance(found, Mapping) and isinstance(found.get("memory_bytes"), int | float)
        require(ok, "prediction", found, "must be a JSON object with memory_bytes, a number")
        known = {"calibration": values["calibration"]} if values.get("calibration") else {}
        texts[plan.label] = files(plan, site, request, {"prediction": found, **known})
    for label, named in texts.items():
        for name, text in named.items():
            write_text(folder / "runs" / label / name, text)
    for name, lines in _by_script(plans_of, site).items():
        first = replace(plans_of[lines[0] - 1], label="sweep")
        write_text(folder / name, render("sweep", first, site, request, array=",".join(map(str, lines))))
    write_text(folder / RUNS, "".join(f"runs/{label}\n" for label in texts))
    return [folder / "runs" / label for label in texts]


def members(folder: Path) -> list[Path]:
    """The run folders, in the order of runs.txt."""
    require((folder / RUNS).exists(), "sweep", folder, "is not the folder of a sweep")
    labels = [line.removeprefix("runs/") for line in read_text(folder / RUNS).splitlines()]
    require(bool(labels), "sweep", folder / RUNS, "names no run")
    for label in labels:
        require_label("sweep.runs", label)
    return [folder.resolve() / "runs" / label for label in labels]


def scripts(folder: Path, site: Site) -> dict[int, Path]:
    """The script of each line of runs.txt."""
    shapes = _by_script([read_plan(path / "plan.json") for path in members(folder)], site)
    return {n: folder / name for name, lines in shapes.items() for n in lines}


def submit(folder: Path, site: Site, parallel: int | None = None, lines: Iterable[int] = ()) -> list[str]:
    """Submit these lines of runs.txt (none given: all), at most `parallel` runs at a time; the arrays' ids.

    None: as many as the script's --array has, which `create` wrote.
    """
    folder = folder.resolve()
    paths = members(folder)
    wanted = sorted(lines) or range(1, len(paths) + 1)
    arrays = []
    with jobs.submitting([paths[n - 1] for n in wanted]):
        for name, group in _by_script([read_plan(p / "plan.json") for p in paths], site).items():
            if chosen := [n for n in group if n in wanted]:
                limit = str(parallel or directives(read_text(folder / name)).get("array", "").partition("%")[2])
                array = f"--array={','.join(map(str, chosen))}{'%' * bool(limit)}{limit}"
                runs = {paths[n - 1]: f"_{n}" for n in chosen}
                arrays.append(jobs.accept(folder / name, runs, site.name, [array]))
    return arrays


def failures(folder: Path) -> list[int]:
    """Lines of runs.txt whose run failed, and may succeed in another attempt."""
    return [n for n, job in enumerate(jobs.job_status(members(folder)), 1) if job.status.can_retry]


def rerun(folder: Path, site: Site, parallel: int | None = None) -> list[str]:
    """Submit only the failures; the arrays' ids. Raises ValueError where a run has not ended."""
    active = [job.run for job in jobs.job_status(members(folder)) if job.status.is_active]
    require(not active, "sweep", folder, f"{', '.join(active)} have not ended")
    return submit(folder, site, parallel, failed) if (failed := failures(folder)) else []


def _by_script(plans: list[Plan], site: Site) -> dict[str, list[int]]:
    """Lines of runs.txt (counted from 1) by their script, one for each shape of a job, NODESxGPUS: an array has one."""
    groups: dict[str, list[int]] = {}
    for line, plan in enumerate(plans, 1):
        nodes, used = node_count(plan, nodes_of(plan, site))
        groups.setdefault(f"sweep-{nodes}x{used}.sbatch", []).append(line)
    return groups
