"""`python -m trilane hang FOLDER`: from a run folder, or a folder of dumps, to who is to blame for a hang."""

import argparse
import json
from pathlib import Path

from trilane.diagnose.hang.text import as_text, grid_of
from trilane.diagnose.hang.verdict import diagnose


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
