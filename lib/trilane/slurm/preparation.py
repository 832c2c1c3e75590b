"""Preparation of corpora by a job of one core, so that no node with GPUs waits while one process tokenizes."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.config.training import Data
from trilane.launch import local
from trilane.slurm import client, frozen_code, ledger, submission
from trilane.slurm.script import render
from trilane.slurm.sites import JobRequest, Site
from trilane.workspace.prepared_corpora import SMALL_BYTES, unprepared
from trilane.workspace.run_folder import write_text

SCRIPT = "prepare.sbatch"
# the options of a request that concern a job of one core
KEPT = ("account", "time_limit", "partition", "reservation", "mail", "comment", "environment")
HERE = "here"  # in place of a job's id


def wanted(plan: Plan, folder: Path, above: int = SMALL_BYTES) -> dict[str, int]:
    """The sources of a run's corpus that are still to be tokenized and have more than `above` bytes, with their bytes.

    Relative paths are below `folder`: the run folder, in which a job runs; here, where the command was called.
    """
    return unprepared(plan.data.parts, folder.resolve(), above)


def prepare(folders: Iterable[Path], site: Site, request: JobRequest, above: int = 0) -> dict[Path, str]:
    """Prepare the corpora of runs, one job for each corpus; the id of the job by run folder, without those prepared.

    A job that prepares it already is taken. At site `local` it is done here, and the id is HERE. Raises ValueError
    where the job is not accepted.
    """
    groups: dict[tuple[Path, ...], list[Path]] = {}
    for folder in (Path(folder).resolve() for folder in folders):
        plan = read_plan(folder / "plan.json")
        if wanted(plan, Path() if site.is_local else folder, above):
            groups.setdefault(_corpus(plan.data, folder), []).append(folder)
    return {folder: job for group in groups.values() for folder, job in _prepare(group, site, request).items()}


def prepare_first(folders: Iterable[Path], site: Site, request: JobRequest) -> dict[Path, str]:
    """As prepare() for training jobs of that request: what they would refuse to tokenize, and not on their nodes."""
    apart = dataclasses.replace(request, partition="", reservation="")
    return prepare(folders, site, apart, SMALL_BYTES)


def lines(made: Mapping[Path, str]) -> list[str]:
    """A line for each run whose corpus is prepared."""
    return [f"corpus of {folder}: " + ("prepared" if job == HERE else f"job {job}") for folder, job in made.items()]


def _corpus(data: Data, folder: Path) -> tuple[Path, ...]:
    """The places of the data that a run in the folder reads: equal ones are prepared once."""
    named = [data.folder, *[data.tokenizer] * (data.tokenizer != "bytes"), *(part.source for part in data.parts)]
    return tuple((folder / name).resolve() for name in named)


def _prepare(folders: list[Path], site: Site, request: JobRequest) -> dict[Path, str]:
    """Prepare the corpus of these runs, which is one."""
    first = folders[0]
    if site.is_local:
        local.prepare_data(first / "plan.json")
        return dict.fromkeys(folders, HERE)
    if going := _going(folders):
        return dict.fromkeys(folders, going)
    kept = {name: getattr(request, name) for name in KEPT}
    text = render("prepare", read_plan(first / "plan.json"), site, JobRequest(**kept, signal_s=0))
    write_text(first / SCRIPT, text)
    code = frozen_code.freeze(first)
    job = submission.sbatch(first / SCRIPT, arguments=[str(code)])
    facts = {"site": site.name, "script": ledger.fingerprint(text), "place": str(first), "code": code.name}
    for folder in folders:
        ledger.note(folder, "preparing", job, **facts)
    return dict.fromkeys(folders, job)


def _going(folders: Iterable[Path]) -> str:
    """A job that prepares the corpus of these runs and has not ended; "" where there is none."""
    ids = [e["id"] for folder in folders for e in ledger.events(folder, "preparing")]
    known = client.states(job for job in ids if client.JOB_ID.fullmatch(job))
    return next((job for job, state in known.items() if not state.has_ended), "")


def output(folder: Path, job: str) -> Path | None:
    """What the job that prepared the corpus of a run printed; None where it prepared none, or printed nothing yet."""
    places = [e.get("place") for e in ledger.events(folder, "preparing") if e["id"] == job]
    path = Path(str(places[-1])) / f"prepare-{job}.out" if places else None
    return path if path and path.is_file() else None
