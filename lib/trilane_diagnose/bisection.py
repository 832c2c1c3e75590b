"""Bisect a hanging plan, as the BLOOM chronicles did by hand: shrink it along one axis at a time,
in short jobs with a time limit, until the boundary between what works and what hangs is known.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.launch.local import train_local
from trilane.utils.validation import require
from trilane.workspace.run import write_text
from trilane.workspace.status import Status

AXES = ("layers", "hidden", "dp", "gbs")
Runner = Callable[[Plan], str]  # a plan -> how it ended


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One short job: the changed axis and value, and its final status."""

    axis: str
    value: int
    status: Status


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Along an axis the largest value that works and the smallest that hangs; 0 where there is
    none.
    """

    axis: str
    works: int
    hangs: int

    def __str__(self) -> str:
        first = f"works at {self.works}, hangs at {self.hangs}"
        return f"{self.axis}: {first if self.works else f'hangs even at {self.hangs}, the smallest that was tried'}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All trials in order, and a boundary for each axis."""

    trials: tuple[Trial, ...]
    boundaries: tuple[Boundary, ...]

    def __str__(self) -> str:
        return "\n".join(
            [*(f"{t.axis} {t.value}: {t.status}" for t in self.trials), *map(str, self.boundaries)]
        )


def values(plan: Plan, axis: str) -> list[int]:
    """The values along an axis that make a valid plan, from the smallest model or batch to the
    plan's own.
    """
    s, t = plan.shape, plan.topology
    candidates = {
        "layers": range(1, s.num_layers + 1),
        "hidden": range(s.num_attention_heads, s.hidden_size + 1, s.num_attention_heads),
        "dp": range(1, t.dp + 1),
        "gbs": range(t.mbs * t.dp, t.gbs + 1, t.mbs * t.dp),
    }
    found = []
    for value in candidates[axis]:
        with contextlib.suppress(ValueError):
            changed(plan, axis, value)
            found.append(value)
    return found


def changed(plan: Plan, axis: str, value: int) -> Plan:
    """The plan with that value and five iterations; ValueError where no such plan exists."""
    # with fewer replicas, as with fewer nodes, each keeps its share of the batch
    shape, t = plan.shape, plan.topology
    sizes: dict[str, Any] = {"layers": {"num_layers": value}, "hidden": {"hidden_size": value}}.get(
        axis, {}
    )
    batch: dict[str, Any] = {
        "gbs": {"gbs": value},
        "dp": {"dp": value, "gbs": t.gbs // t.dp * value},
    }.get(axis, {})
    run = replace(plan.run, train_iters=min(5, plan.run.train_iters))
    made: dict[str, Any] = {"shape": replace(shape, **sizes), "topology": replace(t, **batch)}
    return replace(plan, label=f"{plan.label}-{axis}{value}", run=run, **made)


def bisect(plan: Plan, axes: tuple[str, ...], run: Runner) -> Report:
    """Shrink the hanging plan along each axis separately, by bisection.

    The plan itself runs first: ValueError where it does not hang. Along an axis the smallest value
    is tried, then the middle of the remaining interval: 2 + log2(n) jobs. Assumes that what hangs
    also hangs when larger; for an intermittent hang repeat the search.
    """
    trials: list[Trial] = []

    def works(axis: str, value: int) -> bool:
        status = Status(run(changed(plan, axis, value)))
        trials.append(Trial(axis=axis, value=value, status=status))
        rule = f"{axis} {value} ended otherwise than in a hang; fix that first"
        require(status.is_clean or status in (Status.HANG, Status.TIMEOUT), "status", status, rule)
        return status.is_clean

    def boundary(axis: str) -> Boundary:
        tried = values(plan, axis)
        low, high = 0, len(tried) - 1
        if high == 0 or not works(axis, tried[0]):
            return Boundary(axis=axis, works=0, hangs=tried[0])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if works(axis, tried[middle]) else (low, middle)
        return Boundary(axis=axis, works=tried[low], hangs=tried[high])

    require(not works("plan", 0), "plan", plan.label, "does not hang within five iterations")
    found = tuple(boundary(axis) for axis in axes)
    return Report(trials=tuple(trials), boundaries=found)


def local_runner(folder: Path, timeout_s: float) -> Runner:
    """Runs short jobs on this machine, each in its own folder below `folder`."""

    def run(plan: Plan) -> str:
        write_text(folder / plan.label / "plan.json", json.dumps(plan.to_json(), indent=1))
        return train_local(folder / plan.label, show_progress=False, timeout_s=timeout_s).status

    return run
