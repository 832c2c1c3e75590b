"""The door `megatron-args`: the original's arguments for a plan, or the plan that such arguments mean."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from trilane.config.cluster import cluster
from trilane.config.plan import read_plan
from trilane.interop.megatron_args import ENGINE_OF, LM, megatron_arguments, text
from trilane.interop.megatron_parse import Reading, plan_of
from trilane.interop.shell_args import read_arguments
from trilane.launch.local import environment
from trilane.utils.validation import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("plan", nargs="?", type=Path, help="a plan's JSON file")
    parser.add_argument("--flavour", choices=ENGINE_OF, default=LM, help=f"whose arguments (default: {LM})")
    parser.add_argument("--prepare", action="store_true", help="prepare the corpus, and name its .bin/.idx pairs")
    parser.add_argument("--read", type=Path, metavar="FILE", help="a command line or part of a script; prints a plan")
    parser.add_argument("--cluster", default="", help="for --read: the cluster's name or JSON file")
    parser.add_argument("--gpus", type=int, default=0, help="for --read, where the text starts no torchrun")
    parser.add_argument("--vocab-size", type=int, default=0, help="for --read, padded, where the text names none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the arguments, or the plan and on stderr what of the text is not in it."""
    require((args.plan is None) != (args.read is None), "megatron-args", "", "takes a plan, or --read FILE")
    if args.read:
        return _read(args)
    plan = read_plan(args.plan)
    arguments = megatron_arguments(plan, args.flavour, _prepared(args.plan) if args.prepare else ())
    print(json.dumps(arguments, indent=1) if args.json else text(arguments))
    return 0


def _read(args: argparse.Namespace) -> int:
    require(bool(args.cluster), "cluster", "missing", "--read needs the cluster that the plan is for")
    require(args.read.is_file(), "read", args.read, "no such file")
    values = read_arguments(args.read.read_text(encoding="utf-8", errors="replace"))
    machine = cluster(args.cluster)
    reading = plan_of(values, cluster=machine, gpus=args.gpus, vocab_size=args.vocab_size, label=args.read.stem)
    plan = reading.plan.to_json()
    left = {"ignored": reading.ignored, "unknown": reading.unknown, "differs": reading.differs}
    print(json.dumps({"plan": plan, **left} if args.json else plan, indent=1))
    for line in notes(reading):
        print(f"trilane: {line}", file=sys.stderr)
    return 0


def notes(reading: Reading) -> list[str]:
    """What of the text is not in the plan, a line for each thing that matters and one for all that do not."""
    lines = list(reading.differs)
    lines += [f"{name}: unknown, not in the plan" for name in reading.unknown]
    return lines + ([f"no matter of a plan: {', '.join(reading.ignored)}"] if reading.ignored else [])


def _prepared(path: Path) -> list[str]:
    """The prefixes of the plan's prepared pairs; the process that makes them may import torch."""
    command = [sys.executable, "-m", "trilane.engine.data.corpus", str(path)]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.split("\n")[:-1]
