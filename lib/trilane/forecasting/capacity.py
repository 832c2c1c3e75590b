"""How many GPUs are available from which day on, and whether they are shared with others."""

import json
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from typing import Any

from trilane.utils.validation import require, require_integer, require_known

FOREVER = float("inf")


def parse_day(field: str, text: object) -> date:
    """The date of "2026-03-11"; ValueError names `field` otherwise."""
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"{field}={text}: must be a date such as 2026-03-11") from None


@dataclass(frozen=True, kw_only=True)
class CapacityStep:
    """`gpus` from `first_day` on. `shared`: with others, so that each restart waits in the queue."""

    first_day: date
    gpus: int
    shared: bool = False

    def __post_init__(self) -> None:
        require_integer("capacity.gpus", self.gpus, 0)


@dataclass(frozen=True, kw_only=True)
class CapacityWindow:
    """A time span of constant capacity, in seconds after the start of the run."""

    start_s: float
    end_s: float
    gpus: int
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Steps in the order of their days. Before the first there are no GPUs; the last never ends."""

    steps: tuple[CapacityStep, ...]

    def __post_init__(self) -> None:
        require(len(self.steps) > 0, "capacity", "[]", "needs at least one step: a day and a number of GPUs")
        days = [step.first_day for step in self.steps]
        for earlier, later in pairwise(days):
            require(earlier < later, "capacity.from", later, f"must come after {earlier}")
        require(any(step.gpus for step in self.steps), "capacity.gpus", 0, "no step has any GPU")

    def windows(self, start: date) -> list[CapacityWindow]:
        """The steps in seconds after midnight (UTC) of `start`; past ones are left out, the last one never ends."""
        edges = [max((step.first_day - start).total_seconds(), 0.0) for step in self.steps]
        ends = [*edges[1:], FOREVER]
        found = [
            CapacityWindow(start_s=a, end_s=b, gpus=step.gpus, shared=step.shared)
            for step, a, b in zip(self.steps, edges, ends, strict=True)
            if b > a
        ]
        return [CapacityWindow(start_s=0.0, end_s=edges[0], gpus=0, shared=False), *found] if edges[0] > 0 else found


def constant(gpus: int, start: date, shared: bool = False) -> Capacity:
    """The same number of GPUs from `start` on."""
    return Capacity(steps=(CapacityStep(first_day=start, gpus=gpus, shared=shared),))


def capacity_of(values: object) -> Capacity:
    """The capacity of JSON: a list of {"from": day, "gpus": count, "shared": bool}, or an object with such "steps"."""
    for name in values if isinstance(values, dict) else ():
        require_known("capacity field", name, ("steps",))
    steps = values.get("steps", []) if isinstance(values, dict) else values
    rule = 'must be a list of steps such as {"from": "2026-03-11", "gpus": 384}'
    require(isinstance(steps, list), "capacity", json.dumps(steps)[:60], rule)
    assert isinstance(steps, list)
    return Capacity(steps=tuple(_step(step) for step in steps))


def _step(values: Any) -> CapacityStep:
    require(isinstance(values, dict), "capacity step", values, 'must be an object such as {"from": ..., "gpus": ...}')
    for name in values:
        require_known("capacity field", name, ("from", "gpus", "shared"))
    for name in ("from", "gpus"):
        require(name in values, f"capacity.{name}", "missing", "is required")
    shared = values.get("shared", False)
    require(isinstance(shared, bool), "capacity.shared", shared, "must be true or false")
    return CapacityStep(first_day=parse_day("capacity.from", values["from"]), gpus=values["gpus"], shared=shared)
