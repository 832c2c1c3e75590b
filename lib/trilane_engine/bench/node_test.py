"""The test of one node before a training: `python -m trilane_engine.bench.node_test GPUS`.

Started in a task of srun for each GPU (one on CPUs). The first task of the node prints a line of
JSON: {"broken": [...], "rates": {name: larger is better}}.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from trilane.utils.process import run


def main(gpus: int) -> None:
    """Print the line; ends the process."""
    variables = place(gpus, os.environ)
    result: dict[str, Any] = {"broken": [], "rates": {}}
    if variables["LOCAL_RANK"] == "0":
        result["broken"] = faults(gpus)
        # in which the processes of an attempt that failed give their memory back
        end = time.monotonic() + 15.0
        while any("in use" in fault for fault in result["broken"]) and time.monotonic() < end:
            time.sleep(1.0)
            result["broken"] = faults(gpus)
    if not result["broken"]:
        from trilane_engine import world as worlds
        from trilane_engine.bench import rates

        signal.alarm(55)  # then the kernel ends the test: a GPU that hangs
        os.environ.update(variables)
        world = worlds.start_process_group("fp32")
        every = worlds.gather_values(world, (rates.of_rank(world), rates.wrong(world)))
        result["rates"] = {name: min(own[name] for own, _ in every) for name in every[0][0]}
        result["broken"] = sorted({reason for _, reasons in every for reason in reasons})
        if gpus and world.device.type != "cuda":
            result["broken"] = ["torch finds no GPU"]
        if not world.is_first:
            os._exit(0)
    print(json.dumps(result), flush=True)
    os._exit(0)  # at once: communicators of a peer that has gone would be waited for


def place(gpus: int, env: Mapping[str, str]) -> dict[str, str]:
    """This task's rank among those of its node, as torchrun's variables."""
    local = env.get("SLURM_LOCALID", "0")
    tasks = str(gpus or 1)
    # of this step, as an earlier one may still hold its own, and of this node, as several may be
    # one machine
    port = 37 * int(env["SLURM_JOB_ID"]) + 1000 * int(env["SLURM_STEP_ID"])
    port += int(env.get("SLURM_NODEID", "0"))
    return {
        "RANK": local,
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": tasks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(10_000 + port % 20_000),
    }


def query(what: str, names: str) -> list[list[str]]:
    """The rows of `nvidia-smi --query-WHAT=NAMES`; empty where it is missing, fails or lacks a
    name.
    """
    command = ["nvidia-smi", f"--query-{what}={names}", "--format=csv,noheader,nounits"]
    done = run(
        command, within_s=20.0
    )  # it takes a second or two a GPU without its persistence daemon
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(names.split(","))]


def faults(gpus: int, ask: Callable[[str, str], list[list[str]]] = query) -> list[str]:
    """What makes the node useless, by its GPUs.

    A failed remapping is a reason to replace the GPU:
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html.
    `gpus` is how many the training needs, 0 on CPUs.
    """
    cards = ask("gpu", "index,memory.used")
    broken = []
    if cards and len(cards) < gpus:
        broken.append(f"{len(cards)} of {gpus} GPUs")
    # Before a training nothing should be there: a driver's context takes less than 2 GiB, a
    # forgotten process more.
    for index, mib in cards:
        if mib.isdecimal() and int(mib) > 2048:
            gib = int(mib) / 1024
            broken.append(f"GPU {index}: {gib:.1f} GiB in use before the training")
    for bus, failed in ask("remapped-rows", "gpu_bus_id,remapped_rows.failure"):
        if failed in ("1", "Yes"):
            broken.append(f"GPU {bus}: its memory has no rows left to remap")
    return broken


if __name__ == "__main__":
    main(int(sys.argv[1]))
