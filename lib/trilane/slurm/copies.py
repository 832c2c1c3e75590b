"""Copies of the installed code and of the plan, frozen next to a submission.

A job may wait for days, and is requeued when a node fails: it runs what was installed when it was
submitted, from code/HASH below the submitted folder.
"""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from trilane.config.plan import plan_from_json, read_plan_values
from trilane.utils.files import read_text, replace_text
from trilane.utils.validation import require
from trilane.workspace.continuation import changes
from trilane.workspace.installation import packages, revision, shipped

# what a script that runs the frozen code mentions
USED_BY = "TRILANE_CODE"


def hash_of(text: str) -> str:
    """The hash of a text by which a submission names it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_plan(folder: Path) -> str:
    """Keep the plan of a run folder as submitted/HASH.json, with the text of a layer of its own;
    the hash.
    """
    text = json.dumps(read_plan_values(folder / "plan.json"), indent=1)
    kept = folder / "submitted" / f"{hash_of(text)}.json"
    if read_text(kept) != text:
        kept.parent.mkdir(exist_ok=True)
        replace_text(kept, text)
    return kept.stem


def kept_plan(folder: Path, kept: str) -> str:
    """The text of the plan of that hash; "" where it is missing or edited."""
    text = read_text(folder / f"submitted/{kept}.json")
    return text if hash_of(text) == kept else ""


def plan_changes(folder: Path, kept: object) -> list[str]:
    """In what plan.json differs from the plan of that hash, a line a field, however it is written;
    [] for no hash.

    ValueError where plan.json cannot be read, or differs from what is lost.
    """
    if not isinstance(kept, str) or not re.fullmatch(r"[0-9a-f]{16}", kept):
        return []
    now = read_plan_values(folder / "plan.json")
    if hash_of(json.dumps(now, indent=1)) == kept:
        return []
    was = kept_plan(folder, kept)
    require(
        bool(was),
        "plan",
        folder / f"submitted/{kept}.json",
        "is lost or damaged, and plan.json differs",
    )
    both = (json.loads(was), now)
    return changes(*(plan_from_json(values).to_json() for values in both))


def freeze(home: Path) -> Path:
    """The copy of the installed code below `home`, made where it is not there or damaged.

    ValueError where it cannot be read or written, or is being changed.
    """
    require(
        ":" not in str(home),
        "run folder",
        home,
        "must hold no colon, which separates PYTHONPATH's folders",
    )
    code = home / "code"
    try:
        code.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=code) as place:
            part = Path(place) / "copy"
            for name, root in _roots().items():
                shutil.copytree(root, part / name, ignore=shutil.ignore_patterns("__pycache__"))
            sums = _sums({name: part / name for name in _roots()})
            # an update of the installation takes seconds, in which half of it is old
            require(
                sums == _sums(_roots()),
                "code",
                packages()[0],
                "is being changed; submit when that has ended",
            )
            target = code / hash_of(sums)
            listed = read_text(target / "SHA256SUMS")
            if listed != sums or _sums({name: target / name for name in _roots()}) != sums:
                (part / "SHA256SUMS").write_text(sums)
                (part / "REVISION").write_text(f"{revision()}\n")
                shutil.rmtree(target, ignore_errors=True)
                part.rename(target)
    except OSError as error:
        raise ValueError(f"code={code}: cannot be written ({error.strerror or error})") from None
    return target


def _roots() -> dict[str, Path]:
    """The folders of the packages and of the templates, by their name in a copy."""
    roots = {path.name: path for path in packages()}
    return {**roots, "share/trilane/slurm_templates": shipped("slurm_templates")}


def _sums(roots: dict[str, Path]) -> str:
    """The files below folders in the form of sha256sum, which the job checks them with."""
    paths = [
        (f"{name}/{path.relative_to(root)}", path)
        for name, root in roots.items()
        for path in root.rglob("*")
    ]
    files = sorted(
        (name, path) for name, path in paths if path.is_file() and "__pycache__" not in path.parts
    )
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files
    )
