"""`trilane slurm sweep`: a table of plans as one job array; `trilane slurm chain`: a long run as dependent jobs."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trilane.cli.options import FILE, FOLDER, JSON, PLAN, Group, command, emit, option, whole
from trilane.cli.plan_options import CALIBRATION, constants_of
from trilane.cli.slurm_options import ALLOW, SITE, as_dicts, checked, findings_text, print_status, request_options
from trilane.config.plan import read_plan
from trilane.slurm.sites import JobRequest, Site

sweep = Group("sweep", help="A table of plans as one job array.")


def print_values(as_json: bool, name: str, values: list[str]) -> int:
    """The list, an element a line."""
    lines = [f"{name}: {value}" for value in values or ["nothing"]]
    return emit(as_json, {name: values}, "\n".join(lines), indent=None)


@command(sweep, click.argument("plans", type=FILE), FOLDER, SITE, JSON, request_options, name="create")
def create_sweep(plans: Path, folder: Path, site: Site, as_json: bool, request: JobRequest) -> None:
    """Write the run folders and scripts of an array; PLANS is `plan search --json`, 02's plans.json or a list."""
    from trilane.slurm import sweep

    made = sweep.create(folder, sweep.read_plans(plans), site, request)
    print_values(as_json, "created", [str(path) for path in made])


@command(sweep, FOLDER, SITE, ALLOW, JSON, request_options, name="submit")
def submit_sweep(**options: Any) -> int:
    """Submit all runs, or where the check refuses one, none."""
    return start_sweep(**options, is_again=False)


@command(sweep, FOLDER, SITE, ALLOW, JSON, request_options, name="rerun")
def rerun_sweep(**options: Any) -> int:
    """Submit the failed runs again, or where the check refuses one, none."""
    return start_sweep(**options, is_again=True)


def start_sweep(
    folder: Path, site: Site, allow: Collection[str], as_json: bool, request: JobRequest, *, is_again: bool
) -> int:
    """Check the runs, each with its array's script, and submit them; 1 where one is refused."""
    from trilane.slurm import client, preflight, sweep

    if not site.is_local:
        client.require_answer("; nothing was submitted: submit again when it answers")
    scripts, paths = sweep.scripts(folder, site), sweep.members(folder)
    chosen = sweep.failures(folder) if is_again else range(1, len(paths) + 1)
    found, is_refused = checked([paths[n - 1] for n in chosen], site, request, allow, [scripts[n] for n in chosen])
    if is_refused:
        refused = {path: preflight.refused(findings) for path, findings in found.items()}
        return emit(as_json, {"findings": as_dicts(refused)}, findings_text(found), failed=True)
    is_given = click.get_current_context().get_parameter_source("parallel") is ParameterSource.COMMANDLINE
    parallel = request.parallel if is_given else None  # what `create` was given
    submitted = (sweep.rerun if is_again else sweep.submit)(folder, site, parallel)
    return print_values(as_json, "submitted", submitted)


@command(sweep, FOLDER, JSON, name="status")
def status_of_sweep(folder: Path, as_json: bool) -> int:
    """Print every run; exit code 1 where one failed."""
    from trilane.slurm import sweep

    return print_status(sweep.members(folder), as_json)


@command(sweep, FOLDER, JSON, name="table")
def table_of_sweep(folder: Path, as_json: bool) -> None:
    """Print the results, fastest first."""
    from trilane.slurm import client, sweep

    client.require_answer()
    found = sweep.table(folder)
    emit(
        as_json, json.loads(found.to_json(orient="records")), found.to_string(index=False, float_format="{:.4g}".format)
    )


chain = Group("chain", help="A long run as dependent jobs.")

STAGES = option(
    "--stages", default="", metavar="GBS:NODES:MBS,...", help="numbers of nodes that follow the batch ramp-up"
)
TIMES = option("--times", type=whole(), default=1, help="jobs a stage, where one time limit is not enough")


START = option(
    "--start", default="", metavar="DATE", help="when the first link begins, such as 2026-12-01; default now"
)


@command(chain, PLAN, FOLDER, STAGES, START, CALIBRATION, SITE, JSON, request_options, name="create")
def create_chain(
    plan: Path,
    folder: Path,
    stages: str,
    start: str,
    calibration: str,
    site: Site,
    as_json: bool,
    request: JobRequest,
) -> None:
    """Write the run folders of a chain that trains PLAN, and print each link's batch sizes, hours and dates.

    Batch sizes that a stage's replicas cannot share fall back to a stage before. Hours and dates are predicted, without
    starts, saves and waiting.
    """
    from trilane.slurm import chain

    begin = chain.parse_date(start)
    read, asked = read_plan(plan), chain.parse_stages(stages) if stages else []
    known = constants_of(plan, read.cluster, calibration)
    made = chain.create(folder, read, asked, site, request, {"calibration": known.kept()})
    rows = chain.link_records(made, chain.read(folder), begin, known)
    emit(as_json, {"links": rows}, "\n".join(map(chain.link_line, rows)))


@command(chain, FOLDER, TIMES, SITE, ALLOW, JSON, request_options, name="submit")
def submit_chain(
    folder: Path, times: int, site: Site, allow: Collection[str], as_json: bool, request: JobRequest
) -> int:
    """Submit the jobs, each after the one before; none where the check refuses one."""
    from trilane.slurm import chain
    from trilane.workspace import run_folder

    left = [p for p in chain.stages_of(folder) if not run_folder.is_completed(p)]
    found, is_refused = checked(left, site, request, allow)
    ids = [] if is_refused else chain.submit(folder, site, times)
    text = "\n".join(filter(None, [findings_text(found), f"submitted: {', '.join(ids) or 'nothing'}"]))
    by_name = {Path(path).name: findings for path, findings in found.items()}
    return emit(as_json, {"findings": as_dicts(by_name), "submitted": ids}, text, failed=is_refused)


@command(chain, FOLDER, JSON, name="status")
def status_of_chain(folder: Path, as_json: bool) -> int:
    """Print every stage; exit code 1 where one failed."""
    from trilane.slurm import chain

    return print_status(chain.stages_of(folder), as_json)
