"""The wait graph: which rank waits for which, from the collective in its stack or from its Flight Recorder dump."""

import re
from collections import defaultdict
from collections.abc import Iterable

from trilane.diagnose.hang.condition import HARD, NO_EVIDENCE, Conditions
from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.flight_recorder import Call
from trilane.diagnose.hang.wait import OTHER
from trilane.workspace.rank_grid import Grid

Edges = dict[int, set[int]]


def axes_of(grid: Grid, found: Conditions) -> dict[int, str]:
    """The group axis of each waiting rank's collective: by names in its stack, else by which ranks are absent.

    Of all ways to group the ranks, the one is taken with the fewest, but at least one, members absent from that line;
    among equals one whose absent members do not wait themselves, then the one with the largest groups.
    """
    sites: defaultdict[object, list[int]] = defaultdict(list)
    axes: dict[int, str] = {}
    for rank, c in found.items():
        if c.wait is not None:
            if c.wait.axis == OTHER:
                axes[rank] = OTHER
                continue
            # A group of one does not wait: then the names mislead, or the topology is another.
            axes[rank] = c.wait.axis if c.wait.axis and len(grid.group(c.wait.axis, rank)) > 1 else ""
            if not axes[rank]:
                sites[c.wait.call].append(rank)
    known = {r for r, c in found.items() if c.kind != "unknown"}
    for ranks in sites.values():
        here, latest = set(ranks), max(grid[r].progress for r in ranks)
        best: tuple[tuple[int, int, int], str] = ((2, 0, 0), "world")
        for axis in ("world", "model", "stage", "pp-dp", "dp", "pp", "tp"):
            absent = {m for r in ranks for m in grid.group(axis, r)} & known - here
            # A rank that is an iteration ahead has passed this collective already.
            late = {m for m in absent if grid[m].progress <= latest}
            if absent:
                waiting = sum(found[m].wait is not None for m in absent)
                best = min(best, ((0 if late else 1, len(absent), waiting), axis), key=lambda b: b[0])
        axes |= dict.fromkeys(ranks, best[1])
    return axes


def wait_edges(evidence: Evidence, found: Conditions, axes: dict[int, str]) -> Edges:
    """For each waiting rank, the members of its group that are not in the same collective."""
    edges = _recorded_edges(evidence, found)
    for rank, c in found.items():
        if rank not in edges and c.wait is not None and c.kind in ("waiting", "soft"):
            if axes[rank] == OTHER:  # any rank that waits for none may be a member that has not come
                edges[rank] = {m for m, other in found.items() if other.wait is None and other.kind != "unknown"}
                continue
            group = evidence.grid.group(axes[rank], rank)
            members = {m for m in group if m != rank and found[m].kind != "unknown"}
            edges[rank] = members - _together(evidence, found, rank, group)
    return {rank: edges[rank] for rank in found if rank in edges}


def _together(evidence: Evidence, found: Conditions, rank: int, group: frozenset[int]) -> set[int]:
    """The members in the same collective: the same operation, called by the same lines, in the same iteration."""
    own, step = found[rank].wait, evidence.grid[rank].progress
    assert own is not None
    if own.axis in ("next", "previous"):
        return set()
    peers = set()
    for member in group:
        wait = found[member].wait
        if found[member].kind in ("waiting", "soft") and wait is not None and wait.call == own.call:
            other = evidence.grid[member].progress
            same_step = min(step, other) < 0 or step == other
            peers |= {member} if same_step and (wait.op == own.op or "wait" in (wait.op, own.op)) else set()
    return peers


def _recorded_edges(evidence: Evidence, found: Conditions) -> Edges:
    """The edges by the Flight Recorder: to the members that never entered the call, or entered another."""
    calls: dict[int, Call] = {r: w for r, rec in evidence.recordings.items() if (w := rec.waiting) is not None}
    entered: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    for rank, recording in evidence.recordings.items():
        for call in recording.calls:
            if not call.p2p:
                entered[call.group, call.sequence].setdefault(rank, call)
    edges: Edges = {}
    for rank, call in calls.items():
        if found[rank].kind in HARD:
            continue
        group = [m for m in (call.ranks or evidence.grid.ranks) if m in found and m != rank]
        there = entered[call.group, call.sequence]
        late = {m for m in group if _never_entered(evidence, found, call, m)}
        other = {m for m in group if m in there and there[m].kind != call.kind}
        batch = [c for c in evidence.recordings[rank].calls if not c.done and c.number == call.number]
        peers = {peer for c in batch if (peer := peer_of(c)) is not None}
        if peers:
            edges[rank] = peers & found.keys()
        else:
            # Where all ranks of which it is known are there, it is one of the others, or none.
            edges[rank] = late | other or {m for m in group if _is_unknown(evidence, found, call, m)}
    return edges


def peer_of(call: Call) -> int | None:
    """The other end of a send or a receive, which names group members by their index in the group."""
    match = re.search(r"recv \d+<-(\d+)|send \d+->(\d+)", call.op)
    if match is None:
        return None
    number = int(match[1] or match[2])
    return sorted(call.ranks)[number] if number < len(call.ranks) else number


def _never_entered(evidence: Evidence, found: Conditions, call: Call, member: int) -> bool:
    """Whether a member never entered the call; False for a member that was not dumped."""
    recording = evidence.recordings.get(member)
    if recording is None:
        return found[member].kind in (*HARD, "silent", "busy")
    return not call.p2p and recording.knows(call.group) and recording.entered.get(call.group, 0) < call.sequence


def _is_unknown(evidence: Evidence, found: Conditions, call: Call, member: int) -> bool:
    """Whether nothing shows that the member entered the call, nor that it did not."""
    recording = evidence.recordings.get(member)
    return found[member].kind in NO_EVIDENCE if recording is None else not recording.knows(call.group)


def reaching(edges: Edges, targets: Iterable[int]) -> set[int]:
    """The ranks from which a path of edges leads to one of the targets."""
    back: defaultdict[int, set[int]] = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            back[other].add(rank)
    return reached(back, targets)


def reached(edges: Edges, starts: Iterable[int]) -> set[int]:
    """The ranks to which a path of edges leads from one of the starts."""
    found: set[int] = set()
    queue = list(starts)
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
        while beyond := reached(edges, {start}) - reaching(edges, {start}) - {start}:
            start = min(beyond)
        component = {start, *reached(edges, {start})}
        found.append(component)
        left -= component | reaching(edges, component)
    return found
