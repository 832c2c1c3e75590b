"""What storage writes and reads in a checkpoint's pattern: each rank one file, written by the
saver's own code with its checksum and fsync, all ranks at once; removed afterwards, unless rank 0
is killed outright.
"""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trilane_engine.checkpoint.slices import write_slices
from trilane_engine.world import World, call_on_first, error_text, gather_values

BLOCK = 1 << 22  # bytes of one write of the saver
BLOCKS = 64  # of a rank's file


def measure(world: World, folder: Path, nodes: int) -> tuple[dict[str, Any], str]:
    """Fields of Cluster, rates by node, and how they were measured; OSError on all ranks where
    that fails. Collective.
    """
    new = lambda: tempfile.mkdtemp(prefix=".trilane-", dir=folder)  # noqa: E731
    place = Path(call_on_first(world, new))
    # where there are several nodes a rank reads what another has written, as after a restart
    # elsewhere
    other = (world.rank + world.size // nodes) % world.size
    try:
        written = _at_once(world, lambda: _write(place / str(world.rank)))
        read = _at_once(world, lambda: _read(place / str(other)))
    finally:
        if world.is_first:
            shutil.rmtree(place, ignore_errors=True)
    size = f"{BLOCKS * BLOCK / 1e6:.0f} MB each"
    how = f"{world.size} files at once, {nodes} nodes, {size}, fsync; page cache told to drop"
    rates = {"write_bytes_per_s": written / nodes, "read_bytes_per_s": read / nodes}
    return {**rates, "storage_nodes": nodes}, how


def _at_once(world: World, work: Callable[[], object]) -> float:
    """Bytes per second of all ranks until the last is done."""
    dist.barrier()
    begin = time.perf_counter()
    problem = ""
    try:
        work()
    except OSError as error:
        problem = f"rank {world.rank}: {error_text(error)}"
    every = gather_values(world, (time.perf_counter() - begin, problem))
    for _, problem in every:
        if problem:
            raise OSError(problem)
    return world.size * BLOCKS * BLOCK / max(seconds for seconds, _ in every)


def _write(path: Path) -> None:
    """Write random numbers, which no file system makes smaller."""
    values = torch.rand(BLOCK // 4)
    entries = [(str(number), (len(values),)) for number in range(BLOCKS)]
    write_slices(path, entries, itertools.repeat(values, BLOCKS))


def _read(path: Path) -> None:
    """A file system that ignores what fadvise asks for gives what this node wrote from memory."""
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.readinto(buffer):
            pass
