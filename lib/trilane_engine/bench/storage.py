"""What storage writes in a checkpoint's pattern: each rank one file, written by the
saver's own code with its checksum and fsync, all ranks at once; removed afterwards, unless rank 0
is killed outright.
"""

import itertools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trilane_engine.checkpoint.slices import write_slices
from trilane_engine.world import World, call_on_first, error_text, gather_values

BLOCK = 1 << 22  # bytes of one write of the saver
BLOCKS = 64  # of a rank's file


def measure(world: World, folder: Path, nodes: int) -> tuple[dict[str, Any], str]:
    """Fields of Cluster, the rate by node, and how it was measured; OSError on all ranks where
    that fails. Collective.
    """
    new = lambda: tempfile.mkdtemp(prefix=".trilane-", dir=folder)  # noqa: E731
    place = Path(call_on_first(world, new))
    values = torch.rand(BLOCK // 4)  # which no file system makes smaller
    entries = [(str(number), (len(values),)) for number in range(BLOCKS)]
    problem = ""
    dist.barrier()
    begin = time.perf_counter()
    try:
        write_slices(place / str(world.rank), entries, itertools.repeat(values, BLOCKS))
    except OSError as error:
        problem = f"rank {world.rank}: {error_text(error)}"
    every = gather_values(world, (time.perf_counter() - begin, problem))
    if world.is_first:
        shutil.rmtree(place, ignore_errors=True)
    for _, problem in every:
        if problem:
            raise OSError(problem)
    written = world.size * BLOCKS * BLOCK / max(seconds for seconds, _ in every)
    how = f"{world.size} files at once, {nodes} nodes, {BLOCKS * BLOCK / 1e6:.0f} MB each, fsync"
    return {"write_bytes_per_s": written / nodes, "storage_nodes": nodes}, how
