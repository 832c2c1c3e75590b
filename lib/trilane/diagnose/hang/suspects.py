"""Suspects: the ranks that others wait for and that wait for nobody, or that wait in another collective than theirs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from trilane.diagnose.hang.condition import HARD, UNHEARD, Condition, majority_step
from trilane.diagnose.hang.edges import axes_of, edges_of
from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.graph import Edges, components, reaching
from trilane.diagnose.hang.stack import Frame


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The suspects, the strongest first, with the reason for each; `edges` says who waits for whom; `axes` over which
    group each waiting rank's collective goes, as far as could be told."""

    suspects: tuple[int, ...]
    reasons: dict[int, str]
    edges: Edges = field(repr=False)
    axes: dict[int, str] = field(repr=False)
    complete: bool = False


def blame(evidence: Evidence, found: dict[int, Condition]) -> Blame:
    """The suspects of a hang.

    A rank that is gone, stopped, crashed or locked is one; so is one that is silent where most answer; so is one that
    does something else while members of its groups wait. Where all wait, a group whose members stand in different
    collectives is a mismatch: in the smallest ring of ranks that wait for each other, the ones behind, or the fewest.
    """
    axes = axes_of(evidence.grid, found)
    edges = edges_of(evidence, found, axes)
    waited = Counter(r for targets in edges.values() for r in targets)
    hard = [r for r, c in found.items() if c.kind in HARD]
    silent = [r for r, c in found.items() if c.kind == "silent"]
    # A recording alone says of a rank that it is outside any collective, not that it should be in one.
    idle = [r for r, c in found.items() if c.kind == "busy" and not edges.get(r) and (c.frames or waited[r])]
    busy = _waited_for(idle, waited, edges)
    reached = reaching(edges, {*hard, *silent})
    if hard:  # someone at work is to blame only for who waits for nobody that is gone
        busy = [r for r in busy if any(r in edges[w] and w not in reached for w in edges)]
    roots = [*hard, *busy, *silent]
    reasons = {
        r: found[r].text if found[r].frames or r not in busy else _alone(evidence, found, edges, r) for r in roots
    }
    left = set(edges) - reaching(edges, set(roots))
    mismatch = _mismatch(evidence, found, edges, left, alone=not roots)
    reasons |= {r: text for r, text in mismatch.items() if r not in reasons}
    suspects = sorted(reasons, key=lambda r: (_class(found[r]), -len(_into(edges, r)) if r in busy else 0, r))
    complete = not suspects and bool(edges) and not any(c.kind in UNHEARD for c in found.values())
    return Blame(suspects=tuple(suspects), reasons=reasons, edges=edges, axes=axes, complete=complete)


def _class(condition: Condition) -> int:
    return 0 if condition.kind in HARD else 1 if condition.kind in ("busy", "soft", "waiting") else 2


def _waited_for(busy: list[int], waited: Counter[int], edges: Edges) -> list[int]:
    """Those of the ranks at work that hold up others: at least half as many as the one that holds up most."""
    held = {r: len(_into(edges, r)) for r in busy if waited[r]}
    if not held:
        return busy
    return [r for r, count in held.items() if 2 * count >= max(held.values())]


def _into(edges: Edges, target: int) -> set[int]:
    return reaching(edges, {target})


def _mismatch(
    evidence: Evidence, found: dict[int, Condition], edges: Edges, left: set[int], *, alone: bool
) -> dict[int, str]:
    """Suspects among ranks that all wait, with reasons; with other suspects about, only a ring counts."""
    seen = left | {t for r in left for t in edges[r]}
    inside = {r: edges.get(r, set()) & seen for r in seen}
    rings = [ring for ring in components(inside) if not any(inside[r] - ring for r in ring)]
    rings = [r for r in rings if len(r) > 1 or (alone and any(next(iter(r)) in t for t in inside.values()))]
    reasons: dict[int, str] = {}
    for ring in rings:
        if any(found[r].kind in UNHEARD for r in ring):
            continue
        reasons |= _odd(evidence, found, edges, ring)
    return reasons


def _odd(evidence: Evidence, found: dict[int, Condition], edges: Edges, ring: set[int]) -> dict[int, str]:
    """Of a ring of ranks that wait for each other, those that differ."""
    steps = {r: evidence.grid[r].progress for r in ring}
    usual = majority_step(evidence)
    apart = [r for r in ring if steps[r] >= 0 and steps[r] != usual]
    if 0 < len(apart) < len(ring) or (apart and len(apart) * 2 < len(evidence.grid.ranks)):
        return {r: f"has come to iteration {steps[r]} while most are in {usual}" for r in sorted(apart)}
    calls = {r: rec.waiting for r in ring if (rec := evidence.recordings.get(r)) is not None}
    if len(calls) == len(ring):
        kinds = {r: (c.op, c.sizes) if c else ("", "") for r, c in calls.items()}
        few = _fewest({r: kinds[r] for r in ring})
        said = {r: f"entered {kinds[r][0]} of {kinds[r][1]} where the others of its group entered another" for r in few}
        if few:
            return said
    waits = {r: c.wait for r in ring if (c := found[r]).wait is not None}
    sites = {r: (w.op, w.site.key) for r, w in waits.items()}
    if len(ring) == 1:
        return {r: _alone(evidence, found, edges, r) for r in ring}
    few = _fewest(sites)
    # Sends and receives are rare by their nature: who waits for all is more to blame than who waits for a neighbour.
    few = [r for r in few if not waits[r].p2p] or few
    behind = few or _behind({r: found[r].frames for r in ring})
    where = {r: f"in {w.op}, asked for by {w.site}" for r, w in waits.items()}
    text = "while others of its group wait in another collective"
    return {r: f"{where[r]}, {text}" for r in sorted(behind or ring) if r in where}


def _alone(evidence: Evidence, found: dict[int, Condition], edges: Edges, rank: int) -> str:
    """Why a rank is to blame that waits for nobody who can be seen, but is waited for."""
    for waiter, targets in edges.items():
        recording = evidence.recordings.get(waiter)
        call = recording.waiting if recording and rank in targets else None
        if call is not None:
            return f"never entered {call.op} number {call.sequence} of group {call.desc or call.group}, as others did"
    wait = found[rank].wait
    where = f"in {wait.op}, asked for by {wait.site}" if wait else found[rank].text
    return f"{where}, while others wait for it in another collective"


def _fewest(kinds: Mapping[int, tuple[object, ...]]) -> list[int]:
    """Those of the rarest kind; nobody where all are as frequent."""
    counts = Counter(kinds.values())
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    return [r for r, kind in kinds.items() if counts[kind] == least] if least < most else []


def _behind(stacks: dict[int, tuple[Frame, ...]]) -> list[int]:
    """Those that stand at an earlier line of the function in which their ways part; nobody where lines do not tell."""
    outward = {r: list(reversed(frames)) for r, frames in stacks.items()}
    depth = 0
    while all(len(o) > depth for o in outward.values()) and len({o[depth].key for o in outward.values()}) == 1:
        depth += 1
    at = {r: o[depth] for r, o in outward.items() if len(o) > depth}
    if len(at) < len(stacks) or len({(f.function, f.file.rpartition("/")[2]) for f in at.values()}) != 1:
        return []
    first = min(f.line for f in at.values())
    return [r for r, f in at.items() if f.line == first]
