"""Whether two states are of two different runs, of which neither continues the other."""

from pathlib import Path
from typing import Any

from trilane.config.plan import read_plan
from trilane.diagnose.restart.rules import RestartFinding
from trilane.diagnose.restart.snapshot import Snapshot
from trilane.workspace import checkpoints
from trilane.workspace.continuation import identity
from trilane.workspace.fingerprints import must_decay

# Of the norm of every matrix: of two that have nothing in common it is 1.4, estimated within a quarter.
UNRELATED = 0.5


def two_runs(a: Snapshot, b: Snapshot, states: tuple[Path, Path], given: tuple[Path, Path]) -> RestartFinding | None:
    """A finding where seed, data or shape differ by what the two `states` record of their runs; or where the folder
    that was given for B does not say that it starts from that of A, and matrices have nothing in common.
    """
    held, other = map(_recorded, states)
    different = [n for n in ("shape", "seed", "data") if n in held and n in other and held[n] != other[n]]
    if different:
        words = [f"{n}: {_changes(held[n], other[n])}" for n in different]
        return RestartFinding(kind="run", what=f"{b.name} does not continue {a.name}; {'; '.join(words)}")
    if a.iteration != b.iteration or _follows(*given) or not _unrelated(a, b):
        return None
    what = f"no matrix of {b.name} has anything in common with that of {a.name}: another seed, or other data"
    return RestartFinding(kind="run", what=what)


def _recorded(path: Path) -> dict[str, Any]:
    """What a state records of its run: a checkpoint in its manifest, fingerprints by the plan of their run folder."""
    try:
        if (path / checkpoints.MANIFEST).exists():
            return dict(checkpoints.read_manifest(path).get("identity", {}))
        plan = path.parent.parent / "plan.json"
        return identity(read_plan(plan)) if plan.is_file() else {}
    except (ValueError, TypeError):
        return {}


def _changes(held: Any, other: Any) -> str:
    if not (isinstance(held, dict) and isinstance(other, dict)):
        return f"{held} and {other}"
    return ", ".join(f"{n} {v} and {other[n]}" for n, v in held.items() if n in other and other[n] != v)


def _follows(before: Path, after: Path) -> bool:
    """Whether both are one folder, or the run of `after` was to start from a checkpoint of `before` (run.load)."""
    before, after = before.resolve(), after.resolve()
    plan = next((p / "plan.json" for p in (after, *after.parents[:2]) if (p / "plan.json").is_file()), None)
    try:
        load = read_plan(plan).run.load if plan else ""
    except ValueError:
        load = ""
    source = Path(load).resolve()
    return before == after or bool(load and (source == before or source in before.parents or before in source.parents))


def _unrelated(a: Snapshot, b: Snapshot) -> bool:
    both = [n for n in a.wholes.keys() & b.wholes.keys() if must_decay(n)]
    pairs = [(a.wholes[n].get("weight"), b.wholes[n].get("weight")) for n in both]
    return len(pairs) > 1 and all(one and other and one.apart(other) > UNRELATED for one, other in pairs)
