"""A pool that trains many small plans in turn and imports the heavy libraries once.

`python -m trilane.engine.worker_pool` prints one JSON line that describes this machine. It reads lines
`PROCESSES PORT FOLDER` (0 processes: the reference) and prints the workers' exit codes for each. Without a GPU the
workers are forked; with one each is a new process, since a process that has initialized CUDA cannot be forked.
"""

import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

from trilane.utils.process import PARENT, die_with_parent, python


def worker_environment(rank: int, size: int, port: str, folder: str) -> dict[str, str]:
    """The environment that torchrun would give a worker; on a CPU each gets one thread, as if there were eight."""
    return {
        PARENT: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(max(1, size)),
        "LOCAL_WORLD_SIZE": "8" if not gpu_count() else str(max(1, size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TRILANE_RANK_LOGS": folder,
    }


def work(size: int, folder: str) -> int:
    """Run the engine, or the reference.

    That writes truth.json, [loss, gradient norm] of each iteration, and truth-validation.json, [iteration, loss] of
    each evaluation.
    """
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
    steps, evaluations = reference.train(read_plan(f"{folder}/plan.json"))
    Path(folder, "truth.json").write_text(json.dumps(steps))
    Path(folder, "truth-validation.json").write_text(json.dumps(evaluations))
    return 0


def fork_worker(rank: int, size: int, port: str, folder: str) -> int:
    """Fork a worker that shares this process's imports; its process id."""
    environment = worker_environment(rank, size, port, folder)
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        work_and_exit(size, folder)
    return pid


def work_and_exit(size: int, folder: str) -> None:
    """Run `work` and exit at once with its code."""
    try:
        code = work(size, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def gpu_count() -> int:
    """The number of GPUs here, counted without initializing CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return torch.cuda.device_count()


def machine() -> dict[str, object]:
    """{"cards": number of GPUs, "bf16": whether they support it}; read in a child to keep CUDA uninitialized."""
    if not gpu_count():
        return {"cards": 0, "bf16": True}
    code = "import torch; print(torch.cuda.get_device_capability() >= (8, 0))"
    printed = subprocess.run(python("-c", code), capture_output=True, text=True, check=True).stdout
    return {"cards": gpu_count(), "bf16": printed.strip() == "True"}


def load() -> None:
    """Import the modules that workers need."""
    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()
    import trilane.engine.backends.deepspeed_3d
    import trilane.engine.backends.deepspeed_zero
    import trilane.engine.backends.hf_zero3
    import trilane.engine.backends.megatron
    import trilane.engine.loop
    import trilane.engine.reference  # noqa: F401


def serve_forked() -> None:
    """Import everything, then fork the workers of each line in turn."""
    load()
    gc.freeze()  # a collection in a worker would copy every page that it shares with this process
    for line in sys.stdin:
        size, port, folder = line.rstrip("\n").split(" ", 2)
        workers = [fork_worker(rank, int(size), port, folder) for rank in range(max(1, int(size)))]
        print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers], flush=True)


def serve_fresh() -> None:
    """Start the workers of each line in turn as new processes."""
    for line in sys.stdin:
        size, port, folder = line.rstrip("\n").split(" ", 2)
        command = python("-m", "trilane.engine.worker_pool", size, folder)
        envs = [{**os.environ, **worker_environment(r, int(size), port, folder)} for r in range(max(1, int(size)))]
        workers = [subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) for env in envs]
        print(*[worker.wait() for worker in workers], flush=True)


if __name__ == "__main__":
    die_with_parent()
    if len(sys.argv) == 3:
        work_and_exit(int(sys.argv[1]), sys.argv[2])
    here = machine()
    print(json.dumps(here), flush=True)
    (serve_fresh if here["cards"] else serve_forked)()
