"""Over time: what was saved against what stands in memory after the load, tensor by tensor and rank by rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trilane.diagnose.restart.finding import RestartFinding, share
from trilane.diagnose.restart.snapshot import LOADED, RankPrint, Snapshot
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, Part, default_of, must_decay

# Two trainings of the same samples drift apart by rounding, more so on two layouts: relative, of a matrix. With three
# replicas the two copies of a tied embedding differ by rounding, and a load makes them one: 8e-6 after five iterations.
DRIFT = {True: 1e-3, False: 1e-2}


@dataclass
class Difference:
    """How one tensor differs: on which ranks, in which kind most."""

    ranks: list[RankPrint] = field(default_factory=list)
    size: float = 0.0
    kind: str = ""
    marks: tuple[Mark, Mark] | None = None
    reset: bool = False

    def add(self, rank: RankPrint | None, kind: str, before: Mark, after: Mark, name: str) -> None:
        """One more kind or rank."""
        if rank and rank not in self.ranks:
            self.ranks.append(rank)
        value = default_of(name) if kind in ("weight", COPY) else None
        reset = after.constant(value) and not before.constant(value)
        size = before.apart(after)
        if self.marks is None or (reset, size) > (self.reset, self.size):
            self.size, self.kind, self.marks, self.reset = size, kind, (before, after), reset


def changed(before: Snapshot, after: Snapshot) -> list[RestartFinding]:
    """Every tensor that is not what it was.

    After a load bits are compared. Between two runs only matrices count, and only beyond DRIFT: the gradient of a key's
    bias is 0 but for rounding, which Adam makes as large as any other step.
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


def _pairs(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str, RankPrint | None, Mark, Mark]]:
    """Whatever both know: of the same rank in the same layout, else of the same part, else of the whole tensor."""
    kinds = (*KINDS, COPY) if before.precision == after.precision else KINDS
    for (name, box), held in after.holders.items():
        there = before.holders.get((name, box))
        for rank, part in held if there else ():
            assert there
            same = [p for r, p in there if r.rank == rank.rank and _alike(before, after)]
            old = same[0] if same else there[0][1]
            for kind in kinds:
                if kind in part.marks and kind in old.marks and not _elsewhere(there, kind, part.marks[kind]):
                    yield name, kind, rank, old.marks[kind], part.marks[kind]
    cut = {name for name, box in after.holders if (name, box) not in before.holders}
    for name in sorted(cut):
        marks: tuple[Mapping[str, Mark], ...] = before.wholes.get(name, {}), after.wholes.get(name, {})
        for kind in KINDS:
            if kind in marks[0] and kind in marks[1]:
                yield name, kind, None, marks[0][kind], marks[1][kind]


def _elsewhere(there: Sequence[tuple[RankPrint, Part]], kind: str, mark: Mark) -> bool:
    """Whether some rank held just that: replicas were apart before, which is another finding, and one was taken."""
    return any(kind in part.marks and part.marks[kind].hash == mark.hash for _, part in there)


def _alike(before: Snapshot, after: Snapshot) -> bool:
    return bool(before.layout) and before.layout == after.layout and before.precision in ("", after.precision)


def _missing(before: Snapshot, after: Snapshot) -> Iterator[RestartFinding]:
    if before.notes or after.notes:  # ranks are missing, and are said: their tensors are not missed twice
        return
    for name in before.tensors.keys() - after.tensors.keys():
        yield RestartFinding(kind="missing", tensor=name, ranks=(), what=f"is in {before.name}, not in {after.name}")


def _finding(name: str, difference: Difference) -> RestartFinding:
    assert difference.marks
    before, after = difference.marks
    kind = difference.kind if difference.kind != COPY else "the model's copy of the weight"
    if difference.reset:
        what = f"{kind} was trained (norm {before.norm:.6g}) and is all {after.low:g} now: reset to its defaults"
    else:
        what = f"{kind} is {share(difference.size)} of its norm away from what was saved"
        what += f" (norm {before.norm:.6g}, now {after.norm:.6g})"
    short = "reset" if difference.reset else "not-restored"
    return RestartFinding(kind=short, tensor=name, ranks=tuple(difference.ranks), what=what, size=difference.size)
