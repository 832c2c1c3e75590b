"""Refusals: the line that a process prints before it ends with exit code 2, each error once."""

import os
import platform
import sys


class HostError(ValueError):
    """This host lacks what other hosts may have: each affected rank prints its own line."""


def print_refusal(error: ValueError, prefix: str = "") -> None:
    """Print one line to stderr: on rank 0 alone what all ranks find alike, on each rank what its own host lacks."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if isinstance(error, HostError):
        print(f"{prefix}rank {rank} on {platform.node()}: {error}", file=sys.stderr, flush=True)
    elif rank == "0":
        print(f"{prefix}{error}", file=sys.stderr, flush=True)
