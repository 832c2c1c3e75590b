"""Comparison of replicas: the parts that several ranks hold must be equal on all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trilane.diagnose.restart.finding import RestartFinding, share
from trilane.diagnose.restart.snapshot import RankPrint, Snapshot
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, Part

# Allowed difference of replicas, relative to the tensor's norm: sums in another order differ by rounding.
ROUNDING = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}
AXES = {"pp": "tied", "tp": "tensor-replicas", "dp": "data-replicas"}
Held = tuple[RankPrint, Part]


def differing_replicas(snapshot: Snapshot) -> list[RestartFinding]:
    """A finding for each tensor, and each axis along which its replicas differ."""
    found: dict[tuple[str, str], Deviation] = {}
    for (name, _), held in snapshot.holders.items():
        for axis in AXES:
            for line in _lines(held, axis):
                _compare(line, found.setdefault((name, axis), Deviation()))
    return [_finding(name, axis, deviation) for (name, axis), deviation in found.items() if deviation.ranks]


@dataclass
class Deviation:
    """The difference between replicas of a tensor along an axis: the deviating ranks, and the largest case."""

    ranks: dict[int, RankPrint] = field(default_factory=dict)
    size: float = 0.0
    kind: str = ""
    pair: tuple[Held, Held] | None = None


def _compare(line: Sequence[Held], deviation: Deviation) -> None:
    """Compare the holders that differ from the majority along the line with one of the majority, kind by kind."""
    for kind in (*KINDS, COPY):
        same, other = _split([h for h in line if kind in h[1].marks], kind)
        for odd in other:
            away = odd[1].marks[kind].apart(same[0][1].marks[kind])
            if away > ROUNDING[kind]:
                deviation.ranks[odd[0].rank] = odd[0]
                if away > deviation.size:
                    deviation.size, deviation.kind, deviation.pair = away, kind, (same[0], odd)


def _finding(name: str, axis: str, deviation: Deviation) -> RestartFinding:
    assert deviation.pair
    (place, usual), (odd_place, odd) = deviation.pair
    what = (
        f"{deviation.kind} of {odd_place.place} is {share(deviation.size)} of its norm away from that of {place.place}"
    )
    if axis == "pp":
        what += _why(usual, odd)
    ranks = tuple(deviation.ranks[rank] for rank in sorted(deviation.ranks))
    return RestartFinding(kind=AXES[axis], tensor=name, ranks=ranks, what=what, size=deviation.size)


def _lines(held: Sequence[Held], axis: str) -> Iterator[list[Held]]:
    """The groups of holders that differ only in `axis`."""
    rest = [name for name in AXES if name != axis]
    lines: dict[tuple[int, ...], list[Held]] = {}
    for h in held:
        lines.setdefault(tuple(getattr(h[0], name) for name in rest), []).append(h)
    return (line for line in lines.values() if len(line) > 1)


def _split(line: Sequence[Held], kind: str) -> tuple[list[Held], list[Held]]:
    """The holders that agree with the majority (of equals, with the first), and the others."""
    hashes = [part.marks[kind].hash for _, part in line]
    usual = max(hashes, key=hashes.count) if hashes else 0
    same = [h for h, found in zip(line, hashes, strict=True) if found == usual]
    return same, [h for h, found in zip(line, hashes, strict=True) if found != usual]


def _why(first: Part, last: Part) -> str:
    """Why the two ends of the pipeline differ, by their moments."""
    factor = scale(first, last)
    if factor:
        return f"; its gradients are {factor:.3g} times as large: clipped at one end alone"
    if "exp_avg" in first.marks and first.marks["exp_avg"].hash == last.marks["exp_avg"].hash:
        return "; its moments are equal: only the weight was changed"
    return "; its gradients are not summed over both ends"


def scale(first: Part, last: Part) -> float | None:
    """The factor between two replicas' gradients where they differ only by a factor; None otherwise."""
    marks: list[Mark | None] = [part.marks.get("exp_avg") for part in (first, last)]
    if marks[0] is None or marks[1] is None:
        return None
    factor = marks[1].scaled(marks[0])
    return factor if factor and abs(factor - 1) > 1e-2 else None
