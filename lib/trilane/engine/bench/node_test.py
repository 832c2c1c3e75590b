"""The test of one node, or of a pair, before a training: `python -m trilane.engine.bench.node_test alone|pair GPUS`.

Started by srun with a task for each GPU (one on CPUs). It prints READY once torch is imported, then one line of JSON:
{"broken": [...], "doubtful": [...], "rates": {name: larger is better}}.
"""

import json
import os
import signal
import sys
import time
from typing import Any

from trilane.engine.bench import gpu_health

READY = "READY"
LIMIT_S = 55  # then the kernel ends the test: a GPU or a network that hangs
FREE_WITHIN_S = 15.0  # the processes of an attempt that failed give their memory back
LARGE_CALLS, SMALL_CALLS = 8, 30


def main(argv: list[str]) -> int:
    """0 once the line is printed."""
    mode, gpus = argv[0], int(argv[1])
    found: dict[str, Any] = {"broken": [], "doubtful": [], "rates": {}}
    if mode == "alone" and os.environ.get("SLURM_LOCALID", "0") == "0":
        found["broken"], found["doubtful"] = _health(gpus)
    if found["broken"]:
        print(json.dumps(found), flush=True)
        return 0
    from trilane.engine.distributed import world as worlds

    print(READY, flush=True)
    signal.alarm(LIMIT_S)
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        os.environ.pop("SLURM_PROCID", None)
        worlds.single_process(os.environ)
    worlds.from_slurm(os.environ)
    world = worlds.start_process_group("fp32")
    every = worlds.gather_values(world, _alone(world) if mode == "alone" else _pair(world))
    if world.is_first:
        found["rates"] = {name: min(rates[name] for rates in every) for name in every[0]}
        if gpus and world.device.type != "cuda":
            found["broken"] = ["torch finds no GPU"]
        print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # at once: communicators of a peer that has gone would be waited for


def _health(gpus: int) -> tuple[list[str], list[str]]:
    """What nvidia-smi reports, once memory in use has had time to become free."""
    end = time.monotonic() + FREE_WITHIN_S
    while True:
        broken, doubtful = gpu_health.findings(gpus)
        if not any("in use" in reason for reason in broken) or time.monotonic() > end:
            return broken, doubtful
        time.sleep(1.0)


def _alone(world: Any) -> dict[str, float]:
    """The rates of this rank's device, and of an all_reduce among those of its node."""
    import torch

    from trilane.engine.bench import device_rates as rates

    if world.device.type != "cuda":
        torch.set_num_threads(1)
        flops = rates.fastest_flops_per_s(rates.CPU_SIZES[-1:], rates.CPU, torch.float32)
        found = {"matmul FLOP/s": flops, "memory B/s": rates.copy_bytes_per_s(rates.CPU)}
    else:
        kind = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
        found = {
            "matmul FLOP/s": rates.fastest_flops_per_s(rates.CUDA_SIZES[:1], world.device, kind),
            "memory B/s": rates.copy_bytes_per_s(world.device),
            "PCIe B/s": rates.host_to_device_bytes_per_s(world.device),
        }
    return found | ({"all_reduce within B/s": _ring(world)} if world.size > 1 else {})


def _pair(world: Any) -> dict[str, float]:
    """A large and a small all_reduce among the devices of two nodes."""
    from trilane.engine.bench.collectives import reduce_s

    return {"all_reduce B/s": _ring(world), "all_reduce 1/s": 1 / reduce_s(world, None, 4, SMALL_CALLS)}


def _ring(world: Any) -> float:
    from trilane.engine.bench.collectives import large_bytes, reduce_s, ring_bytes_per_s

    size = large_bytes(world.device)
    return ring_bytes_per_s(size, world.size, reduce_s(world, None, size, LARGE_CALLS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
