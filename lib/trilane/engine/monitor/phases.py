"""Phases: what this process is doing now, such as forward-compute; who listens is told of each change.

The stack belongs to the process, which does one thing at a time: the hooks of the libraries know of no engine.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

# The names that all engines share. Time counts for the innermost phase: data read inside a forward pass is no forward.
DATA, FORWARD, BACKWARD = "batch-generator", "forward-compute", "backward-compute"


P2P, REDUCE, OPTIMIZER = "p2p-wait", "all-grads-sync", "optimizer"


SAVE = "save-checkpoint"  # outside of every iteration: no timer counts it


NAMES = (DATA, FORWARD, BACKWARD, P2P, REDUCE, OPTIMIZER)


T = TypeVar("T")


Listener = Callable[[str], None]  # told what is the innermost phase from now on, "" outside of all


_stack: list[str] = []


_listeners: list[Listener] = []


def now() -> str:
    """The innermost phase, "" outside of all; another thread may ask."""
    return (_stack or [""])[-1]


def begin(name: str) -> None:
    """Enter a phase, inside the one that is on."""
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
    """A block that is a phase. After an exception the phase stays on: it says where the process broke."""
    begin(name)
    yield
    end()


def during(name: str, function: Callable[..., T]) -> Callable[..., T]:
    """The same function, each call of it a phase."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> T:
        with phase(name):
            return function(*args, **options)

    return called


def listen(listener: Listener) -> Callable[[], None]:
    """Tell `listener` of each change from now on; call what is returned to stop."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


class MegatronTimers:
    """megatron-core's hook `config.timers`: its timers become our phases.

    In a pipeline whatever its schedule does but compute is waiting for a neighbour, so the schedule's own timer is
    p2p-wait; without one it is no phase.
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
        """Nothing begins."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing ends."""
