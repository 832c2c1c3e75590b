"""What storage writes and reads in a checkpoint's pattern: each rank one file, written by the
saver's own code with its checksum and fsync, all ranks at once; removed afterwards, unless rank 0
is killed outright.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trilane.workspace.storage import available
from trilane_engine.checkpoint.slices import write_slices
from trilane_engine.world import World, call_on_first, error_text, gather_values

BLOCK = 1 << 22  # bytes of one write of the saver
BLOCKS = 64  # of a rank's file
LIMIT_S = 5.0  # of writing and of reading: slow storage is measured with fewer bytes


def measure(world: World, folder: Path, nodes: int) -> tuple[dict[str, Any], str]:
    """Fields of Cluster, rates by node, and how they were measured; no fields, and why, where not.
    Collective.
    """
    try:
        place = Path(call_on_first(world, lambda: _new_folder(folder, world.size)))
    except OSError as error:
        return {}, f"{folder}: {error_text(error)}"
    # where there are several nodes a rank reads what another has written, as after a restart
    # elsewhere
    other = (world.rank + world.size // nodes) % world.size
    read = 0.0
    try:
        written, problem = _at_once(world, lambda: _write(place / str(world.rank)))
        if not problem:
            read, problem = _at_once(world, lambda: _read(place / str(other)))
    finally:
        if world.is_first:
            shutil.rmtree(place, ignore_errors=True)
    if problem:
        return {}, problem
    size = f"at most {BLOCKS * BLOCK / 1e6:.0f} MB each"
    how = f"{world.size} files at once, {nodes} nodes, {size}, fsync; page cache told to drop"
    rates = {"write_bytes_per_s": written / nodes, "read_bytes_per_s": read / nodes}
    return {**rates, "storage_nodes": nodes}, how


def _new_folder(folder: Path, ranks: int) -> str:
    """A new folder; OSError where the files would take more than a quarter of the free space."""
    if available(folder)[0] < 4 * ranks * BLOCKS * BLOCK:
        raise OSError(f"too little is free for {ranks} files of {BLOCKS * BLOCK / 1e6:.0f} MB")
    return tempfile.mkdtemp(prefix=".trilane-", dir=folder)


def _at_once(world: World, work: Callable[[], int]) -> tuple[float, str]:
    """Bytes per second of all ranks until the last is done, or what went wrong."""
    dist.barrier()
    begin = time.perf_counter()
    size = 0
    problem = ""
    try:
        size = work()
    except OSError as error:
        problem = f"rank {world.rank}: {error_text(error)}"
    every = gather_values(world, (size, time.perf_counter() - begin, problem))
    problems = [problem for *_, problem in every if problem]
    rate = sum(size for size, *_ in every) / max(seconds for _, seconds, _ in every)
    return rate, "".join(problems[:1])


def _write(path: Path) -> int:
    """The bytes written: of random numbers, which no file system makes smaller."""
    values = torch.rand(BLOCK // 4)
    end = time.perf_counter() + LIMIT_S

    def blocks() -> Iterator[torch.Tensor]:
        for _ in range(BLOCKS):
            if time.perf_counter() < end:
                yield values

    entries = [(str(number), (len(values),)) for number in range(BLOCKS)]
    _, (size, _) = write_slices(path, entries, blocks())
    return size


def _read(path: Path) -> int:
    """The bytes read; a file system that ignores what fadvise asks for gives those that this node
    wrote from memory.
    """
    size = 0
    buffer = bytearray(BLOCK)
    end = time.perf_counter() + LIMIT_S
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while time.perf_counter() < end:
            count = file.readinto(buffer)
            if not count:
                break
            size += count
    return size
