"""`trilane slurm`: pre-flight check, scripts, jobs, sweeps, chains."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from trilane.cli.options import (
    FILE,
    Choice,
    Group,
    Number,
    Whole,
    emit,
    json_option,
    option,
    plan_argument,
    request_options,
    site_option,
)
from trilane.utils.validation import require_file

F = TypeVar("F", bound=Callable[..., Any])
TEMPLATES = ("train", "sweep", "bench", "interactive", "monitor")
TIME_IS_OVER = 75  # EX_TEMPFAIL: try again; monitor.sbatch then submits itself once more


@click.group(cls=Group)
def slurm() -> None:
    """Check, submit and watch runs on SLURM."""


def request_of(options: dict[str, Any]) -> Any:
    """The JobRequest that the options describe."""
    from trilane.slurm.request import JobRequest

    return JobRequest(**{f.name: options[f.name] for f in fields(JobRequest)})


def site_of(name: str) -> Any:
    """The site of that name or file."""
    from trilane.slurm import sites

    return sites.site(name)


def runs_argument(function: F) -> F:
    """RUN...: run folders, plans' files, or studies' names."""
    return click.argument("runs", nargs=-1, required=True, metavar="RUN...")(function)


def allow_option(function: F) -> F:
    """--allow RULE, several times."""
    return option("--allow", multiple=True, metavar="RULE", help="only warn of this rule; may be repeated")(function)


def folders_of(runs: Sequence[str]) -> list[Path]:
    """The run folders that paths, plans' files or studies' names mean; a new one for a plan that has none."""
    from trilane.config.plan import locate_plan
    from trilane.launch.local import run_folder
    from trilane.workspace.study import run_folders

    return [
        folder
        for run in runs
        for folder in (
            run_folders([run]) if Path(run).is_dir() or not locate_plan(run)[0].is_file() else [run_folder(run, True)]
        )
    ]


def findings_text(found: dict[str, Any]) -> str:
    """Two lines for each finding, after the name of its run."""
    from trilane.slurm.preflight import check

    return "\n".join(f"{name}: {check.line(f)}" for name, findings in found.items() for f in findings)


def as_dicts(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Findings by run, as JSON."""
    return {name: [f.to_json() for f in findings] for name, findings in found.items()}


@slurm.command("check")
@plan_argument
@site_option
@allow_option
@json_option
@request_options
def check_command(plan: Path, site: str, allow: Collection[str], as_json: bool, **options: Any) -> int:
    """Print what would fail or waste GPUs, before the job of PLAN is submitted; a job.sbatch next to it is checked too.

    Exit code 1 where something is refused.
    """
    from trilane.config.plan import locate_plan, read_plan
    from trilane.slurm.preflight import check

    where, request, (file, _) = site_of(site), request_of(options), locate_plan(plan)
    try:
        read = read_plan(plan)
    except ValueError as error:
        require_file("plan", file)
        found = [check.of_error(error)]
    else:
        found = check.check_job(read, where, request, file.parent, allow)
    text = "\n".join(map(check.line, found)) or "nothing found"
    emit(as_json, lambda: {"findings": [f.to_json() for f in found]}, lambda: text)
    return 1 if check.refused(found) else 0


@slurm.command()
@plan_argument
@option("--template", type=Choice(TEMPLATES), default="train")
@site_option
@json_option
@request_options
def script(plan: Path, template: str, site: str, as_json: bool, **options: Any) -> None:
    """Print the sbatch script of PLAN, to read or edit."""
    from trilane.config.plan import read_plan
    from trilane.slurm.script import render

    text = render(template, read_plan(plan), site_of(site), request_of(options))
    emit(as_json, lambda: {"script": text}, lambda: text.removesuffix("\n"), indent=None)


@slurm.command()
@runs_argument
@site_option
@allow_option
@option("--rewrite", is_flag=True, help="write job.sbatch anew, for this site and these options")
@option("--dry-run", is_flag=True, help="only check, and submit nothing")
@json_option
@request_options
def submit(
    runs: Sequence[str], site: str, allow: Collection[str], rewrite: bool, dry_run: bool, as_json: bool, **options: Any
) -> int:
    """Submit runs that have not completed, or train them here at site local: all, or if the check refuses one, none."""
    from trilane.config.plan import read_plan
    from trilane.slurm import jobs
    from trilane.slurm.preflight import check

    where, request, folders = site_of(site), request_of(options), folders_of(runs)
    for path in folders if rewrite else []:
        jobs.rewrite(path, where, request)
    found = {str(f): check.check_job(read_plan(f / "plan.json"), where, request, f, allow) for f in folders}
    refused = any(check.refused(findings) for findings in found.values())
    submitted = {} if refused or dry_run else {str(f): jobs.submit(f, where, request) for f in folders}
    text = "\n".join(
        "\n".join([f"{submitted.get(folder, 'not submitted')}  {folder}", *map(check.line, findings)])
        for folder, findings in found.items()
    )
    emit(as_json, lambda: {"findings": as_dicts(found), "submitted": submitted}, lambda: text)
    return 1 if refused else 0


slurm.add_command(submit, "resubmit")


@slurm.command()
@runs_argument
@json_option
def status(runs: Sequence[str], as_json: bool) -> int:
    """Print every job of runs: its place in the queue, progress, status; exit code 1 where one failed."""
    return print_status(folders_of(runs), as_json)


def print_status(folders: Sequence[Path], as_json: bool) -> int:
    """The jobs of run folders, a line each; 1 where one failed."""
    from trilane.slurm import jobs

    found = jobs.job_status(folders)
    emit(as_json, lambda: {"jobs": [job.to_json() for job in found]}, lambda: "\n".join(map(status_line, found)))
    return 1 if any(job.has_failed for job in found) else 0


def status_line(job: Any) -> str:
    """A job in one line for the terminal."""
    later = f" +{job.waiting}" if job.waiting else ""
    state = f"{job.run:28.28} {job.id + later:12} {job.state:13} {job.elapsed:>10} {job.reason or job.nodes:22.22}"
    return f"{state} {job.iteration:>7}/{job.iterations} {job.status:10} {job.evidence[:80]}".rstrip()


@slurm.command()
@click.argument("run", metavar="RUN")
@option("--lines", type=Whole(), default=20, help="lines to print")
@json_option
def tail(run: str, lines: int, as_json: bool) -> None:
    """Print the last lines of a run's log."""
    from trilane.slurm import job_status

    found = job_status.logs(folders_of([run])[0], lines)
    emit(as_json, lambda: {"lines": found}, lambda: "\n".join(found), indent=None)


@slurm.command()
@runs_argument
@json_option
def cancel(runs: Sequence[str], as_json: bool) -> None:
    """Cancel the jobs of runs."""
    from trilane.slurm import jobs

    ids = jobs.cancel(folders_of(runs))
    text = f"cancelled: {', '.join(ids) or 'nothing was running or waiting'}"
    emit(as_json, lambda: {"cancelled": ids}, lambda: text, indent=None)


@slurm.command()
@runs_argument
@option("--every", type=Number(), default=60.0, help="seconds between two looks")
@option("--seconds", type=Number(), default=7 * 86400.0, help="end after so many, with exit code 75")
@option("--stall", type=Number(), default=600.0, help="seconds without an iteration that count as stalled")
@json_option
def watch(runs: Sequence[str], every: float, seconds: float, stall: float, as_json: bool) -> int:
    """Print a line whenever a run starts, dies, stalls or goes on; with --json also all jobs at the end.

    Exit code 0 when all completed, 1 when one failed, 75 when the time is over or SLURM does not answer.
    """
    from trilane.slurm import client, jobs, monitor

    folders = folders_of(runs)
    for line in monitor.watch(folders, every, seconds, stall):
        print(line, flush=True)
    try:
        found = jobs.job_status(folders)
    except client.SlurmError as error:
        print(error, flush=True)
        return TIME_IS_OVER
    if as_json:
        emit(True, lambda: {"jobs": [job.to_json() for job in found]}, str)
    if any(job.status.is_active for job in found):
        return TIME_IS_OVER
    return 1 if any(job.has_failed for job in found) else 0


@slurm.command()
@click.argument("job")
@click.argument("what", type=Choice(("memory", "stacks", "processes", "hostfile")))
@option("--slots", type=Whole(), default=8, help="GPUs a node, for the hostfile")
@click.option("--json", "as_json", is_flag=True, help="print the command (or the hostfile) as JSON, run nothing")
def attach(job: str, what: str, slots: int, as_json: bool) -> None:
    """Look into the running job of that id: its GPUs' memory, the ranks' stacks or processes, or its hostfile."""
    from trilane.slurm import monitor

    if what == "hostfile":
        text = monitor.hostfile(job, slots)
        emit(as_json, lambda: {"hostfile": text}, lambda: text.removesuffix("\n"), indent=None)
        return
    command = monitor.attach(job, what)
    if not as_json:
        os.execvp(command[0], command)
    emit(True, lambda: {"command": command}, str, indent=None)


@slurm.group(cls=Group)
def job() -> None:
    """For the job scripts: may this attempt begin, and how did it end."""


@job.command()
@click.argument("folder", type=FILE)
@json_option
def begin(folder: Path, as_json: bool) -> None:
    """Print whether the attempt of the run folder may begin."""
    from trilane.slurm import attempt

    decision = attempt.begin(folder)
    emit(as_json, lambda: {"verdict": decision}, lambda: decision, indent=None)


@job.command()
@click.argument("folder", type=FILE)
@option("--code", type=Whole(-255, 255), default=0, help="the training's exit code")
@json_option
def end(folder: Path, code: int, as_json: bool) -> None:
    """Write and print how the attempt ended."""
    from trilane.slurm import attempt

    outcome = attempt.end(folder, code)
    text = f"{outcome.status} after {outcome.seconds:.0f} s: {outcome.evidence}"
    emit(as_json, lambda: asdict(outcome), lambda: text, indent=None)


@slurm.group(cls=Group)
def sweep() -> None:
    """A table of plans as one job array."""


@sweep.command("create")
@click.argument("plans", type=FILE)
@click.argument("folder", type=FILE)
@site_option
@json_option
@request_options
def create_sweep(plans: Path, folder: Path, site: str, as_json: bool, **options: Any) -> None:
    """Write the run folders and scripts of an array; PLANS is `plan search --json`, 02's plans.json or a list."""
    from trilane.slurm import sweep

    made = sweep.create(folder, sweep.read_plans(plans), site_of(site), request_of(options))
    print_values(as_json, {"created": [str(path) for path in made]})


def print_values(as_json: bool, values: dict[str, list[str]]) -> None:
    """The lists, an element a line."""
    lines = [f"{name}: {value}" for name, found in values.items() for value in found or ["nothing"]]
    emit(as_json, lambda: values, lambda: "\n".join(lines), indent=None)


def sweep_options(function: F) -> F:
    """The arguments of `sweep submit` and `sweep rerun`."""
    for decorate in (request_options, json_option, allow_option, site_option, click.argument("folder", type=FILE)):
        function = decorate(function)
    return function


@sweep.command("submit")
@sweep_options
def submit_sweep(folder: Path, site: str, allow: Collection[str], as_json: bool, **options: Any) -> int:
    """Submit all runs, or where the check refuses one, none."""
    return start_sweep(folder, site_of(site), request_of(options), allow, as_json, is_again=False)


@sweep.command("rerun")
@sweep_options
def rerun_sweep(folder: Path, site: str, allow: Collection[str], as_json: bool, **options: Any) -> int:
    """Submit the failed runs again, or where the check refuses one, none."""
    return start_sweep(folder, site_of(site), request_of(options), allow, as_json, is_again=True)


def start_sweep(folder: Path, site: Any, request: Any, allow: Collection[str], as_json: bool, *, is_again: bool) -> int:
    """Check the runs, each with its array's script, and submit them; 1 where one is refused."""
    from trilane.config.plan import read_plan
    from trilane.slurm import sweep
    from trilane.slurm.preflight import check

    lines = sweep.failures(folder) if is_again else None
    scripts, found = sweep.scripts(folder, site), dict[str, Any]()
    for n, path in enumerate(sweep.members(folder), 1):
        if lines is None or n in lines:
            found[str(path)] = check.check_job(read_plan(path / "plan.json"), site, request, path, allow, scripts[n])
    refused = {path: check.refused(findings) for path, findings in found.items()}
    if any(refused.values()):
        named = {Path(path).name: findings for path, findings in found.items()}
        emit(as_json, lambda: {"findings": as_dicts(refused)}, lambda: findings_text(named))
        return 1
    print_values(as_json, {"submitted": (sweep.rerun if is_again else sweep.submit)(folder, site, request.parallel)})
    return 0


@sweep.command("status")
@click.argument("folder", type=FILE)
@json_option
def status_of_sweep(folder: Path, as_json: bool) -> int:
    """Print every run; exit code 1 where one failed."""
    from trilane.slurm import sweep

    return print_status(sweep.members(folder), as_json)


@sweep.command("table")
@click.argument("folder", type=FILE)
@json_option
def table_of_sweep(folder: Path, as_json: bool) -> None:
    """Print the results, fastest first."""
    from trilane.slurm import sweep

    found = sweep.table(folder)
    emit(as_json, lambda: json.loads(found.to_json(orient="records")), lambda: found.to_string(index=False))


@slurm.group(cls=Group)
def chain() -> None:
    """A long run as dependent jobs."""


@chain.command("create")
@plan_argument
@click.argument("folder", type=FILE)
@option("--stages", default="", metavar="GBS:NODES:MBS,...", help="numbers of nodes that follow the batch ramp-up")
@site_option
@json_option
@request_options
def create_chain(plan: Path, folder: Path, stages: str, site: str, as_json: bool, **options: Any) -> None:
    """Write the run folders of a chain that trains PLAN."""
    from trilane.config.plan import read_plan
    from trilane.slurm import chain

    parsed = chain.parse_stages(stages) if stages else []
    made = chain.create(folder, read_plan(plan), parsed, site_of(site), request_of(options))
    rows = [chain.link_record(path, link) for path, link in zip(made, chain.read(folder), strict=True)]
    lines = (
        f"{row['run']}: iterations {row['first']}-{row['last']}, {row['gpus']} GPUs, {row['hours']:.2f} h, "
        f"{row['gpu_hours']:.2f} GPU hours"
        for row in rows
    )
    emit(as_json, lambda: {"links": rows}, lambda: "\n".join(lines))


@chain.command("submit")
@click.argument("folder", type=FILE)
@option("--times", type=Whole(), default=1, help="jobs a stage, where one time limit is not enough")
@site_option
@allow_option
@json_option
@request_options
def submit_chain(folder: Path, times: int, site: str, allow: Collection[str], as_json: bool, **options: Any) -> int:
    """Submit the jobs, each after the one before; none where the check refuses one."""
    from trilane.config.plan import read_plan
    from trilane.slurm import chain
    from trilane.slurm.preflight import check
    from trilane.workspace import run_folder

    where, request = site_of(site), request_of(options)
    left = [p for p in chain.stages_of(folder) if not run_folder.is_completed(p)]
    found = {p.name: check.check_job(read_plan(p / "plan.json"), where, request, p, allow) for p in left}
    refused = any(check.refused(findings) for findings in found.values())
    ids = [] if refused else chain.submit(folder, where, times)
    text = "\n".join(filter(None, [findings_text(found), f"submitted: {', '.join(ids) or 'nothing'}"]))
    emit(as_json, lambda: {"findings": as_dicts(found), "submitted": ids}, lambda: text)
    return 1 if refused else 0


@chain.command("status")
@click.argument("folder", type=FILE)
@json_option
def status_of_chain(folder: Path, as_json: bool) -> int:
    """Print every stage; exit code 1 where one failed."""
    from trilane.slurm import chain

    return print_status(chain.stages_of(folder), as_json)
