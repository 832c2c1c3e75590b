"""What storage writes and reads in a checkpoint's pattern: each rank one file, written by the
saver's own code with its checksum and fsync, all ranks at once; removed afterwards, unless rank 0
is killed outright.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trilane.workspace.storage import available
from trilane_engine.checkpoint.slices import write_slices
from trilane_engine.world import World, call_on_first, error_text, gather_values

BLOCK, MOST = 1 << 22, 1 << 28  # bytes of one write of the saver; of a rank's file
LIMIT_S = (
    5.0  # of writing and of reading, the fsync left out: slow storage is measured with fewer bytes
)


def measure(world: World, folder: Path, nodes: int) -> tuple[dict[str, Any], str]:
    """Fields of Cluster, rates by node, and how they were measured; no fields, and why, where not.
    Collective.
    """
    place, blocks = call_on_first(world, lambda: _prepare(folder, world.size))
    if not blocks:
        return {}, place
    # where there are several nodes a rank reads what another has written, as after a restart
    # elsewhere
    mine, other = (
        Path(place) / str((world.rank + shift) % world.size) for shift in (0, world.size // nodes)
    )
    usual = signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # torchrun's and SLURM's: the files go first
    try:
        written, problem = _at_once(world, lambda: _write(mine, blocks))
        read, problem = (0.0, problem) if problem else _at_once(world, lambda: _read(other))
    finally:
        signal.signal(signal.SIGTERM, usual)
        if world.is_first:
            shutil.rmtree(place, ignore_errors=True)
    if problem:
        return {}, problem
    each = f"at most {blocks * BLOCK / 1e6:.0f} MB each"
    how = f"{world.size} files at once from {nodes} node{'s' * (nodes > 1)}, {each}, fsync; page cache told to drop"
    return {
        "write_bytes_per_s": written / nodes,
        "read_bytes_per_s": read / nodes,
        "storage_nodes": nodes,
    }, how


def _prepare(folder: Path, ranks: int) -> tuple[str, int]:
    """A new folder and the blocks of each rank's file, which take at most a quarter of the free
    space; else why not.
    """
    try:
        blocks = int(min(MOST, available(folder)[0] / 4 / ranks)) // BLOCK
        return (
            (tempfile.mkdtemp(prefix=".trilane-", dir=folder), blocks)
            if blocks
            else (f"{folder} is full", 0)
        )
    except OSError as error:
        return f"{folder}: {error_text(error)}", 0


def _at_once(world: World, work: Callable[[], int]) -> tuple[float, str]:
    """Bytes per second of all ranks until the last is done, or what went wrong."""
    dist.barrier()
    begin, done, problem = time.perf_counter(), 0, ""
    try:
        done = work()
    except OSError as error:
        problem = f"rank {world.rank}: {error_text(error)}"
    sizes, seconds, problems = zip(
        *gather_values(world, (done, time.perf_counter() - begin, problem)), strict=True
    )
    return sum(sizes) / max(seconds), next(filter(None, problems), "")


def _write(path: Path, blocks: int) -> int:
    """The bytes written: of random numbers, which no file system makes smaller."""
    values, end = torch.rand(BLOCK // 4), time.perf_counter() + LIMIT_S
    written = (values for _ in range(blocks) if time.perf_counter() < end)
    return write_slices(path, [(str(n), (len(values),)) for n in range(blocks)], written)[1][0]


def _read(path: Path) -> int:
    """The bytes read; a file system that ignores what fadvise asks for gives those that this node
    wrote from memory.
    """
    size, end, buffer = 0, time.perf_counter() + LIMIT_S, bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while time.perf_counter() < end and (count := file.readinto(buffer)):
            size += count
    return size
