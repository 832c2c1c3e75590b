"""Comparison over time: what was saved with what is in memory after the load, by tensor and rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trilane.diagnose.restart.one_step import rounding
from trilane.diagnose.restart.rules import RestartFinding, share
from trilane.diagnose.restart.snapshot import LOADED, RankPrint, Snapshot
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, default_of, must_decay

# Relative difference of a matrix by rounding between two trainings on the same samples, by whether their layouts are
# equal. With three replicas the copies of a tied embedding differ by rounding; a load merges them: 8e-6 after 5 steps.
DRIFT = {True: 1e-3, False: 1e-2}
LARGEST = 2.0**-7  # of a tensor by rounding to bf16: twice the last place, as sketches estimate it within a quarter


@dataclass
class Difference:
    """The difference of one tensor: on which ranks, and its largest case."""

    ranks: list[RankPrint] = field(default_factory=list)
    size: float = 0.0
    kind: str = ""
    marks: tuple[Mark, Mark] | None = None
    reset: bool = False

    def add(self, rank: RankPrint | None, kind: str, before: Mark, after: Mark, name: str) -> None:
        """Include one more kind or rank."""
        if rank and rank not in self.ranks:
            self.ranks.append(rank)
        value = default_of(name) if kind in ("weight", COPY) else None
        reset = after.constant(value) and not before.constant(value)
        size = before.apart(after)
        if self.marks is None or (reset, size) > (self.reset, self.size):
            self.size, self.kind, self.marks, self.reset = size, kind, (before, after), reset


def changed(before: Snapshot, after: Snapshot) -> list[RestartFinding]:
    """A finding for every tensor that differs.

    After a load, bits are compared. Between two runs only matrices count, and only beyond DRIFT: the gradient of a key
    bias is 0 but for rounding, which Adam scales to the size of any other step.
    """
    exact, drift = after.moment == LOADED, DRIFT[_alike(before, after)]
    found: dict[str, Difference] = {}
    for name, kind, rank, old, new in _pairs(before, after):
        different = old.hash != new.hash
        if not exact:
            different = kind == "weight" and must_decay(name) and old.apart(new) > drift
        if different:
            found.setdefault(name, Difference()).add(rank, kind, old, new, name)
    return [*_missing(before, after), *(_finding(name, difference) for name, difference in found.items())]


def masters(before: Snapshot, after: Snapshot, found: list[RestartFinding]) -> list[RestartFinding]:
    """One finding in place of `found` where all that differs after a load is the rounding of master weights.

    The proof is that a weight has the bits of the copy that the model computed with before. Without copies the sizes
    are evidence: rounding to bf16 changes a tensor by about 1e-3 of its norm, to fp16 by 1e-4, and both moments came
    back.
    """
    if after.moment != LOADED or not found or any(f.kind == "missing" or (f.size or 0.0) > LARGEST for f in found):
        return []
    weights = {f.tensor: f.size or 0.0 for f in found}
    pairs = {n: (before.wholes.get(n, {}), after.wholes.get(n, {})) for n in weights}
    if not any(map(must_decay, weights)) or any(
        a.get(kind) != b.get(kind) for a, b in pairs.values() for kind in KINDS[1:]
    ):
        return []
    copied = [n for n, (a, b) in pairs.items() if COPY in a and a[COPY].hash == b["weight"].hash]
    name = rounding([*weights.values()])
    if len(copied) < len(weights) and not name:
        return []
    name = before.precision if copied else name
    proof = f"{len(copied)} of them have the bits of the model's copy" if copied else f"by the rounding of {name}"
    what = (
        f"{len(weights)} weights differ from what was saved, at most by {share(max(weights.values()))} of their norm, "
    )
    what += f"{proof}, and both moments came back: rebuilt from the {name} weights of the model"
    return [RestartFinding(kind="masters", what=what, size=max(weights.values()))]


def _pairs(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str, RankPrint | None, Mark, Mark]]:
    """Pairs of marks in both snapshots: of the same rank in the same layout, else of the part, else of the whole."""
    kinds = (*KINDS, COPY) if before.precision == after.precision else KINDS
    for (name, box), held in after.holders.items():
        there = before.holders.get((name, box), [])
        for rank, part in held if there else ():
            same = [p for r, p in there if r.rank == rank.rank and _alike(before, after)]
            old = same[0] if same else there[0][1]
            for kind in (kind for kind in kinds if kind in part.marks and kind in old.marks):
                # Where another rank held exactly these bits, replicas differed before, which is another finding.
                if part.marks[kind].hash not in {p.marks[kind].hash for _, p in there if kind in p.marks}:
                    yield name, kind, rank, old.marks[kind], part.marks[kind]
    cut = {name for name, box in after.holders if (name, box) not in before.holders}
    for name in sorted(cut):
        marks: tuple[Mapping[str, Mark], ...] = before.wholes.get(name, {}), after.wholes.get(name, {})
        for kind in KINDS:
            if kind in marks[0] and kind in marks[1]:
                yield name, kind, None, marks[0][kind], marks[1][kind]


def _alike(before: Snapshot, after: Snapshot) -> bool:
    return bool(before.layout) and before.layout == after.layout and before.precision in ("", after.precision)


def _missing(before: Snapshot, after: Snapshot) -> Iterator[RestartFinding]:
    if before.notes or after.notes:  # ranks without fingerprints are noted: their tensors are no findings
        return
    for name in before.tensors.keys() - after.tensors.keys():
        yield RestartFinding(kind="missing", tensor=name, what=f"is in {before.name}, not in {after.name}")


def _finding(name: str, difference: Difference) -> RestartFinding:
    assert difference.marks
    before, after = difference.marks
    kind = difference.kind if difference.kind != COPY else "the model's copy of the weight"
    short, what = "not-restored", f"{kind} is {share(difference.size)} of its norm away from what was saved"
    what += f" (norm {before.norm:.6g}, now {after.norm:.6g})"
    if difference.reset:
        short, what = "reset", f"{kind} was trained (norm {before.norm:.6g}) and every element is {after.low:g} now"
        what += ": reset to its defaults"
    return RestartFinding(kind=short, tensor=name, ranks=tuple(difference.ranks), what=what, size=difference.size)
