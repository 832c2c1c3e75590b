"""Timers: the seconds of each phase on this rank, and their minimum and maximum over ranks.

A clock is read where the innermost phase changes: on a CPU the host's, on a GPU an event in the stream, which nobody
waits for before the iteration is over. So on a GPU a phase counts the time of its kernels, not of their launch.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from trilane.engine.monitor import phases

Spread = dict[str, tuple[float, float]]  # phase -> seconds an iteration, (min, max) over ranks


class Timers:
    """Seconds by phase since they were last asked for. Each counts its own time, without that of phases inside it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stamp = device, _event if device.type == "cuda" else perf_counter
        self._marks: list[tuple[Any, str]] = []
        self._seconds = dict.fromkeys(phases.NAMES, 0.0)
        self._iterations = 0
        self._mark(phases.now())
        self.stop = phases.listen(self._mark)

    def _mark(self, name: str) -> None:
        self._marks.append((self._stamp(), name))

    def fold(self) -> None:
        """One iteration is over: add up its marks, so that they do not pile up. A GPU is waited for."""
        self._mark(phases.now())
        for name, seconds in durations(self._marks).items():
            if name in self._seconds:
                self._seconds[name] += seconds
        del self._marks[:-1]
        self._iterations += 1

    def own(self) -> dict[str, float]:
        """Seconds an iteration of each phase that this rank was in, since over_ranks() was last called."""
        return {name: seconds / self._iterations for name, seconds in self._seconds.items() if seconds > 0}

    def over_ranks(self) -> Spread:
        """Per iteration since the last call, of the phases that any rank was in; all ranks call it together."""
        mine = torch.tensor([self._seconds[name] / self._iterations for name in phases.NAMES], dtype=torch.float64)
        both = torch.cat([mine, -mine]).to(self._device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        most, least = both.cpu().chunk(2)
        self._seconds, self._iterations = dict.fromkeys(phases.NAMES, 0.0), 0
        spread = zip(phases.NAMES, (-least).tolist(), most.tolist(), strict=True)
        return {name: (low, high) for name, low, high in spread if high > 0}


def durations(marks: Sequence[tuple[Any, str]]) -> dict[str, float]:
    """Seconds by name, where each mark says when which phase became the innermost; the last one only ends."""
    if marks and isinstance(marks[-1][0], torch.cuda.Event):
        marks[-1][0].synchronize()
    found: dict[str, float] = {}
    for (begin, name), (end, _) in pairwise(marks):
        found[name] = found.get(name, 0.0) + _seconds(begin, end)
    return found


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def lines(spread: Mapping[str, tuple[float, float]]) -> str:
    """The table that Megatron-LM prints with --timing-log-option minmax, in milliseconds."""
    rows = [
        f"    {(name + ' ').ljust(48, '.')}: ({1e3 * low:.2f}, {1e3 * high:.2f})"
        for name, (low, high) in spread.items()
    ]
    return "\n".join(["(min, max) time across ranks (ms):", *rows])
