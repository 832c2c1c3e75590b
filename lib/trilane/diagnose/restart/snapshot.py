"""Snapshot: the fingerprints of all ranks at one moment, from their files or made from a checkpoint's slices."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from trilane.utils.tables import grouped
from trilane.utils.validation import read_json, require
from trilane.workspace import checkpoints, fingerprints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import Box, Mark, Part, part_from_json
from trilane.workspace.rank_grid import MOST, Grid, regular

PRINTS = "fingerprint_*.json"
SAVED, LOADED = "saved", "loaded"


@dataclass(frozen=True, kw_only=True)
class RankPrint:
    """The fingerprint of one rank."""

    rank: int
    tp: int
    pp: int
    dp: int
    parts: tuple[Part, ...]
    generators: Mapping[str, str] = field(default_factory=dict)
    samples: int | None = None  # hash of its samples in the next iteration

    @property
    def place(self) -> str:
        """The rank with its coordinates, in words."""
        return f"rank {self.rank} (tp {self.tp}, pp {self.pp}, dp {self.dp})"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All ranks at one moment. Made from a checkpoint's slices it holds each tensor once, without replicas, optimizer
    groups and copies; its notes report this."""

    name: str
    moment: str
    iteration: int
    consumed: int
    layout: tuple[Any, ...]
    precision: str
    shape: Mapping[str, Any]
    optimizer: Mapping[str, float]
    scalars: Mapping[str, float]
    next_lr: float | None
    ranks: tuple[RankPrint, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def by_rank(self) -> dict[int, RankPrint]:
        """The ranks by number."""
        return {r.rank: r for r in self.ranks}

    @cached_property
    def holders(self) -> dict[tuple[str, Box], list[tuple[RankPrint, Part]]]:
        """(tensor, box) -> the ranks that hold it, in order."""
        held = ((r, part) for r in self.ranks for part in r.parts)
        return grouped(held, lambda pair: (pair[1].name, pair[1].box))

    @cached_property
    def wholes(self) -> dict[str, dict[str, Mark]]:
        """Tensor -> the mark of each kind over the whole, each part counted once; only where no part is missing."""
        found: dict[str, dict[str, Mark]] = {}
        for name, parts in grouped((held[0][1] for held in self.holders.values()), lambda part: part.name).items():
            if sum(_count(part.box) for part in parts) != _count([(0, n) for n in parts[0].shape]):
                continue
            kinds = set.intersection(*({*part.marks} for part in parts))
            found[name] = {kind: reduce(add, (part.marks[kind] for part in parts)) for kind in kinds}
        return found

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of which a rank holds a part, with its whole shape."""
        return {part.name: part.shape for r in self.ranks for part in r.parts}

    @property
    def samples(self) -> int | None:
        """The hash of the next iteration's samples over all replicas; None where that of a replica is unknown."""
        by_replica = {r.dp: r.samples for r in self.ranks if r.samples is not None}  # middle stages have none
        replicas, hashes = self.layout[3] if len(self.layout) > 3 else 0, list(by_replica.values())
        return sum(hashes) % fingerprints.WORD if hashes and len(hashes) == replicas else None


def read_snapshot(path: Path, moment: str) -> Snapshot:
    """The snapshot of a checkpoint or a folder of fingerprints; ValueError where a file is missing or damaged."""
    inside = path.parent.name in (fingerprints.FOLDER, checkpoints.FOLDER)
    name = f"{path.parent.parent.name}/{path.name}" if inside else path.name
    if list(path.glob(PRINTS)):
        return _from_prints(path, moment, name)
    try:
        return _from_slices(path, name)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError):
        raise ValueError(f"checkpoint={path}: is damaged") from None


def _from_prints(folder: Path, moment: str, name: str) -> Snapshot:
    """The snapshot in a folder of fingerprints; missing ranks are noted."""
    files, prints, ranks = sorted(folder.glob(PRINTS)), [], []
    for path in files:
        with whole_print(path):
            prints.append(json.loads(path.read_text(encoding="utf-8")))
            ranks.append(_rank(prints[-1]))
    first = prints[0]
    with whole_print(files[0]):
        require(0 < first["world"] <= MOST, "world", first["world"], f"must be at most {MOST}")
        missing = sorted({*range(first["world"])} - {r.rank for r in ranks})
        notes = (f"{name}: no fingerprint of rank {', '.join(map(str, missing))}",) if missing else ()
        # A rank that updates no parameters, as some may with many replicas, has taken no steps.
        scalars = max((values["scalars"] for values in prints), key=lambda scalars: scalars["step"])
        return _snapshot({**first, "scalars": scalars}, name, moment, _undivided(ranks), notes)


def _undivided(ranks: Iterable[RankPrint]) -> list[RankPrint]:
    """The ranks with the marks of parts that replicas divide added up."""
    ranks = list(ranks)
    held = ((r, number) for r in ranks for number, part in enumerate(r.parts) if part.shard is not None)
    parts = {r.rank: list(r.parts) for r in ranks}
    for replicas in grouped(held, lambda h: (h[0].tp, h[0].pp, h[0].parts[h[1]].name, h[0].parts[h[1]].box)).values():
        whole = fingerprints.whole_parts([r.parts[number] for r, number in replicas])
        for (r, number), part in zip(replicas, whole, strict=True):
            parts[r.rank][number] = part
    return [replace(r, parts=tuple(parts[r.rank])) for r in ranks]


def _from_slices(folder: Path, name: str) -> Snapshot:
    """The snapshot of a checkpoint without fingerprints, from its slices."""
    manifest = checkpoints.read_manifest(folder)
    layout = tuple(manifest["layout"] or ())  # an imported checkpoint has none
    grid = regular(layout[1], layout[2], layout[3], 8) if layout else regular(1, 1, 1, 8)
    parts: dict[int, list[Part]] = {}
    for tensor, facts in manifest["tensors"].items():
        for piece in facts["slices"]:
            digits = "".join(filter(str.isdigit, Path(piece["file"]).stem))
            held = parts.setdefault(int(digits or 0) if layout else 0, [])
            held.append(_slice(folder, tensor, facts["shape"], piece))
    ranks = [_rank_of_slices(folder, grid, rank, parts.get(rank, [])) for rank in grid.ranks]
    notes = (f"{name}: has no fingerprints; its slices do not show replicas, optimizer groups and data order",)
    plan = folder.parent.parent / "plan.json"
    more = {"layout": layout, "precision": "", "shape": manifest["identity"]["shape"], "next_lr": None}
    with whole_print(plan):
        optimizer = read_json(plan, "plan").get("optimizer", {}) if plan.exists() else {}  # an export has no plan
        return _snapshot({**manifest, **more, "optimizer": optimizer}, name, SAVED, ranks, notes)


def _snapshot(
    values: Mapping[str, Any], name: str, moment: str, ranks: Iterable[RankPrint], notes: tuple[str, ...]
) -> Snapshot:
    return Snapshot(
        name=name,
        moment=moment,
        iteration=int(values["iteration"]),
        consumed=int(values["consumed_samples"]),
        layout=tuple(values["layout"]),
        precision=str(values["precision"]),
        shape=dict(values["shape"]),
        optimizer={n: float(v) for n, v in values["optimizer"].items() if isinstance(v, int | float)},
        scalars={str(name): float(value) for name, value in values["scalars"].items()},
        next_lr=None if values["next_lr"] is None else float(values["next_lr"]),
        ranks=tuple(ranks),
        notes=notes,
    )


@contextmanager
def whole_print(path: Path) -> Iterator[None]:
    """Raises ValueError with the path for what a truncated or damaged fingerprint raises inside."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"fingerprint={path}: is damaged or half-written") from None


def _rank(values: Mapping[str, Any]) -> RankPrint:
    return RankPrint(
        **{name: int(values[name]) for name in ("rank", "tp", "pp", "dp")},
        parts=tuple(part_from_json(part) for part in values["parts"]),
        generators={str(name): str(text) for name, text in values["generators"].items()},
        samples=None if values["samples"] is None else int(values["samples"], 16),
    )


def _slice(folder: Path, name: str, shape: Iterable[int], piece: Mapping[str, Any]) -> Part:
    """A part with its marks, read without torch. ValueError where the file is missing or truncated."""
    box = tuple((first, end) for first, end in piece["box"])
    marks = {}
    for kind in KINDS:
        try:
            size = tuple(end - first for first, end in box)
            held = np.memmap(folder / piece["file"], np.float32, "r", piece["at"][kind], size)
        except (OSError, ValueError, OverflowError):
            raise ValueError(f"checkpoint={folder}: {piece['file']} is missing or cut short") from None
        marks[kind] = fingerprints.mark(held, box)
    return Part(name=name, shape=tuple(shape), box=box, decay=None, marks=marks)


def _rank_of_slices(folder: Path, grid: Grid, rank: int, parts: list[Part]) -> RankPrint:
    file, place = folder / f"rank_{rank:05d}.json", grid[rank]
    with whole_print(file):
        hashes = fingerprints.hashed(read_json(file, "generators")) if file.exists() else {}
    return RankPrint(rank=rank, tp=place.tp, pp=place.pp, dp=place.dp, parts=tuple(parts), generators=hashes)


def _count(box: Box) -> int:
    return int(np.prod([end - first for first, end in box], dtype=np.int64))
