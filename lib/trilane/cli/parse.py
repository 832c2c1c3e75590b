"""The door `parse`: logs in any dialect, what each run did and how it ended, as text, JSON or CSV."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trilane.analysis.parallel import read_many
from trilane.utils.validation import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log of a training run, plain or gzip")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--csv", metavar="FILE", default="", help="write all iterations of all runs to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the runs. 0, or where a log cannot be read: 2 if it is the only one, 1 if others were read."""
    if args.csv:
        require(Path(args.csv).parent.is_dir(), "csv", args.csv, "its folder does not exist")
        require(Path(args.csv).resolve() not in map(Path.resolve, map(Path, args.logs)), "csv", args.csv, "is a log")
    found = read_many(args.logs, Path(args.csv) if args.csv else None)
    records = [values for one in found for values in one.records]
    bad = [one.error for one in found if one.error]
    for line in bad:
        print(f"trilane: {line}", file=sys.stderr)
    if bad and not records:
        return 2
    if args.json:
        print(json.dumps({"runs": records}, indent=1, allow_nan=False))
    else:
        for values in records:
            print(text(values))
    return 1 if bad else 0


def text(values: dict[str, Any]) -> str:
    """A run's record in three lines."""
    rates = ", ".join(f"{rate:.1f} TFLOP/s/GPU {name}" for name, rate in values["tflops"].items() if rate is not None)
    told = (
        f"{values['iterations']} iterations",
        "" if values["sec_per_it"] is None else f"{values['sec_per_it']:.4g} s/it",
        rates,
        "" if values["max_memory_gib"] is None else f"{values['max_memory_gib']:.2f} GiB",
        "" if values["last_loss"] is None else f"loss {values['last_loss']:.4f}",
    )
    numbers = ", ".join(filter(None, told))
    return f"{values['file']}: {values['status']} ({values['dialect']})\n  {numbers}\n  {values['evidence']}"
