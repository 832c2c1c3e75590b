"""The test of one node, or of a pair, before a training: `python -m trilane_engine.bench.node_test
GPUS ROUND`.

Started in a task of srun for each GPU (one on CPUs). A round is a number, "alone" or "pair", and
the groups of nodes, such as n1,n2. The first task of a group prints a line of JSON: {"broken":
[...], "doubtful": [...], "rates": {name: larger is better}}.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from trilane.utils.process import run


def main(gpus: int, round_: str) -> None:
    """Print the line; ends the process."""
    mode, placed = place(gpus, round_, os.environ)
    found: dict[str, Any] = {"broken": [], "doubtful": [], "rates": {}}
    if not placed:
        return
    if mode == "alone" and placed["LOCAL_RANK"] == "0":
        found |= findings(gpus)
        end = (
            time.monotonic() + 15.0
        )  # in which the processes of an attempt that failed give their memory back
        while any("in use" in reason for reason in found["broken"]) and time.monotonic() < end:
            time.sleep(1.0)
            found |= findings(gpus)
    if not found["broken"]:
        from trilane_engine import world as worlds
        from trilane_engine.bench import rates

        signal.alarm(55)  # then the kernel ends the test: a GPU or a network that hangs
        os.environ.update(placed)
        world = worlds.start_process_group("fp32")
        every = worlds.gather_values(world, (rates.of_rank(world, mode), rates.wrong(world)))
        found["rates"] = {name: min(own[name] for own, _ in every) for name in every[0][0]}
        found["broken"] = sorted({reason for _, reasons in every for reason in reasons})
        if gpus and world.device.type != "cuda":
            found["broken"] = ["torch finds no GPU"]
        if not world.is_first:
            os._exit(0)
    print(json.dumps(found), flush=True)
    os._exit(0)  # at once: communicators of a peer that has gone would be waited for


def place(gpus: int, round_: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The round's mode, and this task's rank in its group as torchrun's variables; empty where its
    node is in none.
    """
    number, mode, *groups = round_.split()
    for index, nodes in enumerate(group.split(",") for group in groups):
        if env["SLURMD_NODENAME"] in nodes:
            each, local = gpus or 1, int(env.get("SLURM_LOCALID", "0"))
            rank = nodes.index(env["SLURMD_NODENAME"]) * each + local
            # of this group and round: an earlier one, even of another step, may still hold its own
            port = (
                37 * int(env["SLURM_JOB_ID"])
                + 1000 * int(env["SLURM_STEP_ID"])
                + 100 * int(number)
                + index
            )
            values = {
                "RANK": rank,
                "WORLD_SIZE": len(nodes) * each,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": each,
            }
            meeting = {
                "MASTER_ADDR": nodes[0] + env.get("HOST_SUFFIX", ""),
                "MASTER_PORT": 10_000 + port % 20_000,
            }
            return mode, {name: str(value) for name, value in {**values, **meeting}.items()}
    return mode, {}


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


def findings(gpus: int, ask: Callable[[str, str], list[list[str]]] = query) -> dict[str, list[str]]:
    """What makes the node useless ("broken"), and what makes another preferable ("doubtful"); of
    its GPUs.

    A failed remapping is a reason to replace the GPU, an uncorrectable error asks for a reset:
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html.
    `gpus` is how many the training needs, 0 on CPUs.
    """
    cards = ask("gpu", "index,memory.used")
    broken = [f"{len(cards)} of {gpus} GPUs"] if cards and len(cards) < gpus else []
    # Before a training nothing should be there: a driver's context takes less than 2 GiB, a
    # forgotten process more.
    used = [(index, int(mib) / 1024) for index, mib in cards if mib.isdecimal() and int(mib) > 2048]
    broken += [f"GPU {index}: {gib:.1f} GiB in use before the training" for index, gib in used]
    remapped = ask("remapped-rows", "gpu_bus_id,remapped_rows.failure")
    broken += [
        f"GPU {bus}: its memory has no rows left to remap"
        for bus, failed in remapped
        if failed in ("1", "Yes")
    ]
    counted = ask("gpu", "index,ecc.errors.uncorrected.volatile.total")
    errors = [(index, n) for index, n in counted if n.isdecimal() and int(n)]
    doubtful = [
        f"GPU {index}: {n} uncorrectable ECC errors since its last reset" for index, n in errors
    ]
    return {"broken": broken, "doubtful": doubtful}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
