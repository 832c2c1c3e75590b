"""Replicas: what several ranks hold alike must be the same on all of them, at one moment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trilane.diagnose.restart.finding import RestartFinding, share
from trilane.diagnose.restart.snapshot import RankPrint, Snapshot
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, Part

# How far replicas may be apart, relative to the tensor's norm: sums in another order differ by rounding.
ROUNDING = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}


AXES = {"pp": "tied", "tp": "tensor-replicas", "dp": "data-replicas"}


Held = tuple[RankPrint, Part]


def torn(snapshot: Snapshot) -> list[RestartFinding]:
    """A finding for each tensor whose replicas are apart, and each direction in which they are."""
    found: dict[tuple[str, str], Torn] = {}
    for (name, _), held in snapshot.holders.items():
        for axis in AXES:
            for line in _lines(held, axis):
                _compare(line, found.setdefault((name, axis), Torn()))
    return [_finding(name, axis, torn) for (name, axis), torn in found.items() if torn.ranks]


@dataclass
class Torn:
    """How far the replicas of a tensor are apart along an axis: who is odd, and the worst case."""

    ranks: dict[int, RankPrint] = field(default_factory=dict)
    size: float = 0.0
    kind: str = ""
    pair: tuple[Held, Held] | None = None


def _compare(line: Sequence[Held], torn: Torn) -> None:
    """Hold those who differ from most along the line against one of these, kind by kind."""
    for kind in (*KINDS, COPY):
        same, other = _split([h for h in line if kind in h[1].marks], kind)
        for odd in other:
            away = odd[1].marks[kind].apart(same[0][1].marks[kind])
            if away > ROUNDING[kind]:
                torn.ranks[odd[0].rank] = odd[0]
                if away > torn.size:
                    torn.size, torn.kind, torn.pair = away, kind, (same[0], odd)


def _finding(name: str, axis: str, torn: Torn) -> RestartFinding:
    assert torn.pair
    (place, usual), (odd_place, odd) = torn.pair
    what = f"{torn.kind} of {odd_place.place} is {share(torn.size)} of its norm away from that of {place.place}"
    if axis == "pp":
        what += _why(usual, odd)
    ranks = tuple(torn.ranks[rank] for rank in sorted(torn.ranks))
    return RestartFinding(kind=AXES[axis], tensor=name, ranks=ranks, what=what, size=torn.size)


def _lines(held: Sequence[Held], axis: str) -> Iterator[list[Held]]:
    """The holders that differ in nothing but `axis`."""
    rest = [name for name in AXES if name != axis]
    lines: dict[tuple[int, ...], list[Held]] = {}
    for h in held:
        lines.setdefault(tuple(getattr(h[0], name) for name in rest), []).append(h)
    return (line for line in lines.values() if len(line) > 1)


def _split(line: Sequence[Held], kind: str) -> tuple[list[Held], list[Held]]:
    """Those who agree with most (of equals, with the first), and the others."""
    hashes = [part.marks[kind].hash for _, part in line]
    usual = max(hashes, key=hashes.count) if hashes else 0
    same = [h for h, found in zip(line, hashes, strict=True) if found == usual]
    return same, [h for h, found in zip(line, hashes, strict=True) if found != usual]


def _why(first: Part, last: Part) -> str:
    """What the moments of the two ends of the pipeline tell about how they came apart."""
    factor = scale(first, last)
    if factor:
        return f"; its gradients are {factor:.3g} times as large: clipped at one end alone"
    if "exp_avg" in first.marks and first.marks["exp_avg"].hash == last.marks["exp_avg"].hash:
        return "; its moments are the same: the weight alone was written otherwise"
    return "; its gradients are not summed over both ends"


def scale(first: Part, last: Part) -> float | None:
    """The factor between two replicas' gradients where they differ by nothing else; None otherwise."""
    marks: list[Mark | None] = [part.marks.get("exp_avg") for part in (first, last)]
    if marks[0] is None or marks[1] is None:
        return None
    factor = marks[1].scaled(marks[0])
    return factor if factor and abs(factor - 1) > 1e-2 else None
