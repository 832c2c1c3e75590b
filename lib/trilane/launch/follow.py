"""Follow a run: collect the ranks' output in one log, in whole lines, and show the progress."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.progress import progress

POLL_S = 0.1


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
    with (
        (folder / "run.log").open("a", encoding="utf-8") as log,
        progress(plan.label, plan.run.train_iters, show_progress) as show,
    ):
        try:
            while True:
                code = child.poll()
                copy(tails, log)
                for line in steps.lines():
                    show(json.loads(line))
                if code is not None:
                    return code
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(POLL_S)
        finally:
            copy(tails, log, rest=True)


def copy(tails: Sequence["Tail"], log: Any, rest: bool = False) -> None:
    """Append each rank's new whole lines to `log`, one rank after the other."""
    for tail in tails:
        for line in tail.lines(rest):
            log.write(line + "\n")
    log.flush()


class Tail:
    """New lines of a file that another process writes, and that may not exist yet.

    A file that is replaced (steps.jsonl, when a resumed run truncates it) is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._offset = path, 0, 0

    def lines(self, rest: bool = False) -> list[str]:
        """The whole lines added since the last call; with `rest` also an unfinished last one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if self._file not in (0, number):
                self._offset = 0
            self._file = number
            file.seek(self._offset)
            new = file.read()
        whole = new if rest else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace").splitlines()
