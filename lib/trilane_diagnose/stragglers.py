"""Stragglers: the rank or node that makes the others wait, from the seconds of each rank in each
phase: ranks/<rank>.phases of a run folder where the plan sets run.timers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from trilane.utils.files import json_lines, read_text
from trilane.utils.frozen import frozen
from trilane.utils.numbers import ranges
from trilane.utils.tables import Record, grouped
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.pace import OWN, Pace
from trilane.workspace.rank_grid import Grid

Seconds = Mapping[int, Mapping[str, float]]  # by rank and phase
SLOW = 5.0  # robust standard deviations
MOST_OF_NODE = 0.75
LEAST_SPREAD = 0.01  # of the median


@frozen
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

    def summary(self) -> str:
        takes = f"{self.phase} takes {self.excess_s:.3g} s longer"
        return f"{self.kind} {self.name}: {takes} (score {self.score:.1f})"


def read_phase_times(folder: Path) -> tuple[Grid, dict[int, dict[str, float]]]:
    """The grid of a run folder, and the median seconds of each rank and phase over its lines.

    The grid is that of plan.json with the ranks' hosts. ValueError where there are no phase times.
    """
    import pandas as pd

    require_folder("folder", folder)
    medians = {}
    hosts = {}
    for path in sorted((folder / "ranks").glob("*.phases")):
        lines = [line for line in json_lines(read_text(path)) if _are_seconds(line.get("seconds"))]
        if lines and path.stem.isdigit():
            rank = int(path.stem)
            hosts[rank] = str(lines[-1].get("host", ""))
            # the first has the warm-up in it
            times = pd.DataFrame([line["seconds"] for line in lines[1:] or lines])
            medians[rank] = times.median().to_dict()
    rule = "holds no phase times (ranks/*.phases); set run.timers in the plan"
    require(medians, "folder", folder, rule)
    grid = rank_grid.read(folder / "plan.json") or rank_grid.unknown(hosts, 8)
    places = [replace(place, node=hosts.get(place.rank, place.node)) for place in grid.places]
    return replace(grid, places=tuple(places)), medians


def _are_seconds(values: object) -> bool:
    """Whether the values are seconds by phase; an iteration of 30 years is a damaged number."""
    if not isinstance(values, dict) or not values:
        return False
    return all(isinstance(value, int | float) and 0 <= value < 1e9 for value in values.values())


def find_stragglers(grid: Grid, seconds: Seconds) -> list[Straggler]:
    """The stragglers by `seconds[rank][phase]`, medians over iterations, the highest score first.

        find_stragglers(*read_phase_times(run_folder))

    Raises ValueError for a rank outside the grid.

    A rank's own work is compared with that of its stage: score = (x - median) / (1.4826 MAD), MAD
    at least 1 % of the median. A node is slow where most of its ranks are. Left out: communication,
    and with it slow links, since ranks that wait for a slow one communicate longer, too.
    """
    for rank in seconds:
        require(rank in grid, "rank", rank, f"must lie below tp x pp x dp = {len(grid.ranks)}")
    slow = _slow_ranks(grid, seconds)
    stragglers = []
    for node, ranks in grid.nodes.items():
        timed = [rank for rank in ranks if rank in seconds]
        own = [slow[rank] for rank in timed if rank in slow]
        if len(timed) > 1 and len(own) >= MOST_OF_NODE * len(timed):
            worst = max(own, key=lambda one: one.score)
            of_node = tuple(one.ranks[0] for one in own)
            stragglers.append(replace(worst, kind="node", name=node, ranks=of_node))
        else:
            stragglers += own
    return sorted(stragglers, key=lambda straggler: -straggler.score)


def _slow_ranks(grid: Grid, seconds: Seconds) -> dict[int, Straggler]:
    """Each rank that is slow in a phase of its own work, in its worst."""
    slow: dict[int, Straggler] = {}
    for phase in OWN:
        timed = [rank for rank, times in seconds.items() if phase in times]
        for ranks in grouped(timed, lambda rank: grid[rank].pp).values():
            values = np.array([seconds[rank][phase] for rank in ranks])  # (R,)
            median = float(np.median(values))
            deviation = 1.4826 * float(np.median(np.abs(values - median)))
            spread = max(deviation, LEAST_SPREAD * median, 1e-9)
            for rank, excess in zip(ranks, (values - median).tolist(), strict=True):
                score = excess / spread
                worst = slow[rank].score if rank in slow else SLOW
                if score > worst:
                    slow[rank] = Straggler(
                        kind="rank",
                        name=str(rank),
                        ranks=(rank,),
                        phase=phase,
                        excess_s=excess,
                        score=score,
                    )
    return slow


def slowest(hosts: Mapping[int, str], paces: Mapping[int, Pace]) -> tuple[str, tuple[int, ...]]:
    """Where a run that has become slow loses its time, in words, and the ranks at fault: none where
    it is all alike.

    A rank that is slow itself works longer than it used to; one that waits for it does not, except
    for a neighbour in its tensor-parallel group (and any rank under ZeRO-3), which waits inside its
    own work. At fault are the ranks whose excess is at least half of the largest, where that is a
    tenth of what an iteration takes longer: no more, because a rank that its node holds up is held
    up while it communicates, too.
    """
    excess = {rank: sum(pace.excess_s) for rank, pace in paces.items()}
    most = max(excess.values())
    if most < max(pace.now_s - pace.usual_s for pace in paces.values()) / 10:
        return "communication, since no rank's own work takes longer", ()
    ranks = tuple(rank for rank in sorted(excess) if excess[rank] >= most / 2)
    by_phase = np.mean([paces[rank].excess_s for rank in ranks], axis=0)  # (phases of OWN,)
    phase = OWN[by_phase.argmax()]
    takes = f"{phase} takes {by_phase.max():.3g} s longer"
    nodes = {hosts[rank] for rank in ranks}
    are_most = 2 * len(ranks) > len(paces)
    if phase == "batch-generator" and (len(nodes) > 1 or are_most):
        return f"the shared disk, since {takes} on {len(ranks)} ranks", ()
    if are_most:
        return f"all ranks alike, {takes}", ()
    return f"ranks {ranges(ranks)} on {', '.join(sorted(nodes))}, {takes}", ranks
