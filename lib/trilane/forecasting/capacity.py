"""How many GPUs are available from which day on, and whether they are shared with others."""

import json
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from typing import Any

from trilane.utils.validation import from_mapping, require, require_integer, require_known


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
        for step in self.steps:
            require_integer("capacity.gpus", step.gpus, 0)
        for earlier, later in pairwise(step.first_day for step in self.steps):
            require(earlier < later, "capacity.from", later, f"must come after {earlier}")
        require(any(step.gpus for step in self.steps), "capacity.gpus", 0, "no step has any GPU")

    def windows(self, start: date) -> list[CapacityWindow]:
        """The steps in seconds after midnight (UTC) of `start`, without past ones; the last one ends at infinity."""
        edges = [max((step.first_day - start).total_seconds(), 0.0) for step in self.steps]
        found = [CapacityWindow(start_s=0.0, end_s=edges[0], gpus=0, shared=False)]
        for step, a, b in zip(self.steps, edges, [*edges[1:], float("inf")], strict=True):
            found.append(CapacityWindow(start_s=a, end_s=b, gpus=step.gpus, shared=step.shared))
        return [window for window in found if window.end_s > window.start_s]


def capacity_of(values: Any) -> Capacity:
    """The capacity of JSON: a list of {"from": day, "gpus": count, "shared": bool}, or an object with such "steps"."""
    for name in values if isinstance(values, dict) else ():
        require_known("capacity field", name, ("steps",))
    steps, found = values.get("steps", []) if isinstance(values, dict) else values, list[CapacityStep]()
    rule = 'must be a list of steps such as {"from": "2026-03-11", "gpus": 384}'
    require(isinstance(steps, list), "capacity", json.dumps(steps)[:60], rule)
    for step in steps:
        require(isinstance(step, dict), "capacity step", step, 'must be an object such as {"from": ..., "gpus": ...}')
        require("from" in step, "capacity.from", "missing", "is required")
        # "from" is a keyword of Python and so no field's name
        day = {"first_day": parse_day("capacity.from", step["from"])}
        found.append(from_mapping(CapacityStep, {**{k: v for k, v in step.items() if k != "from"}, **day}, "capacity"))
    return Capacity(steps=tuple(found))
