"""RunFolder: files written whole, what an attempt left, how far a run is."""

import contextlib
import json
from pathlib import Path

from trilane.utils.files import replace_text, set_aside
from trilane.workspace.status import Status

LEFT = ("run.log", "steps.jsonl", "env.json", "ranks")  # what an attempt leaves beside status.json


def iteration(folder: Path) -> int:
    """The last iteration in steps.jsonl, 0 where there is none."""
    path = folder / "steps.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            return int(json.loads(line)["iteration"])
    return 0


def put_aside(folder: Path, keep: bool) -> None:
    """Move what the earlier attempt left to attempts/N; only its status where the run goes on (`keep`)."""
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
    """Write `text` to `path` at once (temporary name, then rename), keeping an earlier, different version.

    What stood there goes to `earlier/NAME.1`, `.2`, ... beside it: nothing is ever lost. A `derived` file (a rendering
    of what is kept itself) is just replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not derived:
        keep_earlier(path, text)
    replace_text(path, text)
    return path


def keep_earlier(path: Path, new_text: str | None = None) -> None:
    """Keep what stands at `path` under a second name in `earlier/` too, unless it equals `new_text`."""
    if path.exists() and path.read_text(encoding="utf-8") != new_text:
        set_aside(path)


def is_started(folder: Path) -> bool:
    """Whether anything ever ran in that folder."""
    return any((folder / name).exists() for name in ("run.log", "steps.jsonl", "status.json"))


def is_completed(folder: Path) -> bool:
    """Whether the run of that folder came to its end."""
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text(encoding="utf-8")).get("status") == Status.COMPLETED
