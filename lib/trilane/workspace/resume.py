"""A run folder that a run goes on in: what the runs before left stays, and each iteration stands once."""

import json
from pathlib import Path

from trilane.utils.files import replace_text, set_aside

STOP = "stop"  # a file of that name in the run folder: save and end; no later run begins there until it is taken away


SAVE = "save"  # save once; the run takes it away


def reopen(folder: Path) -> None:
    """Make a run folder ready for a launcher: what a run before left of how it ended, and of its ranks, moves aside."""
    for path in [folder / "status.json", *(folder / "ranks").glob("*.*")]:
        if path.is_file():  # a pipe has nothing to keep
            set_aside(path)
        path.unlink(missing_ok=True)


def cut_steps(folder: Path, done: int) -> None:
    """Leave the first `done` iterations in steps.jsonl: the others will be trained again.

    What is cut off, also a line that a killed run left half-written, goes to earlier/steps.jsonl.1, .2, ...
    """
    path = folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if 0 < _iteration(line) <= done]
    if len(kept) == len(lines):
        return
    set_aside(path)
    replace_text(path, "".join(line + "\n" for line in kept))


def _iteration(line: str) -> int:
    """Which iteration the line is about; 0 where it is cut off."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return 0
