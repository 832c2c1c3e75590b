"""Agreement: what one rank finds out, all ranks know; what each found, all can compare."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from trilane.engine.distributed.world import World

T = TypeVar("T")


def told(world: World, ask: Callable[[], T]) -> T:
    """What rank 0 answers to `ask`, on every rank; where it raises ValueError, every rank does."""
    answer: list[tuple[T | None, str]] = [(None, "")]
    if world.is_first:
        try:
            answer = [(ask(), "")]
        except ValueError as error:
            answer = [(None, str(error))]
    dist.broadcast_object_list(answer, src=0)
    value, problem = answer[0]
    if problem:
        raise ValueError(problem)
    return value  # type: ignore[return-value]


def gathered(world: World, value: T) -> list[T]:
    """The value of every rank."""
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
