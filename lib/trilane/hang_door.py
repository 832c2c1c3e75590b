"""`python -m trilane hang FOLDER`: from a run folder, or a folder of dumps, to who is to blame for a hang."""

import argparse
import json
from pathlib import Path

from trilane.checks import require
from trilane.diagnose import places
from trilane.diagnose.places import Grid
from trilane.diagnose.verdict import Verdict, diagnose, shown, span


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m trilane hang`."""
    parser.add_argument("folder", type=Path, help="a run folder, or a folder of dumps (py-spy, faulthandler, NCCL)")
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=0, help="where no topology.json or plan.json says it")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with --tp, --pp, --dp (default: 8)")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 0 also where nothing hangs."""
    verdict = diagnose(args.folder, grid_of(args))
    print(json.dumps(verdict.to_json(), indent=1) if args.json else as_text(verdict))
    return 0


def grid_of(args: argparse.Namespace) -> Grid | None:
    """The grid that the arguments give; None where they give none. ValueError for a size that cannot be."""
    given = {name: getattr(args, name) for name in ("tp", "pp", "dp")}
    for name, size in given.items():
        require(size >= 0, name, size, "must be a whole number of at least 1")
    if not any(given.values()):
        return None
    return places.regular(args.tp or 1, args.pp or 1, args.dp or 1, args.gpus_per_node)


def as_text(verdict: Verdict) -> str:
    """The verdict for a person: the paragraph, the groups, what is odd about the evidence."""
    lines = [verdict.paragraph, "", "stacks (innermost first):"]
    for group in verdict.groups:
        mark = "! " if set(group.ranks) & set(verdict.suspects) else "  "
        lines.append(f"{mark}{len(group.ranks):4d}  ranks {span(group.ranks)}: {group.text}")
        if group.frames:
            lines.append(f"          {shown(group.frames)}")
    lines += ["", *(f"note: {note}" for note in verdict.notes)]
    return "\n".join(lines).rstrip()
