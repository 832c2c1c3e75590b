"""Where trilane and its outputs lie, and the stamp that says what made a file."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import trilane
from trilane.utils.files import read_text
from trilane.utils.process import run


def package() -> Path:
    """The folder of the package trilane."""
    return Path(__file__).resolve().parents[1]


def packages() -> list[Path]:
    """The folders of trilane and of the packages beside it."""
    return [package().with_name(name) for name in ("trilane", "trilane_diagnose", "trilane_engine")]


def checkout() -> Path | None:
    """The repository's checkout: $TRILANE_HOME, else the one that holds this file; None for an
    installed wheel.
    """
    if home := os.environ.get("TRILANE_HOME"):
        return Path(home).absolute()
    root = package().parents[1]
    if (root / "lib/trilane").is_dir():
        return root
    return None


def shipped(folder: str) -> Path:
    """The folder `notebooks` or `slurm_templates`: of the checkout, else of the wheel, which
    installs share/trilane/.

    Raises ValueError where there is neither.
    """
    root = checkout()
    if root:
        places = [root]
    else:
        places = [parent / "share/trilane" for parent in package().parents]
    for place in places:
        if (place / folder).is_dir():
            return place / folder
    rule = f"has no {folder}/; clone the repository and name its folder"
    raise ValueError(f"TRILANE_HOME={root or ''}: {rule}")


def outputs_root() -> Path:
    """The folder of all studies: $TRILANE_OUTPUTS, else `outputs/` of the checkout, or of the
    current folder.
    """
    return Path(os.environ.get("TRILANE_OUTPUTS") or (checkout() or Path.cwd()) / "outputs")


def revision() -> str:
    """The git revision of this code; of a frozen copy that from which it was made."""
    copy = package().parent
    if (copy / "SHA256SUMS").is_file():  # slurm/copies.py
        return read_text(copy / "REVISION").strip()
    root = checkout()
    found = ""
    if root:  # a wheel may lie in the venv of another repository
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        found = run(git).stdout.strip()
    return found or "unknown (not a git checkout)"


def stamp() -> dict[str, str]:
    """What made a file: trilane's version and git revision, Python, host, and the time (UTC)."""
    return {
        "trilane": trilane.__version__,
        "revision": revision(),
        "python": platform.python_version(),
        "host": platform.node(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
