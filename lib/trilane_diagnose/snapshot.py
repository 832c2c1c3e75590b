"""Snapshot: the fingerprints of all ranks at one moment, and what is wrong inside one."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from trilane.utils.numbers import ranges
from trilane.utils.tables import Record, grouped
from trilane.utils.validation import read_json, require, require_folder
from trilane.workspace import checkpoints, fingerprints
from trilane.workspace.fingerprints import COPY, Box, Mark, Part, must_decay, part_from_json
from trilane.workspace.rank_grid import MOST, shared
from trilane_diagnose.stacks import DAMAGED


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
    found, loads = list[State](), sorted((folder / "fingerprints").glob("load_*"))
    for path in dict.fromkeys([folder, *checkpoints.found_in(folder), *loads]):
        for file in _prints(path)[:1]:
            saved = path.name.startswith("save") or (path / "manifest.json").exists()
            with _whole(file):
                iteration = int(read_json(file, "fingerprint")["iteration"])
            found.append(State(path, iteration, not saved))
    rule = "holds no complete checkpoint with fingerprints (a run folder, or one of its checkpoints, is wanted)"
    require(bool(found), field, folder, rule)
    return sorted(found, key=lambda state: state.iteration)


def _prints(folder: Path) -> list[Path]:
    return sorted(folder.glob("fingerprint_*.json"))


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raises ValueError with the path for what a truncated or damaged fingerprint raises inside."""
    try:
        yield
    except (*DAMAGED, OSError):
        raise ValueError(f"fingerprint={path}: is damaged or half-written") from None


# (kind of a finding, rank, name) -> what must come back
Facts = dict[tuple[str, int | None, str], float | str]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A rank and its coordinates."""

    rank: int
    tp: int
    pp: int
    dp: int


Held = tuple[Holder, Part]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All ranks at one moment: what each holds, and the ranks without a fingerprint."""

    name: str
    state: State
    layout: list[Any]
    precision: str
    shape: Mapping[str, Any]
    optimizer: Mapping[str, float]
    facts: Facts
    held: tuple[Held, ...]
    missing: list[int]

    @cached_property
    def holders(self) -> dict[tuple[str, Box], list[Held]]:
        """(tensor, box) -> the ranks that hold it, in order."""
        return grouped(self.held, lambda h: (h[1].name, h[1].box))

    @cached_property
    def wholes(self) -> dict[str, dict[str, Mark]]:
        """Tensor -> the mark of each kind over the whole; only where no part is missing."""
        found: dict[str, dict[str, Mark]] = {}
        once = (held[0][1] for held in self.holders.values())
        for name, parts in grouped(once, lambda part: part.name).items():
            if sum(prod(end - first for first, end in part.box) for part in parts) == prod(
                parts[0].shape
            ):
                kinds = set.intersection(*({*part.marks} for part in parts))
                found[name] = {
                    kind: reduce(add, (part.marks[kind] for part in parts)) for kind in kinds
                }
        return found


def read_snapshot(state: State) -> Snapshot:
    """The snapshot of a state; ValueError where a file is damaged."""
    found, held = [], list[Held]()
    for path in _prints(state.path):
        with _whole(path):
            found.append(json.loads(path.read_text(encoding="utf-8")))
            holder = Holder(**{axis: int(found[-1][axis]) for axis in ("rank", "tp", "pp", "dp")})
            held += [(holder, part_from_json(part)) for part in found[-1]["parts"]]
    first, above = found[0], state.path.parent
    inside = above.name in ("fingerprints", checkpoints.FOLDER)
    with _whole(path):
        world = int(first["world"])
        require(0 < world <= MOST, "world", world, f"must be at most {MOST}")
        # A rank that updates no parameters, as some may with many replicas, has taken no steps.
        scalars = max((values["scalars"] for values in found), key=lambda scalars: scalars["step"])
        optimizer = {
            n: float(v) for n, v in first["optimizer"].items() if isinstance(v, int | float)
        }
        return Snapshot(
            name=f"{above.parent.name}/{state.path.name}" if inside else state.path.name,
            state=state,
            layout=list(first["layout"]),
            precision=str(first["precision"]),
            shape=dict(first["shape"]),
            optimizer=optimizer,
            facts=_facts(found, scalars, optimizer),
            held=_undivided(held),
            missing=sorted({*range(world)} - {values["rank"] for values in found}),
        )


def _facts(
    found: list[dict[str, Any]], scalars: Mapping[str, float], optimizer: Mapping[str, float]
) -> Facts:
    names = ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")
    rate = found[0]["next_lr"]
    once = {**scalars, "the next learning rate": None if rate is None else float(rate)}
    once |= {name: optimizer.get(name) for name in names}
    facts: dict[tuple[str, int | None, str], Any]
    facts = {("optimizer", None, name): value for name, value in once.items()}
    facts["data", None, "the number of consumed samples"] = found[0]["consumed_samples"]
    for values in found:
        rank = values["rank"]
        facts["data", rank, "the hash of the next samples"] = values["samples"]
        facts |= {("generators", rank, name): text for name, text in values["generators"].items()}
    return {key: v if isinstance(v, str) else float(v) for key, v in facts.items() if v is not None}


def _undivided(held: list[Held]) -> tuple[Held, ...]:
    """With the marks of parts that replicas divide (ZeRO, a distributed optimizer) added up."""
    divided = [(n, r, part) for n, (r, part) in enumerate(held) if part.shard is not None]
    for replicas in grouped(divided, lambda d: (d[1].tp, d[1].pp, d[2].name, d[2].box)).values():
        wholes = fingerprints.whole_parts([part for _, _, part in replicas])
        for (n, r, _), part in zip(replicas, wholes, strict=True):
            held[n] = r, part
    return tuple(held)


@dataclass(frozen=True, kw_only=True)
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
        common = ", ".join(shared(self.ranks))
        return f"ranks {ranges([r.rank for r in self.ranks])}" + f" ({common})" * bool(common)

    def line(self) -> str:
        """The finding in one line."""
        place = ", ".join(filter(None, [self.tensor, self.where]))
        return f"{self.kind}: {place}: {self.what}"


Findings = Iterator[RestartFinding]


def within(s: Snapshot) -> Findings:
    """What is wrong inside one state, each finding of a single rank or of the whole."""
    yield from wrong_decay(s)
    yield from differing_replicas(s)
    for r, part in s.held:
        if not {COPY, "weight"} <= {*part.marks}:
            continue
        away = part.marks[COPY].apart(part.marks["weight"])
        # bf16 has 8 bits: a weight and its copy differ by 2e-3; denormal fp16 by somewhat more.
        if away > 2e-2:
            what = (
                f"the model's copy is {share(away)} away from the optimizer's weight (in {s.name})"
            )
            yield RestartFinding(kind="copy", tensor=part.name, ranks=(r,), what=what, size=away)


def share(size: float) -> str:
    """A relative difference as a percentage."""
    return f"{100 * size:.3g} % of its norm"


def wrong_decay(s: Snapshot) -> Findings:
    """Norms and biases that decay, and matrices that do not."""
    for r, part in s.held:
        right = (
            s.optimizer.get("weight_decay", 0.0) if must_decay(part.name, len(part.shape)) else 0.0
        )
        if part.decay is not None and part.decay != right:
            what = f"weight decay {part.decay:g}, not {right:g} (in {s.name})"
            yield RestartFinding(
                kind="decay", tensor=part.name, ranks=(r,), what=what, size=part.decay
            )


def differing_replicas(s: Snapshot) -> Findings:
    """Ranks whose part of a tensor is not that of most of its replicas along an axis; of equals, of
    the first.
    """
    # Sums in another order differ by rounding: allowed, relative to the tensor's norm.
    rounding = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}
    # the coordinates that replicas have in common
    axes: dict[str, Callable[[Held], object]] = {
        "tied": lambda h: (h[0].tp, h[0].dp),
        "tensor-replicas": lambda h: (h[0].pp, h[0].dp),
        "data-replicas": lambda h: (h[0].tp, h[0].pp),
    }
    for (name, _), held in s.holders.items():
        for (found, axis), kind in itertools.product(axes.items(), rounding):
            for line in grouped(held, axis).values():
                marks = [(r, part.marks[kind]) for r, part in line if kind in part.marks]
                hashes = [mark.hash for _, mark in marks]
                for r, mark in marks:
                    first, usual = max(marks, key=lambda m: hashes.count(m[1].hash))
                    if (away := mark.apart(usual)) > rounding[kind]:
                        what = f"{kind} is {share(away)} away from that of rank {first.rank} (in {s.name})"
                        yield RestartFinding(
                            kind=found, tensor=name, ranks=(r,), what=what, size=away
                        )
