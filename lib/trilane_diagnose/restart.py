"""Comparison of a restart: the fingerprints of a save against those of the load, by rank and
tensor.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from trilane.utils.frozen import frozen
from trilane.utils.numbers import ranges
from trilane.utils.tables import DataFrame, Table, grouped
from trilane.utils.validation import DATA, require
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, default_of, must_decay
from trilane.workspace.study import Study
from trilane_diagnose.snapshot import (
    Findings,
    Holder,
    RestartFinding,
    Snapshot,
    State,
    read_snapshot,
    share,
    states,
    within,
)

SHOWN = 6  # findings of a kind
EXAMPLE = (
    "No run of this study was restarted. Shown is an example, made up from the BLOOM chronicles."
)
# By rounding two trainings on the same samples differ this far. With three replicas the copies of a
# tied embedding differ, and a load merges them: 8e-6 after 5 steps.
DRIFT = 1e-3
DRIFT_ACROSS_LAYOUTS = 1e-2
LAST_PLACE = 1e-9  # a schedule that is computed in another order may differ in the last place


@frozen
class RestartComparison(Table):
    """What was compared, the findings, and notes; as a table the findings. `example`: the states
    are made up.
    """

    compared: tuple[str, ...]
    findings: tuple[RestartFinding, ...]
    notes: tuple[str, ...]
    example: bool = False

    def to_frame(self) -> DataFrame:
        """A row per finding: its kind, the tensor, where (its ranks), the difference, and its
        relative size.
        """
        import pandas as pd

        rows = [(f.kind, f.tensor, f.where, f.what, f.size) for f in self.findings]
        names = ["finding", "tensor", "where", "difference", "size"]
        return pd.DataFrame(rows, columns=names).astype({"size": float})

    def summary(self) -> str:
        """What was compared, the largest findings of each kind, the notes."""
        lines = [EXAMPLE] if self.example else []
        lines += [f"compared {line}" for line in self.compared]
        for kind, findings in grouped(self.findings, lambda finding: finding.kind).items():
            largest = sorted(findings, key=lambda finding: -(finding.size or 0))
            lines += [f"  {finding.summary()}" for finding in largest[:SHOWN]]
            if len(largest) > SHOWN:
                lines.append(f"  ... and {len(largest) - SHOWN} more {kind}; --json has them all")
        lines += [f"note: {note}" for note in self.notes]
        number = len(self.findings)
        return "\n".join([*lines, f"{number} findings" if number else "nothing is wrong"])


def compare_restart(before: Path | str, after: Path | str) -> RestartComparison:
    """Compare what one folder saved with what the other loaded or saved: `compare_restart(first,
    second).findings`.

    Each is a run folder, a checkpoint or a folder of fingerprints. Raises ValueError where one
    holds no state, is damaged, or holds another model.
    """
    findings: list[RestartFinding] = []
    compared = []
    notes: list[str] = []
    for one, two in pairs(Path(before), Path(after)):
        a = read_snapshot(one)
        b = read_snapshot(two)
        for field, value in a.shape.items():
            rule = f"{a.name} has {value}: two models cannot be compared"
            require(b.shape.get(field) == value, f"B {field}", b.shape.get(field), rule)
        names = [f"{s.name} ({'loaded' if s.state.loaded else 'saved'})" for s in (a, b)]
        compared.append(" with ".join(names))
        notes += _notes(a, b)
        own = [*within(a), *within(b)]
        if one.iteration == two.iteration:
            # What a bug changed shows in every tensor once the training goes on.
            if two.loaded or not (findings or own):
                own += changed(a, b)
            own += _settings(a, b)
        findings = merged([*findings, *own])
    return RestartComparison(
        compared=tuple(compared),
        findings=tuple(findings),
        notes=tuple(dict.fromkeys(notes)),
    )


def study_restart(study: Study, before: str = "", after: str = "") -> RestartComparison:
    """The comparison of `before` with `after` (by default the same folder), else of the study's
    last restart, else of the example. Raises ValueError where one of them holds no state:
    `study_restart(study, "first", "second")`.
    """
    if before:
        return compare_restart(before, after or before)
    folders = study.run_folders()
    restarted = [folder for folder in folders if list(folder.glob("fingerprints/load_*"))]
    if restarted:
        return compare_restart(restarted[-1], restarted[-1])
    example = DATA / "examples/restart"
    return replace(compare_restart(example / "save_805", example / "load_805"), example=True)


def pairs(before: Path, after: Path) -> list[tuple[State, State]]:
    """The states to compare: each that `after` loaded or saved, with what `before` saved after the
    same iteration.

    Where they have no iteration in common, the newest of both.
    """
    old = states("A", before)
    new = states("B", after)
    # what was saved counts before what was loaded
    saved = {state.iteration: state for state in sorted(old, key=lambda state: not state.loaded)}
    found = []
    for state in new:
        same = saved.get(state.iteration)
        if same and same.path != state.path:
            found.append((same, state))
    if found:
        return found
    newest = [state for state in old if not state.loaded] or old
    return [(newest[-1], new[-1])]


def merged(findings: Iterable[RestartFinding]) -> list[RestartFinding]:
    """One finding for each kind and tensor, the largest, with the ranks of all; a reset is no other
    difference.
    """

    joined = []
    kinds = grouped(findings, lambda f: (f.kind.replace("reset", "not-restored"), f.tensor))
    for same in kinds.values():
        worst = max(same, key=lambda finding: (finding.kind == "reset", finding.size or 0.0))
        holders = {holder.rank: holder for finding in same for holder in finding.ranks}
        joined.append(replace(worst, ranks=tuple(holders[rank] for rank in sorted(holders))))
    return joined


def _notes(a: Snapshot, b: Snapshot) -> Iterator[str]:
    for snapshot in (a, b):
        if snapshot.missing:
            yield f"{snapshot.name}: no fingerprint of ranks {ranges(snapshot.missing)}"
    if a.state.iteration != b.state.iteration:
        yield f"{a.name} and {b.name} are of different iterations: each is checked by itself"
    elif a.layout != b.layout:
        yield f"{b.name} has another layout than {a.name}: tensors are compared as wholes"


def changed(before: Snapshot, after: Snapshot) -> Findings:
    """A finding for every rank's part of a tensor that differs.

    After a load, bits are compared. Between two runs only matrices count, beyond rounding: a
    gradient that is 0 but for rounding, as a key bias has, Adam scales to the size of any other
    step.
    """
    is_alike = before.layout == after.layout and before.precision == after.precision
    drift = DRIFT if is_alike else DRIFT_ACROSS_LAYOUTS
    for name, kind, ranks, old, new in _marks(before, after):
        size = old.apart(new)
        differs = kind == "weight" and must_decay(name) and size > drift
        if after.state.loaded:
            differs = old.hash != new.hash
        if not differs:
            continue
        finding = "not-restored"
        what = f"{kind} is {share(size)} away from what was saved"
        default = default_of(name)
        is_weight = kind in ("weight", COPY)
        if is_weight and new.constant(default) and not old.constant(default):
            finding = "reset"
            what += f": every element is {new.low:g}, its default"
        yield RestartFinding(kind=finding, tensor=name, ranks=ranks, what=what, size=size)
    if before.missing or after.missing:
        return  # the tensors of ranks without fingerprints are no findings
    lost = {name for name, _ in before.holders} - {name for name, _ in after.holders}
    for name in sorted(lost):
        what = f"is in {before.name}, not in {after.name}"
        yield RestartFinding(kind="missing", tensor=name, what=what)


def _marks(
    before: Snapshot, after: Snapshot
) -> Iterator[tuple[str, str, tuple[Holder, ...], Mark, Mark]]:
    """Pairs of marks in both snapshots: of a rank's part, else of the whole."""
    kinds = (*KINDS, COPY) if before.precision == after.precision else KINDS
    others = set()
    for (name, box), held in after.holders.items():
        there = before.holders.get((name, box), [])
        if not there:
            others.add(name)
            continue
        old = there[0][1]
        for holder, part in held:
            for kind in kinds:
                if kind not in part.marks or kind not in old.marks:
                    continue
                # Where another rank held exactly these bits, replicas differed before, which is
                # another finding.
                hashes = [own.marks[kind].hash for _, own in there if kind in own.marks]
                if part.marks[kind].hash not in hashes:
                    yield name, kind, (holder,), old.marks[kind], part.marks[kind]
    for name in sorted(others):
        old_marks = before.wholes.get(name, {})
        marks = after.wholes.get(name, {})
        for kind in KINDS:
            if kind in old_marks and kind in marks:
                yield name, kind, (), old_marks[kind], marks[kind]


def _settings(a: Snapshot, b: Snapshot) -> Findings:
    """What is of no tensor: samples and generators, Adam's step and settings, loss scale, learning
    rate.
    """
    holders = {holder.rank: holder for holder, _ in b.held}
    for (kind, rank, name), old in a.facts.items():
        # generators start again in another layout, and samples belong to other ranks
        if rank is not None and a.layout != b.layout:
            continue
        new = b.facts.get((kind, rank, name), old)
        size = None
        if isinstance(old, float):
            size = abs(float(new) - old)
            if math.isclose(old, float(new), rel_tol=LAST_PLACE):
                continue
        if new != old:
            ranks = (holders[rank],) if rank in holders else ()
            what = f"{name} is {new}, it was {old}"
            yield RestartFinding(kind=kind, ranks=ranks, what=what, size=size)
