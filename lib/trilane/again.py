"""A run folder that a run goes on in: what the runs before left stays, and each iteration stands once."""

import json
import os
from pathlib import Path

EARLIER = "earlier"
STOP = "stop"  # a file of that name in the run folder: save and end; no later run begins there until it is taken away
SAVE = "save"  # save once; the run takes it away


def reopen(folder: Path) -> None:
    """Make a run folder ready for a launcher: what a run before left of how it ended, and of its ranks, moves aside."""
    for path in [folder / "status.json", *(folder / "ranks").glob("*.*")]:
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
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(aside, path)


def set_aside(path: Path) -> None:
    """Keep what stands at `path` under a second name, earlier/NAME.1, .2, ..., too."""
    if path.exists():
        folder = path.parent / EARLIER
        folder.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in folder.glob(f"{path.name}.*"))
        os.link(path, folder / f"{path.name}.{number}")


def _iteration(line: str) -> int:
    """Which iteration the line is about; 0 where it is cut off."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return 0
