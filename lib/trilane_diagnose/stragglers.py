"""Stragglers: the rank or node that makes the others wait, from the seconds of each rank in each
phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trilane.utils.tables import Record, grouped
from trilane.utils.validation import require
from trilane.workspace.pace import OWN, Pace
from trilane.workspace.rank_grid import Grid, shared

Seconds = Mapping[int, Mapping[str, float]]  # by rank and phase
Slow = dict[
    int, tuple[str, float, float]
]  # of each slow rank its worst phase, the excess in seconds, the score


@dataclass(frozen=True, kw_only=True)
class Straggler(Record):
    """A slow "rank" or "node" (`kind`): its name, the phase, the seconds above its peers, the
    score.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    phase: str
    excess_s: float
    score: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.phase} takes {self.excess_s:.3g} s longer (score {self.score:.1f})"


def find_stragglers(grid: Grid, seconds: Seconds) -> list[Straggler]:
    """The stragglers by `seconds[rank][phase]`, medians over iterations, the highest score first.

        find_stragglers(*read_phase_times(run_folder))

    Raises ValueError for a rank outside the grid.

    A rank's own work is compared with that of its stage: score = (x - median) / (1.4826 MAD), MAD
    at least 1 % of the median. A node is slow where most of its ranks are. Ranks that wait for a
    slow rank communicate longer, too: communication is examined only where all do their own work as
    fast as others, and shows the ends of a slow link. Left out: a link that slows a whole ring
    collective evenly.
    """
    for rank in seconds:
        require(rank in grid, "rank", rank, f"must lie below tp x pp x dp = {len(grid.ranks)}")
    # Phases in which a rank does its own work, and below those in which it mostly waits for others.
    slow, less = (
        _scores(grid, seconds, OWN, least) for least in (5.0, 2.5)
    )  # robust standard deviations
    found = []
    for node, ranks in grid.nodes.items():
        timed = [r for r in ranks if r in seconds]
        # Half as many count where most ranks of a node are slow.
        if len(timed) > 1 and len(less.keys() & timed) >= 0.75 * len(timed):
            found.append(_straggler("node", node, [r for r in timed if r in less], less))
    taken = {rank for one in found for rank in one.ranks}
    slow = slow if slow or found else _scores(grid, seconds, ("p2p-wait", "all-grads-sync"), 5.0)
    found += [_straggler("rank", str(rank), [rank], slow) for rank in slow if rank not in taken]
    return sorted(found, key=lambda s: -s.score)


def slowest(grid: Grid, paces: Mapping[int, Pace]) -> tuple[str, tuple[int, ...]]:
    """Where a run that has become slow loses its time, in words, and the ranks at fault: none where
    it is all alike.

    A rank that is slow itself works longer than it used to; one that waits for it does not, except
    for a neighbour in its tensor-parallel group (and any rank under ZeRO-3), which waits inside its
    own work. At fault are the ranks whose excess is at least half of the largest, where that is a
    tenth of what an iteration takes longer: no more, because a rank that its node holds up is held
    up while it communicates, too.
    """
    excess = {rank: sum(pace.excess_s) for rank, pace in paces.items()}
    most, longer_s = max(excess.values()), max(pace.now_s - pace.usual_s for pace in paces.values())
    if most < longer_s / 10:
        return "communication, since no rank's own work takes longer", ()
    ranks = tuple(rank for rank in sorted(excess) if excess[rank] >= most / 2)
    phase = max(range(len(OWN)), key=lambda n: sum(paces[rank].excess_s[n] for rank in ranks))
    takes = f"{OWN[phase]} takes {sum(paces[r].excess_s[phase] for r in ranks) / len(ranks):.3g} s longer"
    nodes = {grid[rank].node for rank in ranks}
    if phase == 0 and (len(nodes) > 1 or 2 * len(ranks) > len(paces)):
        return f"the shared disk, since {takes} on {len(ranks)} ranks", ()
    if 2 * len(ranks) > len(paces):
        return f"all ranks alike, {takes}", ()
    return f"{_place(grid, ranks, nodes)}, {takes}", ranks


def _place(grid: Grid, ranks: tuple[int, ...], nodes: set[str]) -> str:
    """What these ranks have in common: rank, stage, replica, node."""
    where = " and ".join(sorted(nodes)[:3]) + f" and {len(nodes) - 3} more" * (len(nodes) > 3)
    if len(ranks) > 1 and set(ranks) == {rank for node in nodes for rank in grid.nodes[node]}:
        return f"node {where}"
    axes = (
        ", ".join(shared([grid[rank] for rank in ranks]))
        .replace("pp", "stage")
        .replace("dp", "replica")
    )
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {ranks[0]} on"
    return f"{who} ({axes}) on {where}"


def _scores(grid: Grid, seconds: Seconds, phases: tuple[str, ...], least: float) -> Slow:
    found: Slow = {}
    for phase in phases:
        timed = [rank for rank, times in seconds.items() if phase in times]
        for ranks in grouped(timed, lambda rank: grid[rank].pp).values():
            values = np.array([seconds[rank][phase] for rank in ranks])  # (R,)
            middle = float(np.median(values))
            spread = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * middle, 1e-9)
            for rank, value in zip(ranks, values, strict=True):
                excess, score = float(value) - middle, (float(value) - middle) / spread
                # less than 3 % is not worth a restart
                if (
                    score > least
                    and excess > 0.03 * middle
                    and score > found.get(rank, ("", 0.0, 0.0))[2]
                ):
                    found[rank] = (phase, excess, score)
    return found


def _straggler(kind: str, name: str, ranks: list[int], slow: Slow) -> Straggler:
    phase, excess, score = max((slow[r] for r in ranks), key=lambda s: s[2])
    return Straggler(
        kind=kind, name=name, ranks=tuple(ranks), phase=phase, excess_s=excess, score=score
    )
