"""The verdict on a hang as text."""

import argparse

from trilane.diagnose.hang.verdict import Verdict
from trilane.utils.validation import require
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid

as_text = Verdict.to_text


def grid_of(args: argparse.Namespace) -> Grid | None:
    """The grid that the arguments give; None where they give none. ValueError for a size that cannot be."""
    given = {name: getattr(args, name) for name in ("tp", "pp", "dp")}
    for name, size in given.items():
        require(size >= 0, name, size, "must be a whole number of at least 1")
    if not any(given.values()):
        return None
    return rank_grid.regular(args.tp or 1, args.pp or 1, args.dp or 1, args.gpus_per_node)
