"""Copies of the installed code and of the plan, frozen next to a submission.

A job may wait for days, and is requeued when a node fails: it runs what was installed when it was
submitted, from code/HASH below the submitted folder.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from trilane.config.plan import plan_from_json
from trilane.utils.files import hash_of, read_text, replace_text
from trilane.utils.validation import read_json, require
from trilane.workspace.continuation import changes
from trilane.workspace.installation import packages, revision, shipped
from trilane.workspace.run import Run

# what a script that runs the frozen code mentions
USED_BY = "TRILANE_CODE"


def keep_plan(run: Run) -> str:
    """Keep the plan of a run as submitted/HASH.json, with the text of a layer of its
    own; the hash.
    """
    text = json.dumps(run.values, indent=1)
    kept = run.folder / "submitted" / f"{hash_of(text)}.json"
    if read_text(kept) != text:
        kept.parent.mkdir(exist_ok=True)
        replace_text(kept, text)
    return kept.stem


def plan_changes(run: Run, kept: str) -> list[str]:
    """In what plan.json differs from the plan of that hash, a line a field, however it is written.

    ValueError where one of them cannot be read.
    """
    if hash_of(json.dumps(run.values, indent=1)) == kept:
        return []
    before = plan_from_json(read_json(run.folder / f"submitted/{kept}.json", "plan"))
    return changes(before.to_json(), run.plan.to_json())


def freeze(home: Path) -> Path:
    """The copy of the installed code below `home`, made where it is not there or damaged.

    ValueError where it cannot be read or written. Left out: an installation that is changed
    meanwhile.
    """
    rule = "must hold no colon, which separates PYTHONPATH's folders"
    require(":" not in str(home), "run folder", home, rule)
    code = home / "code"
    roots = {path.name: path for path in packages()}
    roots["share/trilane/slurm_templates"] = shipped("slurm_templates")
    try:
        code.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=code) as place:
            copy = Path(place) / "copy"
            for name, root in roots.items():
                shutil.copytree(root, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            sums = _sums(copy)
            target = code / hash_of(sums)
            if read_text(target / "SHA256SUMS") != sums or _sums(target) != sums:
                (copy / "SHA256SUMS").write_text(sums)
                (copy / "REVISION").write_text(f"{revision()}\n")
                shutil.rmtree(target, ignore_errors=True)
                copy.rename(target)
    except OSError as error:
        raise ValueError(f"code={code}: cannot be written ({error.strerror or error})") from None
    return target


def _sums(folder: Path) -> str:
    """The files below a folder's own folders in the form of sha256sum, which the job checks them
    with.
    """
    text = ""
    for path in sorted(folder.glob("*/**/*")):
        # Python may write bytecode beside the code of a job
        if path.is_file() and "__pycache__" not in path.parts:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            text += f"{digest}  {path.relative_to(folder)}\n"
    return text
