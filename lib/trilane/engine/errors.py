"""Refusals: what a process says before it ends with exit code 2, each mistake once."""

import os
import platform
import sys


class HostLacks(ValueError):
    """This host lacks what others may have: each rank that finds it says so."""


def say(error: ValueError, before: str = "") -> None:
    """One line on stderr: from rank 0 alone what every rank finds alike, from each rank what its own host lacks."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if isinstance(error, HostLacks):
        print(f"{before}rank {rank} on {platform.node()}: {error}", file=sys.stderr, flush=True)
    elif rank == "0":
        print(f"{before}{error}", file=sys.stderr, flush=True)
