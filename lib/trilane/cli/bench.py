"""The door `bench`: this machine or cluster measured, as the JSON file that describes it."""

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("out", nargs="?", default="", metavar="OUT.json", help="default: NAME.json")
    parser.add_argument("--name", default="", help="default: the host's name without digits, or local on one machine")


def run(args: argparse.Namespace) -> int:
    """Become the engine's bench."""
    # In place of this process: torchrun and srun count on the rank that they started. Only the engine imports torch.
    engine = [sys.executable, "-m", "trilane.engine.bench.__main__", *filter(None, [args.out]), "--name", args.name]
    os.execv(sys.executable, engine)
