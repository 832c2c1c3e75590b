"""Run folders of several plans: of the best of a study's search, which are checked, priced, started
and followed, and of a table of plans (a sweep).
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from trilane.config.plan import plan_from_json
from trilane.config.training import Data, Optimizer
from trilane.config.training import Run as Limits
from trilane.costmodel.predict import predict
from trilane.launch.local import train_local
from trilane.slurm import chain, jobs, script, sites
from trilane.slurm.preflight import JobFinding, check_job, refused
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.folder_lock import FolderLock
from trilane.utils.frozen import frozen
from trilane.utils.tables import Columns, DataFrame, Json, Table, Text
from trilane.utils.validation import read_json, require
from trilane.workspace.installation import outputs_root
from trilane.workspace.run import Run, put_aside
from trilane.workspace.status import Status
from trilane.workspace.study import Study


@frozen
class StudyRuns(Table):
    """The runs of a study for one site and one request, and why each plan was chosen; as a table,
    the plans, their costs without starts and saves (in jobs of one time limit each), and the
    reasons.
    """

    shown = "label id gpus sec_per_it hours gpu_hours jobs why"

    study: Study
    site: Site
    request: JobRequest
    runs: tuple[Run, ...]
    reasons: tuple[str, ...]

    def to_frame(self) -> DataFrame:
        """A row a plan: label, id, why it was chosen, predicted sec_per_it, and chain.costs()."""
        import pandas as pd

        plans = {run.folder: run.plan for run in self.runs}
        frame = pd.DataFrame(chain.costs(plans, self.request))
        frame["label"] = [plan.label for plan in plans.values()]
        frame["id"] = [plan.id for plan in plans.values()]
        frame["sec_per_it"] = [predict(plan).sec_per_it for plan in plans.values()]
        frame["why"] = self.reasons
        return frame

    @cached_property
    def findings(self) -> dict[str, list[JobFinding]]:
        """The findings of the pre-flight check by the names of the runs that are not completed."""
        return {
            run.folder.name: check_job(run.plan, self.site, self.request, run)
            for run in self.runs
            if not run.is_completed
        }

    def check(self) -> Columns:
        """The findings as a table: a row for each of a run."""
        rows = []
        for name, found in self.findings.items():
            rows += [(name, *finding) for finding in found]
        if not rows:
            return Columns({"run": ["all"], "finding": ["nothing found"]})
        return Columns.of_rows(("run", "level", "rule", "finding", "remedy"), rows)

    def start(self, wanted: bool) -> Columns:
        """Train here (site `local`) or submit the runs neither completed nor active; none where one
        is refused.
        """
        is_refused = not self.site.is_local and any(map(refused, self.findings.values()))
        rows = []
        for run in self.runs:
            job = "not started: dry run"
            if is_refused:
                job = "not started: the check refuses a run"
            elif wanted:
                job = self._start(run)
            rows.append((run.folder.name, job))
        return Columns.of_rows(("run", "job"), rows)

    def _start(self, run: Run) -> str:
        if run.is_completed:
            return "completed before"
        if self.site.is_local:
            with FolderLock([run.folder]).held(0.0):
                resumes = run.newest is not None
                put_aside(run.folder, keep=resumes)
                return f"{train_local(run.folder, resume=resumes).status}, on this machine"
        try:
            return jobs.submit_all([run], self.site, self.request)[0][1]
        except jobs.ActiveJob as error:
            return f"has job {', '.join(error.args[1])} already"

    def status(self) -> jobs.JobTable:
        """The status of each run."""
        return jobs.job_status(run.folder for run in self.runs)

    def summary(self) -> Text:
        """How many runs are completed, and the commands for the others; RuntimeError where one has
        failed.
        """
        states = self.status()
        for job in states:
            if job.status.has_failed:
                raise RuntimeError(f"{job.run} did not complete: {job.evidence}")
        done = sum(job.status is Status.COMPLETED for job in states)
        text = "**{} of {} plans have trained to the end**, in {:code}."
        if done < len(states):
            text += " `trilane slurm submit` submits those that were not."
        return Text.of(text, done, len(states), self.study.folder / "runs")


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
    decay_style: str = "cosine",
    **run: Any,
) -> StudyRuns:
    """Write the run folders of the `count` best plans in the study's plans.json, for the site of
    that name or file.

        prepare_runs(Study.open("demo"), "jean-zay-a100", JobRequest(account="xyz@a100")).check()

    `control` adds the first other plan with tensor and pipeline parallelism, `engine` replaces that
    of the search, and `run` are fields of Run. The learning rate decays to a tenth of `lr`, by WSD
    in the last fifth of the run (Hägele et al. 2024, arXiv:2405.18392). Raises ValueError for an
    impossible plan.
    """
    where = sites.site(site)
    # at site `local` no script is needed, but a generic one is written
    of_script = sites.site("generic") if where.is_local else where
    plans = study.plans()
    reasons = dict.fromkeys(range(len(plans[:count])), "fastest predicted")
    for number, plan in enumerate(plans):
        if control and number >= count and plan.topology.tp > 1 and plan.topology.pp > 1:
            reasons[number] = "control: TP and PP at work"
            break
    data = Data(source=corpus, tokenizer=tokenizer, folder=str(outputs_root() / "data"))
    limits = Limits(**run)
    runs = []
    for number in reasons:
        before = plans[number]
        gbs = before.topology.gbs
        samples = limits.train_iters * gbs
        optimizer = Optimizer(
            lr=lr,
            min_lr=lr / 10,
            warmup_samples=10 * gbs,
            decay_samples=samples,
            decay_style=decay_style,
            wsd_decay_samples=samples // 5 if decay_style == "WSD" else 0,
        )
        own = {"engine": engine or before.engine, "optimizer": optimizer}
        plan = before.replace(data=data, run=limits, **own)
        folder, _ = study.run_folder(plan, script.files(plan, of_script, request), jobs.active_jobs)
        runs.append(Run(folder))
    why = tuple(reasons.values())
    return StudyRuns(study=study, site=where, request=request, runs=tuple(runs), reasons=why)


def read_plans(path: Path) -> list[Json]:
    """Plans: of `trilane plan search --json`, of 02_topology's plans.json, or a list."""
    plans = read_json(path, "plans")
    if isinstance(plans, dict):
        plans = plans.get("plans")
    is_list = isinstance(plans, list) and plans
    are_plans = is_list and all(isinstance(plan, dict) for plan in plans)
    require(are_plans, "plans", path, "must be a list of plans, or hold one as `plans`")
    return list(plans)


def create_sweep(
    folder: Path, plans: Iterable[Json], site: Site, request: JobRequest
) -> list[Path]:
    """Write the run folder runs/LABEL of each plan; the folders. ValueError, and nothing is
    written, where one exists or two plans have the same label.
    """
    folders = {}
    for values in plans:
        plan = plan_from_json(values)
        path = folder / "runs" / plan.label
        require(path not in folders, "label", plan.label, "must be unique in a sweep")
        folders[path] = plan
    return script.create(folders, site, request)
