"""Comparison of a restart: the states in two folders, over time and across replicas, with what is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.diagnose.restart.one_step import Step, first_step
from trilane.diagnose.restart.over_time import changed, masters
from trilane.diagnose.restart.rules import (
    FINDINGS,
    RestartFinding,
    differing_replicas,
    stale_copies,
    unclipped,
    wrong_decay,
)
from trilane.diagnose.restart.snapshot import LOADED, PRINTS, SAVED, RankPrint, Snapshot, read_snapshot, whole_print
from trilane.diagnose.restart.text_dumps import compare_dumps, is_dump
from trilane.diagnose.restart.two_runs import two_runs
from trilane.utils.tables import DataFrame, Table, Text
from trilane.utils.validation import read_json, require, require_folder
from trilane.workspace import checkpoints
from trilane.workspace.fingerprints import FOLDER

IMPLIED = ("not-restored", "clipping", "generators")  # by another step after the load, where they name no tensor
SHOWN = 6  # findings of one kind in text


@dataclass(frozen=True, kw_only=True)
class Record:
    """A state on disk: a checkpoint ("saved"), or the fingerprints of memory after one was loaded ("loaded")."""

    path: Path
    moment: str
    iteration: int


@dataclass(frozen=True, kw_only=True)
class RestartComparison(Table):
    """What was compared, the findings, and notes; as a table the findings. `example`: the states are made up."""

    before: Path
    after: Path
    compared: tuple[str, ...]
    findings: tuple[RestartFinding, ...]
    notes: tuple[str, ...]
    example: bool = False

    def to_frame(self) -> DataFrame:
        """A row per finding: its kind, the tensor, the ranks, the difference."""
        import pandas as pd

        rows = [(FINDINGS[f.kind], f.tensor, f.where, f.what) for f in self.findings]
        return pd.DataFrame(rows, columns=["finding", "tensor", "where", "difference"])

    def summary(self) -> Text:
        """What was compared, the number of findings, and the notes, as Markdown."""
        example = Text(
            "**No run of this study was restarted.** Shown is an example, made up from the text of document 003."
        )
        notes = Text.joined("\n- ", ["", *self.notes])
        values = example if self.example else "", "; ".join(self.compared), len(self.findings), notes
        return Text.of("{}\n\nCompared: {}. {} findings.\n{}", *values)

    def to_text(self) -> str:
        """The comparison for a terminal: what was compared, the findings by kind, the largest first, the notes."""
        lines = [f"compared {line}" for line in self.compared]
        for kind in dict.fromkeys(finding.kind for finding in self.findings):
            same = [finding for finding in self.findings if finding.kind == kind]
            lines += ["", f"{FINDINGS[kind]} ({len(same)}):"]
            lines += [f"  {finding.line()}" for finding in sorted(same, key=lambda f: -(f.size or 0))[:SHOWN]]
            lines += [f"  ... and {len(same) - SHOWN} more; --json has them all"] if len(same) > SHOWN else []
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", f"{len(self.findings)} findings" if self.findings else "nothing is wrong"])

    def to_json(self) -> dict[str, Any]:
        findings = [finding.to_json() for finding in self.findings]
        return {"compared": self.compared, "findings": findings, "notes": self.notes}

    def record(self) -> dict[str, Any]:
        """The same with the compared folders, for a study's result file."""
        return {"before": str(self.before), "after": str(self.after), "example": self.example, **self.to_json()}


def compare_restart(before: Path, after: Path) -> RestartComparison:
    """Compare what one folder saved with what the other loaded or saved.

    Each is a run folder, a checkpoint or a folder of fingerprints. Raises ValueError where one holds no state, is
    damaged, or holds another model. Weights as text (text_dumps) are compared with weights as text.
    """
    if is_dump(before) or is_dump(after):
        lines, found_in_text, remarks = compare_dumps(before, after)
        return RestartComparison(
            before=before, after=after, compared=tuple(lines), findings=tuple(found_in_text), notes=tuple(remarks)
        )
    findings: dict[tuple[str, str, str], RestartFinding] = {}
    compared, notes, restored = [], list[str](), True
    for one, two in pairs(before, after):
        a, b = read_snapshot(one.path, one.moment), read_snapshot(two.path, two.moment)
        known = bool(findings)
        for field, value in a.shape.items():
            rule = f"{a.name} has {value}: two models cannot be compared; these are two different runs"
            require(b.shape.get(field) == value, f"B {field}", b.shape.get(field), rule)
        compared.append(f"{a.name} ({a.moment}) with {b.name} ({b.moment}), {len(b.tensors)} tensors")
        notes += [*a.notes, *b.notes, *_notes(a, b)]
        same = a.iteration == b.iteration
        if apart := two_runs(a, b, (one.path, two.path), (before, after)):
            findings["run", "", ""] = apart
            restored = same = False
        moved = changed(a, b) if same else []
        other = [*_generators(a, b), *_data(a, b), *_optimizer(a, b)] if same else []
        if b.moment == SAVED and len(moved) > 1 and len(moved) == sum(f.kind == "not-restored" for f in moved):
            rest = f"{b.name} differs from {a.name} in {len(moved)} tensors, as the findings of the restart imply"
            notes += [rest] if known else []
            moved = [] if known else [_diverged(a, moved)]
        moved = masters(a, b, moved) or moved
        restored = restored and not (b.moment == LOADED and [*moved, *_generators(a, b)])
        for finding in (*within_each(a, b), *moved, *other):
            findings.setdefault((finding.kind, finding.tensor, finding.where), finding)
    named = any(f.kind not in IMPLIED or f.tensor for f in findings.values())
    for cause in _after_load(before, after) if restored and not named else ():
        implied = [key for key, finding in findings.items() if finding.kind in IMPLIED and not finding.tensor]
        notes += [
            f"implied by the {cause.kind} of the step after the load: {findings.pop(key).what}" for key in implied
        ]
        findings[cause.kind, "", ""] = cause
    found, unique = tuple(findings.values()), tuple(dict.fromkeys(notes))
    return RestartComparison(before=before, after=after, compared=tuple(compared), findings=found, notes=unique)


def _after_load(before: Path, after: Path) -> list[RestartFinding]:
    """What differs in the step after a load, where `before` saved at the load's iteration and at the next, and `after`
    at the next."""
    saved = {m.iteration: m for m in records("A", before) if m.moment == SAVED}
    others = records("B", after)
    for load in (m.iteration for m in others if m.moment == LOADED):
        mine = [m for m in others if m.moment == SAVED and m.iteration == load + 1]
        if mine and {load, load + 1} <= {*saved} and mine[0].path != saved[load + 1].path:
            chosen = (saved[load], saved[load + 1], mine[0], saved.get(load - 1))
            start, usual, other, earlier = (read_snapshot(m.path, m.moment) if m else None for m in chosen)
            assert start and usual and other
            return first_step(Step(start=start, usual=usual, other=other, before=earlier))
    return []


def pairs(before: Path, after: Path) -> list[tuple[Record, Record]]:
    """The states to compare: each that `after` loaded or saved, with what `before` saved after the same iteration.

    Where they have no iteration in common, the newest of both.
    """
    a, b = records("A", before), records("B", after)
    saved = {m.iteration: m for m in a if m.moment == LOADED} | {m.iteration: m for m in a if m.moment == SAVED}
    found = [(saved[m.iteration], m) for m in b if m.iteration in saved and saved[m.iteration].path != m.path]
    return found or [(next((m for m in a[::-1] if m.moment == SAVED), a[-1]), b[-1])]


def records(field: str, folder: Path) -> list[Record]:
    """The states in `folder` (a run, its checkpoints, one checkpoint, or fingerprints), by iteration.

    Raises ValueError that begins with `field` where there is none.
    """
    require_folder(field, folder)
    saved = checkpoints.found_in(folder)
    found = [Record(path=path, moment=SAVED, iteration=_manifest_iteration(path)) for path in saved]
    loads = [folder] if not saved and list(folder.glob(PRINTS)) else sorted((folder / FOLDER).glob("load_*"))
    for path in loads:
        for file in sorted(path.glob(PRINTS))[:1]:
            moment = SAVED if path.name.startswith("save") else LOADED
            with whole_print(file):
                iteration = int(read_json(file, "fingerprint")["iteration"])
                found.append(Record(path=path, moment=moment, iteration=iteration))
    rule = "holds no complete checkpoint and no fingerprints (a run folder, or one of its checkpoints, is wanted)"
    require(bool(found), field, folder, rule)
    return sorted(found, key=lambda record: record.iteration)


def _manifest_iteration(checkpoint: Path) -> int:
    try:
        return int(checkpoints.read_manifest(checkpoint)["iteration"])
    except ValueError as error:
        raise ValueError(f"checkpoint={checkpoint}: {error}") from None


def within_each(a: Snapshot, b: Snapshot) -> list[RestartFinding]:
    """What is wrong inside each of two snapshots; what is wrong in both is one finding."""
    found: dict[tuple[str, str], tuple[RestartFinding, list[str]]] = {}
    for snapshot in (a, b):
        rules = (wrong_decay, unclipped, differing_replicas, stale_copies)
        for finding in (finding for rule in rules for finding in rule(snapshot)):
            found.setdefault((finding.kind, finding.tensor), (finding, []))[1].append(snapshot.name)
    return [replace(finding, what=f"{finding.what} (in {' and '.join(names)})") for finding, names in found.values()]


def _diverged(a: Snapshot, moved: list[RestartFinding]) -> RestartFinding:
    """One finding for a run that diverged from the one it continues, and so differs in all tensors."""
    worst = max(moved, key=lambda finding: finding.size or 0)
    what = f"{len(moved)} tensors differ between the runs at iteration {a.iteration}; most of all {worst.tensor}, whose"
    return replace(worst, tensor="", ranks=(), what=f"{what} {worst.what}")


def _notes(a: Snapshot, b: Snapshot) -> Iterator[str]:
    if a.iteration != b.iteration:
        yield f"{a.name} is after iteration {a.iteration}, {b.name} after {b.iteration}: each is checked by itself"
    elif a.layout != b.layout:
        rest = "tensors that are cut differently are compared as wholes, random number generators start again"
        yield f"{a.name} and {b.name} have different layouts {list(a.layout)} and {list(b.layout)}: {rest}"


def _generators(a: Snapshot, b: Snapshot) -> Iterator[RestartFinding]:
    """Random number generators, per rank; not compared between layouts."""
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
        yield RestartFinding(kind="generators", ranks=tuple(ranks), what=what)


def _data(a: Snapshot, b: Snapshot) -> Iterator[RestartFinding]:
    if a.consumed != b.consumed:
        what = f"{b.consumed} samples are counted as consumed, {a.consumed} were"
        yield RestartFinding(kind="data", what=what, size=abs(b.consumed - a.consumed))
        return
    if a.layout == b.layout:
        before = {r.rank: r.samples for r in a.ranks}
        odd = [r for r in b.ranks if None not in (r.samples, before.get(r.rank)) and r.samples != before[r.rank]]
    else:
        odd = list(b.ranks) if None not in (a.samples, b.samples) and a.samples != b.samples else []
    if odd:
        what = f"the next iteration, after {b.consumed} samples, gets other samples than without the restart"
        yield RestartFinding(kind="data", ranks=tuple(odd) if len(odd) < len(b.ranks) else (), what=what)


def _optimizer(a: Snapshot, b: Snapshot) -> Iterator[RestartFinding]:
    """Adam's step, the loss scale and its counters, the next learning rate, and the optimizer's settings."""
    for name, value in a.scalars.items():
        if name in b.scalars and b.scalars[name] != value:
            what = f"{name} is {b.scalars[name]:g}, it was {value:g}"
            yield RestartFinding(kind="optimizer", what=what, size=abs(b.scalars[name] - value))
    if a.next_lr is not None and b.next_lr is not None and abs(a.next_lr - b.next_lr) > 1e-9 * abs(a.next_lr):
        what = f"the next learning rate is {b.next_lr:.6g}, it would have been {a.next_lr:.6g}"
        size = abs(b.next_lr / (a.next_lr or 1) - 1)
        yield RestartFinding(kind="optimizer", what=what, size=size)
    for name in ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "z_loss"):
        old, new = a.optimizer.get(name), b.optimizer.get(name)
        if old is not None and new is not None and old != new:
            yield RestartFinding(kind="optimizer", what=f"{name} is {new:g}, it was {old:g}")
