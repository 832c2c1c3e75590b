"""`python -m trilane trace-tail FOLDER`: the last call of each rank from trace files of any size."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from trilane.diagnose.hang.call_trace import groups, last_calls

SHOWN = 12  # ranks named in a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m trilane trace-tail`."""
    parser.add_argument("folder", type=Path, help="traces of Python's trace module, or a run folder with ranks/*.calls")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print where the traces end, the rarest place first."""
    calls = last_calls(args.folder)
    if args.json:
        found = [{"function": f, "line": line, "ranks": ranks} for f, line, ranks in groups(calls)]
        print(json.dumps({"groups": found, "calls": [asdict(call) for call in calls]}, indent=1))
        return 0
    print(f"{len(calls)} traces, {sum(call.bytes for call in calls) / 1e9:.2f} GB; where they end, the rarest first:")
    for function, line, ranks in groups(calls):
        more = f", ... ({len(ranks)} in all)" if len(ranks) > SHOWN else ""
        print(f"{len(ranks):5d}  {function}  {line}\n       {', '.join(ranks[:SHOWN])}{more}")
    return 0
