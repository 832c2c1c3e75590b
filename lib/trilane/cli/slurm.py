"""`trilane slurm`: pre-flight check, scripts, jobs, sweeps, chains, sites."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.cli.app import Answer, Group, command, note
from trilane.config.options import option
from trilane.config.plan import Plan, locate_plan, read_plan
from trilane.costmodel.shipped import constants_of, replaced
from trilane.launch.local import run_folder as run_folder_of
from trilane.slurm import chain as chains
from trilane.slurm import client, jobs, ledger, preflight, sites
from trilane.slurm import script as scripts
from trilane.slurm import study_runs as several
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.hooks import hook
from trilane.utils.tables import one_line
from trilane.utils.validation import require_file, to_mapping
from trilane.workspace.run_folder import is_completed
from trilane.workspace.status import Status
from trilane.workspace.study import run_folders

GROUP = Group("slurm", help="Check, submit and watch runs on SLURM.")


@dataclass(frozen=True, kw_only=True)
class Job(JobRequest):
    """What a job asks for, of which site, and which findings are only warnings."""

    site: Site = option(help=f"{', '.join(sites.catalogue())}, or a JSON file", read=sites.site)
    allow: tuple[str, ...] = option((), "only warn of this rule; may be repeated", metavar="RULE")


@command(GROUP)
def check(plan: Path, job: Job) -> Answer:
    """Print what would fail or waste GPUs, before the job of PLAN is submitted; a job.sbatch next
    to it is checked too.

    Exit code 1 where something is refused.
    """
    file, _ = locate_plan(plan)
    try:
        read = read_plan(plan)
    except ValueError as error:
        require_file("plan", file)
        found = [preflight.of_error(error)]
    else:
        note_constants(read, job.site)
        found = preflight.check_job(read, job.site, job, file.parent, job.allow)
    text = "\n".join(map(preflight.line, found)) or "nothing found"
    return Answer({"findings": [f.to_json() for f in found]}, text, preflight.refused(found))


def note_constants(plan: Plan, site: Site) -> None:
    """Where the nodes are predicted by others than the plan's constants, that goes to stderr."""
    note(replaced(plan, constants_of(plan, cluster=scripts.nodes_of(plan, site))))


@command(GROUP)
def script(
    plan: Path, job: Job, template: str = option("train", "which script", choices=scripts.NAMES)
) -> Answer:
    """Print the sbatch script of PLAN, to read or edit."""
    text = scripts.render(template, read_plan(plan), job.site, job)
    return Answer({"script": text}, text.removesuffix("\n"))


@command(GROUP)
def submit(
    *runs: str,
    job: Job,
    parallel: int = option(
        0, "jobs that may run at the same time; 0: all, of a chain 1", minimum=0
    ),
    times: int = option(
        1, "jobs for each run, one after another, where one time limit is not enough", minimum=1
    ),
    until_done: bool = option(
        False, "as many jobs as 1.25 times the predicted hours need; what is left ends at once"
    ),
    failed: bool = option(False, "only runs that failed and may succeed now"),
    rewrite: bool = option(False, "write job.sbatch anew, for this site and these options"),
    accept_changes: bool = option(
        False, "submit an edited job.sbatch; jobs that wait take plan.json as it is now"
    ),
    dry_run: bool = option(
        False, "only check, and print jobs, hours and their sum; submit nothing"
    ),
) -> Answer:
    """Submit runs that have not completed: all, or if the check refuses one, none."""
    client.require_answer("; nothing was submitted: submit again when it answers")
    # where all are completed, the check refuses them with that reason
    folders = folders_of(runs)
    folders = [folder for folder in folders if not is_completed(folder)] or folders
    if failed:
        # what did not fit does not fit again
        states = [
            state.has_failed and state.status is not Status.OOM
            for state in jobs.job_status(folders)
        ]
        folders = [*itertools.compress(folders, states)]
    for path in folders if rewrite else []:
        scripts.rewrite(path, job.site, job)
    plans = {folder: read_plan(folder / "plan.json") for folder in folders}
    for plan in plans.values():
        note_constants(plan, job.site)
    allow = (*job.allow, *["changes"] * accept_changes)
    found = {
        path: preflight.check_job(plan, job.site, job, path, allow) for path, plan in plans.items()
    }
    is_refused = any(map(preflight.refused, found.values()))
    chosen = [] if is_refused or dry_run else folders
    # a stage loads the checkpoint of the one before
    most = 1 if any(map(chains.is_chain, runs)) else parallel
    made = dict[str, list[str]]()
    for path in chosen if accept_changes else []:
        if waiting := jobs.accept_changes(path, job.site.source):
            made[str(path)] = waiting
            note(jobs.unreached(path, waiting))
    chosen = [path for path in chosen if str(path) not in made]
    rows = chains.link_records(list(plans), job) if dry_run or until_done else []
    often = {
        Path(row["run"]): max(times, math.ceil(1.25 * row["jobs"])) if until_done else times
        for row in rows
    }
    for path, one in jobs.submit_all(chosen, job.site, job, times=often or times, parallel=most):
        made.setdefault(str(path), []).append(one)
    lines = [f"{', '.join(made.get(str(path), ['not submitted']))}  {path}" for path in found]
    lines += [f"{path.name}: {preflight.line(f)}" for path, own in found.items() for f in own]
    findings = {str(path): [f.to_json() for f in own] for path, own in found.items()}
    costs = {"runs": rows} if dry_run else {}
    lines += [*map(chains.link_line, rows), chains.total_line(rows)] if rows and dry_run else []
    return Answer(
        {"findings": findings, "submitted": made, **costs},
        "\n".join(lines) or "nothing to submit",
        is_refused,
    )


@command(GROUP)
def status(
    *runs: str, lines: int = option(0, "of each run's log, at its end", minimum=0)
) -> Answer:
    """Print every job of runs: its place in the queue, progress, status; exit code 1 where one
    failed.

    Where SLURM does not answer, one line reports that; exit code 75.
    """
    client.require_answer()
    folders = folders_of(runs)
    found = jobs.job_status(folders)
    note([line for line in map(ledger.damaged, folders) if line])
    logs = [jobs.logs(folder, lines) if lines else [] for folder in folders]
    text = "\n".join(
        line for job, log in zip(found, logs, strict=True) for line in (job.line(), *log)
    )
    values = [
        job.to_json() | ({"lines": log} if lines else {})
        for job, log in zip(found, logs, strict=True)
    ]
    return Answer({"jobs": values}, text, any(job.has_failed for job in found))


@command(GROUP)
def cancel(*runs: str) -> Answer:
    """Cancel the jobs of runs."""
    ids = jobs.cancel(folders_of(runs))
    return Answer(
        {"cancelled": ids}, f"cancelled: {', '.join(ids) or 'nothing was running or waiting'}"
    )


@command(GROUP)
def watch(
    *runs: str,
    every: float = option(60.0, "polling interval (s)", above=0),
    seconds: float = option(7 * 86400.0, "end after so many, with exit code 75", above=0),
) -> int:
    """Print a line whenever a run starts, dies or goes on.

    Exit code 0 when all completed, 1 when one failed, 75 when the time is over or SLURM does not
    answer.
    """
    folders = folders_of(runs)
    for line in jobs.watch(folders, every, seconds):
        print(one_line(line), flush=True)
    client.require_answer()
    found = jobs.job_status(folders)
    # EX_TEMPFAIL of sysexits.h: try again
    return 75 if any(j.status.is_active for j in found) else int(any(j.has_failed for j in found))


def folders_of(runs: Sequence[str]) -> list[Path]:
    """The run folders that paths, plans' files or studies' names mean; a new one for a plan that
    has none.
    """
    found = list[Path]()
    for run in runs:
        is_plan = not Path(run).is_dir() and locate_plan(run)[0].is_file()
        below = (
            chains.stages_of(Path(run))
            if chains.is_chain(run)
            else run_folders([] if is_plan else [run])
        )
        found += [run_folder_of(run, True)] if is_plan else below
    return found


sweep = Group("sweep", help="A table of plans as run folders; `slurm submit FOLDER` submits them.")


@command(sweep, "create")
def create_sweep(plans: Path, folder: Path, job: Job) -> Answer:
    """Write the run folders of a table of plans: of `plan search --json`, 02's plans.json or a
    list.
    """
    made = [
        str(path) for path in several.create_sweep(folder, several.read_plans(plans), job.site, job)
    ]
    return Answer({"created": made}, "\n".join(f"created: {path}" for path in made))


command(sweep, "submit")(submit)

chain = Group("chain", help="A long run as dependent jobs; `slurm submit FOLDER` submits them.")


@command(chain, "create")
def create_chain(
    plan: Path,
    folder: Path,
    job: Job,
    stages: str = option("", "nodes that follow the batch ramp-up", metavar="GBS:NODES:MBS,..."),
    calibration: str = option("", "constants, as of `plan calendar`", metavar="SOURCE"),
) -> Answer:
    """Write the run folders of a chain that trains PLAN, and print each link's batch sizes and
    hours.

    Batch sizes that a stage's replicas cannot share fall back to a stage before. Hours are
    predicted, without starts, saves and waiting; `plan calendar` has the dates.
    """
    asked = chains.parse_stages(stages) if stages else []
    read = read_plan(plan)
    known = constants_of(read, calibration)
    note(replaced(read, known))
    made = chains.create(folder, replace(read, calibration=known.kept()), asked, job.site, job)
    rows = chains.link_records(made, job)
    return Answer(
        {"links": rows}, "\n".join([*map(chains.link_line, rows), chains.total_line(rows)])
    )


@command(GROUP, "site")
def site_command(site: Site = option(argument="SITE", read=sites.site)) -> Answer:
    """Print SITE (a name or a JSON file) as JSON."""
    return Answer(to_mapping(site))


for group in (hook("job"), sweep, chain):
    GROUP.add_command(group)
