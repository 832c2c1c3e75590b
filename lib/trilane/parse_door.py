"""The door `parse`: logs in any dialect, what each run did and how it ended, as text, JSON or CSV."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from trilane.checks import require
from trilane.logs import RunLog
from trilane.many_logs import read_many
from trilane.plan import Plan, read_plan
from trilane.window import ranges

KEEP = ("flops_per_s_per_gpu", "skipped", "nan", "seq_length")  # beside what reading needs: all that a record tells
OURS = ("run.log", "steps.jsonl")  # in a run folder, beside plan.json


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
    found = read_many(args.logs, record, KEEP, Path(args.csv) if args.csv else None)
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


def record(log: RunLog) -> dict[str, Any]:
    """A run as JSON; what the log does not tell is null."""
    from trilane.measure import measure_log

    m = measure_log(log, plan_beside(log))
    values = {
        "file": str(log.source),
        "dialect": log.dialect,
        "status": log.status,
        "evidence": log.evidence,
        "rank": log.rank,
        "asked_gib": log.asked_bytes / 2**30,
        "arguments": dict(log.arguments),
        "iterations": len(log.iterations),
        "sec_per_it": m.sec_per_it,
        "sec_per_it_spread": m.spread,
        "left_out": [{"reason": part.reason, "iterations": ranges(part.iterations)} for part in m.window.left_out],
        "tokens_per_s": m.tokens_per_s,
        "tflops": {name: _plain(rate / 1e12) for name, rate in m.flops_per_s.items()},
        "mfu": m.utilization.get("mfu"),
        "hfu": m.utilization.get("hfu"),
        "max_memory_gib": m.memory_bytes / 2**30,
        "last_loss": m.last_loss,
        "skipped_iterations": m.health.skipped,
        "nan_iterations": m.health.nan_iterations,
        "notes": [*log.notes, *filter(None, [m.window.note, m.setup.note])],
    }
    return {name: _plain(value) for name, value in values.items()}


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


def plan_beside(log: RunLog) -> Plan | None:
    """The plan of the run folder that the log lies in; None where there is none that can be read."""
    file = log.source.parent / "plan.json"
    try:
        return read_plan(file) if log.source.name in OURS and file.is_file() else None
    except ValueError:
        return None  # what the log itself says still stands


def _plain(value: Any) -> Any:
    """A float without a value is null in JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
