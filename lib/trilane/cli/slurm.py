"""`trilane slurm`: pre-flight check, scripts, jobs, sweeps, chains."""

from collections.abc import Collection, Sequence
from pathlib import Path

from trilane.cli.options import JSON, PLAN, Choice, Group, command, emit, number, option, whole
from trilane.cli.slurm_job import job
from trilane.cli.slurm_options import ALLOW, RUNS, SITE, as_dicts, checked, folders_of, print_status, request_options
from trilane.cli.slurm_site import site_command
from trilane.cli.slurm_sweep import chain, sweep
from trilane.config.plan import locate_plan, read_plan, read_plan_values
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.tables import one_line
from trilane.utils.validation import require_file

TIME_IS_OVER = 75  # EX_TEMPFAIL: try again; monitor.sbatch then submits itself once more
TEMPLATES = Choice(("train", "sweep", "bench", "interactive", "monitor", "prepare"))

slurm = Group("slurm", help="Check, submit and watch runs on SLURM.")


@command(slurm, PLAN, SITE, ALLOW, JSON, request_options, name="check")
def check_command(plan: Path, site: Site, allow: Collection[str], as_json: bool, request: JobRequest) -> int:
    """Print what would fail or waste GPUs, before the job of PLAN is submitted; a job.sbatch next to it is checked too.

    Exit code 1 where something is refused.
    """
    from trilane.costmodel.shipped import calibration_of
    from trilane.slurm import preflight

    file, _ = locate_plan(plan)
    try:
        read = read_plan(plan)
    except ValueError as error:
        require_file("plan", file)
        found = [preflight.of_error(error)]
    else:
        known = calibration_of(read_plan_values(plan), read.cluster)
        found = preflight.check_job(read, site, request, file.parent, allow, calibration=known)
    text = "\n".join(map(preflight.line, found)) or "nothing found"
    return emit(as_json, {"findings": [f.to_json() for f in found]}, text, failed=preflight.refused(found))


@command(slurm, PLAN, option("--template", type=TEMPLATES, default="train"), SITE, JSON, request_options)
def script(plan: Path, template: str, site: Site, as_json: bool, request: JobRequest) -> None:
    """Print the sbatch script of PLAN, to read or edit."""
    from trilane.slurm.script import render

    text = render(template, read_plan(plan), site, request)
    emit(as_json, {"script": text}, text.removesuffix("\n"), indent=None)


REWRITE = option("--rewrite", is_flag=True, help="write job.sbatch anew, for this site and these options")
DRY_RUN = option("--dry-run", is_flag=True, help="only check, and submit nothing")


PREPARE = option(
    "--prepare", is_flag=True, help="prepare unprepared corpora by a job first, and train once it succeeded"
)


@command(slurm, RUNS, SITE, ALLOW, REWRITE, DRY_RUN, PREPARE, JSON, request_options)
def submit(
    runs: Sequence[str],
    site: Site,
    allow: Sequence[str],
    rewrite: bool,
    dry_run: bool,
    prepare: bool,
    as_json: bool,
    request: JobRequest,
) -> int:
    """Submit runs that have not completed, or train them here at site local: all, or if the check refuses one, none."""
    from trilane.slurm import jobs, preflight, script

    folders = folders_of(runs)
    for path in folders if rewrite else []:
        script.rewrite(path, site, request)
    found, is_refused = checked(folders, site, request, [*allow, "corpus"] if prepare else allow)
    chosen = [] if is_refused or dry_run else folders
    corpora = jobs.prepare_first(chosen, site, request) if prepare and not site.is_local else {}
    submitted, error = dict[str, str](), None
    for path in chosen:
        try:
            submitted[str(path)] = jobs.submit(path, site, request, after=corpora.get(path.resolve(), ""))
        except ValueError as refused:
            error = refused
            break
    lines = list[str]()
    for folder, findings in found.items():
        lines += [f"{submitted.get(folder, 'not submitted')}  {folder}", *map(preflight.line, findings)]
    lines += jobs.corpus_lines(corpora)
    preparing = {"preparing": {str(path): job for path, job in corpora.items()}} if prepare else {}
    values = {"findings": as_dicts(found), "submitted": submitted, **preparing}
    if error and not submitted:
        raise error
    code = emit(as_json, values, "\n".join(lines), failed=is_refused)
    if error:
        raise error
    return code


@command(slurm, RUNS, SITE, JSON, request_options, name="prepare")
def prepare_command(runs: Sequence[str], site: Site, as_json: bool, request: JobRequest) -> int:
    """Tokenize the corpora of runs by a job of one core for each corpus, or here at site local."""
    from trilane.slurm import client, jobs

    if not site.is_local:
        client.require_answer("; nothing was submitted: submit again when it answers")
    made = jobs.prepare(folders_of(runs), site, request)
    text = "\n".join(jobs.corpus_lines(made)) or "nothing to do: each corpus is prepared, or built in"
    return emit(as_json, {"preparing": {str(path): job for path, job in made.items()}}, text)


LINES = option("--lines", type=whole(0), default=0, help="of each run's log, at its end")


@command(slurm, RUNS, LINES, JSON)
def status(runs: Sequence[str], lines: int, as_json: bool) -> int:
    """Print every job of runs: its place in the queue, progress, status; exit code 1 where one failed."""
    return print_status(folders_of(runs), as_json, lines)


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

    What a person should know is also sent to the webhook of TRILANE_WEBHOOK. Exit code 0 when all completed, 1 when one
    failed, 75 when the time is over or SLURM does not answer.
    """
    from trilane.slurm import client, jobs, monitor

    folders = folders_of(runs)
    for line in monitor.watch(folders, every, seconds, stall):
        print(one_line(line), flush=True)
    try:
        client.require_answer()
        found = jobs.job_status(folders)
    except client.SlurmError as error:
        print(one_line(str(error)), flush=True)
        return TIME_IS_OVER
    if as_json:
        emit(True, {"jobs": [job.to_json() for job in found]}, "")
    return TIME_IS_OVER if any(j.status.is_active for j in found) else int(any(j.has_failed for j in found))


slurm.add_command(job)
slurm.add_command(sweep)
slurm.add_command(chain)
slurm.add_command(site_command)
