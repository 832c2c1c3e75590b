"""Requests to save or to stop, agreed on by all ranks after each iteration."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from trilane.config.training import Run
from trilane.engine.distributed.world import World
from trilane.engine.signals import Signals
from trilane.workspace.run_folder import SAVE, STOP


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """What is requested, and its source; `writing`: a save that has begun is still being written by some rank."""

    reason: str = ""
    save: bool = False
    stop: bool = False
    writing: bool = False


SAME_S = 10.0  # the signals of one request reach all ranks, and a rank's child and parent, within this time
# In ascending priority; every stop also saves.
REQUESTS = (
    StopRequest(),
    StopRequest(reason="SIGUSR1", save=True),
    StopRequest(reason="the file `save`", save=True),
    StopRequest(reason="exit_duration_minutes", save=True, stop=True),
    StopRequest(reason="the file `stop`", save=True, stop=True),
    StopRequest(reason="SIGTERM", save=True, stop=True),
)


class StopRequests:
    """Signals that reached any rank, and rank 0's clock and files `save` and `stop`.

    `save` is removed once seen; `stop` stays, so that a chain of jobs does not continue. A SIGUSR1 that comes to a rank
    before, or up to SAME_S after, all have agreed to save is the same request: it reaches no two ranks at one time.
    """

    def __init__(self, folder: Path, run: Run, world: World, signals: Signals, begin: float) -> None:
        self._folder, self._world, self._signals = folder, world, signals
        self._end = begin + 60 * run.exit_duration_minutes if run.exit_duration_minutes else math.inf
        self._agreed_s = -math.inf

    def now(self, begun: bool = True, writing: bool = False) -> StopRequest:
        """The highest request of any rank, and whether any is `writing`, the same on all: one all-reduce.

        Before the first iteration (not `begun`) only SIGTERM and the file `stop` count, not the clock.
        """
        mine = [self._pending() if begun else self._stop_requested(), int(writing)]
        highest = torch.tensor(mine, device=self._world.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        number, some = highest.tolist()
        if REQUESTS[number].save:
            self._agreed_s = time.monotonic()
        return replace(REQUESTS[number], writing=bool(some))

    def _pending(self) -> int:
        """The number of the highest request on this rank; the file `save` is removed."""
        found = [self._stop_requested()]
        if self._signals.save_s > self._agreed_s + SAME_S:
            found.append(1)
        if self._world.is_first:
            if (self._folder / SAVE).exists():
                (self._folder / SAVE).unlink(missing_ok=True)
                found.append(2)
            if time.monotonic() >= self._end:
                found.append(3)
        return max(found)

    def _stop_requested(self) -> int:
        if self._signals.stop:
            return 5
        return 4 if self._world.is_first and (self._folder / STOP).exists() else 0
