"""Phases: what this process is doing now, such as forward-compute, and their seconds on this rank.

The stack belongs to the process, which does one thing at a time: the hooks of the libraries know of
no engine. A clock is read where the innermost phase changes: on a CPU the host's, on a GPU an event
in the stream, which is not waited for before the end of the iteration. So on a GPU a phase counts
the time of its kernels, not of their launch.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

# The names that all engines share; the readers of logs know them. Time counts for the innermost
# phase only.
DATA = "batch-generator"
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
P2P = "p2p-wait"
REDUCE = "all-grads-sync"
OPTIMIZER = "optimizer"
NAMES = (DATA, FORWARD, BACKWARD, P2P, REDUCE, OPTIMIZER)
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


def subscribe(listener: Callable[[str], None]) -> None:
    """Call `listener` with the new innermost phase at each change from now on."""
    _listeners.append(listener)


def megatron_timers(pipeline: bool) -> Callable[..., SimpleNamespace]:
    """megatron-core's hook `config.timers`: the timer of each name, a phase while it runs where we
    have one for it.

    In a pipeline the schedule's time outside compute is waiting for a neighbour, so its own timer
    is p2p-wait.
    """
    reduces = (REDUCE, "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce")
    names = {FORWARD: FORWARD, BACKWARD: BACKWARD, **dict.fromkeys(reduces, REDUCE)}
    if pipeline:
        names["forward-backward"] = P2P

    def timer(name: str, log_level: Any = None) -> SimpleNamespace:
        if name not in names:
            return SimpleNamespace(start=lambda barrier=False: None, stop=lambda: None)
        return SimpleNamespace(start=lambda barrier=False: begin(names[name]), stop=end)

    return timer


class Timers:
    """Seconds by phase since the last taken(); each without the time of phases inside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, str]] = []
        self._seconds = Counter[str]()
        self._iterations = 0
        self._mark(current())
        subscribe(self._mark)

    def _mark(self, name: str) -> None:
        self._marks.append((_event() if self._device.type == "cuda" else perf_counter(), name))

    def fold(self) -> dict[str, float]:
        """End an iteration: its seconds by phase. Synchronizes with a GPU."""
        self._mark(current())
        seconds = durations(self._marks)
        self._seconds.update(seconds)
        self._iterations += 1
        del self._marks[:-1]
        return seconds

    def skip(self) -> None:
        """Drop what happened since the last iteration, such as the phases of an evaluation."""
        self._marks.clear()
        self._mark(current())

    def taken(self) -> dict[str, float]:
        """Phase -> seconds per iteration on this rank since the last call; only phases that
        occurred.
        """
        count = max(1, self._iterations)
        seconds = {name: self._seconds[name] / count for name in NAMES if self._seconds[name]}
        self._seconds.clear()
        self._iterations = 0
        return seconds


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def durations(marks: Sequence[tuple[Any, str]]) -> dict[str, float]:
    """Seconds by phase from marks (time, new innermost phase); the last mark only ends the one
    before.
    """
    seconds = Counter[str]()
    for (before, name), (after, _) in pairwise(marks):
        if isinstance(after, torch.cuda.Event):
            after.synchronize()
            seconds[name] += before.elapsed_time(after) / 1e3  # it counts in milliseconds
        else:
            seconds[name] += after - before
    return dict(seconds)


def timing_line(seconds: Mapping[str, float]) -> str:
    """The line that Megatron-LM prints with --timing-log-option max, in milliseconds."""
    parts = [f"{name}: {1e3 * spent:.2f}" for name, spent in seconds.items()]
    return " | ".join(["time (ms)", *parts])
