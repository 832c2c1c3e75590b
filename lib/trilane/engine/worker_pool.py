"""Many small runs one after the other, without the start-up of each: the heavy libraries are imported once.

`python -m trilane.engine.worker_pool` says in one JSON line what this machine has. It reads lines
`PROCESSES PORT FOLDER` (0 processes: the reference) and answers each with the workers' exit codes. Without a GPU the
workers are forked; with one they are started afresh, since a process that has touched CUDA cannot be forked.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

from trilane.utils.process import PARENT, die_with_parent


def surroundings(rank: int, size: int, port: str, folder: str) -> dict[str, str]:
    """What torchrun would tell a worker; on a CPU each has one thread, as if there were eight."""
    return {
        PARENT: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(max(1, size)),
        "LOCAL_WORLD_SIZE": "8" if not cards() else str(max(1, size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TRILANE_RANK_LOGS": folder,
    }


def work(size: int, folder: str) -> int:
    """The engine, or the reference, which leaves truth.json: [loss, gradient norm] of each iteration."""
    if size:
        from trilane.engine.__main__ import main

        return main([f"{folder}/plan.json"])
    die_with_parent()
    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()
    import torch

    from trilane.config.plan import read_plan
    from trilane.engine import reference

    torch.set_num_threads(1)
    Path(folder, "truth.json").write_text(json.dumps(reference.train(read_plan(f"{folder}/plan.json"))))
    return 0


def forked(rank: int, size: int, port: str, folder: str) -> int:
    """The process number of a worker that shares what this process has imported."""
    told = surroundings(rank, size, port, folder)
    pid = os.fork()
    if pid == 0:
        os.environ.update(told)
        leave(size, folder)
    return pid


def leave(size: int, folder: str) -> None:
    """Do the work and end this process at once."""
    try:
        code = work(size, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def cards() -> int:
    """GPUs of this machine, asked in a way that leaves CUDA untouched."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return torch.cuda.device_count()


def machine() -> dict[str, object]:
    """{"cards": GPUs here, "bf16": whether they have it}; a child asks, so that this process never touches CUDA."""
    if not cards():
        return {"cards": 0, "bf16": True}
    asked = "import torch; print(torch.cuda.get_device_capability() >= (8, 0))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    return {"cards": cards(), "bf16": said.strip() == "True"}


def load() -> None:
    """Import what workers need."""
    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()
    import trilane.engine.backends.deepspeed_3d
    import trilane.engine.backends.deepspeed_zero
    import trilane.engine.backends.hf_zero3
    import trilane.engine.backends.megatron
    import trilane.engine.loop
    import trilane.engine.reference  # noqa: F401


def serve_forked() -> None:
    """Import everything, then fork the workers of one line after the other."""
    load()
    for line in sys.stdin:
        size, port, folder = line.rstrip("\n").split(" ", 2)
        workers = [forked(rank, int(size), port, folder) for rank in range(max(1, int(size)))]
        print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers], flush=True)


def serve_fresh() -> None:
    """Start the workers of one line after the other, each a process of its own."""
    for line in sys.stdin:
        size, port, folder = line.rstrip("\n").split(" ", 2)
        command = [sys.executable, "-m", "trilane.engine.worker_pool", size, folder]
        every = [{**os.environ, **surroundings(r, int(size), port, folder)} for r in range(max(1, int(size)))]
        workers = [subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) for env in every]
        print(*[worker.wait() for worker in workers], flush=True)


if __name__ == "__main__":
    die_with_parent()
    if len(sys.argv) == 3:
        leave(int(sys.argv[1]), sys.argv[2])
    found = machine()
    print(json.dumps(found), flush=True)
    (serve_fresh if found["cards"] else serve_forked)()
