"""Rates of one device, a GPU or one core: matmul, memory, host to device, and the overhead of a call."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

CPU = torch.device("cpu")
Size = tuple[int, int, int]  # (rows, inner, columns)


# A small GPT's MLP and a larger one's.
CPU_SIZES: tuple[Size, ...] = ((1024, 256, 1024), (2048, 1024, 4096))
# Tokens x hidden size x a quarter of the MLP (tp 4): four sequences of 2048 at hidden size 8192, two at 12288.
CUDA_SIZES: tuple[Size, ...] = ((8192, 8192, 8192), (4096, 12288, 12288))
COPY_BYTES = 2**28  # far beyond the caches


CALLS = 1000  # small enough for a GPU's queue of launches not to fill up
BUDGET_S = 0.4  # for each measurement


def of_core() -> dict[str, float]:
    """Rates of one thread by the field of Cluster that holds them; a core's PCIe rate is that of its memory."""
    torch.set_num_threads(1)
    copied = copy_bytes_per_s(CPU)
    return {
        "gpu.memory_bytes_per_s": copied,
        "gpu.fp32_flops_per_s": fastest_flops_per_s(CPU_SIZES, CPU, torch.float32),
        "gpu.fp16_flops_per_s": 0.0,
        "gpu.bf16_flops_per_s": 0.0,
        "pcie_bytes_per_s": copied,
        "launch_overhead_s": call_s(CPU),
    }


def of_gpu(device: torch.device) -> dict[str, float]:
    """Rates of one GPU by the field of Cluster that holds them; 0 for bf16 below compute capability 8.0."""
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)  # is_bf16_supported() is True on a V100 too
    return {
        "gpu.memory_bytes_per_s": copy_bytes_per_s(device),
        "gpu.fp32_flops_per_s": fastest_flops_per_s(CUDA_SIZES, device, torch.float32),
        "gpu.fp16_flops_per_s": fastest_flops_per_s(CUDA_SIZES, device, torch.float16),
        "gpu.bf16_flops_per_s": fastest_flops_per_s(CUDA_SIZES, device, torch.bfloat16) if has_bf16 else 0.0,
        "pcie_bytes_per_s": host_to_device_bytes_per_s(device),
        "launch_overhead_s": call_s(device),
    }


def fastest_flops_per_s(sizes: tuple[Size, ...], device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the fastest of these matmuls."""
    return max(matmul_flops_per_s(*size, device, dtype) for size in sizes)


def matmul_flops_per_s(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of (m, k) x (k, n). fp32 without TF32, torch's default."""
    a, b = (torch.rand(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2 * m * k * n / best_s(lambda: torch.mm(a, b, out=out), device)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    a, b = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
    return 2 * COPY_BYTES / best_s(lambda: b.copy_(a), device)


def host_to_device_bytes_per_s(device: torch.device) -> float:
    """Bytes per second from page-locked host memory to the GPU."""
    host = torch.ones(COPY_BYTES // 4).pin_memory()
    there = torch.empty_like(host, device=device)
    return COPY_BYTES / best_s(lambda: there.copy_(host, non_blocking=True), device)


def call_s(device: torch.device) -> float:
    """Seconds of one torch call with negligible work, over CALLS in sequence."""
    a = torch.ones(16, device=device)

    def many() -> None:
        for _ in range(CALLS):
            torch.add(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return best_s(many, CPU) / CALLS  # by the host's clock: the host launches


def best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest call within BUDGET_S: disturbances only make a call slower."""
    once_s(work, device)
    end, best = time.perf_counter() + BUDGET_S, float("inf")
    while time.perf_counter() < end:
        best = min(best, once_s(work, device))
    return best


def once_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, by the device's clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3  # milliseconds


def available_memory_bytes() -> float:
    """Bytes of host memory that are free or can be freed."""
    facts = Path("/proc/meminfo")
    if facts.exists():
        lines = dict(line.split(":", 1) for line in facts.read_text().splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
