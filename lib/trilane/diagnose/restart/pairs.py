"""Which recorded states of two folders are compared with each other."""

from dataclasses import dataclass
from pathlib import Path

from trilane.diagnose.restart.snapshot import LOADED, PRINTS, SAVED, Snapshot, read_prints, read_slices
from trilane.utils.validation import read_json, require, require_folder
from trilane.workspace import checkpoints
from trilane.workspace.fingerprints import FOLDER


@dataclass(frozen=True, kw_only=True)
class Record:
    """A state on disk: a checkpoint ("saved"), or the fingerprints of memory after one was loaded ("loaded")."""

    path: Path
    moment: str
    iteration: int

    def read(self) -> Snapshot:
        """Its snapshot; ValueError where its files are damaged."""
        inside = self.path.parent.name in (FOLDER, checkpoints.FOLDER)
        name = f"{self.path.parent.parent.name}/{self.path.name}" if inside else self.path.name
        if not list(self.path.glob(PRINTS)):
            return read_slices(self.path, name)
        return read_prints(self.path, self.moment, name)


def records(field: str, folder: Path) -> list[Record]:
    """The states in `folder` (a run, its checkpoints, one checkpoint, or fingerprints), by iteration.

    Raises ValueError that begins with `field` where there is none.
    """
    require_folder(field, folder)
    saved = checkpoints.found_in(folder)
    found = [Record(path=path, moment=SAVED, iteration=_manifest_iteration(path)) for path in saved]
    loads = [folder] if not saved and list(folder.glob(PRINTS)) else sorted((folder / FOLDER).glob("load_*"))
    for path in loads:
        files = sorted(path.glob(PRINTS))
        if files:
            moment = SAVED if path.name.startswith("save") else LOADED
            found.append(Record(path=path, moment=moment, iteration=_print_iteration(files[0])))
    rule = "holds no complete checkpoint and no fingerprints (a run folder, or one of its checkpoints, is wanted)"
    require(bool(found), field, folder, rule)
    return sorted(found, key=lambda record: record.iteration)


def pairs(before: Path, after: Path) -> list[tuple[Record, Record]]:
    """The states to compare: each that `after` loaded or saved, with what `before` saved after the same iteration.

    Where they have no iteration in common, the newest of both.
    """
    a, b = records("A", before), records("B", after)
    saved = {m.iteration: m for m in a if m.moment == LOADED} | {m.iteration: m for m in a if m.moment == SAVED}
    found = [(saved[m.iteration], m) for m in b if m.iteration in saved and saved[m.iteration].path != m.path]
    return found or [(next((m for m in a[::-1] if m.moment == SAVED), a[-1]), b[-1])]


def _manifest_iteration(checkpoint: Path) -> int:
    try:
        return int(checkpoints.read_manifest(checkpoint)["iteration"])
    except ValueError as error:
        raise ValueError(f"checkpoint={checkpoint}: {error}") from None


def _print_iteration(path: Path) -> int:
    try:
        return int(read_json(path, "fingerprint")["iteration"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"fingerprint={path}: is damaged or half-written") from None
