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
from collections.abc import Callable
from typing import Any

Query = Callable[[str, str], list[list[str]]]


def main(argv: list[str]) -> int:
    """0 once the line is printed."""
    mode, gpus = argv[0], int(argv[1])
    found: dict[str, Any] = {"broken": [], "doubtful": [], "rates": {}}
    if mode == "alone" and os.environ.get("SLURM_LOCALID", "0") == "0":
        end = time.monotonic() + 15.0
        found |= findings(gpus)
        # The processes of an attempt that failed need some seconds to give their memory back.
        while any("in use" in reason for reason in found["broken"]) and time.monotonic() < end:
            time.sleep(1.0)
            found |= findings(gpus)
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

    device, found = world.device, dict[str, float]()
    if world.size > 1:
        size = rates.large_bytes(device)
        ring = rates.ring_bytes_per_s(size, world.size, rates.reduce_s(device, None, size, 8))
        found["all_reduce B/s" if mode == "pair" else "all_reduce within B/s"] = ring
    if mode == "pair":
        return {**found, "all_reduce 1/s": 1 / rates.reduce_s(device, None, 4, 30)}
    if device.type == "cuda":
        found["PCIe B/s"] = rates.host_to_device_bytes_per_s(device)
    else:
        torch.set_num_threads(1)
    kind = list(rates.matmul_types(device).values())[-1]
    return {
        **found,
        "matmul FLOP/s": rates.matmul_flops_per_s(device, kind),
        "memory B/s": rates.copy_bytes_per_s(device),
    }


def query(what: str, names: str) -> list[list[str]]:
    """The rows of `nvidia-smi --query-WHAT=NAMES`; empty where it is missing, fails or lacks a name."""
    command = ["nvidia-smi", f"--query-{what}={names}", "--format=csv,noheader,nounits"]
    try:  # it takes a second or two a GPU without its persistence daemon
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(names.split(","))]


def findings(gpus: int, ask: Query = query) -> dict[str, list[str]]:
    """What makes the node useless ("broken"), and what makes another preferable ("doubtful"); of its GPUs.

    A failed remapping is a reason to replace the GPU, an uncorrectable error asks for a reset:
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html. `gpus` is how many
    the training needs, 0 on CPUs.
    """
    cards = ask("gpu", "index,memory.used")
    broken = [f"{len(cards)} of {gpus} GPUs"] if cards and len(cards) < gpus else []
    # Before a training nothing should be there: a driver's context takes less than 2 GiB, a forgotten process more.
    used = [(index, int(mib) / 1024) for index, mib in cards if mib.isdecimal() and int(mib) > 2048]
    broken += [f"GPU {index}: {gib:.1f} GiB in use before the training" for index, gib in used]
    remapped = ask("remapped-rows", "gpu_bus_id,remapped_rows.failure")
    broken += [f"GPU {bus}: its memory has no rows left to remap" for bus, failed in remapped if failed in ("1", "Yes")]
    counted = ask("gpu", "index,ecc.errors.uncorrected.volatile.total")
    errors = [(index, n) for index, n in counted if n.isdecimal() and int(n)]
    doubtful = [f"GPU {index}: {n} uncorrectable ECC errors since its last reset" for index, n in errors]
    return {"broken": broken, "doubtful": doubtful}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
