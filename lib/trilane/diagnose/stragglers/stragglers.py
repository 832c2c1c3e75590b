"""Stragglers: which rank, node or link makes the others wait, from the seconds that each rank spends in each phase."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trilane.utils.validation import require
from trilane.workspace.rank_grid import Grid

# Phases in which a rank does its own work, and those in which it mostly waits for others (engine/phases.py).
OWN = ("batch-generator", "forward-compute", "backward-compute", "optimizer")
LINKS = ("p2p-wait", "all-grads-sync")
SUSPICIOUS = 5.0  # a score: robust standard deviations
IN_A_NODE = 2.5  # enough where most ranks of a node agree
AT_LEAST = 0.03  # of the median: less is not worth a restart
SAME_NODE = 0.75  # this share of a node's ranks slow: it is the node


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """What is slow: `kind` "rank", "node" or "link", its name, the phase, seconds above its equals, the score."""

    kind: str
    name: str
    ranks: tuple[int, ...]
    phase: str
    excess_s: float
    score: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.phase} takes {self.excess_s:.3g} s longer (score {self.score:.1f})"


def find_stragglers(grid: Grid, seconds: Mapping[int, Mapping[str, float]]) -> list[Straggler]:
    """The slow ones, the slowest first. `seconds[rank][phase]` are medians over iterations.

    A rank's own work is compared with that of its stage, since stages differ: score = (x - median) / (1.4826 MAD), MAD
    at least 1 % of the median, so that equal times do not make a hair's breadth suspicious. A node is slow where most
    of its ranks are. A link is slow where ranks that do their own work as fast as others communicate longer than
    their equals: both ends of a slow link do, so a pair of nodes of which each alone is innocent is named; who waits
    for a slow rank waits in communication too, so where a rank is slow, links are not judged. Left out: a link that
    slows the whole ring of a collective evenly shows at no rank.
    """
    for rank in seconds:
        require(rank in grid, "rank", rank, f"must lie below tp x pp x dp = {len(grid.ranks)}")
    nodes = _nodes(grid, seconds, _scores(grid, seconds, OWN, IN_A_NODE))
    taken = {rank for node in nodes for rank in node.ranks}
    slow = _scores(grid, seconds, OWN, SUSPICIOUS)
    found = [*nodes, *(_straggler("rank", str(r), [r], slow) for r in slow if r not in taken)]
    return sorted(found or _links(grid, _scores(grid, seconds, LINKS, SUSPICIOUS)), key=lambda s: -s.score)


def _scores(
    grid: Grid, seconds: Mapping[int, Mapping[str, float]], phases: tuple[str, ...], least: float
) -> dict[int, tuple[str, float, float]]:
    """For each rank that stands out: the phase, the excess in seconds, the score; of its worst phase."""
    found: dict[int, tuple[str, float, float]] = {}
    for phase in phases:
        stages: defaultdict[int, list[int]] = defaultdict(list)
        for rank, times in seconds.items():
            if phase in times:
                stages[grid[rank].pp].append(rank)
        for ranks in stages.values():
            values = np.array([seconds[rank][phase] for rank in ranks])  # (R,)
            middle = float(np.median(values))
            spread = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * middle, 1e-9)
            for rank, value in zip(ranks, values, strict=True):
                excess, score = float(value) - middle, (float(value) - middle) / spread
                if score > least and excess > AT_LEAST * middle and score > found.get(rank, ("", 0.0, 0.0))[2]:
                    found[rank] = (phase, excess, score)
    return found


def _nodes(
    grid: Grid, seconds: Mapping[int, Mapping[str, float]], slow: dict[int, tuple[str, float, float]]
) -> list[Straggler]:
    found = []
    for node, ranks in grid.nodes.items():
        heard = [r for r in ranks if r in seconds]
        own = [r for r in heard if r in slow]
        if len(heard) > 1 and len(own) >= SAME_NODE * len(heard):
            found.append(_straggler("node", node, own, slow))
    return found


def _links(grid: Grid, slow: dict[int, tuple[str, float, float]]) -> list[Straggler]:
    """Ranks that communicate longer than their equals, joined where they are neighbours on different nodes."""
    found: list[Straggler] = []
    taken: set[int] = set()
    for rank in sorted(slow):
        for axis in ("next", "dp"):
            for peer in sorted(grid.group(axis, rank) - {rank}):
                pair = {grid[rank].node, grid[peer].node}
                if peer in slow and rank < peer and len(pair) == 2 and not {rank, peer} & taken:
                    found.append(_straggler("link", " - ".join(sorted(pair)), [rank, peer], slow))
                    taken |= {rank, peer}
    return found + [_straggler("rank", str(rank), [rank], slow) for rank in slow if rank not in taken]


def _straggler(kind: str, name: str, ranks: list[int], slow: dict[int, tuple[str, float, float]]) -> Straggler:
    worst = max(ranks, key=lambda r: slow[r][2])
    phase, excess, score = slow[worst]
    return Straggler(kind=kind, name=name, ranks=tuple(ranks), phase=phase, excess_s=excess, score=score)
