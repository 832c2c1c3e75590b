"""Suspects of a hang: who waits for whom, and the ranks that others wait for and that wait for
none, or elsewhere.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from trilane.utils.frozen import frozen
from trilane_diagnose.evidence import Evidence
from trilane_diagnose.flight_recorder import Call
from trilane_diagnose.waits import HARD, NO_EVIDENCE, OTHER, Conditions

OPEN = "cannot be determined"  # in each reason that leaves open whether the rank is at fault
WHICH = f"; which of them is wrong {OPEN}"
# group axes by which ranks may be absent from a line, where names in the stack do not show it
AXES = ("world", "model", "stage", "pp-dp", "dp", "pp", "tp")
MINORITY = 3  # ranks are a clear minority where the cycle is so many times as large
Edges = dict[int, set[int]]  # for each waiting rank, those that it waits for
Reasons = dict[int, str]  # by suspect rank


@frozen
class Suspects:
    """The reason for each suspect rank, strongest evidence first, and over which group axis each
    rank waits.
    """

    reasons: Reasons
    axes: dict[int, str]


def find_suspects(evidence: Evidence, found: Conditions) -> Suspects:
    """The suspects of a hang.

    Suspect are ranks that are gone or stopped; ranks without a dump where most have one; and ranks
    that do something else while members of their groups wait. Where all wait: in the
    smallest cycle of the wait graph, the ranks that are behind, or the fewest in another
    collective.
    """
    graph = _Graph(evidence, found)
    hard = [rank for rank, condition in found.items() if condition.kind in HARD]
    silent = [rank for rank, condition in found.items() if condition.kind == "silent"]
    held_up = graph.held_up()
    proven = [*hard, *(rank for rank in held_up if found[rank].on_host)]
    if proven and set(graph.edges) <= reaching(graph.edges, proven):
        silent = []
    reasons = {rank: found[rank].text for rank in (*hard, *held_up, *silent)}
    for rank in held_up:
        if not found[rank].frames:
            reasons[rank] = graph.recorded_reason(rank)
        elif not found[rank].on_host:
            reasons[rank] += f"; whether it computes or waits at this line {OPEN} from stacks"
    if 2 * sum(condition.kind == "gone" for condition in found.values()) > len(found):
        reasons = _with(reasons, f"; which rank ended first {OPEN}")
    reasons = reasons or graph.mismatch()
    waiting = [condition.wait is not None for condition in found.values() if condition.frames]
    if not (hard or silent) and 2 * sum(waiting) < len(waiting):
        reasons = _with(reasons, f"; most do not wait: whether any hangs {OPEN}")

    def strength(rank: int) -> tuple[bool, bool, int, int]:
        # A rank without a dump may not have been dumped.
        kind = found[rank].kind
        return kind == "silent", kind not in HARD, -held_up.get(rank, 0), rank

    reasons = {rank: reasons[rank] for rank in sorted(reasons, key=strength)}
    return Suspects(reasons=reasons, axes=graph.axes)


def _with(reasons: Reasons, reservation: str) -> Reasons:
    return {rank: text + reservation for rank, text in reasons.items()}


class _Graph:
    """Who waits for whom."""

    def __init__(self, evidence: Evidence, found: Conditions) -> None:
        self.evidence = evidence
        self.found = found
        self.grid = evidence.grid
        self.waits = {r: condition.wait for r, condition in found.items() if condition.wait}
        self.known = {r for r, condition in found.items() if condition.kind != "unknown"}
        self.axes = self._axes()
        self.edges = self._edges()

    def _axes(self) -> dict[int, str]:
        """The group axis of each waiting rank: by names in its stack, else by which ranks are
        absent.

        Taken are the groups with the fewest, but at least one, members absent from that line; among
        equals the largest.
        """
        axes = {}
        sites = defaultdict(list)
        for rank, wait in self.waits.items():
            # A group of one does not wait: then the names mislead, or the topology is another.
            if wait.axis == OTHER or (wait.axis and len(self.grid.group(wait.axis, rank)) > 1):
                axes[rank] = wait.axis
            else:
                sites[wait.call].append(rank)
        for ranks in sites.values():
            costs = {"world": len(self.found)}
            for axis in AXES:
                members = set().union(*(self.grid.group(axis, rank) for rank in ranks))
                absent = members & self.known - {*ranks}
                if absent:
                    costs[axis] = len(absent)
            axes |= dict.fromkeys(ranks, min(costs, key=costs.__getitem__))
        return axes

    def _edges(self) -> Edges:
        """For each waiting rank, the members of its group that are not in the same collective."""
        recorded = self._recorded_edges()
        edges = {}
        for rank in self.found:
            if rank in recorded:
                edges[rank] = recorded[rank]
            elif rank not in self.waits:
                continue
            elif self.axes[rank] == OTHER:
                # any rank that waits for none may be a member that has not come
                edges[rank] = self.known - self.waits.keys()
            else:
                members = self.grid.group(self.axes[rank], rank) & self.known - {rank}
                edges[rank] = {member for member in members if not self._is_with(rank, member)}
        return edges

    def _is_with(self, rank: int, member: int) -> bool:
        """Whether both are in one collective: one operation, called by the same lines, in one
        iteration.
        """
        one = self.waits[rank]
        other = self.waits.get(member)
        if other is None or one.axis in ("next", "previous"):
            return False
        steps = {self.grid[rank].progress, self.grid[member].progress}
        in_one_step = len(steps) == 1 or min(steps) < 0
        return one.op == other.op and one.call == other.call and in_one_step

    def _recorded_edges(self) -> Edges:
        """The edges to the members that never entered the recorded call, or entered another."""
        edges = {}
        for rank, recording in self.evidence.recordings.items():
            call = recording.waiting
            if call is None or self.found[rank].kind in HARD:
                continue
            group = {*(call.ranks or self.grid.ranks)} & self.found.keys() - {rank}
            batch = [c for c in recording.calls if not c.done and c.number == call.number]
            peers = {c.peer for c in batch if c.peer is not None}
            absent = {member: self._is_absent(call, member) for member in group}
            late = {member for member in group if absent[member]}
            # Where all ranks of which it is known are there, it is one of the others, or none.
            late = late or {member for member in group if absent[member] is None}
            edges[rank] = peers & self.found.keys() if peers else late
        return edges

    def _is_absent(self, call: Call, member: int) -> bool | None:
        """Whether a member never entered the call, or another one in its place; None where nothing
        shows it.
        """
        recording = self.evidence.recordings.get(member)
        kind = self.found[member].kind
        if recording is None:
            if kind in NO_EVIDENCE:
                return None
            return kind in (*HARD, "silent", "busy")
        if not recording.knows(call.group):
            return None
        if not call.p2p and recording.entered.get(call.group, 0) < call.sequence:
            return True
        own = recording.collectives.get((call.group, call.sequence))
        return own is not None and own.kind != call.kind

    def held_up(self) -> dict[int, int]:
        """Ranks outside communication that others wait for, with how many they hold up."""
        held_up = {}
        for rank in set().union(*self.edges.values()):
            if self.found[rank].kind == "busy" and not self.edges.get(rank):
                held_up[rank] = len(reaching(self.edges, {rank}))
        # A rank that is known to work on the host is more suspect than those that may wait for
        # their GPUs, as for it.
        on_host = {rank for rank in held_up if self.found[rank].on_host}
        explained = reaching(self.edges, on_host)
        others = {w: targets for w, targets in self.edges.items() if w not in explained}
        waited = set().union(*others.values())
        return {r: n for r, n in held_up.items() if r in on_host or r in waited}

    def mismatch(self) -> Reasons:
        """Suspects among ranks that all wait: in the smallest cycles of the graph, those that
        differ.
        """
        waited = set().union(*self.edges.values())
        inside = {rank: self.edges.get(rank, set()) for rank in {*self.edges} | waited}
        reasons: Reasons = {}
        for cycle in final_components(inside):
            is_evident = not any(self.found[rank].kind in NO_EVIDENCE for rank in cycle)
            if is_evident and (len(cycle) > 1 or cycle <= waited):
                reasons |= self._odd_ones(cycle)
        return reasons

    def _odd_ones(self, cycle: set[int]) -> Reasons:
        """Of ranks that wait for each other, those that differ."""
        behind = self._in_other_steps(cycle)
        if behind:
            return behind
        calls = {}
        for rank in cycle:
            recording = self.evidence.recordings.get(rank)
            if recording and recording.waiting and not recording.waiting.p2p:
                calls[rank] = recording.waiting
        kinds = {rank: call.kind for rank, call in calls.items()}
        is_one_place = len({call.number for call in calls.values()}) == 1
        if len(calls) == len(cycle) and is_one_place and len({*kinds.values()}) > 1:
            few = _fewest(kinds)
            which = "" if few else WHICH
            return {r: f"entered {calls[r]}, others another{which}" for r in few or calls}
        waits = {rank: self.waits[rank] for rank in cycle if rank in self.waits}
        if any(wait.is_blind for wait in waits.values()):
            return {}
        if len(cycle) == 1:
            (rank,) = cycle
            if rank in calls and not self.edges.get(rank):
                return {}
            # Its whole group is there by its stack, and their operation does not end.
            kinds_of_all = {condition.kind for condition in self.found.values()}
            if waits and not self.evidence.recordings and not kinds_of_all & {*NO_EVIDENCE}:
                return {}
            return {rank: self.recorded_reason(rank)}
        # The rarest line; where all are at one, those that came there differently. Different layers
        # call the same line: ranks of one group in it are no rarer for being in two layers.
        few = _fewest({rank: (wait.op, wait.site.key) for rank, wait in waits.items()})
        few = few or _fewest({rank: wait.call for rank, wait in waits.items()})
        # Sends and receives are rare by nature.
        few = [rank for rank in few if not waits[rank].p2p] or few
        if MINORITY * len(few) > len(cycle):
            few = []
        which = "" if few and self.grid.known else WHICH
        return {rank: f"{waits[rank]}, others in another{which}" for rank in sorted(few or waits)}

    def _in_other_steps(self, cycle: set[int]) -> Reasons:
        """The ranks of a cycle in another iteration than most, if they are a minority."""
        counts = Counter(place.progress for place in self.grid.places if place.step >= 0)
        usual = max(counts, key=counts.__getitem__, default=-1)
        steps = {rank: self.grid[rank].progress for rank in cycle}
        apart = [rank for rank in sorted(cycle) if steps[rank] >= 0 and steps[rank] != usual]
        if len(apart) == len(cycle) and 2 * len(apart) >= len(self.grid.ranks):
            return {}
        return {r: f"is in iteration {steps[r]} while most are in {usual}" for r in apart}

    def recorded_reason(self, rank: int) -> str:
        """The reason for a rank that others wait for and that is seen to wait for none."""
        for waiter, targets in self.edges.items():
            recording = self.evidence.recordings.get(waiter)
            if rank in targets and recording and recording.waiting:
                call = recording.waiting
                own = self.evidence.recordings.get(rank)
                if own and not own.knows(call.group):
                    return f"others wait for it in {call}; whether it came {OPEN}"
                return f"others wait for it in {call}"
        return f"{self.found[rank].text}, others wait for it in another collective"


def _fewest(kinds: Mapping[int, tuple[object, ...]]) -> list[int]:
    """The ranks of the rarest kind; none where all kinds are equally frequent."""
    counts = Counter(kinds.values())
    least = min(counts.values(), default=0)
    if least == max(counts.values(), default=0):
        return []
    return [rank for rank, kind in kinds.items() if counts[kind] == least]


def reaching(edges: Edges, targets: Iterable[int]) -> set[int]:
    """The ranks from which a path of edges leads to one of the targets."""
    back = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            back[other].add(rank)
    return _reached(back, targets)


def _reached(edges: Edges, starts: Iterable[int]) -> set[int]:
    reached = set[int]()
    queue = list(starts)
    while queue:
        fresh = edges.get(queue.pop(), set()) - reached
        reached |= fresh
        queue += fresh
    return reached


def final_components(edges: Edges) -> list[set[int]]:
    """The strongly connected components of a graph that no edge leaves."""
    left = set(edges)
    components = []
    while left:
        start = min(left)
        while beyond := _reached(edges, {start}) - reaching(edges, {start}) - {start}:
            start = min(beyond)
        component = {start, *_reached(edges, {start})}
        components.append(component)
        left -= component | reaching(edges, component)
    return components
