"""Replicas: what several ranks hold alike must be the same on all of them, at one moment."""

from collections.abc import Iterator, Sequence

from trilane.checkpoints import KINDS
from trilane.diagnose.finding import Finding
from trilane.diagnose.snapshot import RankPrint, Snapshot
from trilane.fingerprint import COPY, Mark, Part

# How far replicas may be apart, relative to the tensor's norm: sums in another order differ by rounding.
ROUNDING = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}
AXES = {"pp": "tied", "tp": "tensor-replicas", "dp": "data-replicas"}
Held = tuple[RankPrint, Part]


def torn(snapshot: Snapshot) -> list[Finding]:
    """A finding for each tensor whose replicas are apart, and each direction in which they are."""
    found: dict[tuple[str, str], Finding] = {}
    for (name, _), held in snapshot.holders.items():
        for axis, kind in AXES.items():
            finding = _torn(name, held, axis, kind)
            before = found.get((name, kind))
            if finding and (before is None or (finding.size or 0) > (before.size or 0)):
                found[name, kind] = finding
    return list(found.values())


def _torn(name: str, held: Sequence[Held], axis: str, finding: str) -> Finding | None:
    """Along one axis, the others being equal, the odd ones out: the furthest apart of all kinds."""
    worst: tuple[float, str, list[Held], list[Held]] | None = None
    for line in _lines(held, axis):
        for kind in (*KINDS, COPY):
            same, other = _split([h for h in line if kind in h[1].marks], kind)
            away = max((o[1].marks[kind].apart(same[0][1].marks[kind]) for o in other), default=0.0)
            if away > ROUNDING[kind] and (worst is None or away > worst[0]):
                worst = (away, kind, same, other)
    if worst is None:
        return None
    away, kind, same, other = worst
    what = f"{kind} is {away:.1e} of its norm away from that of {_names(same)}"
    if axis == "pp":
        what = f"the tied embedding's {what}; {_why(same[0][1], other[0][1])}"
    return Finding(kind=finding, tensor=name, ranks=tuple(r for r, _ in other), what=what, size=away)


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
    factor = scale(first, last)
    if factor:
        return f"its gradients are {factor:.3g} times as large: clipped at one end alone"
    return "its gradients are not summed over both ends"


def scale(first: Part, last: Part) -> float | None:
    """The factor between two replicas' gradients where they differ by nothing else; None otherwise."""
    marks: list[Mark | None] = [part.marks.get("exp_avg") for part in (first, last)]
    if marks[0] is None or marks[1] is None:
        return None
    factor = marks[1].scaled(marks[0])
    return factor if factor and abs(factor - 1) > 1e-2 else None


def _names(held: Sequence[Held]) -> str:
    return held[0][0].place + (f" and {len(held) - 1} more" if len(held) > 1 else "")
