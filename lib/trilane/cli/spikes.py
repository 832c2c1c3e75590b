"""The door `spikes`: logs of one or several trainings, and what went wrong with their loss."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trilane.analysis.loss_curve import Curve, join, trainings
from trilane.analysis.spikes import find_spikes
from trilane.documents.runs import read_runs
from trilane.logs.run import RunLog

KEEP = ("grad_norm", "consumed_samples")  # beside what reading needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="logs in the order in which they ran")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the events of each training. 0, or where a log cannot be read: 2 if it is the only one, 1 otherwise."""
    logs, bad = list[RunLog](), list[str]()
    for name in args.logs:
        try:
            logs += read_runs(name, KEEP)
        except (ValueError, OSError) as error:
            bad.append(str(error))
    for line in bad:
        print(f"trilane: {line}", file=sys.stderr)
    if bad and not logs:
        return 2
    found = [(group, join(group)) for group in trainings(logs)]
    if args.json:
        print(json.dumps({"trainings": [record(group, curve) for group, curve in found]}, indent=1, allow_nan=False))
    else:
        for group, curve in found:
            print(text(group, curve))
        if not found:
            print("no log holds an iteration")
    return 1 if bad else 0


def record(group: Sequence[RunLog], curve: Curve) -> dict[str, Any]:
    """A training as JSON; a loss that is no number is null."""
    told = [{k: None if v != v else v for k, v in asdict(event).items()} for event in find_spikes(curve)]
    for event in told:
        event["size"] = event["peak"] and event["level"] and math.log(event["peak"] / event["level"])
    return {
        "files": [str(log.source) for log in group],
        "iterations": len(curve.table),
        "restarts": [asdict(restart) for restart in curve.restarts],
        "events": told,
    }


def text(group: Sequence[RunLog], curve: Curve) -> str:
    """A training in a line, and a line for each restart and event."""
    files = ", ".join(str(log.source) for log in group)
    restarts = [f"  restart at iteration {r.iteration} ({r.redone} lines done again): {r.log}" for r in curve.restarts]
    lines = [f"  {event.sentence}" for event in find_spikes(curve)] or ["  no spike, jump or divergence"]
    return "\n".join([f"{files}: {len(curve.table)} lines", *restarts, *lines])
