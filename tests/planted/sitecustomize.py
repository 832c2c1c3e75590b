"""Six ways to hang a real training, and one to lead it by hand, planted from outside: Python finds
it in PYTHONPATH.

TRILANE_PLANT="kind rank iteration": the rank does it when it asks for the samples of that
iteration, or in its first collective after that. `paced` does it at every iteration. Without the
variable nothing happens.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIND, RANK, ITERATION = (os.environ.get("TRILANE_PLANT") or "none -1 0").split()


class Later(importlib.abc.MetaPathFinder):
    """Calls `then` on a module once it is imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then, self._busy = name, then, False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name or self._busy:
            return None
        self._busy = True
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_lock() -> None:
    """A helper thread in a C call that keeps Python's global lock: an expression that needs for
    ever to fail.
    """
    import re

    threading.Thread(
        target=re.match, args=(r"(a+)+$", "a" * 60 + "b"), name="monitor", daemon=True
    ).start()
    time.sleep(0.1)


def read_a_pipe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipe")
        os.mkfifo(path)
        path.read_text()


def leave() -> None:
    os._exit(0)


def wait_for_leave(number: int) -> None:
    """The file `allowed` in the run folder holds the last iteration that may begin: a test acts in
    between.
    """
    while int(Path("allowed").read_text() or 0) < number:
        time.sleep(0.02)


HERE = {
    "stopped": stop,
    "lock-held": hold_the_lock,
    "pipe": read_a_pipe,
    "exit": leave,
}


def plant_in_data(module: Any) -> None:
    original = module.SampleLoader.microbatches

    def microbatches(self: Any, batch: Any) -> Any:
        if KIND == "paced":
            wait_for_leave(batch.number)
        elif batch.number == int(ITERATION):
            HERE[KIND]()
        return original(self, batch)

    module.SampleLoader.microbatches = microbatches


def plant_in_engine(module: Any) -> None:
    """`mismatch`, `slow`: the rank's first collective then is another, or lasts."""
    import torch.distributed as dist

    original = module.Megatron.step
    all_reduce = dist.all_reduce
    steps = 0

    def step(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        return original(self, *args)

    def other(tensor: Any, *args: Any, **options: Any) -> Any:
        group = options.get("group")
        is_now = steps == int(ITERATION)
        if is_now and KIND == "slow":
            while True:
                time.sleep(0.01)
        # The gradient norm's group, tp x pp: where two disagree nobody could tell who of them is
        # wrong.
        if is_now and KIND == "mismatch" and dist.get_world_size(group) == 4:
            return dist.barrier(group=group)
        return all_reduce(tensor, *args, **options)

    module.Megatron.step = step
    dist.all_reduce = other


if os.environ.get("RANK") == RANK:
    if KIND in HERE or KIND == "paced":
        sys.meta_path.insert(0, Later("trilane_engine.data.samples", plant_in_data))
    else:
        sys.meta_path.insert(0, Later("trilane_engine.backends.megatron", plant_in_engine))
