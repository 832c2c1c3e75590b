"""A restart: what two folders know of the same moment, compared over time and over replicas, and what is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.diagnose.restart.adam_moments import pairs
from trilane.diagnose.restart.finding import RestartFinding
from trilane.diagnose.restart.over_time import changed
from trilane.diagnose.restart.replicas import torn
from trilane.diagnose.restart.rules import decaying, stale, unclipped
from trilane.diagnose.restart.snapshot import SAVED, RankPrint, Snapshot
from trilane.utils.validation import require


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was compared with what, what is wrong, and what the reader should know besides."""

    compared: tuple[str, ...]
    findings: tuple[RestartFinding, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        findings = [finding.to_json() for finding in self.findings]
        return {"compared": self.compared, "findings": findings, "notes": self.notes}


def audit(before: Path, after: Path) -> Audit:
    """Compare what the folders know (see moments.py). ValueError where one knows nothing, is damaged, or holds another
    model than the other."""
    findings: dict[tuple[str, str, str], RestartFinding] = {}
    compared, notes = [], []
    for one, two in pairs(before, after):
        a, b = one.read(), two.read()
        known = bool(findings)
        _require_same_model(a, b)
        compared.append(f"{a.name} ({a.moment}) with {b.name} ({b.moment}), {len(b.tensors)} tensors")
        notes += [*a.notes, *b.notes, *_notes(a, b)]
        moved = changed(a, b) if a.iteration == b.iteration else []
        if b.moment == SAVED and len(moved) > 1 and len(moved) == sum(f.kind == "not-restored" for f in moved):
            notes += [_consequence(a, b, moved)] if known else []
            moved = [] if known else [_gone_apart(a, moved)]
        for finding in (*within(a, b), *moved, *beside(a, b)):
            findings.setdefault((finding.kind, finding.tensor, finding.where), finding)
    return Audit(compared=tuple(compared), findings=tuple(findings.values()), notes=tuple(dict.fromkeys(notes)))


def within(a: Snapshot, b: Snapshot) -> list[RestartFinding]:
    """What is wrong inside each of two snapshots; what is wrong in both is said once."""
    found: dict[tuple[str, str], tuple[RestartFinding, list[str]]] = {}
    for snapshot in (a, b):
        for finding in (*decaying(snapshot), *unclipped(snapshot), *torn(snapshot), *stale(snapshot)):
            found.setdefault((finding.kind, finding.tensor), (finding, []))[1].append(snapshot.name)
    return [replace(finding, what=f"{finding.what} (in {' and '.join(names)})") for finding, names in found.values()]


def beside(a: Snapshot, b: Snapshot) -> list[RestartFinding]:
    """What, beside tensors, is not what it was at the same iteration."""
    return [*_generators(a, b), *_data(a, b), *_optimizer(a, b)] if a.iteration == b.iteration else []


def _gone_apart(a: Snapshot, moved: list[RestartFinding]) -> RestartFinding:
    """A run that went on otherwise than the one it continues differs everywhere: that is one finding."""
    worst = max(moved, key=lambda finding: finding.size or 0)
    what = (
        f"{len(moved)} tensors differ between the runs at iteration {a.iteration}; most of all {worst.tensor}, whose "
    )
    what += worst.what
    return replace(worst, tensor="", ranks=(), what=what)


def _consequence(a: Snapshot, b: Snapshot, moved: list[RestartFinding]) -> str:
    return f"{b.name} differs from {a.name} in {len(moved)} tensors, as what was found at the restart lets expect"


def _require_same_model(a: Snapshot, b: Snapshot) -> None:
    for name, value in a.shape.items():
        rule = f"{a.name} has {value}: two models cannot be compared"
        require(b.shape.get(name) == value, f"B {name}", b.shape.get(name), rule)


def _notes(a: Snapshot, b: Snapshot) -> Iterator[str]:
    if a.iteration != b.iteration:
        yield f"{a.name} is after iteration {a.iteration}, {b.name} after {b.iteration}: only each by itself was judged"
    elif a.layout != b.layout:
        yield (
            f"{a.name} and {b.name} have other layouts {list(a.layout)} and {list(b.layout)}: tensors are compared as "
            "wholes where they are cut in another way, random number generators begin anew"
        )


def _generators(a: Snapshot, b: Snapshot) -> Iterator[RestartFinding]:
    """Each rank's own, where it is the same rank."""
    if a.layout != b.layout:
        return
    wrong: dict[str, list[RankPrint]] = {}
    for r in b.ranks:
        before = a.by_rank[r.rank].generators if r.rank in a.by_rank else {}
        for name, state in r.generators.items():
            if name in before and before[name] != state:
                wrong.setdefault(name, []).append(r)
    for name, ranks in wrong.items():
        what = f"the state of generator {name} is not the one that was saved"
        yield RestartFinding(kind="generators", tensor="", ranks=tuple(ranks), what=what)


def _data(a: Snapshot, b: Snapshot) -> Iterator[RestartFinding]:
    if a.consumed != b.consumed:
        what = f"{a.consumed} samples were consumed, now {b.consumed} are counted"
        yield RestartFinding(kind="data", tensor="", ranks=(), what=what, size=abs(b.consumed - a.consumed))
        return
    if a.layout == b.layout:
        odd = [r for r in b.ranks if r.rank in a.by_rank and _differs(a.by_rank[r.rank].samples, r.samples)]
    else:
        odd = list(b.ranks) if _differs(a.samples, b.samples) else []
    if odd:
        what = f"the next iteration, after {b.consumed} samples, gets other samples than it would have had"
        yield RestartFinding(kind="data", tensor="", ranks=tuple(odd) if len(odd) < len(b.ranks) else (), what=what)


def _differs(a: object, b: object) -> bool:
    return a is not None and b is not None and a != b


def _optimizer(a: Snapshot, b: Snapshot) -> Iterator[RestartFinding]:
    """Adam's step, the loss scale and what decides when it changes, the next learning rate, and what was set."""
    for name, value in a.scalars.items():
        if name in b.scalars and b.scalars[name] != value:
            what = f"{name} is {b.scalars[name]:g}, it was {value:g}"
            yield RestartFinding(kind="optimizer", tensor="", ranks=(), what=what, size=abs(b.scalars[name] - value))
    if a.next_lr is not None and b.next_lr is not None and abs(a.next_lr - b.next_lr) > 1e-9 * abs(a.next_lr):
        what = f"the next learning rate is {b.next_lr:.6g}, it would have been {a.next_lr:.6g}"
        yield RestartFinding(
            kind="optimizer", tensor="", ranks=(), what=what, size=abs(b.next_lr / (a.next_lr or 1) - 1)
        )
    for name in ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"):
        old, new = a.optimizer.get(name), b.optimizer.get(name)
        if old is not None and new is not None and old != new:
            yield RestartFinding(kind="optimizer", tensor="", ranks=(), what=f"{name} is {new:g}, it was {old:g}")
