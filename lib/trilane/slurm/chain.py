"""Chain: a long run as dependent jobs, each resuming where the last one stopped; nodes may follow
the batch ramp-up.

SLURM runs one job of a run's name at a time, in the order of submission.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trilane.config.batch_rampup import Phase, Ramp
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.predict import predict
from trilane.slurm.script import write
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.validation import is_count, read_object, require, require_integer, require_label
from trilane.workspace.run_folder import write_text

# the site's name, and the names of the stages' run folders in order
INDEX = "chain.json"


@dataclass(frozen=True, kw_only=True)
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


def parse_stages(text: str) -> list[Stage]:
    """The stages in "GBS:NODES:MBS,...", such as the BLOOM chronicles' "32:8:1,64:16:1,128:32:1"."""
    parts = [part.strip().split(":") for part in text.split(",")]
    is_form = all(len(numbers) == 3 and all(map(is_count, numbers)) for numbers in parts)
    require(is_form, "stages", text, "must be GBS:NODES:MBS,GBS:NODES:MBS,...")
    return [Stage(gbs=int(gbs), nodes=int(nodes), mbs=int(mbs)) for gbs, nodes, mbs in parts]


def first_iteration(plan: Plan, gbs: int) -> int:
    """The number of iterations before the first whose batch is at least `gbs`; all where there is
    none.
    """
    run, full = plan.run, plan.topology.gbs
    before = sum(phase.iterations for phase in run.ramp.phases(full) if phase.gbs < gbs)
    return before if gbs <= full and before < run.goal else run.train_iters


def links(plan: Plan, stages: Sequence[Stage], folder: Path) -> list[Plan]:
    """One plan per link: its own DP and MBS, from the checkpoint of the link before to the start of
    the next.

    A stage is one link, or three where the ramp passes batch sizes that mbs x dp of the stage does
    not divide: there the chain falls back to the latest stage before that can share them all. All
    links keep the run's ramp-up, length and learning rate, so that the samples and their order are
    those of one run. ValueError where no stage can share a batch size.
    """
    sizes = [stage.gbs for stage in stages]
    require(
        sizes == sorted(sizes),
        "stages",
        ",".join(map(str, sizes)),
        "must be in the order of the batch size",
    )
    starts = [*(first_iteration(plan, gbs) for gbs in sizes), plan.run.train_iters]
    require(starts[0] == 0, "stages", sizes[0], "the first must hold the ramp's first batch")
    made: list[Plan] = []
    for number, (start, end) in enumerate(pairwise(starts), 1):
        require(
            start < end,
            "stages",
            sizes[number - 1],
            "no iteration has such a batch before the next stage",
        )
        for stage, begin, until in _parts(plan, stages[:number], start, end):
            before = str(folder.resolve() / made[-1].label) if made else plan.run.load
            made.append(_link(plan, stage, begin, until, before, len(made) + 1))
    return made


def _link(plan: Plan, stage: Stage, start: int, end: int, before: str, number: int) -> Plan:
    """The plan of the iterations after the first `start`, up to number `end`, from the last
    checkpoint in `before`.
    """
    last = 0 if end == plan.run.train_iters else end
    run = replace(plan.run, load=before, start_iteration=start, exit_iteration=last)
    topology = replace(plan.topology, dp=_replicas(plan, stage), mbs=stage.mbs)
    return replace(plan, label=f"{plan.label}-{number}-n{stage.nodes}", topology=topology, run=run)


def _replicas(plan: Plan, stage: Stage) -> int:
    gpus, model_gpus = stage.nodes * plan.cluster.gpus_per_node, plan.topology.tp * plan.topology.pp
    rule = f"{gpus} GPUs are not a multiple of tp x pp = {model_gpus}"
    require(gpus % model_gpus == 0, "nodes", stage.nodes, rule)
    return gpus // model_gpus


def _parts(
    plan: Plan, stages: Sequence[Stage], start: int, end: int
) -> list[tuple[Stage, int, int]]:
    """The iterations after the first `start`, up to `end`, in parts, each with the stage on whose
    nodes it trains.
    """
    phases = plan.run.ramp.between(plan.topology.gbs, start, end)
    failing = [
        i
        for i, phase in enumerate(phases)
        if phase.gbs % (stages[-1].mbs * _replicas(plan, stages[-1]))
    ]
    first, last = (failing[0], failing[-1] + 1) if failing else (0, 0)
    for able in reversed(stages[:-1] if first else []):
        if not any(phase.gbs % (able.mbs * _replicas(plan, able)) for phase in phases[first:last]):
            begin = start + sum(phase.iterations for phase in phases[:first])
            until = begin + sum(phase.iterations for phase in phases[first:last])
            parts = [(stages[-1], start, begin), (able, begin, until), (stages[-1], until, end)]
            return [part for part in parts if part[1] < part[2]]
    return [
        (stages[-1], start, end)
    ]  # where its own batch size is at fault, the plan itself refuses it


def create(
    folder: Path, plan: Plan, stages: Sequence[Stage], site: Site, request: JobRequest
) -> list[Path]:
    """Write a new chain; its stages' run folders, in order. Raises ValueError where one exists.

    Without stages the chain is one run folder, in which each job resumes the run.
    """
    plans = links(plan, stages, folder) if stages else [plan]
    for link in plans:
        require(
            not (folder / link.label).exists(),
            "run folder",
            folder / link.label,
            "exists; take a new one",
        )
    for link in plans:
        write(folder / link.label, link, site, request)
    index = {"site": site.name, "links": [link.label for link in plans]}
    write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return stages_of(folder)


def is_chain(folder: str | Path) -> bool:
    """Whether that is the folder of a chain."""
    return (Path(folder) / INDEX).exists()


def stages_of(folder: Path) -> list[Path]:
    """The run folders of a chain, in order."""
    require(is_chain(folder), "chain", folder, "is not the folder of a chain")
    labels = read_object(folder / INDEX, "chain", links=list)["links"]
    for label in labels:
        require_label("chain.links", str(label))
    return [folder / str(label) for label in labels]


def phases(plan: Plan) -> list[Phase]:
    """The batch sizes of the iterations from the plan's start to its goal."""
    return plan.run.ramp.between(plan.topology.gbs, plan.run.start_iteration, plan.run.goal)


def link_records(folders: Sequence[Path], request: JobRequest) -> list[dict[str, Any]]:
    """Runs as JSON: each one's folder, nodes, batch sizes, iterations, predicted hours, and jobs of
    one time limit.

    Each batch size is predicted by its own. Left out: starts, saves, evaluations.
    """

    def hours_of(plan: Plan, phase: Phase) -> float:
        topology, run = replace(plan.topology, gbs=phase.gbs), replace(plan.run, ramp=Ramp())
        return (
            phase.iterations * predict(replace(plan, run=run, topology=topology)).sec_per_it / 3600
        )

    rows = list[dict[str, Any]]()
    for folder in folders:
        plan = read_plan(folder / "plan.json")
        gpus, hours = plan.topology.gpus, sum(hours_of(plan, phase) for phase in phases(plan))
        sizes, nodes = [phase.gbs for phase in phases(plan)], -(-gpus // plan.cluster.gpus_per_node)
        job = {"gpus": gpus, "nodes": nodes, "mbs": plan.topology.mbs, "batches": sizes}
        span = {
            "first": plan.run.start_iteration + 1,
            "last": plan.run.goal,
            "gpu_hours": hours * gpus,
            "hours": hours,
        }
        count = max(1, math.ceil(hours * 3600 / request.time_limit_s))
        rows.append({"run": str(folder), **job, **span, "jobs": count})
    return rows


def link_line(row: Mapping[str, Any]) -> str:
    """A run's record in one line for the terminal."""
    batches = " to ".join(dict.fromkeys(str(row["batches"][place]) for place in (0, -1)))
    text = "{run}: iterations {first}-{last}, {nodes} nodes, {gpus} GPUs, mbs {mbs}, batch {of}, {hours:.2f} h, "
    return (text + "{gpu_hours:.2f} GPU hours, {jobs} jobs").format(**row, of=batches)


def total_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sum of the runs' records."""
    jobs, hours, cost = (sum(row[name] for row in rows) for name in ("jobs", "hours", "gpu_hours"))
    return f"in all: {len(rows)} runs, {jobs} jobs, {hours:.2f} h one after another, {cost:.2f} GPU hours"
