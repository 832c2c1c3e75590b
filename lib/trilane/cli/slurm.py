"""`trilane slurm`: pre-flight check, scripts, jobs, sweeps, chains."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from trilane.cli.options import FILE, FOLDER, JSON, PLAN, Checked, Choice, Group, command, emit, number, option, whole
from trilane.config.plan import locate_plan, read_plan
from trilane.slurm import sites
from trilane.slurm.sites import CHOICES, JobRequest, Site
from trilane.utils.tables import one_line
from trilane.utils.validation import require_file

TIME_IS_OVER = 75  # EX_TEMPFAIL: try again; monitor.sbatch then submits itself once more
TEMPLATES = Choice(("train", "sweep", "bench", "interactive", "monitor"))
RUNS = click.argument("runs", nargs=-1, required=True, metavar="RUN...")
ALLOW = option("--allow", multiple=True, metavar="RULE", help="only warn of this rule; may be repeated")
SITE_TYPE = Checked("text", lambda field, name: sites.site(name))
SITE = option("--site", required=True, type=SITE_TYPE, help=f"{', '.join(sites.catalogue())}, or a JSON file")


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each field of a JobRequest; the function gets them as one, named `request`."""

    @wraps(function)
    def with_request(**given: Any) -> Any:
        request = JobRequest(**{f.name: given.pop(f.name) for f in fields(JobRequest)})
        return function(request=request, **given)

    decorated: Callable[..., Any] = with_request
    for f in reversed(fields(JobRequest)):
        name = f.name.replace("_", "-")
        if isinstance(f.default, bool):
            decorated = option(f"--{name}/--no-{name}", default=f.default, show_default=True)(decorated)
        else:
            kind = Choice(CHOICES[f.name]) if f.name in CHOICES else whole(0) if isinstance(f.default, int) else str
            decorated = option(f"--{name}", type=kind, default=f.default)(decorated)
    return decorated


slurm = Group("slurm", help="Check, submit and watch runs on SLURM.")


def folders_of(runs: Sequence[str]) -> list[Path]:
    """The run folders that paths, plans' files or studies' names mean; a new one for a plan that has none."""
    from trilane.launch.local import run_folder
    from trilane.workspace.study import run_folders

    found = list[Path]()
    for run in runs:
        is_plan = not Path(run).is_dir() and locate_plan(run)[0].is_file()
        found += [run_folder(run, True)] if is_plan else run_folders([run])
    return found


def checked(
    paths: Sequence[Path], site: Site, request: JobRequest, allow: Collection[str], scripts: Sequence[Path] = ()
) -> tuple[dict[str, Any], bool]:
    """The findings about run folders, each with its script if given; and whether one is refused."""
    from trilane.slurm.preflight import check

    found = dict[str, Any]()
    for path, script in zip_longest(paths, scripts):
        found[str(path)] = check.check_job(read_plan(path / "plan.json"), site, request, path, allow, script)
    return found, any(map(check.refused, found.values()))


def findings_text(found: Mapping[str, Any]) -> str:
    """Two lines for each finding, after the name of its run."""
    from trilane.slurm.preflight import check

    return "\n".join(f"{Path(path).name}: {check.line(f)}" for path, findings in found.items() for f in findings)


def as_dicts(found: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Findings by run, as JSON."""
    return {name: [f.to_json() for f in findings] for name, findings in found.items()}


@command(slurm, PLAN, SITE, ALLOW, JSON, request_options, name="check")
def check_command(plan: Path, site: Site, allow: Collection[str], as_json: bool, request: JobRequest) -> int:
    """Print what would fail or waste GPUs, before the job of PLAN is submitted; a job.sbatch next to it is checked too.

    Exit code 1 where something is refused.
    """
    from trilane.slurm.preflight import check

    file, _ = locate_plan(plan)
    try:
        read = read_plan(plan)
    except ValueError as error:
        require_file("plan", file)
        found = [check.of_error(error)]
    else:
        found = check.check_job(read, site, request, file.parent, allow)
    text = "\n".join(map(check.line, found)) or "nothing found"
    return emit(as_json, {"findings": [f.to_json() for f in found]}, text, failed=check.refused(found))


@command(slurm, PLAN, option("--template", type=TEMPLATES, default="train"), SITE, JSON, request_options)
def script(plan: Path, template: str, site: Site, as_json: bool, request: JobRequest) -> None:
    """Print the sbatch script of PLAN, to read or edit."""
    from trilane.slurm.script import render

    text = render(template, read_plan(plan), site, request)
    emit(as_json, {"script": text}, text.removesuffix("\n"), indent=None)


REWRITE = option("--rewrite", is_flag=True, help="write job.sbatch anew, for this site and these options")
DRY_RUN = option("--dry-run", is_flag=True, help="only check, and submit nothing")


@command(slurm, RUNS, SITE, ALLOW, REWRITE, DRY_RUN, JSON, request_options)
def submit(
    runs: Sequence[str],
    site: Site,
    allow: Sequence[str],
    rewrite: bool,
    dry_run: bool,
    as_json: bool,
    request: JobRequest,
) -> int:
    """Submit runs that have not completed, or train them here at site local: all, or if the check refuses one, none."""
    from trilane.slurm import jobs
    from trilane.slurm.preflight import check

    folders = folders_of(runs)
    for path in folders if rewrite else []:
        jobs.rewrite(path, site, request)
    found, is_refused = checked(folders, site, request, allow)
    submitted = {} if is_refused or dry_run else {str(f): jobs.submit(f, site, request) for f in folders}
    lines = list[str]()
    for folder, findings in found.items():
        lines += [f"{submitted.get(folder, 'not submitted')}  {folder}", *map(check.line, findings)]
    return emit(as_json, {"findings": as_dicts(found), "submitted": submitted}, "\n".join(lines), failed=is_refused)


slurm.add_command(submit, "resubmit")


@command(slurm, RUNS, JSON)
def status(runs: Sequence[str], as_json: bool) -> int:
    """Print every job of runs: its place in the queue, progress, status; exit code 1 where one failed."""
    return print_status(folders_of(runs), as_json)


def print_status(folders: Sequence[Path], as_json: bool) -> int:
    """The jobs of run folders, a line each; 1 where one failed."""
    from trilane.slurm import jobs

    found = jobs.job_status(folders)
    text, failed = "\n".join(map(status_line, found)), any(job.has_failed for job in found)
    return emit(as_json, {"jobs": [job.to_json() for job in found]}, text, failed=failed)


def status_line(job: Any) -> str:
    """A job in one line for the terminal."""
    later = f" +{job.waiting}" if job.waiting else ""
    state = f"{job.run:28.28} {job.id + later:12} {job.state:13} {job.elapsed:>10} {job.reason or job.nodes:22.22}"
    return f"{state} {job.iteration:>7}/{job.iterations} {job.status:10} {job.evidence[:80]}".rstrip()


@command(slurm, click.argument("run"), option("--lines", type=whole(), default=20, help="lines to print"), JSON)
def tail(run: str, lines: int, as_json: bool) -> None:
    """Print the last lines of a run's log."""
    from trilane.slurm import job_status

    found = job_status.logs(folders_of([run])[0], lines)
    emit(as_json, {"lines": found}, "\n".join(found), indent=None)


@command(slurm, RUNS, JSON)
def cancel(runs: Sequence[str], as_json: bool) -> None:
    """Cancel the jobs of runs."""
    from trilane.slurm import jobs

    ids = jobs.cancel(folders_of(runs))
    text = f"cancelled: {', '.join(ids) or 'nothing was running or waiting'}"
    emit(as_json, {"cancelled": ids}, text, indent=None)


EVERY = option("--every", type=number(), default=60.0, help="seconds between two looks")
SECONDS = option("--seconds", type=number(), default=7 * 86400.0, help="end after so many, with exit code 75")
STALL = option("--stall", type=number(), default=600.0, help="seconds without an iteration that count as stalled")


@command(slurm, RUNS, EVERY, SECONDS, STALL, JSON)
def watch(runs: Sequence[str], every: float, seconds: float, stall: float, as_json: bool) -> int:
    """Print a line whenever a run starts, dies, stalls or goes on; with --json also all jobs at the end.

    Exit code 0 when all completed, 1 when one failed, 75 when the time is over or SLURM does not answer.
    """
    from trilane.slurm import client, jobs, monitor

    folders = folders_of(runs)
    for line in monitor.watch(folders, every, seconds, stall):
        print(one_line(line), flush=True)
    try:
        found = jobs.job_status(folders)
    except client.SlurmError as error:
        print(one_line(str(error)), flush=True)
        return TIME_IS_OVER
    if as_json:
        emit(True, {"jobs": [job.to_json() for job in found]}, "")
    return TIME_IS_OVER if any(j.status.is_active for j in found) else int(any(j.has_failed for j in found))


WHAT = click.argument("what", type=Choice(("memory", "stacks", "processes", "hostfile")))
SLOTS = option("--slots", type=whole(), default=8, help="GPUs a node, for the hostfile")
ONLY_JSON = option("--json", "as_json", is_flag=True, help="print the command (or the hostfile) as JSON, run nothing")


@command(slurm, click.argument("job"), WHAT, SLOTS, ONLY_JSON)
def attach(job: str, what: str, slots: int, as_json: bool) -> None:
    """Look into the running job of that id: its GPUs' memory, the ranks' stacks or processes, or its hostfile."""
    from trilane.slurm import monitor

    if what == "hostfile":
        text = monitor.hostfile(job, slots)
        emit(as_json, {"hostfile": text}, text.removesuffix("\n"), indent=None)
        return
    words = monitor.attach(job, what)
    if not as_json:
        os.execvp(words[0], words)
    emit(True, {"command": words}, "", indent=None)


job = Group("job", help="For the job scripts: may this attempt begin, and how did it end.")
slurm.add_command(job)


@command(job, FOLDER, JSON)
def begin(folder: Path, as_json: bool) -> None:
    """Print whether the attempt of the run folder may begin."""
    from trilane.slurm import attempt

    decision = attempt.begin(folder)
    emit(as_json, {"verdict": decision}, decision, indent=None)


@command(job, FOLDER, option("--code", type=whole(-255, 255), default=0, help="the training's exit code"), JSON)
def end(folder: Path, code: int, as_json: bool) -> None:
    """Write and print how the attempt ended."""
    from trilane.slurm import attempt

    outcome = attempt.end(folder, code)
    text = f"{outcome.status} after {outcome.seconds:.0f} s: {outcome.evidence}"
    emit(as_json, asdict(outcome), text, indent=None)


sweep = Group("sweep", help="A table of plans as one job array.")
slurm.add_command(sweep)


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
    from trilane.slurm import sweep
    from trilane.slurm.preflight import check

    scripts, paths = sweep.scripts(folder, site), sweep.members(folder)
    chosen = sweep.failures(folder) if is_again else range(1, len(paths) + 1)
    found, is_refused = checked([paths[n - 1] for n in chosen], site, request, allow, [scripts[n] for n in chosen])
    if is_refused:
        refused = {path: check.refused(findings) for path, findings in found.items()}
        return emit(as_json, {"findings": as_dicts(refused)}, findings_text(found), failed=True)
    submitted = (sweep.rerun if is_again else sweep.submit)(folder, site, request.parallel)
    return print_values(as_json, "submitted", submitted)


@command(sweep, FOLDER, JSON, name="status")
def status_of_sweep(folder: Path, as_json: bool) -> int:
    """Print every run; exit code 1 where one failed."""
    from trilane.slurm import sweep

    return print_status(sweep.members(folder), as_json)


@command(sweep, FOLDER, JSON, name="table")
def table_of_sweep(folder: Path, as_json: bool) -> None:
    """Print the results, fastest first."""
    from trilane.slurm import sweep

    found = sweep.table(folder)
    emit(as_json, json.loads(found.to_json(orient="records")), found.to_string(index=False))


chain = Group("chain", help="A long run as dependent jobs.")
slurm.add_command(chain)


STAGES = option(
    "--stages", default="", metavar="GBS:NODES:MBS,...", help="numbers of nodes that follow the batch ramp-up"
)
TIMES = option("--times", type=whole(), default=1, help="jobs a stage, where one time limit is not enough")


@command(chain, PLAN, FOLDER, STAGES, SITE, JSON, request_options, name="create")
def create_chain(plan: Path, folder: Path, stages: str, site: Site, as_json: bool, request: JobRequest) -> None:
    """Write the run folders of a chain that trains PLAN."""
    from trilane.slurm import chain

    made = chain.create(folder, read_plan(plan), chain.parse_stages(stages) if stages else [], site, request)
    rows = [chain.link_record(path, link) for path, link in zip(made, chain.read(folder), strict=True)]
    text = "{run}: iterations {first}-{last}, {gpus} GPUs, {hours:.2f} h, {gpu_hours:.2f} GPU hours"
    emit(as_json, {"links": rows}, "\n".join(text.format_map(row) for row in rows))


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
