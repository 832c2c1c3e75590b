"""Watching a run while it goes: what the ranks say gathered in one log, and a progress bar where a person sits."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.plan import Plan

POLL_S = 0.1


def follow(child: subprocess.Popen[bytes], folder: Path, plan: Plan, progress: bool, deadline: float) -> int:
    """Copy what the ranks say to run.log and show the progress until the child ends; its exit code.

    Raises TimeoutError after `deadline` (seconds of the monotonic clock).
    """
    tails = [Tail(folder / "ranks" / f"{rank}.log") for rank in range(plan.topology.gpus)]
    steps = Tail(folder / "steps.jsonl")
    with (folder / "run.log").open("w", encoding="utf-8") as log, bar(plan, progress) as show:
        try:
            while True:
                code = child.poll()
                copy(tails, log)
                for line in steps.lines():
                    show(json.loads(line))
                if code is not None:
                    return code
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
    """New lines of a file that somebody else is writing, and that may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self, rest: bool = False) -> list[str]:
        """The whole lines added since the last call; with `rest` also an unfinished last one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new if rest else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace").splitlines()


@contextlib.contextmanager
def bar(plan: Plan, wanted: bool) -> Iterator[Any]:
    """A function that shows one step of steps.jsonl: as a progress bar where a person watches, else not at all."""
    notebook = "ipykernel" in sys.modules
    if not wanted or not (notebook or sys.stderr.isatty()):
        yield lambda step: None
        return
    from tqdm.std import tqdm

    with tqdm(total=plan.run.train_iters, desc=plan.label, unit="it", dynamic_ncols=True) as shown:

        def show(step: Mapping[str, Any]) -> None:
            shown.set_postfix_str(f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it", refresh=False)
            shown.update(step["iteration"] - shown.n)

        yield show
