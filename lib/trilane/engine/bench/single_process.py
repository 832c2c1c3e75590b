"""A CPU machine measured by one process, which starts the few others that it needs.

"One GPU" of this cluster is one process with one core, as the engine runs where there is no GPU.
"""

import os
import platform
import subprocess
import sys
from datetime import date

import torch
import torch.distributed as dist

from trilane.config.cluster import Cluster, Gpu
from trilane.engine.bench import device_rates
from trilane.engine.bench.collectives import LARGE_CALLS, SMALL_CALLS, large_bytes, median_s
from trilane.engine.distributed.world import alone, cores
from trilane.engine.monitor.report import resident_bytes

PROCESSES = 8  # allowed side by side here; they share the cores


REDUCE_BYTES = large_bytes(device_rates.CPU)


def measure(name: str) -> Cluster:
    """This machine as a cluster of one node; takes about 10 s and all cores.

    Compute is the better of two matmul shapes on one thread. The memory of "one GPU" is what the host has free now,
    divided by PROCESSES; its context what a process holds after importing torch and megatron, having built nothing.
    """
    context = _answer(_start("context", {}))[0]
    torch.set_num_threads(cores())
    together = device_rates.fastest_flops_per_s(device_rates.CPU_SIZES, device_rates.CPU, torch.float32)
    found = device_rates.of_core()
    bandwidth, latency = _reduce()
    host = device_rates.available_memory_bytes()
    gpu = Gpu(
        name=f"core of {platform.node()}",
        kind="cpu",
        memory_bytes=host / PROCESSES,
        memory_bytes_per_s=found["gpu.memory_bytes_per_s"],
        fp32_flops_per_s=found["gpu.fp32_flops_per_s"],
        fp16_flops_per_s=0.0,
        bf16_flops_per_s=0.0,
        context_bytes=context,
    )
    return Cluster(
        name=name,
        gpu=gpu,
        gpus_per_node=PROCESSES,
        max_nodes=1,
        node_bytes_per_s=bandwidth,
        network_bytes_per_s=bandwidth,
        pcie_bytes_per_s=gpu.memory_bytes_per_s,
        latency_s=latency,
        cores_per_node=cores(),
        host_memory_bytes=host,
        launch_overhead_s=found["launch_overhead_s"],
        sources=_sources({1: gpu.fp32_flops_per_s, cores(): together}),
    )


def _sources(flops: dict[int, float]) -> dict[str, str]:
    said = f"measured on {platform.node()} at {date.today().isoformat()}"
    every = " and ".join(f"{rate / 1e9:.1f} GFLOP/s with {n} thread(s)" for n, rate in flops.items())
    mebibytes = device_rates.COPY_BYTES >> 20
    return {
        "gpu.fp32_flops_per_s": f"{said}: torch matmul, {every}; one thread counts",
        "gpu.memory_bytes_per_s": f"{said}: copy of {mebibytes} MiB by one thread, bytes read and written",
        "gpu.memory_bytes": f"{said}: free host memory / {PROCESSES} processes",
        "gpu.context_bytes": f"{said}: resident memory of a process that imported torch and megatron-core",
        "node_bytes_per_s": f"{said}: gloo all_reduce of {REDUCE_BYTES >> 20} MiB between 2 processes, bytes / seconds",
        "latency_s": f"{said}: gloo all_reduce of 4 bytes between 2 processes",
        "network_bytes_per_s": "one node: as node_bytes_per_s",
        "pcie_bytes_per_s": "no PCIe between a core and its memory: as gpu.memory_bytes_per_s",
        "launch_overhead_s": f"{said}: one torch call on 16 numbers",
    }


def _reduce() -> tuple[float, float]:
    """Bytes per second, and seconds of the smallest, of a gloo all_reduce between two processes."""
    env: dict[str, str] = {}
    alone(env)
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": env["MASTER_PORT"], "GLOO_SOCKET_IFNAME": "lo"}
    pair = [_start("reduce", {**port, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    large, small = _answer(pair[0])
    _answer(pair[1])
    return REDUCE_BYTES / large, small


def _start(what: str, env: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trilane.engine.bench.single_process", what]
    # Under a torchrun of one process its children would look for torchrun's own meeting point.
    ours = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return subprocess.Popen(command, env={**ours, **env}, stdout=subprocess.PIPE, text=True)


def _answer(child: "subprocess.Popen[str]") -> list[float]:
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0, f"{child.args!r} ended with {child.returncode}"
    return [float(number) for number in said.split()]


def context_bytes() -> float:
    """What this process holds once torch and megatron-core are imported."""
    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()

    return float(resident_bytes())


def _reduce_here() -> list[float]:
    """Median seconds of a large and of a small all_reduce, in this one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers = []
    for numbers, calls in ((REDUCE_BYTES // 4, LARGE_CALLS), (1, SMALL_CALLS)):
        tensor = torch.zeros(numbers)
        answers.append(median_s(lambda tensor=tensor: dist.all_reduce(tensor), device_rates.CPU, calls))  # type: ignore[misc]
    dist.destroy_process_group()
    return answers


if __name__ == "__main__":
    doors = {"context": lambda: [context_bytes()], "reduce": _reduce_here}
    print(*doors[sys.argv[1]]())
