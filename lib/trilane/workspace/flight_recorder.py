"""NCCL's Flight Recorder: where it dumps its record of collectives, and how to request a dump while
a job hangs.

torch creates a pipe per rank, TORCH_NCCL_DEBUG_INFO_PIPE_FILE + rank + ".pipe", polls it once a
second, and dumps when something was written to it (DumpPipe in torch 2.13's ProcessGroupNCCL.hpp).
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path


def environment(ranks: Path, rank: str) -> dict[str, str]:
    """Environment variables for torch, to set before NCCL starts: the dump file and the pipe."""
    # torch ends the process where the pipe cannot be created, as on some file systems: then there
    # is none
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    values = {**dict.fromkeys(names, str(_dump(ranks))), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    with contextlib.suppress(OSError):
        forget(ranks, rank)
        os.mkfifo(_pipe(ranks, rank))
        forget(ranks, rank)
        values["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(ranks / "nccl_pipe_rank_")
    return values


def ask(ranks: Path, wanted: Iterable[int]) -> dict[int, int]:
    """Request dumps from ranks of this host; those that listen, with the time of their last dump
    (ns, 0: never).
    """
    return {
        rank: _written_ns(_dump(ranks, rank)) for rank in wanted if _request(_pipe(ranks, rank))
    }


def collect(ranks: Path, asked: dict[int, int], stacks: Path) -> None:
    """Copy the dumps that the asked ranks write within 8 s into `stacks`: torch polls once a
    second, then formats.
    """
    end = time.monotonic() + 8.0
    sizes = dict.fromkeys(asked, 0)
    while sizes and time.monotonic() < end:
        time.sleep(0.2)
        for rank, before in sizes.copy().items():
            path = _dump(ranks, rank)
            if _written_ns(path) != asked[rank]:
                sizes[rank] = path.stat().st_size
                if 0 < sizes[rank] == before:
                    shutil.copyfile(path, stacks / path.name)
                    del sizes[rank]


def forget(ranks: Path, rank: str) -> None:
    """Remove the rank's pipe, on which a reader of all files in the folder would block."""
    _pipe(ranks, rank).unlink(missing_ok=True)


def _dump(ranks: Path, rank: int | str = "") -> Path:
    return ranks / f"nccl_trace_rank_{rank}"


def _pipe(ranks: Path, rank: int | str) -> Path:
    return ranks / f"nccl_pipe_rank_{rank}.pipe"


def _request(pipe: Path) -> bool:
    """Write to the pipe; whether a process reads it. Never blocks."""
    with contextlib.suppress(OSError):
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO where no process reads
        try:
            return os.write(end, b"?") == 1
        finally:
            os.close(end)
    return False


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
