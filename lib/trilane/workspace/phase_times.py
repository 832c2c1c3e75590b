"""Phase times: the seconds that each rank spends in each phase, in ranks/<rank>.phases where the plan has timers."""

import json
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from trilane.utils.validation import require
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid

SUFFIX = ".phases"


def append(ranks: Path, rank: int, iteration: int, seconds: Mapping[str, float]) -> None:
    """Add a line of this rank: its seconds an iteration since its last line, and the host that it runs on."""
    ranks.mkdir(exist_ok=True)
    line = {"iteration": iteration, "host": platform.node(), "seconds": seconds}
    with (ranks / f"{rank}{SUFFIX}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_phase_times(folder: Path, grid: Grid | None = None) -> tuple[Grid, dict[int, dict[str, float]]]:
    """Where the ranks of a run folder stand, and the median seconds of each rank and phase over its lines.

    The first line is left out where there are others: it holds the warm-up. The grid is that of plan.json with the
    hosts that the ranks name, unless one is given. ValueError where no rank left phase times.
    """
    found: dict[int, dict[str, float]] = {}
    hosts: dict[int, str] = {}
    for path in sorted((folder / "ranks").glob(f"*{SUFFIX}")):
        lines = [line for line in map(_line, path.read_text(encoding="utf-8").splitlines()) if line]
        if lines and path.stem.isdigit():
            rank, counted = int(path.stem), lines[1:] or lines
            hosts[rank] = str(lines[-1].get("host", ""))
            times: defaultdict[str, list[float]] = defaultdict(list)
            for line in counted:
                for phase, seconds in line["seconds"].items():
                    times[phase].append(seconds)
            found[rank] = {phase: median(values) for phase, values in times.items()}
    require(bool(found), "folder", folder, "holds no phase times (ranks/*.phases); set run.timers in the plan")
    return grid or _grid(folder, hosts), found


def _grid(folder: Path, hosts: Mapping[int, str]) -> Grid:
    plan = folder / "plan.json"
    values = json.loads(plan.read_text(encoding="utf-8")) if plan.is_file() else {}
    grid = rank_grid.from_json(values) or rank_grid.unknown(hosts, 8)
    # A rank that left nothing runs where the others of its node do.
    heard = {grid[rank].node: host for rank, host in hosts.items() if host and rank in grid}
    return replace(grid, places=tuple(replace(p, node=heard.get(p.node, p.node)) for p in grid.places))


def _line(text: str) -> dict | None:
    """A line; None for one that is half written."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("seconds"), dict) else None
