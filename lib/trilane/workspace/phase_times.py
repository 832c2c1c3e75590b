"""Phase times: the seconds of each rank in each phase, in ranks/<rank>.phases where the plan sets
run.timers.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from trilane.utils.files import json_lines, read_text
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid


def line(iteration: int, seconds: Mapping[str, float]) -> bytes:
    """A rank's line: its seconds per iteration since its last line, and its host."""
    return (
        json.dumps({"iteration": iteration, "host": platform.node(), "seconds": seconds}).encode()
        + b"\n"
    )


def read_phase_times(
    folder: Path, grid: Grid | None = None
) -> tuple[Grid, dict[int, dict[str, float]]]:
    """The grid of a run folder, and the median seconds of each rank and phase over its lines.

    The grid is that of plan.json with the ranks' hosts, unless one is given. ValueError where there
    are no phase times.
    """
    require_folder("folder", folder)
    found: dict[int, dict[str, float]] = {}
    hosts: dict[int, str] = {}
    for path in sorted((folder / "ranks").glob("*.phases")):
        lines = [line for line in json_lines(read_text(path)) if _are_seconds(line.get("seconds"))]
        if lines and path.stem.isdigit():
            rank = int(path.stem)
            hosts[rank] = str(lines[-1].get("host", ""))
            # the first has the warm-up in it
            times = [line["seconds"] for line in lines[1:] or lines]
            phases = dict.fromkeys(phase for seconds in times for phase in seconds)
            found[rank] = {phase: median(s[phase] for s in times if phase in s) for phase in phases}
    require(
        bool(found),
        "folder",
        folder,
        "holds no phase times (ranks/*.phases); set run.timers in the plan",
    )
    grid = grid or rank_grid.read(folder / "plan.json") or rank_grid.unknown(hosts, 8)
    # A rank without phase times is on the host of the others of its node.
    known = {grid[rank].node: host for rank, host in hosts.items() if host and rank in grid}
    return replace(
        grid, places=tuple(replace(p, node=known.get(p.node, p.node)) for p in grid.places)
    ), found


def _are_seconds(values: object) -> bool:
    """Whether the values are seconds by phase; an iteration of 30 years is a damaged number."""
    return isinstance(values, dict) and all(
        isinstance(v, int | float) and 0 <= v < 1e9 for v in values.values()
    )
