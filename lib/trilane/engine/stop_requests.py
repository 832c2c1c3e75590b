"""Requests: when to save, when to end, agreed on by all ranks after each iteration."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trilane.config.plan import Run
from trilane.engine.distributed.world import World
from trilane.engine.signals import Signals
from trilane.workspace.run_folder import SAVE, STOP


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """What is asked for, and by what."""

    reason: str = ""
    save: bool = False
    stop: bool = False


# The later, the stronger: who ends saves too.
REQUESTS = (
    StopRequest(),
    StopRequest(reason="SIGUSR1", save=True),
    StopRequest(reason="the file `save`", save=True),
    StopRequest(reason="exit_duration_minutes", save=True, stop=True),
    StopRequest(reason="the file `stop`", save=True, stop=True),
    StopRequest(reason="SIGTERM", save=True, stop=True),
)


class StopRequests:
    """Signals that reached any rank, and what rank 0 sees: the clock, and the files `save` and `stop`.

    `save` is taken away once it is seen; `stop` stays, so that a chain of jobs does not go on.
    """

    def __init__(self, folder: Path, run: Run, world: World, signals: Signals, begin: float) -> None:
        self._folder, self._world, self._signals = folder, world, signals
        self._end = begin + 60 * run.exit_duration_minutes if run.exit_duration_minutes else float("inf")

    def now(self, begun: bool = True) -> StopRequest:
        """The strongest request of any rank, the same on all: one number goes around, after which all go on.

        A run that has not `begun` an iteration is only kept from it by those who want the end whatever the clock says.
        """
        number = torch.tensor(self._iteration_done() if begun else self._end_wanted(), device=self._world.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return REQUESTS[int(number)]

    def _iteration_done(self) -> int:
        """The number of the strongest request that this rank knows of; what asks for one save has been heard."""
        found = [self._end_wanted()]
        if self._signals.save:
            self._signals.save = False
            found.append(1)
        if self._world.is_first:
            if (self._folder / SAVE).exists():
                (self._folder / SAVE).unlink(missing_ok=True)
                found.append(2)
            if time.monotonic() >= self._end:
                found.append(3)
        return max(found)

    def _end_wanted(self) -> int:
        if self._signals.stop:
            return 5
        return 4 if self._world.is_first and (self._folder / STOP).exists() else 0
