"""Rules for one state, and what they find: where replicas differ, weight-decay groups, gradient clipping, a model
whose weights are not the optimizer's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trilane.diagnose.hang.words import span
from trilane.diagnose.restart.snapshot import RankPrint, Snapshot
from trilane.utils.tables import grouped
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, Part, must_decay
from trilane.workspace.rank_grid import shared

FINDINGS = {
    "reset": "reset to its defaults",
    "not-restored": "not what was saved",
    "missing": "missing",
    "tied": "the tied embedding differs at the ends of the pipeline",
    "tensor-replicas": "replicas differ across tensor-parallel ranks",
    "data-replicas": "replicas differ across data-parallel ranks",
    "decay": "in the wrong weight-decay group",
    "clipping": "gradients were not clipped",
    "copy": "the model computes with another weight than the optimizer holds",
    "generators": "random number generators not restored",
    "data": "data order not restored",
    "optimizer": "optimizer not restored",
    "rate": "another learning rate in the step after the load",
    "beta": "another beta of Adam in the step after the load",
    "moments": "Adam's moments lost in the step after the load",
    "gradients": "gradients of another size in the step after the load",
    "replayed": "other samples in the step after the load: data replayed or skipped",
    "accumulation": "part of the samples in the step after the load: accumulation changed",
    "masters": "master weights rebuilt from half precision",
    "run": "two different runs",
}
# Allowed difference of replicas, relative to the tensor's norm: sums in another order differ by rounding.
ROUNDING = {"weight": 1e-5, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, COPY: 1e-5}
AXES = {"pp": "tied", "tp": "tensor-replicas", "dp": "data-replicas"}
Held = tuple[RankPrint, Part]

# bf16 has 8 bits: a weight and its copy differ by 2e-3, relative; a tensor of denormal fp16 somewhat more.
ROUNDED = 2e-2
# Some engines sum the gradient norm in half precision, and clip to within its rounding.
SLACK = 1.02


@dataclass(frozen=True, kw_only=True)
class RestartFinding:
    """A finding, of one of FINDINGS. `tensor` is "" where it concerns none; `size`: the relative difference, if any."""

    kind: str
    what: str
    tensor: str = ""
    ranks: tuple[RankPrint, ...] = ()
    size: float | None = None

    def __post_init__(self) -> None:
        assert self.kind in FINDINGS, self.kind

    @property
    def where(self) -> str:
        """The ranks, and the coordinates that they share."""
        if not self.ranks:
            return "all ranks"
        if len(self.ranks) == 1:
            return self.ranks[0].place
        common = ", ".join(shared(self.ranks))
        return f"ranks {span([r.rank for r in self.ranks])}" + (f" ({common})" if common else "")

    def line(self) -> str:
        """The finding in one line."""
        return f"{self.kind}: {self.tensor + ', ' if self.tensor else ''}{self.where}: {self.what}"

    def to_json(self) -> dict[str, Any]:
        ranks = [{axis: getattr(r, axis) for axis in ("rank", "tp", "pp", "dp")} for r in self.ranks]
        return {"kind": self.kind, "tensor": self.tensor, "ranks": ranks, "what": self.what, "size": self.size}


def share(size: float) -> str:
    """A relative difference as a percentage."""
    return f"{100 * size:.2g} %" if size < 0.995 else f"{100 * size:.0f} %"


def wrong_decay(snapshot: Snapshot) -> list[RestartFinding]:
    """Findings for norms and biases that decay, and matrices that do not."""
    wrong: dict[tuple[str, float], list[RankPrint]] = {}
    usual = snapshot.optimizer.get("weight_decay", 0.0)
    for r in snapshot.ranks:
        for part in r.parts:
            right = usual if must_decay(part.name) else 0.0
            if part.decay is not None and part.decay != right:
                wrong.setdefault((part.name, part.decay), []).append(r)
    findings = []
    for (name, decay), ranks in wrong.items():
        rule = "norms and biases must not decay" if not must_decay(name) else f"matrices decay by {usual:g}"
        what = f"its optimizer group has weight decay {decay:g}; {rule}"
        findings.append(RestartFinding(kind="decay", tensor=name, ranks=tuple(ranks), what=what, size=decay))
    return findings


def stale_copies(snapshot: Snapshot) -> list[RestartFinding]:
    """Findings for weights where the model's copy is not what the optimizer holds."""
    found: dict[str, tuple[float, list[RankPrint]]] = {}
    for r in snapshot.ranks:
        for part in r.parts:
            if {COPY, "weight"} <= {*part.marks} and (away := part.marks[COPY].apart(part.marks["weight"])) > ROUNDED:
                size, ranks = found.get(part.name, (0.0, []))
                found[part.name] = (max(size, away), [*ranks, r])
    what = "the model's copy is {} of its norm away from the optimizer's weight"
    return [
        RestartFinding(kind="copy", tensor=name, ranks=tuple(ranks), what=what.format(share(size)), size=size)
        for name, (size, ranks) in found.items()
    ]


def unclipped(snapshot: Snapshot) -> list[RestartFinding]:
    """A finding where gradients were larger than clipping allows, with the pipeline stages concerned.

    Adam's second moment after t steps is v = sum over k of (1 - b) b^(t-k) g_k^2, b = beta2 (Kingma and Ba 2015).
    Summed over all elements of the model, v / (1 - b^t) is a mean of |g_k|^2 with weights that add up to 1; and
    |g_k| <= clip_grad for every step. So it is at most clip_grad^2, whatever the gradients were. Left out: a limit that
    was lowered during the run, and a failure too rare or too small to show in the mean.
    """
    limit, step = snapshot.optimizer.get("clip_grad", 0.0), snapshot.scalars.get("step", 0)
    moments = [marks["exp_avg_sq"].total for marks in snapshot.wholes.values() if "exp_avg_sq" in marks]
    if not limit or not step or not moments:
        return []
    mean = 1 / (1 - snapshot.optimizer["adam_beta2"] ** step)
    norm = (mean * sum(moments)) ** 0.5
    if norm <= limit * SLACK:
        return []
    what = f"the gradients' norm after clipping was {norm:.4g} (root mean square over the steps), "
    what += f"clip_grad is {limit:g}"
    stages = _stages(snapshot, mean, limit)
    ranks = tuple(r for r in snapshot.ranks if r.pp in stages)
    if len(stages) < len({r.pp for r in snapshot.ranks}):
        what += f"; too large on pipeline stage {', '.join(map(str, sorted(stages)))}"
    return [RestartFinding(kind="clipping", ranks=ranks, what=what, size=norm / limit)]


def _stages(snapshot: Snapshot, mean: float, limit: float) -> set[int]:
    """The stages that were not clipped: that of the larger copy of a tied embedding, where one is a multiple of the
    other; else those above the limit by themselves; else the one that adds most."""
    ends = dict(_tied(snapshot))
    if len(ends) == 2:
        (first, one), (last, other) = sorted(ends.items())
        factor = scale(one, other)
        if factor:
            return {last if factor > 1 else first}
    shares: dict[int, float] = {}
    for pp in {r.pp for r in snapshot.ranks}:
        unique = {(part.name, part.box): part for r in snapshot.ranks if r.pp == pp for part in r.parts}
        moments = [part.marks["exp_avg_sq"] for part in unique.values() if "exp_avg_sq" in part.marks]
        shares[pp] = mean * sum(mark.total for mark in moments)
    beyond = {pp for pp, share in shares.items() if share > (limit * SLACK) ** 2}
    return beyond or {max(shares, key=lambda pp: shares[pp])}


def _tied(snapshot: Snapshot) -> Iterator[tuple[int, Part]]:
    """Pipeline stage and part of the tensor that several stages hold."""
    for held in snapshot.holders.values():
        if len({r.pp for r, _ in held}) > 1:
            yield from ((r.pp, part) for r, part in held)
            return


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
    away = f"{share(deviation.size)} of its norm away from that of {place.place}"
    what = f"{deviation.kind} of {odd_place.place} is {away}{_why(usual, odd) if axis == 'pp' else ''}"
    ranks = tuple(deviation.ranks[rank] for rank in sorted(deviation.ranks))
    return RestartFinding(kind=AXES[axis], tensor=name, ranks=ranks, what=what, size=deviation.size)


def _lines(held: Sequence[Held], axis: str) -> Iterator[list[Held]]:
    """The groups of holders that differ only in `axis`."""
    rest = [name for name in AXES if name != axis]
    lines = grouped(held, lambda h: tuple(getattr(h[0], name) for name in rest))
    return (line for line in lines.values() if len(line) > 1)


def _split(line: Sequence[Held], kind: str) -> tuple[list[Held], list[Held]]:
    """The holders that agree with the majority (of equals, with the first), and the others."""
    hashes = [part.marks[kind].hash for _, part in line]
    usual = max(hashes, key=hashes.count, default=0)
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
