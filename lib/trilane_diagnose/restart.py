"""Comparison of a restart: the fingerprints of a save against those of the load, by rank and
tensor.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trilane.utils.numbers import ranges
from trilane.utils.tables import DataFrame, Table, Text, frame_of, grouped
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


@dataclass(frozen=True, kw_only=True)
class RestartComparison(Table):
    """What was compared, the findings, and notes; as a table the findings. `example`: the states
    are made up.
    """

    before: Path
    after: Path
    compared: tuple[str, ...]
    findings: tuple[RestartFinding, ...]
    notes: tuple[str, ...]
    example: bool = False

    def to_frame(self) -> DataFrame:
        """A row per finding: its kind, the tensor, where (its ranks), the difference, and its
        relative size.
        """
        columns = {
            "finding": "kind",
            "tensor": "tensor",
            "where": "where",
            "difference": "what",
            "size": "size",
        }
        return frame_of(self.findings, columns).astype({"size": float})

    def summary(self) -> Text:
        """What was compared, the number of findings, and the notes, as Markdown."""
        example = "**No run of this study was restarted.** Shown is an example, made up from the BLOOM chronicles."
        lead = Text.of("Compared: {}. {} findings.", "; ".join(self.compared), len(self.findings))
        return Text.joined("\n\n- ", [*[Text(example)] * self.example, lead, *self.notes])

    def to_text(self) -> str:
        """The comparison for a terminal: what was compared, the largest findings of each kind, the
        notes.
        """
        lines = [f"compared {line}" for line in self.compared]
        for kind, same in grouped(self.findings, lambda f: f.kind).items():
            lines += [
                f"  {finding.line()}" for finding in sorted(same, key=lambda f: -(f.size or 0))[:6]
            ]
            lines += (
                [f"  ... and {len(same) - 6} more {kind}; --json has them all"]
                if len(same) > 6
                else []
            )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(
            [*lines, f"{len(self.findings)} findings" if self.findings else "nothing is wrong"]
        )


def compare_restart(before: Path, after: Path) -> RestartComparison:
    """Compare what one folder saved with what the other loaded or saved: `compare_restart(first,
    second).findings`.

    Each is a run folder, a checkpoint or a folder of fingerprints. Raises ValueError where one
    holds no state, is damaged, or holds another model.
    """
    findings, compared, notes = list[RestartFinding](), list[str](), list[str]()
    for one, two in pairs(before, after):
        a, b = read_snapshot(one), read_snapshot(two)
        for field, value in a.shape.items():
            rule = (
                f"{a.name} has {value}: two models cannot be compared; these are two different runs"
            )
            require(b.shape.get(field) == value, f"B {field}", b.shape.get(field), rule)
        compared.append(
            " with ".join(f"{s.name} ({'loaded' if s.state.loaded else 'saved'})" for s in (a, b))
        )
        notes += _notes(a, b)
        found = [*within(a), *within(b)]
        if one.iteration == two.iteration:
            # What a bug changed shows in every tensor once the training goes on.
            moved = list(changed(a, b)) if two.loaded or not (findings or found) else []
            found += [*moved, *_settings(a, b)]
        findings = merged([*findings, *found])
    # What another step after the load leads to.
    implied = [f for f in findings if f.kind in ("not-restored", "generators")]
    cause = _after_load(before, after) if len(implied) == len(findings) else []
    notes += [
        f"implied by the {cause[0].kind} of the step after the load: {f.what}"
        for f in implied
        if cause
    ]
    return RestartComparison(
        before=before,
        after=after,
        compared=tuple(compared),
        findings=tuple(cause or findings),
        notes=tuple(dict.fromkeys(notes)),
    )


def study_restart(study: Study, before: str = "", after: str = "") -> RestartComparison:
    """The comparison of `before` with `after` (by default the same folder), else of the study's
    last restart, else of the example. Raises ValueError where one of them holds no state:
    `study_restart(study, "first", "second")`.
    """
    restarted = [
        folder for folder in study.run_folders() if list(folder.glob("fingerprints/load_*"))
    ]
    if before or restarted:
        first = Path(before) if before else restarted[-1]
        return compare_restart(first, Path(after) if before and after else first)
    example = DATA / "examples/restart"
    return replace(compare_restart(example / "save_805", example / "load_805"), example=True)


def pairs(before: Path, after: Path) -> list[tuple[State, State]]:
    """The states to compare: each that `after` loaded or saved, with what `before` saved after the
    same iteration.

    Where they have no iteration in common, the newest of both.
    """
    a, b = states("A", before), states("B", after)
    saved = {s.iteration: s for s in sorted(a, key=lambda s: not s.loaded)}
    found = [
        (saved[s.iteration], s)
        for s in b
        if s.iteration in saved and saved[s.iteration].path != s.path
    ]
    return found or [(next((s for s in a[::-1] if not s.loaded), a[-1]), b[-1])]


def merged(findings: Iterable[RestartFinding]) -> list[RestartFinding]:
    """One finding for each kind and tensor, the largest, with the ranks of all; a reset is no other
    difference.
    """
    same = grouped(findings, lambda f: (f.kind if f.kind != "reset" else "not-restored", f.tensor))
    joined = []
    for found in same.values():
        worst = max(found, key=lambda f: (f.kind == "reset", f.size or 0.0))
        ranks = {r.rank: r for f in found for r in f.ranks}
        joined.append(replace(worst, ranks=tuple(ranks[n] for n in sorted(ranks))))
    return joined


def _notes(a: Snapshot, b: Snapshot) -> Iterator[str]:
    for s in (a, b):
        if s.missing:
            yield f"{s.name}: no fingerprint of ranks {ranges(s.missing)}"
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
    # By rounding two trainings on the same samples differ this far. With three replicas the copies
    # of a tied embedding differ, and a load merges them: 8e-6 after 5 steps.
    drift = 1e-3 if _alike(before, after) else 1e-2
    for name, kind, ranks, old, new in _marks(before, after):
        size = old.apart(new)
        beyond = kind == "weight" and must_decay(name) and size > drift
        if old.hash != new.hash if after.state.loaded else beyond:
            value = default_of(name) if kind in ("weight", COPY) else None
            reset = new.constant(value) and not old.constant(value)
            what = f"{kind} is {share(size)} away from what was saved"
            what += f": every element is {new.low:g}, its default" * reset
            finding = "reset" if reset else "not-restored"
            yield RestartFinding(kind=finding, tensor=name, ranks=ranks, what=what, size=size)
    old_names, names = ({name for name, _ in s.holders} for s in (before, after))
    # the tensors of ranks without fingerprints are no findings
    for name in sorted(old_names - names) if not (before.missing or after.missing) else ():
        yield RestartFinding(
            kind="missing", tensor=name, what=f"is in {before.name}, not in {after.name}"
        )


def _marks(
    before: Snapshot, after: Snapshot
) -> Iterator[tuple[str, str, tuple[Holder, ...], Mark, Mark]]:
    """Pairs of marks in both snapshots: of the same rank in the same layout, else of the part, else
    of the whole.
    """
    kinds = (*KINDS, COPY) if before.precision == after.precision else KINDS
    for (name, box), held in after.holders.items():
        there = before.holders.get((name, box), [])
        for rank, part in held if there else ():
            same = [p for r, p in there if r.rank == rank.rank and _alike(before, after)]
            old = same[0] if same else there[0][1]
            for kind in (kind for kind in kinds if kind in part.marks and kind in old.marks):
                # Where another rank held exactly these bits, replicas differed before, which is
                # another finding.
                if part.marks[kind].hash not in {
                    p.marks[kind].hash for _, p in there if kind in p.marks
                }:
                    yield name, kind, (rank,), old.marks[kind], part.marks[kind]
    for name in sorted({name for name, box in after.holders if (name, box) not in before.holders}):
        old_whole, whole = before.wholes.get(name, {}), after.wholes.get(name, {})
        yield from (
            (name, k, (), old_whole[k], whole[k]) for k in KINDS if k in old_whole and k in whole
        )


def _alike(before: Snapshot, after: Snapshot) -> bool:
    return before.layout == after.layout and before.precision == after.precision


def _settings(a: Snapshot, b: Snapshot) -> Findings:
    """What is of no tensor: samples and generators, Adam's step and settings, loss scale, learning
    rate.
    """
    ranks: dict[int | None, Holder] = {r.rank: r for r, _ in b.held}
    for (kind, rank, name), old in a.facts.items():
        new = b.facts.get((kind, rank, name), old)
        # a schedule that is computed in another order may differ in the last place
        same = old == new or (
            isinstance(old, float) and math.isclose(old, float(new), rel_tol=1e-9)
        )
        # generators start again in another layout, and samples belong to other ranks
        if not same and (rank is None or a.layout == b.layout):
            size = abs(float(new) - old) if isinstance(old, float) else None
            what = f"{name} is {new}, it was {old}"
            yield RestartFinding(
                kind=kind, ranks=(ranks[rank],) if rank in ranks else (), what=what, size=size
            )


def _after_load(before: Path, after: Path) -> list[RestartFinding]:
    """What differs in the step after a load, where all came back by it, and `before` saved at the
    load's iteration and at the next, `after` at the next.
    """
    saved, mine = (
        {s.iteration: s for s in states(x, y) if not s.loaded}
        for x, y in (("A", before), ("B", after))
    )
    for load in (s for s in states("B", after) if s.loaded):
        first, last = load.iteration, load.iteration + 1
        if {first, last} <= {*saved} and last in mine and mine[last].path != saved[last].path:
            start, usual, other = map(read_snapshot, (saved[first], saved[last], mine[last]))
            restored = not [
                *changed(start, read_snapshot(load)),
                *_settings(start, read_snapshot(load)),
            ]
            return list(first_step(start, usual, other)) if restored else []
    return []


def first_step(start: Snapshot, usual: Snapshot, other: Snapshot) -> Findings:
    """What differs in the step of `other` after the load, relative to that of `usual` without it.

    After one step Adam's moments are m = b1 m0 + (1 - b1) g and v = b2 v0 + (1 - b2) g^2 (Kingma
    and Ba 2015). Sketches are linear in the values: those of m0 and both m give g, and what was
    kept of m0; with equal moments the weights move equally, times the ratio of the rates. Left out:
    why gradients differ, and whether a moment was lost or decays by another beta.
    """
    trio, kinds = (start, usual, other), {"weight", "exp_avg", "exp_avg_sq"}
    names = [name for name in start.wholes if all(kinds <= {*s.wholes.get(name, ())} for s in trio)]
    beta1, beta2 = (usual.optimizer.get(name, math.nan) for name in ("adam_beta1", "adam_beta2"))
    if not names or not 0 < beta1 < 1:
        return
    w0, w, w_other = (np.ravel([s.wholes[n]["weight"].sketch for n in names]) for s in trio)
    m0, m, m_other = (np.ravel([s.wholes[n]["exp_avg"].sketch for n in names]) for s in trio)
    v, v_other = (np.array([s.wholes[n]["exp_avg_sq"].total for n in names]) for s in trio[1:])
    gradient = (m - beta1 * m0) / (1 - beta1)
    (kept, added), *_ = np.linalg.lstsq(np.stack([m0, gradient], axis=1), m_other, rcond=None)
    misfit, second = (
        _misfit(m_other, kept * m0 + added * gradient),
        float(np.max(np.abs(v_other / v - 1))),
    )
    moved = w - w0
    length = float((w_other - w0) @ moved / (moved @ moved or 1.0))
    if misfit > 2e-3:  # more than the rounding of sketches
        kind, size, what = (
            "gradients",
            misfit,
            "the first moment holds other samples, or fewer microbatches",
        )
    elif abs(kept - beta1) > 0.02 * (1 - beta1) + 2e-3:
        kind, size, what = "moments", kept, "the first moment is lost, or has another beta"
    elif abs(added / (1 - beta1) - 1) > 0.01:
        kind, size, what = (
            "gradients",
            added / (1 - beta1),
            "they are a multiple: another mean, or clipping",
        )
    elif second > 2e-3 * (1 - beta2):
        kind, size, what = "moments", second, "the second moment is lost, or has another beta"
    elif abs(length - 1) > 0.01 and _misfit(w_other - w0, length * moved) < 0.05:
        kind, size, what = (
            "rate",
            length,
            "the weights move as many times as far: another rate, or count of steps",
        )
    else:
        return
    yield RestartFinding(kind=kind, what=f"{what} ({size:.4g})", size=size)


def _misfit(values: np.ndarray, fit: np.ndarray) -> float:
    return float(np.linalg.norm(values - fit) / (np.linalg.norm(values) or 1.0))
