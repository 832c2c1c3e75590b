"""The test of one node, or of a pair, before a training: `python -m trilane.engine.bench.node_test alone|pair GPUS`.

Started by srun with a task for each GPU (one on CPUs). It prints READY once torch is imported, then one line of JSON:
{"broken": [...], "doubtful": [...], "rates": {name: larger is better}}.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Query = Callable[[str, Sequence[str]], list[list[str]]]


def main(argv: list[str]) -> int:
    """0 once the line is printed."""
    mode, gpus = argv[0], int(argv[1])
    found: dict[str, Any] = {"broken": [], "doubtful": [], "rates": {}}
    if mode == "alone" and os.environ.get("SLURM_LOCALID", "0") == "0":
        found["broken"], found["doubtful"] = _health(gpus)
    if found["broken"]:
        print(json.dumps(found), flush=True)
        return 0
    from trilane.engine import world as worlds

    print("READY", flush=True)
    signal.alarm(55)  # then the kernel ends the test: a GPU or a network that hangs
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        os.environ.pop("SLURM_PROCID", None)
        worlds.single_process(os.environ)
    worlds.from_slurm(os.environ)
    world = worlds.start_process_group("fp32")
    every = worlds.gather_values(world, _rates(world, mode))
    if world.is_first:
        found["rates"] = {name: min(rates[name] for rates in every) for name in every[0]}
        if gpus and world.device.type != "cuda":
            found["broken"] = ["torch finds no GPU"]
        print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # at once: communicators of a peer that has gone would be waited for


def _rates(world: Any, mode: str) -> dict[str, float]:
    """Of this rank's device and of an all_reduce within its node; or in a pair of nodes of a large and a small one."""
    import torch

    from trilane.engine.bench import rates

    size, found = rates.large_bytes(world.device), dict[str, float]()
    if world.size > 1:
        ring = rates.ring_bytes_per_s(size, world.size, rates.reduce_s(world.device, None, size, 8))
        found["all_reduce B/s" if mode == "pair" else "all_reduce within B/s"] = ring
    if mode == "pair":
        return {**found, "all_reduce 1/s": 1 / rates.reduce_s(world.device, None, 4, 30)}
    kind = torch.float32
    if world.device.type == "cuda":
        kind = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
        found["PCIe B/s"] = rates.host_to_device_bytes_per_s(world.device)
    else:
        torch.set_num_threads(1)
    found["matmul FLOP/s"] = rates.matmul_flops_per_s(world.device, kind)
    return {**found, "memory B/s": rates.copy_bytes_per_s(world.device)}


def _health(gpus: int) -> tuple[list[str], list[str]]:
    """What nvidia-smi reports, once the processes of an attempt that failed have had time to give memory back."""
    end = time.monotonic() + 15.0
    while True:
        broken, doubtful = findings(gpus)
        if not any("in use" in reason for reason in broken) or time.monotonic() > end:
            return broken, doubtful
        time.sleep(1.0)


def query(what: str, names: Sequence[str]) -> list[list[str]]:
    """The rows of `nvidia-smi --query-WHAT`, a cell for each name; empty where it is missing, fails or lacks a name."""
    command = ["nvidia-smi", f"--query-{what}={','.join(names)}", "--format=csv,noheader,nounits"]
    try:  # it takes a second or two a GPU without its persistence daemon
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(names)] if done.returncode == 0 else []


def findings(gpus: int, ask: Query = query) -> tuple[list[str], list[str]]:
    """(what makes the node useless, what makes another node preferable), of its GPUs; both empty without nvidia-smi.

    A failed remapping is a reason to replace the GPU; an uncorrectable error and a pending remapping only ask for a
    reset, and until then a new process neither computes wrongly nor more slowly:
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html. `gpus` is how many
    the training needs, 0 on CPUs.
    """
    broken, doubtful = list[str](), list[str]()
    cards = ask("gpu", ("index", "memory.used"))
    if cards and len(cards) < gpus:
        broken.append(f"{len(cards)} of {gpus} GPUs")
    for index, used in cards:
        # Before a training nothing should be there: a driver's context takes less than 2 GiB, a forgotten process more.
        if used.isdecimal() and int(used) > 2048:
            broken.append(f"GPU {index}: {int(used) / 1024:.1f} GiB in use before the training")
    for index, errors in ask("gpu", ("index", "ecc.errors.uncorrected.volatile.total")):
        if errors.isdecimal() and int(errors):
            doubtful.append(f"GPU {index}: {errors} uncorrectable ECC errors since its last reset")
    for index, pending in ask("gpu", ("index", "retired_pages.pending")):
        if _is_true(pending):
            doubtful.append(f"GPU {index}: pages to be retired at its next reset")
    for bus, pending, failure in ask("remapped-rows", ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")):
        if _is_true(failure):
            broken.append(f"GPU {bus}: its memory has no rows left to remap")
        elif _is_true(pending):
            doubtful.append(f"GPU {bus}: rows to be remapped at its next reset")
    return broken, doubtful


def _is_true(cell: str) -> bool:
    return cell.lower() not in ("", "0", "no", "[n/a]", "n/a", "[not supported]")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
