"""Snapshot: the fingerprints of all ranks at one moment, and what is wrong inside one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, reduce
from math import prod
from operator import add, attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from trilane.utils.frozen import frozen
from trilane.utils.numbers import ranges
from trilane.utils.tables import Json, Record, grouped
from trilane.utils.validation import read_json, require, require_folder
from trilane.workspace import checkpoints
from trilane.workspace.fingerprints import (
    COPY,
    Box,
    Mark,
    Part,
    is_expert,
    must_decay,
    part_from_json,
    whole_parts,
)
from trilane.workspace.rank_grid import COORDINATES, MOST
from trilane_diagnose.stacks import DAMAGED

# Sums in another order differ by rounding: allowed between replicas, relative to the tensor's norm.
ROUNDING = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}
# finding: the coordinates that replicas have in common
REPLICAS = {
    "tied": ("tp", "dp"),
    "tensor-replicas": ("pp", "dp"),
    "data-replicas": ("tp", "pp"),
}
# bf16 has 8 bits: a weight and its copy differ by 2e-3; denormal fp16 by somewhat more.
COPY_ROUNDING = 2e-2
PRINTS = "fingerprint_*.json"  # of each rank one
# of the optimizer, that must come back
SETTINGS = ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")


class State(NamedTuple):
    """A folder of fingerprints: of a checkpoint, or (`loaded`) of memory after one was loaded."""

    path: Path
    iteration: int
    loaded: bool


def states(field: str, folder: Path) -> list[State]:
    """The states in `folder` (a run, its checkpoints, one checkpoint, or fingerprints), by
    iteration.

    Raises ValueError that begins with `field` where there is none.
    """
    require_folder(field, folder)
    loads = sorted((folder / "fingerprints").glob("load_*"))
    found = []
    for path in dict.fromkeys([folder, *checkpoints.found_in(folder), *loads]):
        for file in sorted(path.glob(PRINTS))[:1]:
            is_saved = path.name.startswith("save") or (path / "manifest.json").exists()
            with _whole(file):
                iteration = int(read_json(file, "fingerprint")["iteration"])
            found.append(State(path, iteration, not is_saved))
    rule = (
        "holds no complete checkpoint with fingerprints (a run folder, or one of its checkpoints)"
    )
    require(found, field, folder, rule)
    return sorted(found, key=lambda state: state.iteration)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raises ValueError with the path for what a truncated or damaged fingerprint raises inside."""
    try:
        yield
    except (*DAMAGED, OSError):
        raise ValueError(f"fingerprint={path}: is damaged or half-written") from None


# (kind of a finding, rank, name) -> what must come back
Facts = dict[tuple[str, int | None, str], float | str]


@frozen
class Holder:
    """A rank and its coordinates."""

    rank: int
    tp: int
    pp: int
    dp: int


Held = tuple[Holder, Part]


@frozen
class Snapshot:
    """All ranks at one moment: what each holds, and the ranks without a fingerprint."""

    name: str
    state: State
    layout: list[Any]
    precision: str
    shape: Json
    facts: Facts
    held: tuple[Held, ...]
    missing: list[int]

    @cached_property
    def holders(self) -> dict[tuple[str, Box], list[Held]]:
        """(tensor, box) -> the ranks that hold it, in order."""
        return grouped(self.held, lambda held: (held[1].name, held[1].box))

    @cached_property
    def wholes(self) -> dict[str, dict[str, Mark]]:
        """Tensor -> the mark of each kind over the whole; only where no part is missing."""
        wholes = {}
        one_of_each = [held[0][1] for held in self.holders.values()]
        for name, parts in grouped(one_of_each, lambda part: part.name).items():
            size = sum(prod(end - first for first, end in part.box) for part in parts)
            if size == prod(parts[0].shape):
                kinds = set(parts[0].marks).intersection(*(part.marks for part in parts))
                marks = {kind: [part.marks[kind] for part in parts] for kind in kinds}
                wholes[name] = {kind: reduce(add, own) for kind, own in marks.items()}
        return wholes


def read_snapshot(state: State) -> Snapshot:
    """The snapshot of a state; ValueError where a file is damaged."""
    prints = []
    held = []
    for path in sorted(state.path.glob(PRINTS)):
        with _whole(path):
            values = json.loads(path.read_text(encoding="utf-8"))
            holder = Holder(**{axis: int(values[axis]) for axis in ("rank", *COORDINATES)})
            held += [(holder, part_from_json(part)) for part in values["parts"]]
            prints.append(values)
    folder = state.path.parent
    name = state.path.name
    if folder.name in ("fingerprints", checkpoints.FOLDER):
        name = f"{folder.parent.name}/{name}"
    with _whole(path):
        first = prints[0]
        world = int(first["world"])
        require(0 < world <= MOST, "world", world, f"must be at most {MOST}")
        return Snapshot(
            name=name,
            state=state,
            layout=list(first["layout"]),
            precision=str(first["precision"]),
            shape=dict(first["shape"]),
            facts=_facts(prints),
            held=_undivided(held),
            missing=sorted({*range(world)} - {values["rank"] for values in prints}),
        )


def _facts(prints: list[Json]) -> Facts:
    first = prints[0]
    # A rank that updates no parameters, as some may with many replicas, has taken no steps.
    scalars = max((values["scalars"] for values in prints), key=lambda scalars: scalars["step"])
    once = dict(scalars)
    if first["next_lr"] is not None:
        once["the next learning rate"] = float(first["next_lr"])
    once |= {name: first["optimizer"].get(name) for name in SETTINGS}
    facts = {("optimizer", None, name): value for name, value in once.items()}
    facts["data", None, "the number of consumed samples"] = first["consumed_samples"]
    for values in prints:
        rank = values["rank"]
        facts["data", rank, "the hash of the next samples"] = values["samples"]
        for name, text in values["generators"].items():
            facts["generators", rank, name] = text
    return {key: v if isinstance(v, str) else float(v) for key, v in facts.items() if v is not None}


def _undivided(held: list[Held]) -> tuple[Held, ...]:
    """With the marks of parts that replicas divide (ZeRO, a distributed optimizer) added up."""
    divided = [n for n, (_, part) in enumerate(held) if part.shard is not None]

    def key(n: int) -> tuple[object, ...]:
        holder, part = held[n]
        if is_expert(part.name):
            return holder.pp, part.name, part.box
        return holder.tp, holder.pp, part.name, part.box

    for replicas in grouped(divided, key).values():
        wholes = whole_parts([held[n][1] for n in replicas])
        for n, part in zip(replicas, wholes, strict=True):
            held[n] = held[n][0], part
    return tuple(held)


@frozen
class RestartFinding(Record):
    """A finding. `tensor` is "" where it concerns none; `size`: the relative difference, if any."""

    kind: str
    what: str
    tensor: str = ""
    ranks: tuple[Holder, ...] = ()
    size: float | None = None

    @property
    def where(self) -> str:
        """The ranks, and the coordinates that they share."""
        if not self.ranks:
            return "all ranks"
        where = f"ranks {ranges([holder.rank for holder in self.ranks])}"
        common = []
        for axis in COORDINATES:
            numbers = {getattr(holder, axis) for holder in self.ranks}
            if len(numbers) == 1:
                common.append(f"{axis} {numbers.pop()}")
        return f"{where} ({', '.join(common)})" if common else where

    def summary(self) -> str:
        """The finding in one line."""
        place = ", ".join(filter(None, [self.tensor, self.where]))
        return f"{self.kind}: {place}: {self.what}"


Findings = Iterator[RestartFinding]


def within(snapshot: Snapshot) -> Findings:
    """What is wrong inside one state, each finding of a single rank or of the whole."""
    yield from wrong_decay(snapshot)
    yield from differing_replicas(snapshot)
    for holder, part in snapshot.held:
        if COPY not in part.marks or "weight" not in part.marks:
            continue
        size = part.marks[COPY].apart(part.marks["weight"])
        if size > COPY_ROUNDING:
            away = f"the model's copy is {share(size)} away from the optimizer's weight"
            what = f"{away} (in {snapshot.name})"
            ranks = (holder,)
            yield RestartFinding(kind="copy", tensor=part.name, ranks=ranks, what=what, size=size)


def share(size: float) -> str:
    """A relative difference as a percentage."""
    return f"{100 * size:.3g} % of its norm"


def wrong_decay(snapshot: Snapshot) -> Findings:
    """Norms and biases that decay, and matrices that do not."""
    for holder, part in snapshot.held:
        right: float | str = 0.0
        if must_decay(part.name, len(part.shape)):
            right = snapshot.facts.get(("optimizer", None, "weight_decay"), 0.0)
        if part.decay is not None and part.decay != right:
            yield RestartFinding(
                kind="decay",
                tensor=part.name,
                ranks=(holder,),
                what=f"weight decay {part.decay:g}, not {float(right):g} (in {snapshot.name})",
                size=part.decay,
            )


def differing_replicas(snapshot: Snapshot) -> Findings:
    """Ranks whose part of a tensor is not that of most of its replicas along an axis; of equals, of
    the first.
    """
    for finding, axes in REPLICAS.items():
        coordinates = attrgetter(*axes)
        lines: dict[tuple[object, ...], list[Held]] = {}
        for holder, part in snapshot.held:
            key = (part.name, part.box, coordinates(holder))
            lines.setdefault(key, []).append((holder, part))
        for replicas in lines.values():
            for kind in ROUNDING:
                yield from _apart(snapshot, finding, replicas, kind)


def _apart(snapshot: Snapshot, finding: str, replicas: list[Held], kind: str) -> Findings:
    """Of these replicas of a part, those that differ from most of them."""
    marks = [(holder, part.marks[kind]) for holder, part in replicas if kind in part.marks]
    if not marks:
        return
    hashes = [mark.hash for _, mark in marks]
    first, usual = max(marks, key=lambda pair: hashes.count(pair[1].hash))
    for holder, mark in marks:
        size = mark.apart(usual)
        if size > ROUNDING[kind]:
            away = f"{kind} is {share(size)} away from that of rank {first.rank}"
            yield RestartFinding(
                kind=finding,
                tensor=replicas[0][1].name,
                ranks=(holder,),
                what=f"{away} (in {snapshot.name})",
                size=size,
            )
