"""Follow a run: collect the ranks' output in one log, in whole lines; print its progress."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.files import Appended, json_object
from trilane.utils.process import Child, interrupt
from trilane.utils.tables import Json

POLL_S = 0.1


def follow(
    child: Child,
    folder: Path,
    plan: Plan,
    show_progress: bool,
    deadline: float,
    monitor: Any,
) -> int:
    """Copy the ranks' output to run.log until the child ends; its exit code.

    Raises TimeoutError after `deadline` (seconds of the monotonic clock), and what the check() of
    the `monitor`, called each poll, raises; the child is ended then. Its news() are lines of the
    log.
    """
    ranks = [Tail(folder / f"ranks/{rank}.log") for rank in range(plan.topology.gpus)]
    steps = Tail(folder / "steps.jsonl")
    log = Appended(folder / "run.log")
    log.write(b"")  # it exists from the start

    def copy(rest: bool = False) -> None:
        text = ""
        for tail in ranks:
            text += "".join(f"{line}\n" for line in tail.lines(rest))
        if text:
            log.write(text.encode())

    try:
        while True:
            code = child.poll()
            copy()
            for line in steps.lines():
                step = json_object(line)
                if step and show_progress:
                    print_fifth(plan, step)
            if code is not None:
                return code
            monitor.check()
            if text := monitor.news():
                log.write(f"trilane: {text}\n".encode())
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_S)
    finally:
        # torchrun ends its workers without a save; until they end the ranks train on, and print it
        interrupt(child)
        copy(rest=True)


def print_fifth(plan: Plan, step: Json) -> None:
    """Print a record of steps.jsonl to stderr, five of a run."""
    done = step["iteration"]
    goal = plan.run.train_iters
    if done % max(1, goal // 5) == 0:
        facts = f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it"
        print(f"{plan.label}: {done}/{goal}, {facts}", file=sys.stderr, flush=True)


class Tail:
    """New lines of a file that another process writes, and that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def lines(self, rest: bool = False) -> list[str]:
        """The whole lines added since the last call; with `rest` also an unfinished last one."""
        # opened at each call: on NFS only this asks the server for what other hosts added
        try:
            with self._path.open("rb") as file:
                # replaced by a shorter one: a resumed run cuts steps.jsonl
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                    self._rest = b""
                file.seek(self._at)
                new = file.read()
        except (FileNotFoundError, IsADirectoryError):
            new = b""
        self._at += len(new)
        whole, end, self._rest = (self._rest + new).rpartition(b"\n")
        if rest:
            whole += end + self._rest
            self._rest = b""
        return whole.decode("utf-8", "replace").splitlines()
