"""`python -m trilane restart A B`: what was saved against what a restart made of it; who is to blame for a spike."""

import argparse
import json
from pathlib import Path

from trilane.diagnose.restart.compare import audit
from trilane.diagnose.restart.text import as_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m trilane restart`."""
    what = "a run folder, a checkpoint, or a folder of fingerprints"
    parser.add_argument("before", type=Path, metavar="A", help=f"what was saved: {what}")
    parser.add_argument("after", type=Path, metavar="B", help=f"what came of it: {what}")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print what is wrong; 0 where nothing is, 1 where something is."""
    found = audit(args.before, args.after)
    print(json.dumps(found.to_json(), indent=1) if args.json else as_text(found))
    return 1 if found.findings else 0
