"""Bisect a hanging plan, as the BLOOM chronicles did by hand: shrink it along one axis at a time,
in short jobs with a time limit, until the boundary between what works and what hangs is known.
"""

import contextlib
import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trilane.config.plan import Plan
from trilane.launch.local import train_local
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import require
from trilane.workspace.run import write_text
from trilane.workspace.status import Status

AXES = ("layers", "hidden", "dp", "gbs")
ITERATIONS = 5  # of a job
Runner = Callable[[Plan], str]  # a plan -> how it ended


@frozen
class Trial:
    """One short job: the changed axis and value, and its final status."""

    axis: str
    value: int
    status: Status


@frozen
class Boundary:
    """Along an axis the largest value that works and the smallest that hangs; 0 where there is
    none.
    """

    axis: str
    works: int
    hangs: int


@frozen
class Report(Record):
    """All trials in order, and a boundary for each axis."""

    trials: tuple[Trial, ...]
    boundaries: tuple[Boundary, ...]

    def summary(self) -> str:
        lines = [f"{trial.axis} {trial.value}: {trial.status}" for trial in self.trials]
        for end in self.boundaries:
            line = f"{end.axis}: works at {end.works}, hangs at {end.hangs}"
            if not end.works:
                line = f"{end.axis}: hangs even at {end.hangs}, the smallest that was tried"
            lines.append(line)
        return "\n".join(lines)


def values(plan: Plan, axis: str) -> list[int]:
    """The values along an axis that make a valid plan, from the smallest model or batch to the
    plan's own.
    """
    shape = plan.shape
    topology = plan.topology
    replicas = topology.mbs * topology.dp
    candidates = {
        "layers": range(1, shape.num_layers + 1),
        "hidden": range(
            shape.num_attention_heads, shape.hidden_size + 1, shape.num_attention_heads
        ),
        "dp": range(1, topology.dp + 1),
        "gbs": range(replicas, topology.gbs + 1, replicas),
    }
    valid = []
    for value in candidates[axis]:
        with contextlib.suppress(ValueError):
            changed(plan, axis, value)
            valid.append(value)
    return valid


def changed(plan: Plan, axis: str, value: int) -> Plan:
    """The plan with that value and five iterations; ValueError where no such plan exists."""
    shape = plan.shape
    topology = plan.topology
    if axis == "layers":
        shape = replace(shape, num_layers=value)
    elif axis == "hidden":
        shape = replace(shape, hidden_size=value)
    elif axis == "gbs":
        topology = replace(topology, gbs=value)
    elif axis == "dp":
        # with fewer replicas, as with fewer nodes, each keeps its share of the batch
        topology = replace(topology, dp=value, gbs=topology.gbs // topology.dp * value)
    run = replace(plan.run, train_iters=min(ITERATIONS, plan.run.train_iters))
    label = f"{plan.label}-{axis}{value}"
    return replace(plan, label=label, run=run, shape=shape, topology=topology)


def bisect(plan: Plan, axes: tuple[str, ...], run: Runner) -> Report:
    """Shrink the hanging plan along each axis separately, by bisection.

    The plan itself runs first: ValueError where it does not hang. Along an axis the smallest value
    is tried, then the middle of the remaining interval: 2 + log2(n) jobs. Assumes that what hangs
    also hangs when larger; for an intermittent hang repeat the search.
    """
    trials = []

    def works(axis: str, value: int) -> bool:
        status = Status(run(changed(plan, axis, value)))
        trials.append(Trial(axis=axis, value=value, status=status))
        rule = f"{axis} {value} ended otherwise than in a hang; fix that first"
        require(status.is_clean or status in (Status.HANG, Status.TIMEOUT), "status", status, rule)
        return status.is_clean

    def boundary(axis: str) -> Boundary:
        tried = values(plan, axis)
        last = len(tried) - 1
        if not last or not works(axis, tried[0]):
            return Boundary(axis=axis, works=0, hangs=tried[0])
        place = bisect_left(tried, True, 1, last, key=lambda value: not works(axis, value))
        return Boundary(axis=axis, works=tried[place - 1], hangs=tried[place])

    require(not works("plan", 0), "plan", plan.label, "does not hang within five iterations")
    boundaries = tuple(boundary(axis) for axis in axes)
    return Report(trials=tuple(trials), boundaries=boundaries)


def local_runner(folder: Path, timeout_s: float) -> Runner:
    """Runs short jobs on this machine, each in its own folder below `folder`."""

    def run(plan: Plan) -> str:
        place = folder / plan.label
        write_text(place / "plan.json", json.dumps(plan.to_json(), indent=1))
        return train_local(place, show_progress=False, timeout_s=timeout_s).status

    return run
