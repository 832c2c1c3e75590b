"""Imports the heavy libraries once, then forks the workers of one run after the other: it saves the start-up of each.

Reads lines `PROCESSES PORT FOLDER`, 0 processes for the reference; answers with the workers' exit codes.
"""

import json
import os
import sys
import traceback
from pathlib import Path


def child(rank: int, size: int, port: str, folder: str) -> None:
    """One worker, as torchrun would have started it, but for one thread each; it never returns."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE="8")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TRILANE_RANK_LOGS=folder)
    try:
        code = work(size, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(size: int, folder: str) -> int:
    """The engine, or the reference."""
    if size:
        from trilane.engine.__main__ import main

        return main([f"{folder}/plan.json"])
    import torch

    from trilane.engine import reference
    from trilane.plan import read_plan

    torch.set_num_threads(1)
    Path(folder, "truth.json").write_text(json.dumps(reference.train(read_plan(f"{folder}/plan.json"))))
    return 0


def serve() -> None:
    """Answer one line after the other until there are no more."""
    from trilane.engine.cpu import enable_cpu

    enable_cpu()
    import trilane.engine.deepspeed_3d
    import trilane.engine.deepspeed_zero
    import trilane.engine.loop
    import trilane.engine.megatron  # noqa: F401

    for line in sys.stdin:
        size, port, folder = line.rstrip("\n").split(" ", 2)
        workers = []
        for rank in range(max(1, int(size))):
            workers.append(os.fork())
            if workers[-1] == 0:
                child(rank, int(size), port, folder)
        print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers], flush=True)


if __name__ == "__main__":
    serve()
