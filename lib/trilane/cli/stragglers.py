"""The door `stragglers`: which rank, node or link makes the others wait, and how to find a bad node by swaps."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trilane.diagnose.hang.text import grid_of
from trilane.diagnose.stragglers.node_swaps import Search, restarts_at_most
from trilane.diagnose.stragglers.stragglers import Straggler, find_stragglers
from trilane.utils.validation import require, require_known
from trilane.workspace.phase_times import read_phase_times
from trilane.workspace.rank_grid import Grid

VERDICTS = ("good", "bad")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("folder", type=Path, help="a run folder whose plan has run.timers")
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=0, help="where no plan.json says it")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with --tp, --pp, --dp (default: 8)")
    parser.add_argument("--spares", type=int, default=0, help="spare nodes: plan the search for one bad node, too")
    parser.add_argument("--told", default="", metavar="good,bad,...", help="how the restarts so far went")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print who is slow, and what to swap next; 0 also where nobody is."""
    grid, seconds = read_phase_times(args.folder, grid_of(args))
    slow = find_stragglers(grid, seconds)
    search = _search(grid, slow, args.spares, args.told) if args.spares else None
    found = {"ranks": len(seconds), "stragglers": [asdict(one) for one in slow], "search": search}
    print(json.dumps(found, indent=1) if args.json else text(found, slow))
    return 0


def _search(grid: Grid, slow: list[Straggler], spares: int, told: str) -> dict[str, Any]:
    """The search among the nodes of the slow ranks, or among all where nobody stands out."""
    suspects = sorted({grid[rank].node for one in slow for rank in one.ranks}) or list(grid.nodes)
    state = Search(suspects=tuple(suspects), spares=spares)
    for verdict in filter(None, told.split(",")):
        require_known("told", verdict, VERDICTS)
        require(not state.done, "told", told, f"has more verdicts than the search took; it is {state.suspects[0]}")
        state = state.told(verdict == "good")
    return {
        "suspects": list(state.suspects),
        "left_out": list(state.left_out),
        "restarts": state.restarts,
        "restarts_at_most": restarts_at_most(len(state.suspects), spares),
        "exclude": f"--exclude={','.join(state.suspects if state.done else state.left_out)}",
    }


def text(found: dict[str, Any], slow: list[Straggler]) -> str:
    """The result for a person."""
    lines = [str(one) for one in slow] or [f"{found['ranks']} ranks, none slower than its equals"]
    if search := found["search"]:
        done = len(search["suspects"]) == 1
        lines.append(
            f"the bad node: {search['suspects'][0]} ({search['exclude']})"
            if done
            else f"one bad node among {len(search['suspects'])}: restart with {search['exclude']}, say how it went "
            f"with --told; at most {search['restarts_at_most']} restarts more"
        )
    return "\n".join(lines)
