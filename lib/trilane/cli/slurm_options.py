"""What the commands of `trilane slurm` share: options, run folders, findings and states as text."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from trilane.cli.options import Checked, Choice, emit, option, whole
from trilane.config.plan import locate_plan, read_plan, read_plan_values
from trilane.slurm import sites
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.tables import one_line

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
            choices = f.metadata.get("choices")
            kind = Choice(choices) if choices else whole(0) if isinstance(f.default, int) else str
            decorated = option(f"--{name}", type=kind, default=f.default)(decorated)
    return decorated


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
    from trilane.costmodel.shipped import calibration_of
    from trilane.slurm import client, preflight

    if not site.is_local:
        client.require_answer("; nothing was submitted: submit again when it answers")
    found = dict[str, Any]()
    for path, script in zip_longest(paths, scripts):
        plan = read_plan(path / "plan.json")
        known = calibration_of(read_plan_values(path), plan.cluster)
        found[str(path)] = preflight.check_job(plan, site, request, path, allow, script, known)
    return found, any(map(preflight.refused, found.values()))


def findings_text(found: Mapping[str, Any]) -> str:
    """Two lines for each finding, after the name of its run."""
    from trilane.slurm import preflight

    return "\n".join(f"{Path(path).name}: {preflight.line(f)}" for path, findings in found.items() for f in findings)


def as_dicts(found: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Findings by run, as JSON."""
    return {name: [f.to_json() for f in findings] for name, findings in found.items()}


def print_status(folders: Sequence[Path], as_json: bool, count: int = 0) -> int:
    """The jobs of run folders, a line each, and the last lines of their logs; 1 where one failed, 75 where SLURM does
    not answer: then by the ledgers."""
    from trilane.slurm import client, jobs

    found, silence = jobs.current_status(folders)
    lines = [one_line(f"{silence}; by the ledgers:")] if silence else []
    logs = [jobs.logs(folder, count) if count else [] for folder in folders]
    for job, log in zip(found, logs, strict=True):
        lines += [status_line(job), *log]
    values = [job.to_json() | ({"lines": log} if count else {}) for job, log in zip(found, logs, strict=True)]
    failed = any(job.has_failed for job in found)
    code = emit(as_json, {"jobs": values, "slurm": silence}, "\n".join(lines), failed=failed)
    return code or (client.SlurmUnreachable.exit_code if silence else 0)


def status_line(job: Any) -> str:
    """A job in one line for the terminal."""
    later = f" +{job.waiting}" if job.waiting else ""
    state = f"{job.run:28.28} {job.id + later:12} {job.state:13} {job.elapsed:>10} {job.reason or job.nodes:22.22}"
    as_of = f"(as of {job.as_of}) " if job.as_of else ""
    without = f"--exclude={job.exclude[:80]} " if job.exclude else ""
    return f"{state} {job.iteration:>7}/{job.iterations} {job.status:10} {as_of}{without}{job.evidence[:80]}".rstrip()
