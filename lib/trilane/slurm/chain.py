"""Chain: a long run as dependent jobs, each resuming where the last one stopped; nodes may follow
the batch ramp-up.

SLURM runs one job of a run's name at a time, in the order of submission.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trilane.config.batch_rampup import Phase, Ramp
from trilane.config.plan import Plan
from trilane.costmodel.predict import predict
from trilane.slurm import script
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json
from trilane.utils.validation import is_count, require, require_integer


@frozen
class Stage:
    """Training on `nodes` nodes with microbatches of `mbs`, from the first iteration whose batch is
    at least `gbs`.
    """

    gbs: int
    nodes: int
    mbs: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_integer(name, value, 1)

    def replicas(self, plan: Plan) -> int:
        """DP of the plan on the nodes of this stage; ValueError where tp x pp does not divide their
        GPUs.
        """
        gpus = self.nodes * plan.cluster.gpus_per_node
        model_gpus = plan.topology.tp * plan.topology.pp
        rule = f"{gpus} GPUs are not a multiple of tp x pp = {model_gpus}"
        require(gpus % model_gpus == 0, "nodes", self.nodes, rule)
        return gpus // model_gpus

    def can_share(self, plan: Plan, phases: Sequence[Phase]) -> bool:
        """Whether its replicas can share the batches of all these phases."""
        unit = self.mbs * self.replicas(plan)
        return all(phase.gbs % unit == 0 for phase in phases)


def parse_stages(text: str) -> list[Stage]:
    """The stages in "GBS:NODES:MBS,...", such as the BLOOM chronicles'
    "32:8:1,64:16:1,128:32:1".
    """
    stages = []
    for part in text.split(","):
        numbers = part.strip().split(":")
        is_stage = len(numbers) == 3 and all(map(is_count, numbers))
        require(is_stage, "stages", text, "must be GBS:NODES:MBS,GBS:NODES:MBS,...")
        gbs, nodes, mbs = map(int, numbers)
        stages.append(Stage(gbs=gbs, nodes=nodes, mbs=mbs))
    return stages


def links(plan: Plan, stages: Sequence[Stage], folder: Path) -> list[Plan]:
    """One plan per link: its own DP and MBS, from the checkpoint of the link before to the start of
    the next.

    A stage is one link, or two where the ramp passes batch sizes that mbs x dp of the stage does
    not divide: from there to the next stage the chain falls back to the latest stage before that
    can share them all. All links keep the run's ramp-up, length and learning rate, so that the
    samples and their order are those of one run. ValueError where no stage can share a batch size.
    """
    sizes = [stage.gbs for stage in stages]
    text = ",".join(map(str, sizes))
    require(sizes == sorted(sizes), "stages", text, "must be in the order of the batch size")
    iterations = plan.run.train_iters
    whole = plan.run.ramp.between(plan.topology.gbs, 0, iterations)
    starts = []
    for gbs in sizes:
        starts.append(sum(phase.iterations for phase in whole if phase.gbs < gbs))
    starts.append(iterations)
    require(starts[0] == 0, "stages", sizes[0], "the first must hold the ramp's first batch")
    plans: list[Plan] = []
    for number, (start, end) in enumerate(itertools.pairwise(starts), 1):
        rule = "no iteration has such a batch before the next stage"
        require(start < end, "stages", sizes[number - 1], rule)
        for stage, first, last in _parts(plan, stages[:number], start, end):
            load = plan.run.load
            if plans:
                load = str(folder.resolve() / plans[-1].label)
            if last == iterations:
                last = 0
            run = replace(plan.run, load=load, start_iteration=first, exit_iteration=last)
            label = f"{plan.label}-{len(plans) + 1}-n{stage.nodes}"
            plans.append(plan.replace(label=label, run=run, dp=stage.replicas(plan), mbs=stage.mbs))
    return plans


def _parts(
    plan: Plan, stages: Sequence[Stage], start: int, end: int
) -> list[tuple[Stage, int, int]]:
    """The iterations after the first `start`, up to `end`, in parts, each with the stage on whose
    nodes it trains.
    """
    own = stages[-1]
    phases = plan.run.ramp.between(plan.topology.gbs, start, end)
    shared = list(itertools.takewhile(lambda phase: own.can_share(plan, [phase]), phases))
    rest = phases[len(shared) :]
    # where its own batch size is at fault, the plan itself refuses it
    if shared and rest:
        middle = start + sum(phase.iterations for phase in shared)
        for other in reversed(stages[:-1]):
            if other.can_share(plan, rest):
                return [(own, start, middle), (other, middle, end)]
    return [(own, start, end)]


def create(
    folder: Path, plan: Plan, stages: Sequence[Stage], site: Site, request: JobRequest
) -> list[Path]:
    """Write a new chain; its stages' run folders, in order. Raises ValueError where one exists.

    Without stages the chain is one run folder, in which each job resumes the run.
    """
    plans = [plan]
    if stages:
        plans = links(plan, stages, folder)
    return script.create({folder / link.label: link for link in plans}, site, request)


def phases(plan: Plan) -> list[Phase]:
    """The batch sizes of the iterations from the plan's start to its goal."""
    return plan.run.ramp.between(plan.topology.gbs, plan.run.start_iteration, plan.run.goal)


def costs(plans: Mapping[Path, Plan], request: JobRequest) -> list[Json]:
    """Runs as JSON: each one's folder, nodes, batch sizes, iterations, predicted hours, and jobs of
    one time limit.

    Each batch size is predicted by its own. Left out: starts, saves, evaluations.
    """
    rows = []
    for folder, plan in plans.items():
        seconds = 0.0
        batches = phases(plan)
        for phase in batches:
            constant = plan.replace(gbs=phase.gbs, run=replace(plan.run, ramp=Ramp()))
            seconds += phase.iterations * predict(constant).sec_per_it
        gpus = plan.topology.gpus
        row = {
            "run": str(folder),
            "gpus": gpus,
            "nodes": -(-gpus // plan.cluster.gpus_per_node),
            "mbs": plan.topology.mbs,
            "batches": [phase.gbs for phase in batches],
            "first": plan.run.start_iteration + 1,
            "last": plan.run.goal,
            "gpu_hours": seconds / 3600 * gpus,
            "hours": seconds / 3600,
            "jobs": max(1, math.ceil(seconds / request.time_limit_s)),
        }
        rows.append(row)
    return rows


def costs_text(rows: Sequence[Json]) -> str:
    """The costs of runs for the terminal: a line each, and their sum."""
    form = "{run}: iterations {first}-{last}, {nodes} nodes, {gpus} GPUs, mbs {mbs}, "
    form += "{hours:.2f} h, {gpu_hours:.2f} GPU hours, {jobs} jobs"
    lines = [form.format(**row) for row in rows]
    hours = sum(row["gpu_hours"] for row in rows)
    count = sum(row["jobs"] for row in rows)
    return "\n".join([*lines, f"in all: {hours:.2f} GPU hours, {count} jobs"])
