"""The test of one node, or of a pair, before a training: `python -m trilane.engine.bench.node_test GPUS ROUND`.

Started in a task of srun for each GPU (one on CPUs). A round is a number, "alone" or "pair", and the groups of nodes,
such as n1,n2. The first task of a group prints a line of JSON:
{"broken": [...], "doubtful": [...], "rates": {name: larger is better}}.
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
        end = time.monotonic() + 15.0  # in which the processes of an attempt that failed give their memory back
        while any("in use" in reason for reason in found["broken"]) and time.monotonic() < end:
            time.sleep(1.0)
            found |= findings(gpus)
    if not found["broken"]:
        from trilane.engine import world as worlds

        signal.alarm(55)  # then the kernel ends the test: a GPU or a network that hangs
        os.environ.update(placed)
        world = worlds.start_process_group("fp32")
        every = worlds.gather_values(world, (_rates(world, mode), _wrong(world)))
        found["rates"] = {name: min(rates[name] for rates, _ in every) for name in every[0][0]}
        found["broken"] = sorted({reason for _, reasons in every for reason in reasons})
        if gpus and world.device.type != "cuda":
            found["broken"] = ["torch finds no GPU"]
        if not world.is_first:
            os._exit(0)
    print(json.dumps(found), flush=True)
    os._exit(0)  # at once: communicators of a peer that has gone would be waited for


def place(gpus: int, round_: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The round's mode, and this task's rank in its group as torchrun's variables; empty where its node is in none."""
    number, mode, *groups = round_.split()
    for index, nodes in enumerate(group.split(",") for group in groups):
        if env["SLURMD_NODENAME"] in nodes:
            each, local = gpus or 1, int(env.get("SLURM_LOCALID", "0"))
            rank = nodes.index(env["SLURMD_NODENAME"]) * each + local
            # of this group and round: an earlier one, even of another step, may still hold its own
            port = 37 * int(env["SLURM_JOB_ID"]) + 1000 * int(env["SLURM_STEP_ID"]) + 100 * int(number) + index
            values = {"RANK": rank, "WORLD_SIZE": len(nodes) * each, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each}
            meeting = {"MASTER_ADDR": nodes[0] + env.get("HOST_SUFFIX", ""), "MASTER_PORT": 10_000 + port % 20_000}
            return mode, {name: str(value) for name, value in {**values, **meeting}.items()}
    return mode, {}


def _rates(world: Any, mode: str) -> dict[str, float]:
    """Of this rank's device and of an all_reduce within its node; or in a pair of nodes of a large and a small one."""
    import torch

    from trilane.engine.bench import rates

    device, found = world.device, dict[str, float]()
    if world.size > 1:
        sent, small_s = rates.all_reduce(device, None, world.size, rates.large_bytes(device), 8)
        if mode == "pair":
            return {"all_reduce B/s": sent, "all_reduce 1/s": 1 / small_s}
        found["all_reduce within B/s"] = sent
    if device.type == "cuda":
        found["PCIe B/s"] = rates.host_to_device_bytes_per_s(device)
    else:
        torch.set_num_threads(1)
    kind = list(rates.matmul_types(device).values())[-1]
    found["matmul FLOP/s"] = rates.matmul_flops_per_s(device, kind)
    return {**found, "memory B/s": rates.copy_bytes_per_s(device)}


def _wrong(world: Any) -> list[str]:
    """Which results of this rank are wrong: of a matmul and of an all_reduce whose values are known."""
    import torch
    import torch.distributed as dist

    from trilane.engine.bench import rates

    device, n, found = world.device, 4096 if world.device.type == "cuda" else 256, list[str]()
    for name, kind in rates.matmul_types(device).items():
        # all partial sums of 4096 products (i % 4) (j % 4) / 1024 in powers of two are exact, in 8 bits too
        i = (torch.arange(n, device=device) % 4).to(kind)
        out = torch.mm(i[:, None].repeat(1, 4096), (i / 1024).repeat(4096, 1)).float()
        if not ((out - 4 * torch.outer(i, i).float()).abs() <= 0.5).all():  # NaN is not <= 0.5 either
            found.append(f"a matmul in {name} gives wrong results")
    if world.size > 1:
        ranks = torch.full((2**16,), world.rank + 1.0, device=device)
        dist.all_reduce(ranks)
        if not (ranks == world.size * (world.size + 1) / 2).all():
            found.append("an all_reduce gives wrong sums")
    return found


def query(what: str, names: str) -> list[list[str]]:
    """The rows of `nvidia-smi --query-WHAT=NAMES`; empty where it is missing, fails or lacks a name."""
    command = ["nvidia-smi", f"--query-{what}={names}", "--format=csv,noheader,nounits"]
    done = run(command, within_s=20.0)  # it takes a second or two a GPU without its persistence daemon
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(names.split(","))]


def findings(gpus: int, ask: Callable[[str, str], list[list[str]]] = query) -> dict[str, list[str]]:
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
    main(int(sys.argv[1]), sys.argv[2])
