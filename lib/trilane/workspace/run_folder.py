"""Files of a run folder: written atomically, moved aside for the next attempt; the progress that
they show.

A file `save` makes the run save once, and is removed by it; a file `stop` makes it save and end,
and no later run starts there until it is removed.
"""

from pathlib import Path

from trilane.config.plan import read_plan
from trilane.utils.files import json_object, numbered, read_text, replace_text, set_aside
from trilane.utils.tables import one_line
from trilane.workspace.status import Status, known_status

NOT_FINITE = "ranks/not-finite.txt"  # a line about the first value of the run that was NaN or Inf


def not_finite(folder: Path) -> str:
    """Where the first value arose that is not finite, in one line; "" where all are, or the engine
    does not look.
    """
    return one_line(read_text(folder / NOT_FINITE, 2000))


def iteration(folder: Path) -> int:
    """The last iteration in steps.jsonl; 0 where there is none. Damaged lines do not count."""
    path = folder / "steps.jsonl"
    for last in (
        (1 << 14, 0) if path.is_file() else ()
    ):  # else all of it: a crash may leave many NULs at the end
        numbers = (_iteration(line) for line in reversed(read_text(path, last).split("\n")))
        if number := next(filter(None, numbers), 0):
            return number
    return 0


def cut_steps(folder: Path, done: int) -> None:
    """Keep the first `done` iterations in steps.jsonl and validation.jsonl; the others will be
    trained again.

    What is removed, also a line that a killed run left half-written, goes to earlier/NAME.1, .2,
    ...
    """
    for path in (folder / "steps.jsonl", folder / "validation.jsonl"):
        if path.is_dir():
            set_aside(path)
        text = path.read_bytes() if path.exists() else b""
        lines = (line.strip("\0") for line in text.decode("utf-8", "replace").split("\n"))
        kept = "".join(f"{line}\n" for line in lines if 0 < _iteration(line) <= done)
        if kept.encode() != text:
            set_aside(path)
            replace_text(path, kept)


def _iteration(line: str) -> int:
    """The iteration of a line of either file; 0 for a damaged line."""
    number = (json_object(line) or {}).get("iteration")
    return number if type(number) is int and 0 < number < 1 << 40 else 0


def put_aside(folder: Path, keep: bool) -> None:
    """Move what the earlier attempt left to attempts/N; only its status and ranks where the run
    continues (`keep`).
    """
    names = ["status.json", "ranks"]
    if not keep:
        names += ["run.log", "steps.jsonl", "validation.jsonl", "env.json"]
    left = [folder / name for name in names if (folder / name).exists()]
    if left:
        target = numbered(folder / "attempts", "", Path.mkdir)
        for path in left:
            path.rename(target / path.name)


def write_text(path: Path, text: str) -> Path:
    """Replace `path` by `text`; a different earlier version is kept as `earlier/NAME.1`, `.2`, ...
    beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or (path.exists() and path.read_bytes() != text.encode()):
        set_aside(path)
    return replace_text(path, text)


def is_started(folder: Path) -> bool:
    """Whether a run was ever started in the folder."""
    return any((folder / name).exists() for name in ("run.log", "steps.jsonl", "status.json"))


def is_completed(folder: Path) -> bool:
    """Whether the run in the folder has completed; not where its plan was extended since, or
    status.json is damaged.
    """
    written = known_status(folder)
    if written is None or written.status is not Status.COMPLETED:
        return False
    try:
        return not 0 < iteration(folder) < read_plan(folder / "plan.json").run.goal
    except (ValueError, OSError):
        return True
