"""Follow a run: collect the ranks' output in one log, in whole lines; its progress as a bar, or as
lines in a batch.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.files import Appended, json_object
from trilane.utils.process import Child, interrupt
from trilane.utils.progress import BATCH, bar, is_watched

POLL_S = 0.1
# a disk with less cannot take what the ranks print until the next poll
FULL_BYTES = 1 << 14


def follow(
    child: Child,
    folder: Path,
    plan: Plan,
    show_progress: bool,
    deadline: float,
    check: Callable[[], None] = lambda: None,
    news: Callable[[], str] = str,
) -> int:
    """Copy the ranks' output to run.log until the child ends; its exit code.

    Raises TimeoutError after `deadline` (seconds of the monotonic clock), and what `check`, called
    each poll, raises; the child is ended then. What `news` returns is another line of the log.
    """
    ranks = [Tail(folder / f"ranks/{rank}.log") for rank in range(plan.topology.gpus)]
    steps = Tail(folder / "steps.jsonl")
    log = Appended(folder / "run.log")
    log.write(b"")  # it exists from the start
    was_full = False

    def copy(rest: bool = False) -> None:
        text = ""
        for tail in ranks:
            text += "".join(f"{line}\n" for line in tail.lines(rest))
        if text:
            log.write(text.encode())

    with progress(plan.label, plan.run.train_iters, show_progress) as show:
        try:
            while True:
                code = child.poll()
                copy()
                # the ranks report it only in files on that disk
                is_full = shutil.disk_usage(folder).free < FULL_BYTES
                if is_full and not was_full:
                    text = f"trilane: no space is left on the disk of {folder}; training continues"
                    print(f"{text}, and records its steps later", file=sys.stderr, flush=True)
                was_full = is_full
                for line in steps.lines():
                    if step := json_object(line):
                        show(step)
                if code is not None:
                    return code
                check()
                if text := news():
                    log.write(f"trilane: {text}\n".encode())
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(POLL_S)
        finally:
            # torchrun ends its workers without a save; until they end the ranks train on, and print
            # it
            interrupt(child)
            copy(rest=True)


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


@contextlib.contextmanager
def progress(
    label: str, train_iters: int, wanted: bool = True
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that shows one record of steps.jsonl: as a bar, as five lines in a batch, or not
    at all.
    """
    is_batch = bool(os.environ.get(BATCH))

    def print_fifth(step: Mapping[str, Any]) -> None:
        done = step["iteration"]
        if done % max(1, train_iters // 5) == 0:
            facts = f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it"
            print(f"{label}: {done}/{train_iters}, {facts}", flush=True)

    if not wanted or not (is_batch or is_watched()):
        yield lambda step: None
    elif is_batch:
        yield print_fifth
    else:
        with bar(total=train_iters, desc=label, unit="it") as shown:

            def show(step: Mapping[str, Any]) -> None:
                facts = f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it"
                shown.set_postfix_str(facts, refresh=False)
                shown.update(step["iteration"] - shown.n)

            yield show
