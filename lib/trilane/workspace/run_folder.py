"""Files of a run folder: written atomically, moved aside for the next attempt; the progress that they show."""

from pathlib import Path

from trilane.config.plan import read_plan
from trilane.utils.files import json_object, numbered, replace_text, set_aside
from trilane.workspace.status import Status, known_status

STOP = "stop"  # a file of that name in the run folder: save and end; no later run starts there until it is removed
SAVE = "save"  # a file of that name: save once; the run removes it
STEPS, VALIDATION = "steps.jsonl", "validation.jsonl"  # a line for each iteration, and for each evaluation
LEFT = ("run.log", STEPS, VALIDATION, "env.json", "ranks")  # what an attempt leaves, besides status.json
MOST_ITERATIONS = 1 << 40  # a larger number is a damaged one


def iteration(folder: Path) -> int:
    """The last iteration in steps.jsonl; 0 where there is none. Damaged lines do not count."""
    path = folder / STEPS
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        for last in (1 << 14, path.stat().st_size):  # a crash may leave many NULs at the end
            file.seek(max(0, path.stat().st_size - last))
            numbers = (_iteration(line) for line in reversed(file.read().split(b"\n")))
            if number := next(filter(None, numbers), 0):
                return number
    return 0


def cut_steps(folder: Path, done: int) -> None:
    """Keep the first `done` iterations in steps.jsonl and validation.jsonl; the others will be trained again.

    What is removed, also a line that a killed run left half-written or a crash damaged, goes to
    earlier/NAME.1, .2, ...
    """
    for name in (STEPS, VALIDATION):
        _cut(folder / name, done)


def _cut(path: Path, done: int) -> None:
    if path.is_dir():
        set_aside(path)
    text = path.read_bytes() if path.exists() else b""
    kept = b"".join(line.strip(b"\0") + b"\n" for line in text.split(b"\n") if 0 < _iteration(line) <= done)
    if kept != text:
        set_aside(path)
        replace_text(path, kept.decode())


def _iteration(line: bytes) -> int:
    """The iteration of a line of either file; 0 for a damaged line."""
    number = (json_object(line.decode("utf-8", "replace")) or {}).get("iteration")
    return number if type(number) is int and 0 < number < MOST_ITERATIONS else 0


def reopen(folder: Path) -> None:
    """Prepare a run folder for another launch: move status.json and the files of its ranks to earlier/."""
    for path in [folder / "status.json", *(folder / "ranks").glob("*.*")]:
        if path.is_file() or path.is_dir():  # a pipe has no content to keep
            set_aside(path)
        path.unlink(missing_ok=True)


def put_aside(folder: Path, keep: bool) -> None:
    """Move what the earlier attempt left to attempts/N; only its status where the run continues (`keep`)."""
    names = ("status.json",) if keep else (*LEFT, "status.json")
    left = [folder / name for name in names if (folder / name).exists()]
    if left:
        target = numbered(folder / "attempts", "", Path.mkdir)
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
    if path.is_dir() or (path.exists() and (new_text is None or path.read_bytes() != new_text.encode())):
        set_aside(path)


def is_started(folder: Path) -> bool:
    """Whether a run was ever started in the folder."""
    return any((folder / name).exists() for name in ("run.log", STEPS, "status.json"))


def is_completed(folder: Path) -> bool:
    """Whether the run in the folder has completed; not where its plan was extended since, or status.json is damaged."""
    written = known_status(folder)
    return written is not None and written.status is Status.COMPLETED and not _is_extended(folder)


def _is_extended(folder: Path) -> bool:
    """Whether the plan in the folder has iterations after the last one in steps.jsonl."""
    done = iteration(folder)
    try:
        return 0 < done < read_plan(folder / "plan.json").run.goal
    except (ValueError, OSError):
        return False
