"""A CPU machine measured by one process, which starts the few others that it needs.

"One GPU" of this cluster is one process on one core, as the engine runs without a GPU.
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
from trilane.engine.distributed.world import cores
from trilane.engine.monitor.report import resident_bytes
from trilane.utils.process import held_port, python

PROCESSES = 8  # allowed at once here; they share the cores
REDUCE_BYTES = large_bytes(device_rates.CPU)


def measure(name: str) -> Cluster:
    """This machine as a cluster of one node; takes about 10 s and all cores.

    Compute is the better of two matmul shapes on one thread. The memory of "one GPU" is what the host has free now,
    divided by PROCESSES; its context is what a process holds after importing torch and megatron.
    """
    context = _result(_start("context", {}))[0]
    torch.set_num_threads(cores())
    all_cores = device_rates.fastest_flops_per_s(device_rates.CPU_SIZES, device_rates.CPU, torch.float32)
    rates = device_rates.of_core()
    bandwidth, latency = _reduce()
    host = device_rates.available_memory_bytes()
    gpu = Gpu(
        name=f"core of {platform.node()}",
        kind="cpu",
        memory_bytes=host / PROCESSES,
        memory_bytes_per_s=rates["gpu.memory_bytes_per_s"],
        fp32_flops_per_s=rates["gpu.fp32_flops_per_s"],
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
        launch_overhead_s=rates["launch_overhead_s"],
        sources=_sources({1: gpu.fp32_flops_per_s, cores(): all_cores}),
    )


def _sources(flops: dict[int, float]) -> dict[str, str]:
    origin = f"measured on {platform.node()} at {date.today().isoformat()}"
    every = " and ".join(f"{rate / 1e9:.1f} GFLOP/s with {n} thread(s)" for n, rate in flops.items())
    mebibytes = device_rates.COPY_BYTES >> 20
    return {
        "gpu.fp32_flops_per_s": f"{origin}: torch matmul, {every}; one thread counts",
        "gpu.memory_bytes_per_s": f"{origin}: copy of {mebibytes} MiB by one thread, bytes read and written",
        "gpu.memory_bytes": f"{origin}: free host memory / {PROCESSES} processes",
        "gpu.context_bytes": f"{origin}: resident memory of a process that imported torch and megatron-core",
        "node_bytes_per_s": f"{origin}: gloo all_reduce of {REDUCE_BYTES >> 20} MiB by 2 processes, bytes / seconds",
        "latency_s": f"{origin}: gloo all_reduce of 4 bytes between 2 processes",
        "network_bytes_per_s": "one node: as node_bytes_per_s",
        "pcie_bytes_per_s": "no PCIe between a core and its memory: as gpu.memory_bytes_per_s",
        "launch_overhead_s": f"{origin}: one torch call on 16 numbers",
    }


def _reduce() -> tuple[float, float]:
    """Bytes per second, and seconds of the smallest, of a gloo all_reduce between two processes."""
    with held_port() as port:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        pair = [_start("reduce", {**world, "RANK": str(rank)}) for rank in range(2)]
        large, small = _result(pair[0])
        _result(pair[1])
    return REDUCE_BYTES / large, small


def _start(what: str, env: dict[str, str]) -> "subprocess.Popen[str]":
    command = python("-m", "trilane.engine.bench.single_process", what)
    # Children of a torchrun worker would look for torchrun's own rendezvous.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return subprocess.Popen(command, env={**inherited, **env}, stdout=subprocess.PIPE, text=True)


def _result(child: "subprocess.Popen[str]") -> list[float]:
    printed, _ = child.communicate(timeout=60)
    assert child.returncode == 0, f"{child.args!r} ended with {child.returncode}"
    return [float(number) for number in printed.split()]


def context_bytes() -> float:
    """Resident bytes of this process once torch and megatron-core are imported."""
    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()

    return float(resident_bytes())


def _reduce_here() -> list[float]:
    """Median seconds of a large and of a small all_reduce, in this one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = []
    for numbers, calls in ((REDUCE_BYTES // 4, LARGE_CALLS), (1, SMALL_CALLS)):
        tensor = torch.zeros(numbers)
        seconds.append(median_s(lambda tensor=tensor: dist.all_reduce(tensor), device_rates.CPU, calls))  # type: ignore[misc]
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    measurements = {"context": lambda: [context_bytes()], "reduce": _reduce_here}
    print(*measurements[sys.argv[1]]())
