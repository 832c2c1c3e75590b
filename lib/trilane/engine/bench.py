"""What this machine can do, measured in seconds: `python -m trilane.engine.bench OUT.json` writes it as a Cluster.

"One GPU" of this cluster is one process with one core, as the engine runs where there is no GPU.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from trilane.checks import to_mapping
from trilane.engine.report import resident_bytes
from trilane.engine.stamp import write_json
from trilane.engine.world import alone, cores
from trilane.hardware import Cluster, Gpu

PROCESSES = 8  # allowed side by side here; they share the cores
SMALL, LARGE = (
    (1024, 256, 1024),
    (2048, 1024, 4096),
)  # (rows, inner, columns) of a small GPT's MLP and of a larger one's
COPY_BYTES = 2**28  # far beyond the caches
REDUCE_BYTES = 2**22  # the size of a small GPT's gradient buckets
BUDGET_S = 0.5  # for each measurement


def measure() -> Cluster:
    """This machine as a cluster of one node; takes about 10 s and all cores.

    Compute is the better of two matmul shapes on one thread. The memory of "one GPU" is what the host has free now,
    divided by PROCESSES; its context what a process holds after importing torch and megatron, having built nothing.
    """
    context = _child("context")[0]
    rates = {n: max(matmul_flops_per_s(n, *size) for size in (SMALL, LARGE)) for n in (1, cores())}
    bandwidth, latency = _reduce()
    host = available_memory_bytes()
    said = f"measured on {platform.node()} at {date.today().isoformat()}"
    gpu = Gpu(
        name=f"core of {platform.node()}",
        kind="cpu",
        memory_bytes=host / PROCESSES,
        memory_bytes_per_s=copy_bytes_per_s(),
        fp32_flops_per_s=rates[1],
        fp16_flops_per_s=0.0,
        bf16_flops_per_s=0.0,
        context_bytes=context,
    )
    return Cluster(
        name="local",
        gpu=gpu,
        gpus_per_node=PROCESSES,
        max_nodes=1,
        node_bytes_per_s=bandwidth,
        network_bytes_per_s=bandwidth,
        pcie_bytes_per_s=gpu.memory_bytes_per_s,
        latency_s=latency,
        cores_per_node=cores(),
        host_memory_bytes=host,
        launch_overhead_s=call_s(),
        sources=_sources(said, rates),
    )


def _sources(said: str, rates: dict[int, float]) -> dict[str, str]:
    every = " and ".join(f"{rate / 1e9:.1f} GFLOP/s with {n} thread(s)" for n, rate in rates.items())
    return {
        "gpu.fp32_flops_per_s": f"{said}: torch matmul, {every}; one thread counts",
        "gpu.memory_bytes_per_s": f"{said}: copy of {COPY_BYTES >> 20} MiB by one thread, bytes read and written",
        "gpu.memory_bytes": f"{said}: free host memory / {PROCESSES} processes",
        "gpu.context_bytes": f"{said}: resident memory of a process that imported torch and megatron-core",
        "node_bytes_per_s": f"{said}: gloo all_reduce of {REDUCE_BYTES >> 20} MiB between 2 processes, bytes / seconds",
        "latency_s": f"{said}: gloo all_reduce of 4 bytes between 2 processes",
        "network_bytes_per_s": "one node: as node_bytes_per_s",
        "pcie_bytes_per_s": "no PCIe between a core and its memory: as gpu.memory_bytes_per_s",
        "launch_overhead_s": f"{said}: one torch call on 16 numbers",
    }


def matmul_flops_per_s(threads: int, m: int, k: int, n: int) -> float:
    """fp32 FLOPs per second of (m, k) x (k, n) on `threads` threads."""
    torch.set_num_threads(threads)
    a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
    return 2 * m * k * n / best_s(lambda: torch.mm(a, b, out=out))


def copy_bytes_per_s() -> float:
    """Bytes that one thread reads and writes per second."""
    torch.set_num_threads(1)
    a, b = torch.ones(COPY_BYTES // 4), torch.ones(COPY_BYTES // 4)
    return 2 * COPY_BYTES / best_s(lambda: b.copy_(a))


def call_s() -> float:
    """Seconds of one torch call that has next to nothing to compute."""
    torch.set_num_threads(1)
    a, calls = torch.ones(16), 1000

    def many() -> None:
        for _ in range(calls):
            torch.add(a, a)

    return best_s(many) / calls


def available_memory_bytes() -> float:
    """Host memory that is free or can be freed."""
    facts = Path("/proc/meminfo")
    if facts.exists():
        lines = dict(line.split(":", 1) for line in facts.read_text().splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of the calls that fit in BUDGET_S: what disturbs a machine only makes it slower."""
    work()
    end, best = time.perf_counter() + BUDGET_S, float("inf")
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def _reduce() -> tuple[float, float]:
    """Bytes per second, and seconds of the smallest, of a gloo all_reduce between two processes."""
    env: dict[str, str] = {}
    alone(env)
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": env["MASTER_PORT"], "GLOO_SOCKET_IFNAME": "lo"}
    pair = [_start("reduce", {**port, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    large, small = _answer(pair[0])
    _answer(pair[1])
    return REDUCE_BYTES / large, small


def _child(what: str) -> list[float]:
    return _answer(_start(what, {}))


def _start(what: str, env: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trilane.engine.bench", f"--{what}"]
    return subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)


def _answer(child: "subprocess.Popen[str]") -> list[float]:
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0, f"{child.args!r} ended with {child.returncode}"
    return [float(number) for number in said.split()]


def _context() -> list[float]:
    from trilane.engine.cpu import enable_cpu

    enable_cpu()
    import trilane.engine.loop
    import trilane.engine.megatron  # noqa: F401

    return [float(resident_bytes())]


def _reduce_here() -> list[float]:
    """Median seconds of a large and of a small all_reduce, in this one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers = []
    for numbers, calls in ((REDUCE_BYTES // 4, 40), (1, 200)):
        tensor, times = torch.zeros(numbers), []
        for _ in range(calls):
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
        answers.append(sorted(times)[calls // 2])
    dist.destroy_process_group()
    return answers


def main(argv: list[str]) -> int:
    """Measure and write argv[0]; its two inner doors answer in numbers."""
    doors = {"--context": _context, "--reduce": _reduce_here}
    if argv[0] in doors:
        print(*doors[argv[0]]())
        return 0
    write_json(Path(argv[0]), to_mapping(measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
