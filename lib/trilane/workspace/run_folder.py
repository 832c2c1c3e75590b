"""Files of a run folder: written atomically, moved aside for the next attempt; the progress that they show."""

import json
from pathlib import Path

from trilane.utils.files import replace_text, set_aside
from trilane.workspace.status import Status

STOP = "stop"  # a file of that name in the run folder: save and end; no later run starts there until it is removed
SAVE = "save"  # a file of that name: save once; the run removes it
LEFT = ("run.log", "steps.jsonl", "env.json", "ranks")  # what an attempt leaves, besides status.json


def iteration(folder: Path) -> int:
    """The last iteration in steps.jsonl; 0 where there is none."""
    path = folder / "steps.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    return next((number for line in reversed(lines) if (number := _iteration(line))), 0)


def cut_steps(folder: Path, done: int) -> None:
    """Keep the first `done` iterations in steps.jsonl; the others will be trained again.

    What is removed, also a line that a killed run left half-written, goes to earlier/steps.jsonl.1, .2, ...
    """
    path = folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if 0 < _iteration(line) <= done]
    if len(kept) == len(lines):
        return
    set_aside(path)
    replace_text(path, "".join(line + "\n" for line in kept))


def _iteration(line: str | bytes) -> int:
    """The iteration of a line of steps.jsonl; 0 for a truncated line."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return 0


def reopen(folder: Path) -> None:
    """Prepare a run folder for another launch: move status.json and the files of its ranks to earlier/."""
    for path in [folder / "status.json", *(folder / "ranks").glob("*.*")]:
        if path.is_file():  # a pipe has no content to keep
            set_aside(path)
        path.unlink(missing_ok=True)


def put_aside(folder: Path, keep: bool) -> None:
    """Move what the earlier attempt left to attempts/N; only its status where the run continues (`keep`)."""
    names = ("status.json",) if keep else (*LEFT, "status.json")
    left = [folder / name for name in names if (folder / name).exists()]
    if not left:
        return
    aside = folder / "attempts"
    aside.mkdir(exist_ok=True)
    target = aside / str(1 + sum(1 for _ in aside.iterdir()))
    target.mkdir()
    for path in left:
        path.rename(target / path.name)


def write_text(path: Path, text: str, *, derived: bool = False) -> Path:
    """Write `text` to `path` atomically (temporary name, then rename), and return `path`.

    A different earlier version is kept as `earlier/NAME.1`, `.2`, ... in the same folder. A `derived` file, which can
    be made again from what is kept, is only replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not derived:
        keep_earlier(path, text)
    replace_text(path, text)
    return path


def keep_earlier(path: Path, new_text: str | None = None) -> None:
    """Keep a copy of `path` in `earlier/`, unless its text equals `new_text`."""
    if path.exists() and path.read_text(encoding="utf-8") != new_text:
        set_aside(path)


def is_started(folder: Path) -> bool:
    """Whether a run was ever started in the folder."""
    return any((folder / name).exists() for name in ("run.log", "steps.jsonl", "status.json"))


def is_completed(folder: Path) -> bool:
    """Whether the run in the folder has completed."""
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text(encoding="utf-8")).get("status") == Status.COMPLETED
