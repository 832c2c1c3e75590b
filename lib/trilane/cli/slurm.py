"""`trilane slurm`: pre-flight check, scripts, jobs, sweeps, chains, sites."""

from collections.abc import Sequence
from pathlib import Path

from trilane.cli.app import GROUPS, Answer, Group, command, note
from trilane.config.options import option
from trilane.config.plan import locate_plan, read_plan
from trilane.launch.local import run_folder as run_folder_of
from trilane.slurm import chain as chains
from trilane.slurm import client, jobs, preflight, sites
from trilane.slurm import script as scripts
from trilane.slurm import study_runs as several
from trilane.utils.frozen import frozen
from trilane.utils.hooks import hook
from trilane.utils.tables import Json, one_line
from trilane.utils.validation import to_mapping
from trilane.workspace.run import Run
from trilane.workspace.study import run_folders

slurm = Group("slurm", help=GROUPS["slurm"])
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
RUNS = option(argument="RUNS...")


@frozen
class Job(sites.JobRequest):
    """What a job asks for, of which site, and which findings are only warnings."""

    site: sites.Site = option(
        help=f"{', '.join(sites.catalogue())}, or a JSON file", read=sites.site
    )
    allow: tuple[str, ...] = option((), "only warn of this rule; may be repeated", metavar="RULE")


@command(slurm)
def check(plan: Path, job: Job) -> Answer:
    """Print what would fail or waste GPUs, before the job of PLAN is submitted; a job.sbatch next
    to it is checked too.

    Exit code 1 where something is refused.
    """
    run = Run(locate_plan(plan)[0].parent)
    found = preflight.check_job(read_plan(plan), job.site, job, run, job.allow)
    text = "\n".join(finding.summary() for finding in found) or "nothing found"
    values = {"findings": [finding.to_json() for finding in found]}
    return Answer(values, text, bool(preflight.refused(found)))


@command(slurm)
def script(
    plan: Path, job: Job, template: str = option("train", "which script", choices=scripts.NAMES)
) -> Answer:
    """Print the sbatch script of PLAN, to read or edit."""
    text = scripts.render(template, read_plan(plan), job.site, job)
    return Answer({"script": text}, text)


@command(slurm)
def submit(
    job: Job,
    runs: tuple[str, ...] = RUNS,
    parallel: int = option(0, "jobs that may run at the same time; 0: all, of a chain 1"),
    times: int = option(
        1, "jobs for each run, one after another, where one time limit is not enough", minimum=1
    ),
    dry_run: bool = option(
        False, "only check, and print jobs, hours and their sum; submit nothing"
    ),
) -> Answer:
    """Submit runs that have not completed: all, or if the check refuses one, none.

    A run folder's job.sbatch is written where there is none.
    """
    client.require_answer()
    every = [Run(folder) for folder in folders_of(runs)]
    # where all are completed, the check refuses them with that reason
    asked = [run for run in every if not run.is_completed] or every
    asked.sort(key=lambda run: run.plan.run.start_iteration)
    findings = {run: preflight.check_job(run.plan, job.site, job, run, job.allow) for run in asked}
    is_refused = any(preflight.refused(found) for found in findings.values())
    submitted = dict[Run, list[str]]()
    if not is_refused and not dry_run:
        # a link loads the checkpoint of the one before
        most = 1 if any(run.plan.run.start_iteration for run in asked) else parallel
        for run, one in jobs.submit_all(asked, job.site, job, times=times, parallel=most):
            submitted.setdefault(run, []).append(one)
    lines = []
    values: Json = {"findings": {}}
    for run, found in findings.items():
        ids = submitted.get(run, ["not submitted"])
        lines.append(f"{', '.join(ids)}  {run.folder}")
        lines += [f"{run.folder.name}: {finding.summary()}" for finding in found]
        values["findings"][str(run.folder)] = [finding.to_json() for finding in found]
    values["submitted"] = {str(run.folder): ids for run, ids in submitted.items()}
    if dry_run:
        rows = chains.costs({run.folder: run.plan for run in asked}, job)
        values["runs"] = rows
        lines.append(chains.costs_text(rows))
    return Answer(values, "\n".join(lines), is_refused)


@command(slurm)
def status(
    runs: tuple[str, ...] = RUNS,
) -> Answer:
    """Print every job of runs: its place in the queue, progress, status; exit code 1 where one
    failed.

    Where SLURM does not answer, one line reports that; exit code 75.
    """
    client.require_answer()
    found = jobs.job_status(folders_of(runs))
    text = "\n".join(job.summary() for job in found)
    has_failed = any(job.status.has_failed for job in found)
    return Answer({"jobs": [job.to_json() for job in found]}, text, has_failed)


@command(slurm)
def cancel(runs: tuple[str, ...] = RUNS) -> Answer:
    """Cancel the jobs of runs."""
    ids = jobs.cancel(folders_of(runs))
    return Answer({"cancelled": ids}, f"cancelled: {', '.join(ids) or 'nothing'}")


@command(slurm)
def watch(
    runs: tuple[str, ...] = RUNS,
    every: float = option(60.0, "polling interval (s)", above=0),
    seconds: float = option(7 * 86400.0, "end after so many, with exit code 75", above=0),
) -> int:
    """Print a line whenever a run starts, dies or goes on.

    Exit code 0 when all completed, 1 when one failed or was not submitted, 75 when the time is over
    or SLURM does not answer.
    """
    folders = folders_of(runs)
    files = "plan.json, jobs.jsonl, status.json, steps.jsonl, run.log, slurm-*.out"
    note([f"reads squeue, sacct and {files} of {len(folders)} run folders, from {folders[0]}"])
    for line in jobs.watch(folders, every, seconds):
        print(one_line(line), flush=True)
    client.require_answer()
    found = jobs.job_status(folders)
    if any(job.status.is_active for job in found):
        return TRY_AGAIN
    return int(not all(job.status.is_clean for job in found))


def folders_of(runs: Sequence[str]) -> list[Path]:
    """The run folders that paths, plans' files or studies' names mean, each once; a new one for a
    plan that has none.
    """
    folders = []
    for run in runs:
        if not Path(run).is_dir() and locate_plan(run)[0].is_file():
            folders.append(run_folder_of(run, True))
        else:
            folders += run_folders([run])
    by_place: dict[Path, Path] = {}
    for folder in folders:
        by_place.setdefault(folder.resolve(), folder)
    return list(by_place.values())


@command(slurm)
def sweep(plans: Path, folder: Path, job: Job) -> Answer:
    """Write the run folders of a table of plans: of `plan search --json`, 02's plans.json or a
    list; `slurm submit FOLDER` submits them.
    """
    created = several.create_sweep(folder, several.read_plans(plans), job.site, job)
    paths = [str(path) for path in created]
    return Answer({"created": paths}, "\n".join(f"created: {path}" for path in paths))


@command(slurm)
def chain(
    plan: Path,
    folder: Path,
    job: Job,
    stages: str = option("", "nodes that follow the batch ramp-up", metavar="GBS:NODES:MBS,..."),
) -> Answer:
    """Write the run folders of a chain of jobs that trains PLAN, and print each link's batch sizes
    and hours; `slurm submit FOLDER` submits them.

    Batch sizes that a stage's replicas cannot share fall back to a stage before. Hours are
    predicted, without starts, saves and waiting; `plan calendar` has the dates.
    """
    asked = chains.parse_stages(stages) if stages else []
    links = chains.create(folder, read_plan(plan), asked, job.site, job)
    rows = chains.costs({path: read_plan(path) for path in links}, job)
    return Answer({"links": rows}, chains.costs_text(rows))


@command(slurm)
def site(site: str) -> Answer:
    """Print SITE (a name or a JSON file) as JSON."""
    return Answer(to_mapping(sites.site(site)))


slurm.add_command(hook("job"))
