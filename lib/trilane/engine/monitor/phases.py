"""Phases: what this process is doing now, such as forward-compute, and the seconds of each on this rank and over ranks.

The stack belongs to the process, which does one thing at a time: the hooks of the libraries know of no engine.
A clock is read where the innermost phase changes: on a CPU the host's, on a GPU an event in the stream, which is not
waited for before the end of the iteration. So on a GPU a phase counts the time of its kernels, not of their launch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# The names that all engines share. Time counts for the innermost phase only.
DATA, FORWARD, BACKWARD = "batch-generator", "forward-compute", "backward-compute"
P2P, REDUCE, OPTIMIZER = "p2p-wait", "all-grads-sync", "optimizer"


SAVE, EVALUATE = "save-checkpoint", "evaluate"  # outside of every iteration, so no timer counts them
NAMES = (DATA, FORWARD, BACKWARD, P2P, REDUCE, OPTIMIZER)


T = TypeVar("T")
Listener = Callable[[str], None]  # receives the new innermost phase, "" outside of all


_stack: list[str] = []
_listeners: list[Listener] = []


def current() -> str:
    """The innermost phase, "" outside of all; safe to call from another thread."""
    return (_stack or [""])[-1]


def begin(name: str) -> None:
    """Enter a phase, inside the current one."""
    _stack.append(name)
    for listener in _listeners:
        listener(name)


def end() -> None:
    """Leave the innermost phase."""
    _stack.pop()
    outer = _stack[-1] if _stack else ""
    for listener in _listeners:
        listener(outer)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Make a block a phase. After an exception the phase stays current: it records where the process failed."""
    begin(name)
    yield
    end()


def during(name: str, function: Callable[..., T]) -> Callable[..., T]:
    """The same function with each call as a phase."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> T:
        with phase(name):
            return function(*args, **options)

    return called


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` at each change of phase; the returned function ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


class MegatronTimers:
    """megatron-core's hook `config.timers`: its timers become phases.

    In a pipeline the schedule's time outside compute is waiting for a neighbour, so its own timer is p2p-wait;
    without a pipeline it is no phase.
    """

    def __init__(self, pipeline: bool) -> None:
        self._known = {"forward-compute": _Timer(FORWARD), "backward-compute": _Timer(BACKWARD)}
        reductions = ("all-grads-sync", "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce")
        self._known |= {name: _Timer(REDUCE) for name in reductions}
        self._known |= {"forward-backward": _Timer(P2P)} if pipeline else {}
        self._none = _NoTimer()

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer | _NoTimer":
        """The timer of that name, with start() and stop()."""
        return self._known.get(name, self._none)


class _Timer:
    def __init__(self, name: str) -> None:
        self._name = name

    def start(self, barrier: bool = False) -> None:
        begin(self._name)

    def stop(self, barrier: bool = False) -> None:
        end()


class _NoTimer:
    def start(self, barrier: bool = False) -> None:
        """No phase."""

    def stop(self, barrier: bool = False) -> None:
        """No phase."""


Spread = dict[str, tuple[float, float]]  # phase -> seconds an iteration, (min, max) over ranks


class Timers:
    """Seconds by phase since the last over_ranks(); each without the time of phases inside it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stamp = device, _event if device.type == "cuda" else perf_counter
        self._marks: list[tuple[Any, str]] = []
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._iterations = 0
        self._mark(current())
        self.stop = subscribe(self._mark)

    def _mark(self, name: str) -> None:
        self._marks.append((self._stamp(), name))

    def fold(self) -> None:
        """End an iteration: add up its marks and drop them. Synchronizes with a GPU."""
        self._mark(current())
        for name, seconds in durations(self._marks).items():
            if name in self._seconds:
                self._seconds[name] += seconds
        del self._marks[:-1]
        self._iterations += 1

    def skip(self) -> None:
        """Drop what happened since the last iteration, such as the phases of an evaluation."""
        self._marks.clear()
        self._mark(current())

    def own(self) -> dict[str, float]:
        """Phase -> seconds per iteration on this rank since the last over_ranks(); only phases that occurred."""
        return {name: seconds / self._iterations for name, seconds in self._seconds.items() if seconds > 0}

    def over_ranks(self) -> Spread:
        """Seconds per iteration since the last call, of the phases of any rank. Collective."""
        mine = torch.tensor([self._seconds[name] / self._iterations for name in NAMES], dtype=torch.float64)
        both = torch.cat([mine, -mine]).to(self._device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        most, least = both.cpu().chunk(2)
        self._seconds, self._iterations = dict.fromkeys(NAMES, 0.0), 0
        spread = zip(NAMES, (-least).tolist(), most.tolist(), strict=True)
        return {name: (low, high) for name, low, high in spread if high > 0}


def durations(marks: Sequence[tuple[Any, str]]) -> dict[str, float]:
    """Seconds by phase from marks (time, new innermost phase); the last mark only ends the one before."""
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


def timing_table(spread: Mapping[str, tuple[float, float]]) -> str:
    """The table that Megatron-LM prints with --timing-log-option minmax, in milliseconds."""
    rows = [
        f"    {(name + ' ').ljust(48, '.')}: ({1e3 * low:.2f}, {1e3 * high:.2f})"
        for name, (low, high) in spread.items()
    ]
    return "\n".join(["(min, max) time across ranks (ms):", *rows])
