"""What is changed by hand after a spike of the loss: iterations that a run leaves out, and a lower learning rate."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trilane.utils.validation import require, require_integer

RANGES = re.compile(r" *[0-9]{1,12}( *- *[0-9]{1,12})? *(, *[0-9]{1,12}( *- *[0-9]{1,12})? *)*")
Ranges = tuple[tuple[int, int], ...]  # (first, last) of each, both left out


@dataclass(frozen=True, kw_only=True)
class LrChange:
    """Once so many `samples` are consumed, the learning rate is that of the schedule times `factor`."""

    samples: int
    factor: float

    def __post_init__(self) -> None:
        require_integer("lr_changes samples", self.samples, 0)
        rule = "must be above 0, and 100 at most"
        require(0 < self.factor <= 100, f"lr_changes factor from sample {self.samples}", self.factor, rule)


def factor_of(changes: Sequence[LrChange], samples: int) -> float:
    """The factor of the learning rate in an iteration that ends at `samples` consumed: the last change before it."""
    return ([1.0] + [change.factor for change in changes if change.samples < samples])[-1]


def parse_ranges(field: str, text: str) -> Ranges:
    """The ranges of "101-200,251-300,400"; () of "". ValueError where they are malformed, overlap or do not rise."""
    if not text:
        return ()
    require(bool(RANGES.fullmatch(text)), field, text, "must be ranges of iterations, such as 101-200,251-300")
    ends = [part.split("-") for part in text.split(",")]
    ranges = tuple((int(part[0]), int(part[-1])) for part in ends)
    require(ranges[0][0] > 0, field, text, "iterations are counted from 1")
    falls = [f"{first}-{last}" for first, last in ranges if first > last]
    require(not falls, field, text, f"{''.join(falls[:1])} ends before it begins")
    for (_, last), (first, _) in pairwise(ranges):
        require(first > last, field, text, f"ranges must rise and not overlap: {first} comes after {last}")
    return ranges


def require_trained(skip: str, last: int, goal: int) -> None:
    """ValueError where `skip` holds the last iteration of the run, or that of a plan, `goal`: both are saved."""
    skipped = parse_ranges("skip", skip)
    rule = f"must end before the last iteration, {last}"
    require(not skipped or skipped[-1][1] < last, "skip", skip, rule)
    require(not inside(skipped, goal), "skip", skip, f"holds exit_iteration={goal}, which saves")


def ranges_text(ranges: Iterable[Sequence[int]]) -> str:
    """The text that parse_ranges() reads."""
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """The ranges of these numbers."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def until(ranges: Iterable[Sequence[int]], iteration: int) -> list[tuple[int, int]]:
    """What the ranges hold of the first `iteration` iterations."""
    return [(first, min(last, iteration)) for first, last in ranges if first <= iteration]


def inside(ranges: Ranges, iteration: int) -> bool:
    """Whether the iteration is left out."""
    return any(first <= iteration <= last for first, last in ranges)
