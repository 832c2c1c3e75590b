"""Run folders of several plans: of the best of a study's search, which are checked, priced, started
and followed, and of a table of plans (a sweep).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trilane.config.engines import label_of
from trilane.config.plan import Plan, plan_from_json
from trilane.config.training import Data, Optimizer, Run
from trilane.costmodel.predict import predict
from trilane.launch import local
from trilane.slurm import jobs, script, sites
from trilane.slurm.checks import REFUSAL
from trilane.slurm.preflight import JobFinding, check_job
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.folder_lock import FolderLock
from trilane.utils.progress import progress
from trilane.utils.tables import Columns, DataFrame, Html, Table, Text, grouped
from trilane.utils.validation import read_json, require
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.installation import outputs_root
from trilane.workspace.run_folder import put_aside
from trilane.workspace.status import Status
from trilane.workspace.study import Study


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One plan with its prediction as in plans.json, why it was chosen, and its folder, completed
    before or not.
    """

    plan: Plan
    prediction: Mapping[str, Any]
    reason: str
    folder: Path
    is_completed: bool


@dataclass(frozen=True, kw_only=True)
class StudyRuns(Table):
    """The runs of a study for one site and one request; as a table, the plans, their costs without
    starts and saves (in jobs of one time limit each), and why they were chosen.
    """

    digits = 4
    study: Study
    site: Site
    request: JobRequest
    rows: tuple[StudyRun, ...]

    @property
    def folders(self) -> list[Path]:
        """The run folders."""
        return [run.folder for run in self.rows]

    def to_frame(self) -> DataFrame:
        """A row a plan: label, id, gpus, the predicted sec_per_it, hours, gpu_hours, jobs, and why
        it was chosen.
        """
        rows = []
        for run in self.rows:
            gpus, seconds = run.plan.topology.gpus, run.prediction["sec_per_it"]
            hours = run.plan.run.goal * seconds / 3600
            jobs_needed = math.ceil(hours * 3600 / self.request.time_limit_s)
            rows.append(
                (
                    run.plan.label,
                    run.plan.id,
                    gpus,
                    seconds,
                    hours,
                    hours * gpus,
                    jobs_needed,
                    run.reason,
                )
            )
        heads = ("label", "id", "gpus", "sec_per_it", "hours", "gpu_hours", "jobs", "why")
        return Columns.of_rows(heads, rows).to_frame()

    def files(self) -> Html:
        """The files of the first run folder."""
        texts = script.files(self.rows[0].plan, script_site(self.site), self.request)
        template = "<details><summary>{}</summary><pre>{}</pre></details>"
        return Html.joined("", [Html.of(template, name, text) for name, text in texts.items()])

    @cached_property
    def findings(self) -> list[tuple[str, JobFinding]]:
        """The findings of the pre-flight check with the run's name, of runs that are not completed."""
        args = (self.site, self.request)
        return [
            (run.folder.name, finding)
            for run in self.rows
            if not run.is_completed
            for finding in check_job(run.plan, *args, run.folder)
        ]

    def check(self) -> Columns:
        """The findings as a table: a row for each, with the plans that it is about."""
        checked, rows = sum(not run.is_completed for run in self.rows), []
        for f, found in grouped(self.findings, lambda pair: pair[1]).items():
            about = "all" if len(found) == checked > 1 else ", ".join(name for name, _ in found)
            rows.append((about, f.level, f.rule, f.message, f.remedy))
        heads = ("plans", "level", "rule", "finding", "remedy")
        return (
            Columns.of_rows(heads, rows)
            if rows
            else Columns({"plans": ["all"], "finding": ["nothing found"]})
        )

    def start(self, wanted: bool) -> Columns:
        """Train here (site `local`) or submit the runs neither completed nor active; none where one
        is refused.
        """
        refused = not self.site.is_local and any(f.level == REFUSAL for _, f in self.findings)
        dry_run = "not started: the check refuses a run" if refused else "not started: dry run"
        is_go = wanted and not refused
        rows = progress(self.rows, "runs", "run") if is_go else self.rows
        started = [(run.folder.name, self._start(run) if is_go else dry_run) for run in rows]
        return Columns.of_rows(("run", "job"), started)

    def _start(self, run: StudyRun) -> str:
        if run.is_completed:
            return "completed before"
        try:
            return (
                _train_here(run.folder)
                if self.site.is_local
                else jobs.submit(run.folder, self.site, self.request)
            )
        except jobs.ActiveJob as error:
            return f"has job {', '.join(error.args[1])} already"

    def status(self) -> jobs.JobTable:
        """The status of each run."""
        return jobs.job_status(self.folders)

    def summary(self) -> Text:
        """How many runs are completed, and the commands for the others; RuntimeError where one has
        failed.
        """
        found, name = self.status(), self.study.name
        for job in (job for job in found if job.has_failed):
            raise RuntimeError(f"{job.run} did not complete: {job.evidence}")
        done = sum(job.status is Status.COMPLETED for job in found)
        if done == len(found):
            what = f"{self.rows[0].plan.run.goal} iterations" if self.rows else "nothing"
            where = self.study.folder / "runs"
            return Text.of(
                "**All {} plans trained** for {}; their logs are in {:code}.", done, what, where
            )
        text = "**{} of {} plans have trained to the end.** {:code} shows the others, {:code} submits those that were not."
        shows, submits = f"trilane slurm status {name}", f"trilane slurm submit {name} --site ..."
        return Text.of(text, done, len(found), shows, submits)


def _train_here(folder: Path) -> str:
    """Train to the end, from the newest checkpoint where there is one; how that ended."""
    with FolderLock([folder]).held(0.0):
        has_checkpoint = latest(folder / FOLDER) is not None
        put_aside(folder, keep=has_checkpoint)
        return f"{local.train_local(folder, resume=has_checkpoint).status}, on this machine"


def script_site(site: Site) -> Site:
    """The site of the job script in a run folder: at site `local` no script is needed, but a
    generic one is written.
    """
    return sites.site("generic") if site.is_local else site


def prepare_runs(
    study: Study,
    site: str,
    request: JobRequest,
    *,
    count: int = 3,
    control: bool = True,
    engine: str = "",
    corpus: str = "stdlib",
    tokenizer: str = "bytes",
    lr: float = 6e-4,
    **run: Any,
) -> StudyRuns:
    """Write the run folders of the `count` best plans in the study's plans.json, for the site of
    that name or file.

        prepare_runs(Study.open("demo"), "jean-zay-a100", JobRequest(account="xyz@a100")).check()

    `control` adds the first other plan with tensor and pipeline parallelism, `engine` replaces that
    of the search, and `run` are fields of Run. The learning rate decays as a cosine to a tenth of
    `lr`. Raises ValueError for an impossible plan.
    """
    where, plans = sites.site(site), study.plans()
    found = study.load("plans.json", "02_topology")
    entries = found["plans"]
    both = (
        i for i, p in enumerate(plans[count:], count) if p.topology.tp > 1 and p.topology.pp > 1
    )
    chosen = [*range(len(plans[:count])), *(list(both)[:1] if control else [])]
    rows = []
    data = Data(source=corpus, tokenizer=tokenizer, folder=str(outputs_root() / "data"))
    for i in chosen:
        plan = _trained(plans[i], engine or plans[i].engine, data, lr, Run(**run))
        prediction = entries[i]["prediction"] if plan.id == plans[i].id else predict(plan).to_json()
        texts = script.files(plan, script_site(where), request, {"prediction": prediction})
        folder, is_completed = study.run_folder(plan, texts, jobs.active_jobs)
        reason = "fastest predicted" if i < count else "control: TP and PP at work"
        by: dict[str, Any] = {"prediction": prediction, "reason": reason}
        rows.append(StudyRun(plan=plan, folder=folder, is_completed=is_completed, **by))
    return StudyRuns(study=study, site=where, request=request, rows=tuple(rows))


def _trained(searched: Plan, engine: str, data: Data, lr: float, run: Run) -> Plan:
    """The plan of a search with data, a learning rate that decays as a cosine to a tenth, and a
    length; by `engine`.
    """
    gbs = searched.topology.gbs
    optimizer = Optimizer(
        lr=lr, min_lr=lr / 10, warmup_samples=10 * gbs, decay_samples=run.train_iters * gbs
    )
    label = searched.label
    if engine != searched.engine:
        label = label_of(searched.shape, searched.cluster, searched.topology, engine)
    return replace(searched, label=label, engine=engine, data=data, optimizer=optimizer, run=run)


def read_plans(path: Path) -> list[dict[str, Any]]:
    """Plans, with predictions if given: of `trilane plan search --json`, of 02_topology's
    plans.json, or a list.
    """
    values = read_json(path, "plans")
    plans = values.get("plans") if isinstance(values, dict) else values
    ok = isinstance(plans, list) and bool(plans) and all(isinstance(plan, dict) for plan in plans)
    require(ok, "plans", path, "must be a list of plans, or hold one as `plans`")
    return list(plans or [])


def create_sweep(
    folder: Path, plans: Iterable[Mapping[str, Any]], site: Site, request: JobRequest
) -> list[Path]:
    """Write the run folder runs/LABEL of each plan; the folders. ValueError, and nothing is
    written, where one exists or two plans have the same label.
    """
    made = dict[Path, tuple[Any, ...]]()
    for values in plans:
        plan = plan_from_json(dict(values))
        path = folder / "runs" / plan.label
        require(path not in made, "label", plan.label, "must be unique in a sweep")
        require(not path.exists(), "run folder", path, "exists; take a new one")
        found = values.get("prediction") or predict(plan, script.nodes_of(plan, site)).to_json()
        ok = isinstance(found, Mapping) and isinstance(found.get("memory_bytes"), int | float)
        require(ok, "prediction", found, "must be a JSON object with memory_bytes, a number")
        script.render("train", plan, site, request)
        made[path] = (path, plan, site, request, {"prediction": found})
    for run in made.values():
        script.write(*run)
    return list(made)
