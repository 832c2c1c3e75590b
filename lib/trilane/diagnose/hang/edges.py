"""Who waits for whom: from the collective each rank stands in, or from what its Flight Recorder says."""

import re
from collections import defaultdict

from trilane.diagnose.hang.condition import HARD, UNHEARD, Condition
from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.flight_recorder import Call
from trilane.diagnose.hang.graph import Edges
from trilane.workspace.rank_grid import Grid


def axes_of(grid: Grid, found: dict[int, Condition]) -> dict[int, str]:
    """Over which group each waiting rank's collective goes: told by names in its stack, else by who is not there.

    Of all ways to cut the ranks into groups, the one counts that leaves the fewest members out of those who wait at
    that line, but not none; among equals the one with the largest groups.
    """
    sites: defaultdict[object, list[int]] = defaultdict(list)
    axes: dict[int, str] = {}
    for rank, c in found.items():
        if c.wait is not None:
            axes[rank] = c.wait.axis
            if not c.wait.axis:
                sites[c.wait.site.key].append(rank)
    heard = {r for r, c in found.items() if c.kind != "unknown"}
    for ranks in sites.values():
        here, latest = set(ranks), max(grid[r].progress for r in ranks)
        best: tuple[tuple[int, int], str] = ((2, 0), "world")
        for axis in ("world", "model", "stage", "lane", "dp", "pp", "tp"):
            absent = {m for r in ranks for m in grid.group(axis, r)} & heard - here
            # Who is an iteration ahead has been in this collective already.
            late = {m for m in absent if grid[m].progress <= latest}
            if absent:
                best = min(best, ((0 if late else 1, len(absent)), axis), key=lambda b: b[0])
        axes |= dict.fromkeys(ranks, best[1])
    return axes


def edges_of(evidence: Evidence, found: dict[int, Condition], axes: dict[int, str]) -> Edges:
    """For each rank that waits, the members of its group that are not in the same collective."""
    recorded = _recorded_edges(evidence, found)
    edges: Edges = {}
    for rank, c in found.items():
        if rank in recorded:
            edges[rank] = recorded[rank]
        elif c.wait is not None and c.kind in ("waiting", "soft"):
            group = evidence.grid.group(axes[rank], rank)
            edges[rank] = {m for m in group if m != rank and found[m].kind != "unknown"} - _together(
                evidence, found, rank, group
            )
    return edges


def _together(evidence: Evidence, found: dict[int, Condition], rank: int, group: frozenset[int]) -> set[int]:
    """The members that are in the same collective: asked for by the same line, in the same iteration."""
    own, step = found[rank].wait, evidence.grid[rank].progress
    assert own is not None
    peers = set()
    for member in group:
        wait = found[member].wait
        if found[member].kind in ("waiting", "soft") and wait is not None and wait.site.key == own.site.key:
            other = evidence.grid[member].progress
            same_step = min(step, other) < 0 or step == other
            peers |= {member} if same_step and (wait.op == own.op or "wait" in (wait.op, own.op)) else set()
    return peers if not _is_p2p(found[rank]) else set()


def _is_p2p(condition: Condition) -> bool:
    return condition.wait is not None and condition.wait.axis in ("next", "previous")


def _recorded_edges(evidence: Evidence, found: dict[int, Condition]) -> Edges:
    """Who waits for whom by the Flight Recorder: the members that never entered the call, or entered another."""
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
        late = {m for m in group if _missing(evidence, found, call, m)}
        other = {m for m in group if m in there and (there[m].op, there[m].sizes) != (call.op, call.sizes)}
        batch = [c for c in evidence.recordings[rank].calls if not c.done and c.number == call.number]
        peers = {peer for c in batch if (peer := _peer(c)) is not None}
        if peers:
            edges[rank] = peers & found.keys()
        else:
            late |= other if call.op not in ("gather", "scatter", "all_to_all") else set()
            # Where all that were heard are there, it is one of the others, or nobody.
            edges[rank] = late or {m for m in group if m not in evidence.recordings and found[m].kind in UNHEARD}
    return edges


def _peer(call: Call) -> int | None:
    """The other end of a send or a receive, which names members of the group by their number in it."""
    match = re.search(r"recv \d+<-(\d+)|send \d+->(\d+)", call.op)
    if match is None:
        return None
    number = int(match[1] or match[2])
    return sorted(call.ranks)[number] if number < len(call.ranks) else number


def _missing(evidence: Evidence, found: dict[int, Condition], call: Call, member: int) -> bool:
    """Whether a member never entered the call. Of one that says nothing, as nobody asked it, nothing is concluded."""
    recording = evidence.recordings.get(member)
    if recording is None:
        return found[member].kind in (*HARD, "silent", "busy")
    return not call.p2p and recording.entered.get(call.group, 0) < call.sequence
