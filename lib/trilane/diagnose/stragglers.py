"""Stragglers: the rank, node or link that makes the others wait, from the seconds of each rank in each phase.

NodeSearch finds a bad node by restarts that leave some nodes out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trilane.utils.tables import DataFrame, Table, grouped
from trilane.utils.validation import require, require_integer, require_known
from trilane.workspace.rank_grid import Grid

# Phases in which a rank does its own work, and those in which it mostly waits for others (engine/monitor/phases.py).
OWN = ("batch-generator", "forward-compute", "backward-compute", "optimizer")
LINKS = ("p2p-wait", "all-grads-sync")
RANK_SCORE = 5.0  # robust standard deviations
NODE_SCORE = 2.5  # of each rank, where most ranks of a node are slow
MIN_EXCESS = 0.03  # of the median; less is not worth a restart
NODE_SHARE = 0.75  # of a node's ranks that must be slow
Seconds = Mapping[int, Mapping[str, float]]  # by rank and phase
Slow = dict[int, tuple[str, float, float]]  # of each slow rank its worst phase, the excess in seconds, the score


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow "rank", "node" or "link" (`kind`): its name, the phase, the seconds above its peers, the score."""

    kind: str
    name: str
    ranks: tuple[int, ...]
    phase: str
    excess_s: float
    score: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.phase} takes {self.excess_s:.3g} s longer (score {self.score:.1f})"


class Stragglers(list[Straggler], Table):
    """Stragglers, the highest score first; as a table a row for each."""

    def nodes(self, grid: Grid) -> list[str]:
        """The nodes of the stragglers; all nodes where there is no straggler."""
        return sorted({grid[rank].node for one in self for rank in one.ranks}) or list(grid.nodes)

    def to_text(self) -> str:
        """A line for each."""
        return "\n".join(map(str, self)) or "no rank is slower than its peers"

    def to_frame(self) -> DataFrame:
        """Kind, name, phase, excess in seconds, score."""
        import pandas as pd

        columns = ["kind", "name", "phase", "excess (s)", "score"]
        return pd.DataFrame([(s.kind, s.name, s.phase, s.excess_s, s.score) for s in self], columns=columns)


def find_stragglers(grid: Grid, seconds: Seconds) -> Stragglers:
    """The stragglers by `seconds[rank][phase]`, medians over iterations. ValueError for a rank outside the grid.

    A rank's own work is compared with that of its stage, since stages differ: score = (x - median) / (1.4826 MAD), MAD
    at least 1 % of the median, so that tiny differences between equal times do not count. A node is slow where most
    of its ranks are. A link is slow where ranks that do their own work as fast as others communicate longer than
    their peers: this holds at both ends, so that the pair of nodes is named although each alone is not slow. Ranks
    that wait for a slow rank also wait in communication, so where a rank is slow, links are not examined. Left out: a
    link that slows a whole ring collective evenly shows at no rank.
    """
    for rank in seconds:
        require(rank in grid, "rank", rank, f"must lie below tp x pp x dp = {len(grid.ranks)}")
    nodes = _nodes(grid, seconds, _scores(grid, seconds, OWN, NODE_SCORE))
    taken = {rank for node in nodes for rank in node.ranks}
    slow = _scores(grid, seconds, OWN, RANK_SCORE)
    found = [*nodes, *(_straggler("rank", str(r), [r], slow) for r in slow if r not in taken)]
    found = found or _links(grid, _scores(grid, seconds, LINKS, RANK_SCORE))
    return Stragglers(sorted(found, key=lambda s: -s.score))


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
                if score > least and excess > MIN_EXCESS * middle and score > found.get(rank, ("", 0.0, 0.0))[2]:
                    found[rank] = (phase, excess, score)
    return found


def _nodes(grid: Grid, seconds: Seconds, slow: Slow) -> list[Straggler]:
    found = []
    for node, ranks in grid.nodes.items():
        timed = [r for r in ranks if r in seconds]
        own = [r for r in timed if r in slow]
        if len(timed) > 1 and len(own) >= NODE_SHARE * len(timed):
            found.append(_straggler("node", node, own, slow))
    return found


def _links(grid: Grid, slow: Slow) -> list[Straggler]:
    """Ranks that communicate longer than their peers, paired where they are neighbours on different nodes."""
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


def _straggler(kind: str, name: str, ranks: list[int], slow: Slow) -> Straggler:
    worst = max(ranks, key=lambda r: slow[r][2])
    phase, excess, score = slow[worst]
    return Straggler(kind=kind, name=name, ranks=tuple(ranks), phase=phase, excess_s=excess, score=score)


@dataclass(frozen=True, kw_only=True)
class NodeSearch:
    """The search for a bad node with spares: one of `suspects`, which are distinct, is bad; the next restart omits
    `left_out`.

    A job needs n nodes, k spares are available, and a run only shows whether it was good. Each restart leaves out up to
    k of the suspect nodes; if the run is good, the bad one is among them. Group testing for one defective (Dorfman
    1943; Du and Hwang 2000, chapter 2), with groups of at most k: ceil(m / k) - 1 tests at most find the group of m,
    and ceil(log2 k) more the node in it.
    """

    suspects: tuple[str, ...]
    spares: int
    restarts: int = 0

    def __post_init__(self) -> None:
        require(len(set(self.suspects)) == len(self.suspects) > 0, "suspects", self.suspects, "must be distinct nodes")
        require_integer("spares", self.spares, 1)

    @property
    def done(self) -> bool:
        """Whether one suspect is left."""
        return len(self.suspects) == 1

    @property
    def exclude(self) -> str:
        """sbatch's option for the next restart; once the search is done, that for the bad node."""
        return f"--exclude={','.join(self.suspects if self.done else self.left_out)}"

    def to_json(self) -> dict[str, Any]:
        counts = {"restarts": self.restarts, "restarts_at_most": restarts_at_most(len(self.suspects), self.spares)}
        return {"suspects": [*self.suspects], "left_out": [*self.left_out], **counts, "exclude": self.exclude}

    def to_text(self) -> str:
        """The bad node, or the next step of the search."""
        if self.done:
            return f"the bad node: {self.suspects[0]} ({self.exclude})"
        most = restarts_at_most(len(self.suspects), self.spares)
        lead = f"one bad node among {len(self.suspects)}: restart with {self.exclude}, then add its result to --results"
        return f"{lead}; at most {most} more restarts"

    @property
    def left_out(self) -> tuple[str, ...]:
        """The nodes to swap for spares: half of the suspects, at most as many as there are spares."""
        return self.suspects[: min(self.spares, len(self.suspects) // 2)]

    def after_run(self, good: bool) -> "NodeSearch":
        """The state after a run without `left_out`: if it was good, the bad node is one of these."""
        rest = tuple(node for node in self.suspects if node not in self.left_out)
        return replace(self, suspects=self.left_out if good else rest, restarts=self.restarts + 1)


def restarts_at_most(suspects: int, spares: int) -> int:
    """The restarts that the search needs in the worst case."""
    count, inside = 0, 0
    while suspects > 1:
        out = min(spares, suspects // 2)
        # If the run is good, the bad node is in the group left out: the logarithm of its size more.
        inside = max(inside, count + 1 + math.ceil(math.log2(out)))
        suspects, count = suspects - out, count + 1
    return max(count, inside)


def resume_search(nodes: Sequence[str], spares: int, results: Sequence[str]) -> NodeSearch:
    """The state of a search among `nodes` after restarts whose `results` were "good" or "bad".

    Raises ValueError for another word, or for more results than the search takes.
    """
    state = NodeSearch(suspects=tuple(nodes), spares=spares)
    for result in results:
        require_known("results", result, ("good", "bad"))
        rule = f"has more results than the search takes; the bad node is {state.suspects[0]}"
        require(not state.done, "results", ",".join(results), rule)
        state = state.after_run(result == "good")
    return state
