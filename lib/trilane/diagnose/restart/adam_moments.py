"""Moments: what a folder that a person names knows about, and which moments of two folders belong together."""

from dataclasses import dataclass
from pathlib import Path

from trilane.diagnose.restart.snapshot import LOADED, PRINTS, SAVED, Snapshot, read_prints, read_slices
from trilane.utils.validation import read_json, require
from trilane.workspace import checkpoints
from trilane.workspace.fingerprints import FOLDER


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A checkpoint ("saved"), or what stood in memory after one was loaded ("loaded")."""

    path: Path
    moment: str
    iteration: int

    def read(self) -> Snapshot:
        """Its snapshot; ValueError where its files are not what was written."""
        inside = self.path.parent.name in (FOLDER, checkpoints.FOLDER)
        name = f"{self.path.parent.parent.name}/{self.path.name}" if inside else self.path.name
        if not list(self.path.glob(PRINTS)):
            return read_slices(self.path, name)
        return read_prints(self.path, self.moment, name)


def moments(field: str, folder: Path) -> list[Moment]:
    """What `folder` (a run, its checkpoints, one checkpoint, a folder of fingerprints) knows, by iteration.

    ValueError that begins with `field` where it knows nothing.
    """
    require(folder.is_dir(), field, folder, "no such folder")
    saved = checkpoints.found_in(folder)
    found = [Moment(path=path, moment=SAVED, iteration=_iteration(path)) for path in saved]
    loads = [folder] if not saved and list(folder.glob(PRINTS)) else sorted((folder / FOLDER).glob("load_*"))
    for path in loads:
        files = sorted(path.glob(PRINTS))
        if files:
            moment = SAVED if path.name.startswith("save") else LOADED
            found.append(Moment(path=path, moment=moment, iteration=_said(files[0])))
    rule = "holds no complete checkpoint and no fingerprints (a run folder, or one of its checkpoints, is wanted)"
    require(bool(found), field, folder, rule)
    return sorted(found, key=lambda moment: moment.iteration)


def pairs(before: Path, after: Path) -> list[tuple[Moment, Moment]]:
    """Which moments to compare: what `after` loaded or saved, each with what `before` saved after that iteration.

    Where they have no iteration in common, the newest of both.
    """
    a, b = moments("A", before), moments("B", after)
    saved = {m.iteration: m for m in a if m.moment == LOADED} | {m.iteration: m for m in a if m.moment == SAVED}
    found = [(saved[m.iteration], m) for m in b if m.iteration in saved and saved[m.iteration].path != m.path]
    return found or [(next((m for m in a[::-1] if m.moment == SAVED), a[-1]), b[-1])]


def _iteration(checkpoint: Path) -> int:
    try:
        return int(checkpoints.read_manifest(checkpoint)["iteration"])
    except ValueError as error:
        raise ValueError(f"checkpoint={checkpoint}: {error}") from None


def _said(path: Path) -> int:
    try:
        return int(read_json(path, "fingerprint")["iteration"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"fingerprint={path}: is damaged or half-written") from None
