"""Snapshot: the fingerprints of all ranks at one moment, and what is wrong inside one."""

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from trilane.diagnose.hang import span
from trilane.diagnose.stacks import DAMAGED
from trilane.utils.tables import grouped
from trilane.utils.validation import read_json, require, require_folder
from trilane.workspace import checkpoints, fingerprints
from trilane.workspace.fingerprints import COPY, Box, Mark, Part, must_decay, part_from_json
from trilane.workspace.rank_grid import MOST, shared


class State(NamedTuple):
    """A folder of fingerprints: of a checkpoint, or (`loaded`) of memory after one was loaded."""

    path: Path
    iteration: int
    loaded: bool


def states(field: str, folder: Path) -> list[State]:
    """The states in `folder` (a run, its checkpoints, one checkpoint, or fingerprints), by iteration.

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


Facts = dict[tuple[str, int | None, str], float | str]  # (kind of a finding, rank, name) -> what must come back


@dataclass(frozen=True, kw_only=True)
class RankPrint:
    """The tensors of one rank."""

    rank: int
    tp: int
    pp: int
    dp: int
    parts: tuple[Part, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All ranks at one moment; ranks without a fingerprint are noted."""

    name: str
    state: State
    layout: list[Any]
    precision: str
    shape: Mapping[str, Any]
    optimizer: Mapping[str, float]
    step: float
    facts: Facts
    ranks: tuple[RankPrint, ...]
    notes: tuple[str, ...] = ()

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
            if sum(prod(end - first for first, end in part.box) for part in parts) == prod(parts[0].shape):
                kinds = set.intersection(*({*part.marks} for part in parts))
                found[name] = {kind: reduce(add, (part.marks[kind] for part in parts)) for kind in kinds}
        return found


def read_snapshot(state: State) -> Snapshot:
    """The snapshot of a state; ValueError where a file is damaged."""
    found, ranks = [], []
    for path in _prints(state.path):
        with _whole(path):
            found.append(json.loads(path.read_text(encoding="utf-8")))
            ranks.append(_rank(found[-1]))
    first, above = found[0], state.path.parent
    inside = above.name in ("fingerprints", checkpoints.FOLDER)
    name = f"{above.parent.name}/{state.path.name}" if inside else state.path.name
    with _whole(path):
        require(0 < first["world"] <= MOST, "world", first["world"], f"must be at most {MOST}")
        missing = sorted({*range(first["world"])} - {r.rank for r in ranks})
        # A rank that updates no parameters, as some may with many replicas, has taken no steps.
        scalars = max((values["scalars"] for values in found), key=lambda scalars: scalars["step"])
        optimizer = {n: float(v) for n, v in first["optimizer"].items() if isinstance(v, int | float)}
        return Snapshot(
            name=name,
            state=state,
            layout=list(first["layout"]),
            precision=str(first["precision"]),
            shape=dict(first["shape"]),
            optimizer=optimizer,
            step=float(scalars["step"]),
            facts=_facts(found, scalars, optimizer),
            ranks=tuple(_undivided(ranks)),
            notes=(f"{name}: no fingerprint of ranks {span(missing)}",) if missing else (),
        )


def _facts(found: list[dict[str, Any]], scalars: Mapping[str, float], optimizer: Mapping[str, float]) -> Facts:
    names = ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "z_loss")
    once = {**scalars, "the next learning rate": found[0]["next_lr"], **{name: optimizer.get(name) for name in names}}
    facts: dict[tuple[str, int | None, str], Any] = {("optimizer", None, name): once[name] for name in once}
    facts["data", None, "the number of consumed samples"] = found[0]["consumed_samples"]
    for values in found:
        facts["data", values["rank"], "the hash of the next samples"] = values["samples"]
        facts |= {("generators", values["rank"], name): text for name, text in values["generators"].items()}
    return {key: v if isinstance(v, str) else float(v) for key, v in facts.items() if v is not None}


def _rank(values: Mapping[str, Any]) -> RankPrint:
    return RankPrint(
        **{name: int(values[name]) for name in ("rank", "tp", "pp", "dp")},
        parts=tuple(part_from_json(part) for part in values["parts"]),
    )


def _undivided(ranks: list[RankPrint]) -> list[RankPrint]:
    """The ranks with the marks of parts that replicas divide (ZeRO, a distributed optimizer) added up."""
    parts = {r.rank: list(r.parts) for r in ranks}
    held = ((r, number, part) for r in ranks for number, part in enumerate(r.parts) if part.shard is not None)
    for replicas in grouped(held, lambda h: (h[0].tp, h[0].pp, h[2].name, h[2].box)).values():
        undivided = fingerprints.whole_parts([part for _, _, part in replicas])
        for (r, number, _), part in zip(replicas, undivided, strict=True):
            parts[r.rank][number] = part
    return [replace(r, parts=tuple(parts[r.rank])) for r in ranks]


@dataclass(frozen=True, kw_only=True)
class RestartFinding:
    """A finding. `tensor` is "" where it concerns none; `size`: the relative difference, if any."""

    kind: str
    what: str
    tensor: str = ""
    ranks: tuple[RankPrint, ...] = ()
    size: float | None = None

    @property
    def where(self) -> str:
        """The ranks, and the coordinates that they share."""
        common = f" ({', '.join(shared(self.ranks))})" if shared(self.ranks) else ""
        return f"ranks {span([r.rank for r in self.ranks])}{common}" if self.ranks else "all ranks"

    def line(self) -> str:
        """The finding in one line."""
        return f"{self.kind}: {self.tensor + ', ' if self.tensor else ''}{self.where}: {self.what}"

    def to_json(self) -> dict[str, Any]:
        ranks = [{axis: getattr(r, axis) for axis in ("rank", "tp", "pp", "dp")} for r in self.ranks]
        return {"kind": self.kind, "tensor": self.tensor, "ranks": ranks, "what": self.what, "size": self.size}


Findings = Iterator[RestartFinding]


def within(s: Snapshot) -> Findings:
    """What is wrong inside one state, each finding of a single rank or of the whole."""
    yield from wrong_decay(s)
    yield from unclipped(s)
    yield from differing_replicas(s)
    for r in s.ranks:
        for part in (p for p in r.parts if {COPY, "weight"} <= {*p.marks}):
            # bf16 has 8 bits: a weight and its copy differ by 2e-3, relative; a tensor of denormal fp16 somewhat more.
            if (away := part.marks[COPY].apart(part.marks["weight"])) > 2e-2:
                what = f"the model's copy is {share(away)} away from the optimizer's weight (in {s.name})"
                yield RestartFinding(kind="copy", tensor=part.name, ranks=(r,), what=what, size=away)


def share(size: float) -> str:
    """A relative difference as a percentage."""
    return f"{100 * size:.{2 if size < 0.995 else 4}g} % of its norm"


def wrong_decay(s: Snapshot) -> Findings:
    """Norms and biases that decay, and matrices that do not."""
    for r in s.ranks:
        for part in r.parts:
            right = s.optimizer.get("weight_decay", 0.0) if must_decay(part.name) else 0.0
            if part.decay is not None and part.decay != right:
                what = f"its optimizer group has weight decay {part.decay:g}, not {right:g} (in {s.name})"
                yield RestartFinding(kind="decay", tensor=part.name, ranks=(r,), what=what, size=part.decay)


def differing_replicas(s: Snapshot) -> Findings:
    """Ranks that hold a tensor otherwise than the majority of its replicas along an axis; of equals, than the first."""
    # Sums in another order differ by rounding: allowed, relative to the tensor's norm.
    rounding = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}
    for (name, _), held in s.holders.items():
        lines = {
            "tied": grouped(held, lambda h: (h[0].tp, h[0].dp)),
            "tensor-replicas": grouped(held, lambda h: (h[0].pp, h[0].dp)),
            "data-replicas": grouped(held, lambda h: (h[0].tp, h[0].pp)),
        }
        for found, kind in itertools.product(lines, rounding):
            for line in lines[found].values():
                marks = [(r, part.marks[kind]) for r, part in line if kind in part.marks]
                hashes = [mark.hash for _, mark in marks]
                for r, mark in marks:
                    first, usual = max(marks, key=lambda m: hashes.count(m[1].hash))
                    if (away := mark.apart(usual)) > rounding[kind]:
                        what = f"{kind} is {share(away)} away from that of rank {first.rank} (in {s.name})"
                        yield RestartFinding(kind=found, tensor=name, ranks=(r,), what=what, size=away)


def unclipped(s: Snapshot) -> Findings:
    """A finding where gradients were larger than clipping allows, with the pipeline stages concerned.

    Adam's second moment after t steps is v = sum over k of (1 - b) b^(t-k) g_k^2, b = beta2 (Kingma and Ba 2015).
    Summed over all elements of the model, v / (1 - b^t) is a mean of |g_k|^2 with weights that add up to 1; and
    |g_k| <= clip_grad for every step. So it is at most clip_grad^2, whatever the gradients were. Left out: a limit that
    was lowered during the run, and a failure too rare or too small to show in the mean.
    """
    limit = s.optimizer.get("clip_grad", 0.0)
    moments = [marks["exp_avg_sq"].total for marks in s.wholes.values() if "exp_avg_sq" in marks]
    if not limit or not s.step or not moments:
        return
    mean = 1 / (1 - s.optimizer["adam_beta2"] ** s.step)
    norm = (mean * sum(moments)) ** 0.5
    most = limit * 1.02  # some engines sum the norm in half precision, and clip to within its rounding
    if norm > most:
        stages = dict.fromkeys((r.pp for r in s.ranks), 0.0)
        parts = {
            (r.pp, p.name, p.box): p.marks["exp_avg_sq"] for r in s.ranks for p in r.parts if "exp_avg_sq" in p.marks
        }
        for (pp, _, _), mark in parts.items():
            stages[pp] += mean * mark.total
        beyond = {pp for pp, square in stages.items() if square > most**2} or {max(stages, key=stages.__getitem__)}
        what = f"the gradients' norm after clipping was {norm:.4g} (root mean square over the steps), clip_grad is "
        what += f"{limit:g}; too large on pipeline stage {span([*beyond])} (in {s.name})"
        ranks = tuple(r for r in s.ranks if r.pp in beyond)
        yield RestartFinding(kind="clipping", ranks=ranks, what=what, size=norm / limit)
