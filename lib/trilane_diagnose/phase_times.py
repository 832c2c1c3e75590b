"""Phase times: the seconds of each rank in each phase, in ranks/<rank>.phases where the plan sets
run.timers.
"""

from dataclasses import replace
from pathlib import Path

from trilane.utils.files import json_lines, read_text
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid


def read_phase_times(
    folder: Path, grid: Grid | None = None
) -> tuple[Grid, dict[int, dict[str, float]]]:
    """The grid of a run folder, and the median seconds of each rank and phase over its lines.

    The grid is that of plan.json with the ranks' hosts, unless one is given. ValueError where there
    are no phase times.
    """
    import pandas as pd

    require_folder("folder", folder)
    medians: dict[int, dict[str, float]] = {}
    hosts: dict[int, str] = {}
    for path in sorted((folder / "ranks").glob("*.phases")):
        lines = [line for line in json_lines(read_text(path)) if _are_seconds(line.get("seconds"))]
        if lines and path.stem.isdigit():
            rank = int(path.stem)
            hosts[rank] = str(lines[-1].get("host", ""))
            # the first has the warm-up in it
            times = pd.DataFrame([line["seconds"] for line in lines[1:] or lines])
            medians[rank] = times.median().to_dict()
    rule = "holds no phase times (ranks/*.phases); set run.timers in the plan"
    require(bool(medians), "folder", folder, rule)
    grid = grid or rank_grid.read(folder / "plan.json") or rank_grid.unknown(hosts, 8)
    places = [replace(place, node=hosts.get(place.rank, place.node)) for place in grid.places]
    return replace(grid, places=tuple(places)), medians


def _are_seconds(values: object) -> bool:
    """Whether the values are seconds by phase; an iteration of 30 years is a damaged number."""
    if not isinstance(values, dict) or not values:
        return False
    return all(isinstance(value, int | float) and 0 <= value < 1e9 for value in values.values())
