"""Suspects of a hang: ranks that others wait for and that wait for none, or that wait in another collective."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trilane.diagnose.hang.condition import HARD, NO_EVIDENCE, Conditions, Wait, majority_step
from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.flight_recorder import Call
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.wait_graph import Edges, axes_of, final_components, peer_of, reaching, wait_edges

OPEN = "cannot be determined"  # in each reason that leaves open whether the rank is at fault
MAY_WAIT = f"; whether it computes at this line, or waits there (for its GPU, a lock, a file), {OPEN} from stacks"
BETWEEN = f"; most ranks do not wait: whether the job is only between two steps {OPEN} from one dump"
RING = f": whether it did, which its ring has lost, {OPEN}"
WHICH = f"; which of them is wrong {OPEN}"
CANNOT = f"{WHICH} from stacks"


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """The suspect ranks, strongest evidence first, with the reason for each; `edges` is the wait graph, `axes` the
    group axis of each waiting rank's collective where known; `complete`: every member of every group is in its call;
    `moves`: every rank has another stack than in an earlier dump."""

    ranks: tuple[int, ...]
    reasons: dict[int, str]
    edges: Edges = field(repr=False)
    axes: dict[int, str] = field(repr=False)
    complete: bool = False
    moves: bool = False

    @property
    def is_certain(self) -> bool:
        """Whether no reason leaves the question open."""
        return not any(OPEN in reason for reason in self.reasons.values())


def find_suspects(evidence: Evidence, found: Conditions) -> Suspects:
    """The suspects of a hang.

    Suspect are ranks that are gone, stopped, crashed or locked; ranks without a dump where most have one; and ranks
    that do something else while members of their groups wait. Where all wait, a group whose members are in different
    collectives is a mismatch: in the smallest cycle of the wait graph, the ranks that are behind, or the fewest.
    """
    axes = axes_of(evidence.grid, found)
    edges = wait_edges(evidence, found, axes)
    waited = Counter(r for targets in edges.values() for r in targets)
    hard = [r for r, c in found.items() if c.kind in HARD]
    if evidence.earlier and not hard and all(found[r].moves for r in evidence.dumps):
        return Suspects(ranks=(), reasons={}, edges=edges, axes=axes, moves=True)
    silent = [r for r, c in found.items() if c.kind == "silent"]
    # A recording alone shows that a rank is outside any collective, not that it should be in one.
    idle = [r for r, c in found.items() if c.kind == "busy" and not edges.get(r) and (c.frames or waited[r])]
    held = {r: len(reaching(edges, {r})) for r in idle if waited[r]}
    # A rank that is known to work on the host is more suspect than those that may wait for their GPUs, as for it.
    sure = reaching(edges, {r for r in held if found[r].on_host})
    held = {r: n for r, n in held.items() if found[r].on_host or any(r in edges[w] and w not in sure for w in edges)}
    idle = [r for r in idle if found[r].on_host]
    # Those that hold up at least half as many as the one that holds up most.
    busy = [r for r, count in held.items() if 2 * count >= max(held.values())] if held else idle
    reached = reaching(edges, {*hard, *silent})
    # A busy rank is suspect only for those that do not wait for a rank that is gone; a lock may be held for an instant.
    if any(found[r].kind != "locked" for r in hard):
        busy = [r for r in busy if any(r in edges[w] and w not in reached for w in edges)]
    proven = [r for r in (*hard, *busy) if found[r].on_host or found[r].kind in ("gone", "crashed", "stopped")]
    if proven and set(edges) <= reaching(edges, proven):
        silent = []
    reasons = {r: found[r].text + MAY_WAIT * (r in busy and not found[r].on_host) for r in (*hard, *busy, *silent)}
    reasons |= {r: _only_waited_for(evidence, found, edges, r) for r in busy if not found[r].frames}
    gone = [r for r in hard if found[r].kind == "gone"]
    if 2 * len(gone) > len(found):
        reasons |= {r: f"{found[r].text}; which rank was the first to end {OPEN} from dumps" for r in gone}
    left = set(edges) - reaching(edges, set(reasons))
    reasons = _mismatch(evidence, found, edges, left, alone=not reasons) | reasons
    stacks = [c for c in found.values() if c.frames]
    waiting = [c for c in stacks if c.wait is not None]
    if not (hard or silent or evidence.earlier) and 2 * len(waiting) < len(stacks):
        reasons = {r: text + BETWEEN for r, text in reasons.items()}
    strength = dict.fromkeys(HARD, 0) | dict.fromkeys(("locked", "busy", "soft", "waiting"), 1)
    held = {r: len(reaching(edges, {r})) for r in busy}
    ranks = sorted(reasons, key=lambda r: (strength.get(found[r].kind, 2), RING in reasons[r], -held.get(r, 0), r))
    complete = not ranks and bool(edges) and not any(edges.values())
    complete = complete and not any(c.kind in NO_EVIDENCE for c in found.values())
    return Suspects(ranks=tuple(ranks), reasons=reasons, edges=edges, axes=axes, complete=complete)


def _mismatch(evidence: Evidence, found: Conditions, edges: Edges, left: set[int], *, alone: bool) -> dict[int, str]:
    """Suspects among ranks that all wait, with reasons; unless `alone` (no other suspects), only cycles count."""
    seen = left | {t for r in left for t in edges[r]}
    inside = {r: edges.get(r, set()) & seen for r in seen}
    waited = set().union(*inside.values())
    reasons = _strays(evidence, found, inside) or _ahead(evidence, inside) if alone else {}
    for cycle in [] if reasons else final_components(inside):
        counts = len(cycle) > 1 or (alone and cycle <= waited)
        if counts and not any(found[r].kind in NO_EVIDENCE for r in cycle):
            reasons |= _odd_ones(evidence, found, edges, cycle)
    return reasons


def _strays(evidence: Evidence, found: Conditions, inside: Edges) -> dict[int, str]:
    """Suspects, with reasons, where the groups at the end of the graph have all come together: none of these is late.

    A rank that left the order of collectives is in the rarest one, waits there for ranks that have not reached it, and
    keeps its own group waiting. Where it receives from a neighbour that has gone on, either may be wrong.
    """
    waits = {r: w for r in inside if (w := found[r].wait) is not None and r not in evidence.recordings}
    waits = {r: w for r, w in waits.items() if not w.is_blind}
    ends = final_components(inside)
    if len(waits) < len(inside) or any(len(end) > 1 or inside[min(end)] for end in ends):
        return {}
    few = _rare(waits)
    waited = set().union(*inside.values())
    stray = {r for r in few if inside[r] and r in waited}
    sources = {s for r in stray if waits[r].p2p for s in inside[r]} - stray
    text = "while others wait for it in another collective" + CANNOT * bool(sources)
    return {r: f"in {waits[r]}, {text}" for r in sorted(stray | sources)}


def _ahead(evidence: Evidence, inside: Edges) -> dict[int, str]:
    """Suspects, with reasons, among ranks whose recorders all wait in one group: a minority in a later call of it, for
    which the others, still in an earlier one, would count as late."""
    calls = {r: rec.waiting for r in inside if (rec := evidence.recordings.get(r)) and rec.waiting is not None}
    if len(calls) < len(inside) or len({c.group for c in calls.values()}) != 1:
        return {}
    # a root may have sent its part, or received all, and gone on
    if any(c.is_rooted for c in calls.values()):
        return {}
    (usual, most), *_ = Counter(c.sequence for c in calls.values()).most_common(1)
    later = {r: c for r, c in calls.items() if c.sequence > usual}
    if 2 * most <= len(calls) or len(later) + most < len(calls):
        return {}
    text = "of group {}, while most are still in number {}"
    return {r: f"in {c.op} number {c.sequence} {text.format(c.desc or c.group, usual)}" for r, c in later.items()}


def _odd_ones(evidence: Evidence, found: Conditions, edges: Edges, cycle: set[int]) -> dict[int, str]:
    """Of ranks that wait for each other, those that differ, with reasons."""
    steps = {r: evidence.grid[r].progress for r in cycle}
    usual = majority_step(evidence)
    apart = [r for r in cycle if steps[r] >= 0 and steps[r] != usual]
    if 0 < len(apart) < len(cycle) or (apart and len(apart) * 2 < len(evidence.grid.ranks)):
        return {r: f"is in iteration {steps[r]} while most are in {usual}" for r in sorted(apart)}
    calls = {r: rec.waiting for r in cycle if (rec := evidence.recordings.get(r)) is not None}
    if len(calls) == len(cycle):
        made = {r: c for r, c in calls.items() if c is not None and not c.p2p}
        if len(made) == len(cycle) and len({(c.number, c.desc) for c in made.values()}) == 1:
            few = _fewest({r: c.kind for r, c in made.items()})
            other = "where the others of its group entered another"
            if not few and len({c.kind for c in made.values()}) > 1:
                few, (call, *_) = [*made], made.values()
                other = f"as number {call.sequence} of group {call.desc or call.group}, and others another{WHICH}"
            if few:
                return {r: f"entered {_told(made[r], [*made.values()])} {other}" for r in few}
    waits = {r: c.wait for r in cycle if (c := found[r]).wait is not None}
    if any(wait.is_blind for wait in waits.values()):
        return _left_behind(found, waits)
    if len(cycle) == 1:
        # By its stack such a rank is where its whole group is: their operation does not end, and none of them is late.
        recording = evidence.recordings.get(min(cycle))
        is_there = recording is not None and recording.waiting is not None and not edges.get(min(cycle))
        if is_there or (waits and not evidence.recordings and not any(c.kind in NO_EVIDENCE for c in found.values())):
            return {}
        return {r: _only_waited_for(evidence, found, edges, r) for r in cycle}
    few = _rare(waits)
    # Sends and receives are rare by nature: a rank that waits for all is more suspect than one that waits for one.
    few = [r for r in few if not waits[r].p2p] or few
    few = few if 3 * len(few) <= len(cycle) else []
    text = "while others of its group wait in another collective" + CANNOT * (not few)
    if not evidence.grid.known:
        text = f"while others wait in another collective{CANNOT} without tp, pp and dp"
    # The innermost line of a "soft" wait communicates by its name alone.
    return {
        r: f"at {waits[r].site}{MAY_WAIT}" if found[r].kind == "soft" else f"in {waits[r]}, {text}"
        for r in sorted(few or cycle)
        if r in waits
    }


def _told(call: Call, among: Sequence[Call]) -> str:
    """A call in words, with what differs among several."""
    types = f" ({call.types})" if len({c.types for c in among}) > 1 else ""
    outputs = f" into {call.outputs}" if len({c.outputs for c in among}) > 1 == len({c.sizes for c in among}) else ""
    return f"{call.op} of {call.sizes}{types}{outputs}"


def _left_behind(found: Conditions, waits: Mapping[int, Wait]) -> dict[int, str]:
    """Suspects, with reasons, where some ranks wait for what their stacks do not show: the few in a collective that all
    of these have left, since they are at a later line of a function that called it; else none."""
    blind = [r for r, wait in waits.items() if wait.is_blind]
    few = [r for r in waits if r not in blind]
    before = all(_is_before(found[r].frames, found[b].frames) for r in few for b in blind)
    if not before or any(waits[b].op == "device" for b in blind) or not 0 < 2 * len(few) < len(waits):
        return {}
    text = f"while most are at a later line, {waits[blind[0]].site}"
    return {r: f"in {waits[r]}, {text}" for r in sorted(few)}


def _is_before(frames: Sequence[Frame], others: Sequence[Frame]) -> bool:
    """Whether a stack is in an earlier line of the function in which it and another one part."""
    for one, other in zip(reversed(frames), reversed(others), strict=False):
        if one.key != other.key:
            return one.key[:2] == other.key[:2] and one.line < other.line
    return False


def _only_waited_for(evidence: Evidence, found: Conditions, edges: Edges, rank: int) -> str:
    """The reason for a rank that others wait for, and that waits for none that can be seen."""
    for waiter, targets in edges.items():
        recording = evidence.recordings.get(waiter)
        call = recording.waiting if recording and rank in targets else None
        if call is not None:
            name = f"number {call.sequence} of group {call.desc or call.group}"
            batch = (
                [c.op for c in recording.calls if c.number == call.number and peer_of(c) == rank] if recording else []
            )
            other = evidence.recordings.get(rank)
            if other is not None and not other.knows(call.group):
                return f"may not have entered {call.op} {name}{RING}"
            return f"is waited for in {batch[0]} {name}" if batch else f"never entered {call.op} {name}, as others did"
    wait = found[rank].wait
    where = f"in {wait}" if wait else found[rank].text
    return f"{where}, while others wait for it in another collective"


def _rare(waits: Mapping[int, Wait]) -> list[int]:
    """The ranks in the rarest operation of a line; only where all are at one line, those that came there differently.

    Different layers call the same line: ranks of one group in it are no rarer for being in two layers.
    """
    return _fewest({r: (w.op, w.site.key) for r, w in waits.items()}) or _fewest({r: w.call for r, w in waits.items()})


def _fewest(kinds: Mapping[int, tuple[object, ...]]) -> list[int]:
    """The ranks of the rarest kind; none where all kinds are equally frequent."""
    counts = Counter(kinds.values())
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    return [r for r, kind in kinds.items() if counts[kind] == least] if least < most else []
