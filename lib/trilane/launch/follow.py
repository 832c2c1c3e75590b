"""Follow a run: collect the ranks' output in one log, in whole lines; its progress as a bar, or as lines in a batch."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.files import Appended, json_object
from trilane.utils.growing import Growing
from trilane.utils.progress import BATCH, bar_html, in_kernel

POLL_S = 0.1
DISK_S = 1.0  # between two looks at the space on the disk
LITTLE_BYTES = 1 << 14  # a disk with less counts as full
LINES = 5  # per run, in a batch
Show = Callable[[Mapping[str, Any]], None]  # takes a record of steps.jsonl


def follow(
    child: subprocess.Popen[bytes],
    folder: Path,
    plan: Plan,
    show_progress: bool,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Copy the ranks' output to run.log until the child ends; its exit code.

    Raises TimeoutError after `deadline` (seconds of the monotonic clock), and what `check`, called each poll, raises.
    """
    tails = [Tail(folder / "ranks" / f"{rank}.log") for rank in range(plan.topology.gpus)]
    steps = Tail(folder / "steps.jsonl")
    log, disk = Appended(folder / "run.log", _warn), Disk(folder)
    log.flush()  # it exists from the start
    with progress(plan.label, plan.run.train_iters, show_progress) as show:
        try:
            while True:
                code = child.poll()
                copy(tails, log)
                disk.check()
                for step in map(json_object, steps.lines()):
                    if step is not None:
                        show(step)
                if code is not None:
                    return code
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(POLL_S)
        finally:
            copy(tails, log, rest=True)


def copy(tails: Sequence["Tail"], log: Appended, rest: bool = False) -> None:
    """Append each rank's new whole lines to `log`, one rank after the other."""
    for tail in tails:
        if lines := tail.lines(rest):
            log.add("".join(line + "\n" for line in lines).encode())


def _warn(text: str) -> None:
    print(f"trilane: {text}", file=sys.stderr, flush=True)


class Disk:
    """Warns on stderr when the disk of a folder becomes full, and when it no longer is.

    The ranks report it too, but in files that may lie on that disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._next, self._is_full = folder, 0.0, False

    def check(self) -> None:
        """Look, at most every DISK_S seconds. Left out: a quota, which the ranks report."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DISK_S
        free, was_full = shutil.disk_usage(self._folder).free, self._is_full
        self._is_full = free < LITTLE_BYTES
        if self._is_full and not was_full:
            _warn(f"no space is left on the disk of {self._folder}; the training goes on, and records its steps later")
        elif was_full and not self._is_full:
            _warn(f"there is space again on the disk of {self._folder}")


class Tail:
    """New lines of a file that another process writes, and that may not exist yet.

    A file that is replaced (steps.jsonl, when a resumed run truncates it) is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._file = Growing(path)

    def lines(self, rest: bool = False) -> list[str]:
        """The whole lines added since the last call; with `rest` also an unfinished last one."""
        new = b"".join(self._file.blocks()) + (self._file.close() if rest else b"")
        return new.decode("utf-8", "replace").splitlines()


@contextlib.contextmanager
def progress(label: str, train_iters: int, wanted: bool = True) -> Iterator[Show]:
    """A function that shows one step; it does nothing where `wanted` is False or stderr is not a terminal."""
    if wanted and os.environ.get(BATCH):
        yield lambda step: _line(label, train_iters, step)
    elif wanted and in_kernel():
        yield _notebook_bar(label, train_iters)
    elif wanted and sys.stderr.isatty():
        from tqdm.std import tqdm

        with tqdm(total=train_iters, desc=label, unit="it", dynamic_ncols=True) as bar:

            def show(step: Mapping[str, Any]) -> None:
                bar.set_postfix_str(f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it", refresh=False)
                bar.update(step["iteration"] - bar.n)

            yield show
    else:
        yield lambda step: None


def text(label: str, train_iters: int, step: Mapping[str, Any]) -> str:
    """ "tp2-pp1-dp1: 10/50, loss 3.402, 0.431 s/it"."""
    return f"{label}: {step['iteration']}/{train_iters}, loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it"


def _line(label: str, train_iters: int, step: Mapping[str, Any]) -> None:
    if step["iteration"] % max(1, train_iters // LINES) == 0:
        print(text(label, train_iters, step), flush=True)


def _notebook_bar(label: str, train_iters: int) -> Show:
    from IPython.display import HTML, display

    def html(done: int, caption: str) -> HTML:
        return HTML(bar_html(done, train_iters, caption))

    handle = display(html(0, f"{label}: starting"), display_id=True)
    return lambda step: handle.update(html(step["iteration"], text(label, train_iters, step)))
