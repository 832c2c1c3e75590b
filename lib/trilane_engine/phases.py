"""Phases: what this process is doing now, such as forward-compute, and their seconds on this rank
and over ranks.

The stack belongs to the process, which does one thing at a time: the hooks of the libraries know of
no engine. A clock is read where the innermost phase changes: on a CPU the host's, on a GPU an event
in the stream, which is not waited for before the end of the iteration. So on a GPU a phase counts
the time of its kernels, not of their launch.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# The names that all engines share; the readers of logs know them. Time counts for the innermost
# phase only.
NAMES = (
    "batch-generator",
    "forward-compute",
    "backward-compute",
    "p2p-wait",
    "all-grads-sync",
    "optimizer",
)
DATA, FORWARD, BACKWARD, P2P, REDUCE, OPTIMIZER = NAMES
_stack: list[str] = []
_listeners: list[Callable[[str], None]] = []


def current() -> str:
    """The innermost phase, "" outside of all; safe to call from another thread."""
    return (_stack or [""])[-1]


def within() -> tuple[str, ...]:
    """All phases that this process is in, the outermost first."""
    return tuple(_stack)


def begin(name: str) -> None:
    """Enter a phase, inside the current one."""
    _stack.append(name)
    for listener in _listeners:
        listener(name)


def end() -> None:
    """Leave the innermost phase."""
    _stack.pop()
    for listener in _listeners:
        listener(current())


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Make a block a phase, or as phase(name)(function) each call of a function.

    After an exception the phase stays current: it records where the process failed.
    """
    begin(name)
    yield
    end()


def subscribe(listener: Callable[[str], None]) -> Callable[[], None]:
    """Call `listener` with the new innermost phase, "" outside of all, at each change; the result
    ends that.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def megatron_timers(pipeline: bool) -> Callable[..., SimpleNamespace]:
    """megatron-core's hook `config.timers`: the timer of each name, a phase while it runs where we
    have one for it.

    In a pipeline the schedule's time outside compute is waiting for a neighbour, so its own timer
    is p2p-wait.
    """
    known = {FORWARD: FORWARD, BACKWARD: BACKWARD} | ({"forward-backward": P2P} if pipeline else {})
    known |= dict.fromkeys(
        (REDUCE, "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce"), REDUCE
    )

    def timer(name: str, log_level: Any = None) -> SimpleNamespace:
        start = (lambda: begin(known[name])) if name in known else lambda: None
        stop = end if name in known else lambda: None
        return SimpleNamespace(start=lambda barrier=False: start(), stop=stop)

    return timer


class Timers:
    """Seconds by phase since the last over_ranks(); each without the time of phases inside it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._clock = device, _event if device.type == "cuda" else perf_counter
        self._marks: list[tuple[Any, str]] = []
        self._seconds, self._iterations = Counter[str](), 0
        self._mark(current())
        self.stop = subscribe(self._mark)

    def _mark(self, name: str) -> None:
        self._marks.append((self._clock(), name))

    def fold(self) -> dict[str, float]:
        """End an iteration: add up its marks and drop them; its seconds by phase. Synchronizes with
        a GPU.
        """
        self._mark(current())
        found = durations(self._marks)
        self._seconds.update(found)
        del self._marks[:-1]
        self._iterations += 1
        return found

    def skip(self) -> None:
        """Drop what happened since the last iteration, such as the phases of an evaluation."""
        self._marks.clear()
        self._mark(current())

    def own(self) -> dict[str, float]:
        """Phase -> seconds per iteration on this rank since the last over_ranks(); only phases that
        occurred.
        """
        return {
            name: self._seconds[name] / self._iterations
            for name in NAMES
            if self._seconds[name] > 0
        }

    def over_ranks(self) -> dict[str, tuple[float, float]]:
        """Phase -> seconds an iteration since the last call, (min, max) over ranks. Collective."""
        mine = torch.tensor([self.own().get(name, 0.0) for name in NAMES], dtype=torch.float64)
        both = torch.cat([mine, -mine]).to(self._device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        most, least = both.cpu().chunk(2)
        self._seconds, self._iterations = Counter(), 0
        spread = zip(NAMES, (-least).tolist(), most.tolist(), strict=True)
        return {name: (low, high) for name, low, high in spread if high > 0}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def durations(marks: Sequence[tuple[Any, str]]) -> dict[str, float]:
    """Seconds by phase from marks (time, new innermost phase); the last mark only ends the one
    before.
    """
    found = defaultdict[str, float](float)
    for (before, name), (after, _) in pairwise(marks):
        if isinstance(after, torch.cuda.Event):
            after.synchronize()
            found[name] += before.elapsed_time(after) / 1e3  # it counts in milliseconds
        else:
            found[name] += after - before
    return found


def timing_table(spread: Mapping[str, tuple[float, float]]) -> str:
    """The table that Megatron-LM prints with --timing-log-option minmax, in milliseconds."""
    rows = (
        f"    {(name + ' ').ljust(48, '.')}: ({1e3 * low:.2f}, {1e3 * high:.2f})"
        for name, (low, high) in spread.items()
    )
    return "\n".join(["(min, max) time across ranks (ms):", *rows])
