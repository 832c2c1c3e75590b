"""The door `compare`: two sets of logs, and whether one is faster."""

import argparse
import json
from dataclasses import asdict

from trilane.analysis.collect import measure_path
from trilane.analysis.compare import Comparison, compare
from trilane.analysis.measure import KEEP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("a", nargs="+", metavar="A", help="logs or run folders of one variant")
    parser.add_argument("--with", dest="b", nargs="+", required=True, metavar="B", help="those of the other")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the interval (default: 0.95)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; exit code 0."""
    a, b = ([m for path in paths for m in measure_path(path, keep=KEEP)] for paths in (args.a, args.b))
    found = compare(a, b, args.confidence)
    if args.json:
        print(json.dumps({**asdict(found), "decided": found.decided, "verdict": found.sentence}, indent=1))
    else:
        print(text(found))
    return 0


def text(found: Comparison) -> str:
    """The verdict and what it rests on."""
    lines = [
        found.sentence,
        f"A {found.seconds_a:.4g} s, B {found.seconds_b:.4g} s a{'n' * (found.unit == 'iteration')} {found.unit} "
        f"({found.runs_a} and {found.runs_b} runs)",
        f"spread between runs {found.deviation:.2%}: {found.source}",
    ]
    return "\n".join([*lines, *found.notes])
