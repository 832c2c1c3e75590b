"""Follow a run: collect the ranks' output in one log, in whole lines; its progress as a bar, or as
lines in a batch.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.files import Appended, json_object
from trilane.utils.process import Child, interrupt
from trilane.utils.progress import BATCH, bar, is_watched


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
    tails = [Tail(folder / "ranks" / f"{rank}.log") for rank in range(plan.topology.gpus)]
    steps, log, was_full = Tail(folder / "steps.jsonl"), Appended(folder / "run.log"), False
    log.write(b"")  # it exists from the start
    with progress(plan.label, plan.run.train_iters, show_progress) as show:
        try:
            while True:
                code = child.poll()
                _copy(tails, log)
                was_full = _warn_if_full(folder, was_full)
                for step in filter(None, map(json_object, steps.lines())):
                    show(step)
                if code is not None:
                    return code
                check()
                if line := news():
                    log.write(f"trilane: {line}\n".encode())
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.1)
        finally:
            # torchrun ends its workers without a save; until they end the ranks train on, and print
            # it
            interrupt(child)
            _copy(tails, log, rest=True)


def _copy(tails: Sequence["Tail"], log: Appended, rest: bool = False) -> None:
    """Append each rank's new whole lines to `log`, one rank after the other."""
    if text := "".join(f"{line}\n" for tail in tails for line in tail.lines(rest)):
        log.write(text.encode())


def _warn_if_full(folder: Path, was_full: bool) -> bool:
    """Whether the disk is full, with a warning when that changes."""
    # the ranks report it only in files on that disk
    is_full = shutil.disk_usage(folder).free < 1 << 14
    if is_full and not was_full:
        then = "training continues, and records its steps later"
        print(
            f"trilane: no space is left on the disk of {folder}; {then}",
            file=sys.stderr,
            flush=True,
        )
    return is_full


class Tail:
    """New lines of a file that another process writes, and that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self, rest: bool = False) -> list[str]:
        """The whole lines added since the last call; with `rest` also an unfinished last one."""
        new = b""
        # opened at each call: on NFS only this asks the server for what other hosts added
        with (
            contextlib.suppress(FileNotFoundError, IsADirectoryError),
            self._path.open("rb") as file,
        ):
            # replaced by a shorter one: a resumed run cuts steps.jsonl
            if file.seek(0, os.SEEK_END) < self._at:
                self._at, self._rest = 0, b""
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        whole, end, self._rest = (self._rest + new).rpartition(b"\n")
        if rest:
            whole, end, self._rest = whole + end + self._rest, b"", b""
        return whole.decode("utf-8", "replace").splitlines()


@contextlib.contextmanager
def progress(
    label: str, train_iters: int, wanted: bool = True
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that shows one record of steps.jsonl: as a bar, as five lines in a batch, or not
    at all.
    """

    def line(step: Mapping[str, Any]) -> None:
        done, loss, seconds = step["iteration"], step["lm_loss"], step["sec_per_it"]
        if done % max(1, train_iters // 5) == 0:
            print(f"{label}: {done}/{train_iters}, loss {loss:.3f}, {seconds:.3f} s/it", flush=True)

    if not wanted or not (os.environ.get(BATCH) or is_watched()):
        yield lambda step: None
    elif os.environ.get(BATCH):
        yield line
    else:
        with bar(total=train_iters, desc=label, unit="it") as shown:

            def show(step: Mapping[str, Any]) -> None:
                shown.set_postfix_str(
                    f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it", refresh=False
                )
                shown.update(step["iteration"] - shown.n)

            yield show
