"""Suspects of a hang: who waits for whom, and the ranks that others wait for and that wait for
none, or elsewhere.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trilane.workspace.rank_grid import Grid
from trilane_diagnose.evidence import Evidence
from trilane_diagnose.flight_recorder import Call
from trilane_diagnose.waits import HARD, NO_EVIDENCE, OTHER, Conditions

OPEN = "cannot be determined"  # in each reason that leaves open whether the rank is at fault
WHICH = f"; which of them is wrong {OPEN}"
Edges = dict[int, set[int]]  # for each waiting rank, those that it waits for


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """The reason for each suspect rank, strongest evidence first, who waits for whom, and over
    which group axis.
    """

    reasons: dict[int, str]
    edges: Edges
    axes: dict[int, str]


def find_suspects(evidence: Evidence, found: Conditions) -> Suspects:
    """The suspects of a hang.

    Suspect are ranks that are gone, stopped or locked; ranks without a dump where most have
    one; and ranks that do something else while members of their groups wait. Where all wait: in the
    smallest cycle of the wait graph, the ranks that are behind, or the fewest in another
    collective.
    """
    axes = axes_of(evidence.grid, found)
    edges = wait_edges(evidence, found, axes)
    hard = [r for r, c in found.items() if c.kind in HARD]
    if evidence.earlier and not hard and all(found[r].moves for r in evidence.dumps):
        return Suspects(reasons={}, edges=edges, axes=axes)
    silent = [r for r, c in found.items() if c.kind == "silent"]
    held = _busy(found, edges)
    proven = [r for r in (*hard, *held) if found[r].on_host or found[r].kind in HARD[:2]]
    if proven and set(edges) <= reaching(edges, proven):
        silent = []
    at_line = f"; whether it computes or waits at this line {OPEN} from stacks"
    reasons = {
        r: found[r].text + at_line * (r in held and not found[r].on_host)
        for r in (*hard, *held, *silent)
    }
    reasons |= {r: _recorded_reason(evidence, found, edges, r) for r in held if not found[r].frames}
    if 2 * sum(c.kind == "gone" for c in found.values()) > len(found):
        reasons = {r: f"{text}; which rank ended first {OPEN}" for r, text in reasons.items()}
    reasons = reasons or _mismatch(evidence, found, edges)
    waiting = [c.wait is not None for c in found.values() if c.frames]
    if not (hard or silent or evidence.earlier) and 2 * sum(waiting) < len(waiting):
        reasons = {
            r: f"{text}; most do not wait: whether any hangs {OPEN}" for r, text in reasons.items()
        }
    # A rank without a dump may not have been dumped.
    ranks = sorted(
        reasons,
        key=lambda r: (found[r].kind == "silent", found[r].kind not in HARD, -held.get(r, 0), r),
    )
    return Suspects(reasons={r: reasons[r] for r in ranks}, edges=edges, axes=axes)


def _busy(found: Conditions, edges: Edges) -> dict[int, int]:
    """Ranks outside communication that others wait for, with how many they hold up."""
    waited = set().union(*edges.values())
    held = {
        r: len(reaching(edges, {r})) for r in waited if found[r].kind == "busy" and not edges.get(r)
    }
    # A rank that is known to work on the host is more suspect than those that may wait for their
    # GPUs, as for it.
    sure = reaching(edges, {r for r in held if found[r].on_host})
    return {
        r: n
        for r, n in held.items()
        if found[r].on_host or any(r in edges[w] and w not in sure for w in edges)
    }


def _mismatch(evidence: Evidence, found: Conditions, edges: Edges) -> dict[int, str]:
    """Suspects among ranks that all wait: in the smallest cycles of the graph, those that differ."""
    inside = {r: edges.get(r, set()) for r in {*edges}.union(*edges.values())}
    reasons, waited = dict[int, str](), set().union(*inside.values())
    for cycle in final_components(inside):
        if (len(cycle) > 1 or cycle <= waited) and not any(
            found[r].kind in NO_EVIDENCE for r in cycle
        ):
            reasons |= _odd_ones(evidence, found, edges, cycle)
    # Where one is named in its cycle, others may wait in theirs for what it left out.
    return {r: text for r, text in reasons.items() if OPEN not in text} or reasons


def _odd_ones(
    evidence: Evidence, found: Conditions, edges: Edges, cycle: set[int]
) -> dict[int, str]:
    """Of ranks that wait for each other, those that differ."""
    steps = {r: evidence.grid[r].progress for r in cycle}
    counts = Counter(p.progress for p in evidence.grid.places if p.step >= 0)
    usual = max(counts, key=counts.__getitem__, default=-1)
    apart = [r for r in cycle if steps[r] >= 0 and steps[r] != usual]
    if 0 < len(apart) < len(cycle) or (apart and len(apart) * 2 < len(evidence.grid.ranks)):
        return {r: f"is in iteration {steps[r]} while most are in {usual}" for r in sorted(apart)}
    calls = {
        r: call
        for r in cycle
        if (rec := evidence.recordings.get(r)) and (call := rec.waiting) and not call.p2p
    }
    kinds = {r: call.kind for r, call in calls.items()}
    if len(calls) == len(cycle) and len({c.number for c in calls.values()}) == 1 < len(
        {*kinds.values()}
    ):
        few = _fewest(kinds)
        return {r: f"entered {calls[r]}, others another{WHICH * (not few)}" for r in few or calls}
    waits = {r: w for r in cycle if (w := found[r].wait) is not None}
    if any(wait.is_blind for wait in waits.values()):
        return {}
    if len(cycle) == 1:
        # Its whole group is there by its stack, and their operation does not end.
        there = not evidence.recordings and not any(c.kind in NO_EVIDENCE for c in found.values())
        is_there = (waits and there) or (min(cycle) in calls and not edges.get(min(cycle)))
        return {} if is_there else {r: _recorded_reason(evidence, found, edges, r) for r in cycle}
    # The rarest line; where all are at one, those that came there differently. Different layers
    # call the same line: ranks of one group in it are no rarer for being in two layers.
    few = _fewest({r: (w.op, w.site.key) for r, w in waits.items()}) or _fewest(
        {r: w.call for r, w in waits.items()}
    )
    # Sends and receives are rare by nature.
    few = [r for r in few if not waits[r].p2p] or few
    few = few if 3 * len(few) <= len(cycle) else []
    which = "" if few and evidence.grid.known else WHICH
    return {r: f"{waits[r]}, others in another{which}" for r in sorted(few or cycle) if r in waits}


def _recorded_reason(evidence: Evidence, found: Conditions, edges: Edges, rank: int) -> str:
    """The reason for a rank that others wait for and that is seen to wait for none."""
    for waiter in (
        w for w, targets in edges.items() if rank in targets and w in evidence.recordings
    ):
        if (call := evidence.recordings[waiter].waiting) is not None:
            own = evidence.recordings.get(rank)
            lost = own is not None and not own.knows(call.group)
            return f"others wait for it in {call}" + f"; whether it came {OPEN}" * lost
    return f"{found[rank].text}, others wait for it in another collective"


def _fewest(kinds: Mapping[int, tuple[object, ...]]) -> list[int]:
    """The ranks of the rarest kind; none where all kinds are equally frequent."""
    counts = Counter(kinds.values())
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    return [r for r, kind in kinds.items() if counts[kind] == least] if least < most else []


def axes_of(grid: Grid, found: Conditions) -> dict[int, str]:
    """The group axis of each waiting rank: by names in its stack, else by which ranks are absent.

    Taken are the groups with the fewest, but at least one, members absent from that line; among
    equals those whose absent members do not wait themselves, then the largest.
    """
    sites, axes = defaultdict[object, list[int]](list), dict[int, str]()
    for rank, wait in ((r, c.wait) for r, c in found.items() if c.wait is not None):
        # A group of one does not wait: then the names mislead, or the topology is another.
        if wait.axis == OTHER or (wait.axis and len(grid.group(wait.axis, rank)) > 1):
            axes[rank] = wait.axis
        else:
            sites[wait.call].append(rank)
    dumped = {r for r, c in found.items() if c.kind != "unknown"}
    for ranks in sites.values():
        costs = {"world": (len(found), 0)}
        for axis in ("world", "model", "stage", "pp-dp", "dp", "pp", "tp"):
            if absent := {m for r in ranks for m in grid.group(axis, r)} & dumped - {*ranks}:
                costs[axis] = len(absent), sum(found[m].wait is not None for m in absent)
        axes |= dict.fromkeys(ranks, min(costs, key=costs.__getitem__))
    return axes


def wait_edges(evidence: Evidence, found: Conditions, axes: dict[int, str]) -> Edges:
    """For each waiting rank, the members of its group that are not in the same collective."""
    recorded = _recorded_edges(evidence, found)
    known = {m for m, c in found.items() if c.kind != "unknown"}
    edges: Edges = {}
    for rank, wait in ((r, c.wait) for r, c in found.items()):
        if rank in recorded:
            edges[rank] = recorded[rank]
        elif (
            wait is not None and axes[rank] == OTHER
        ):  # any rank that waits for none may be a member that has not come
            edges[rank] = {m for m in known if found[m].wait is None}
        elif wait is not None:
            members = evidence.grid.group(axes[rank], rank) & known - {rank}
            edges[rank] = {m for m in members if not _is_with(evidence.grid, found, rank, m)}
    return edges


def _is_with(grid: Grid, found: Conditions, rank: int, member: int) -> bool:
    """Whether both are in one collective: one operation, called by the same lines, in one
    iteration.
    """
    one, other, steps = (
        found[rank].wait,
        found[member].wait,
        {grid[rank].progress, grid[member].progress},
    )
    if one is None or other is None or one.axis in ("next", "previous") or one.call != other.call:
        return False
    return one.op == other.op and (len(steps) == 1 or min(steps) < 0)


def _recorded_edges(evidence: Evidence, found: Conditions) -> Edges:
    """The edges to the members that never entered the recorded call, or entered another."""
    edges: Edges = {}
    for rank, recording in evidence.recordings.items():
        if (call := recording.waiting) is None or found[rank].kind in HARD:
            continue
        group = {*(call.ranks or evidence.grid.ranks)} & found.keys() - {rank}
        batch = (c.peer for c in recording.calls if not c.done and c.number == call.number)
        peers = {peer for peer in batch if peer is not None}
        absent = {m: _is_absent(evidence, found, call, m) for m in group}
        # Where all ranks of which it is known are there, it is one of the others, or none.
        late = {m for m in group if absent[m]} or {m for m in group if absent[m] is None}
        edges[rank] = peers & found.keys() if peers else late
    return edges


def _is_absent(evidence: Evidence, found: Conditions, call: Call, member: int) -> bool | None:
    """Whether a member never entered the call, or another one in its place; None where nothing
    shows it.
    """
    recording, kind = evidence.recordings.get(member), found[member].kind
    if recording is None:
        return None if kind in NO_EVIDENCE else kind in (*HARD, "silent", "busy")
    if not recording.knows(call.group):
        return None
    made = recording.collectives.get((call.group, call.sequence))
    late = not call.p2p and recording.entered.get(call.group, 0) < call.sequence
    return late or (made is not None and made.kind != call.kind)


def reaching(edges: Edges, targets: Iterable[int]) -> set[int]:
    """The ranks from which a path of edges leads to one of the targets."""
    back = defaultdict[int, set[int]](set)
    for rank, others in edges.items():
        for other in others:
            back[other].add(rank)
    return _reached(back, targets)


def _reached(edges: Edges, starts: Iterable[int]) -> set[int]:
    found, queue = set[int](), list(starts)
    while queue:
        fresh = edges.get(queue.pop(), set()) - found
        found |= fresh
        queue += fresh
    return found


def final_components(edges: Edges) -> list[set[int]]:
    """The strongly connected components of a graph that no edge leaves."""
    left, found = set(edges), []
    while left:
        start = min(left)
        while beyond := _reached(edges, {start}) - reaching(edges, {start}) - {start}:
            start = min(beyond)
        found.append({start, *_reached(edges, {start})})
        left -= found[-1] | reaching(edges, found[-1])
    return found
