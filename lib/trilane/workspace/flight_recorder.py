"""NCCL's Flight Recorder: where it writes what it remembers of collectives, and how it is asked to while a job hangs.

torch makes a pipe for each rank, TORCH_NCCL_DEBUG_INFO_PIPE_FILE + rank + ".pipe", looks into it once a second, and
dumps when something was written into it (DumpPipe in torch 2.13's ProcessGroupNCCL.hpp). Without NCCL there is none.
"""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

DUMP, PIPE = "nccl_trace_rank_", "nccl_pipe_rank_"  # below ranks/; torch adds the rank, to a pipe also ".pipe"


DUMP_S = 8.0  # torch looks once a second, and writes what took it a moment to put into words


def environment(ranks: Path, rank: str) -> dict[str, str]:
    """What tells torch where to write, by its names of today and of before, and where to listen; before NCCL starts.

    torch ends the process where the pipe cannot be made, as on some file systems: then it is not asked to listen.
    """
    told = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(ranks / DUMP))
    told["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    pipe = _pipe(ranks, rank)
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        pipe.unlink()
    except OSError:
        return told
    return {**told, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(ranks / PIPE)}


def ask(ranks: Path, wanted: Iterable[int]) -> dict[int, int]:
    """Ask ranks of this host for their dumps; those who listen, and when each last wrote one (ns, 0: never)."""
    return {rank: _written_ns(ranks, rank) for rank in wanted if _rings(_pipe(ranks, rank))}


def collect(ranks: Path, asked: dict[int, int], stacks: Path) -> None:
    """Copy what the asked ranks write within DUMP_S into `stacks`; who has not written by then is left out."""
    end, sizes = time.monotonic() + DUMP_S, dict.fromkeys(asked, 0)
    while sizes and time.monotonic() < end:
        time.sleep(0.2)
        for rank, before in sizes.copy().items():
            path = ranks / f"{DUMP}{rank}"
            if _written_ns(ranks, rank) == asked[rank]:
                continue
            sizes[rank] = path.stat().st_size
            if 0 < sizes[rank] == before:
                shutil.copyfile(path, stacks / path.name)
                del sizes[rank]


def forget(ranks: Path, rank: str) -> None:
    """Take the rank's pipe away: whoever reads all files of a folder would wait at it for ever."""
    _pipe(ranks, rank).unlink(missing_ok=True)


def _pipe(ranks: Path, rank: int | str) -> Path:
    return ranks / f"{PIPE}{rank}.pipe"


def _rings(pipe: Path) -> bool:
    """Whether somebody listens, and now knows that he is asked; never waits."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO where nobody reads
    except OSError:
        return False
    try:
        return os.write(end, b"?") == 1
    except OSError:
        return False
    finally:
        os.close(end)


def _written_ns(ranks: Path, rank: int) -> int:
    path = ranks / f"{DUMP}{rank}"
    return path.stat().st_mtime_ns if path.exists() else 0
