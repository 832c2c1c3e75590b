"""Rates of one device, a GPU or one core, and of an all_reduce among ranks."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trilane.costmodel.constants import Constants

COPY_BYTES = 2**28  # far beyond the caches
Facts = dict[str, tuple[float, str]]  # field of Cluster -> its value, and how it was measured


def of_device(device: torch.device) -> Facts:
    """Rates of a card, as peaks of which a plan gets a share, or of one thread; 0 where it lacks a precision."""
    is_card, types = device.type == "cuda", matmul_types(device)
    if not is_card:
        torch.set_num_threads(1)
    share, copied_share = (Constants.matmul, Constants.memory) if is_card else (1.0, 1.0)
    found: Facts = {}
    for precision in ("fp32", "fp16", "bf16", "fp8"):
        rate, how = 0.0, "not measured here: 0, so that no plan may choose it"
        if precision in types:
            rate = matmul_flops_per_s(device, types[precision]) / share
            how = f"the fastest torch matmul, without TF32, {share:g} of the peak"
        found[f"gpu.{precision}_flops_per_s"] = (rate, how)
    size, copied = f"copy of {COPY_BYTES >> 20} MiB", copy_bytes_per_s(device)
    how = f"{size} on the device, bytes read and written, {copied_share:g} of the peak"
    found["gpu.memory_bytes_per_s"] = (copied / copied_share, how)
    found["pcie_bytes_per_s"] = (copied, "no PCIe between a core and its memory: as gpu.memory_bytes_per_s")
    if is_card:
        found["pcie_bytes_per_s"] = (host_to_device_bytes_per_s(device), f"{size} from page-locked host memory")
    return {**found, "launch_overhead_s": (call_s(device), "torch calls on 16 numbers, 1000 in a row")}


def matmul_types(device: torch.device) -> dict[str, torch.dtype]:
    """Precision -> the type of a matmul in it, of those that the device has units for."""
    if device.type != "cuda":
        return {"fp32": torch.float32}
    types = {"fp32": torch.float32, "fp16": torch.float16}
    # is_bf16_supported() is True on a V100 too
    return types | ({"bf16": torch.bfloat16} if torch.cuda.get_device_capability(device) >= (8, 0) else {})


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the faster of two matmuls (rows, inner, columns) as a GPT has them.

    On a card tokens x hidden size x a quarter of the MLP (tp 4): four sequences of 2048 at hidden size 8192, two at
    12288. On a core a small GPT's MLP and a larger one's.
    """
    card, core = ((8192, 8192, 8192), (4096, 12288, 12288)), ((1024, 256, 1024), (2048, 1024, 4096))

    def rate(m: int, k: int, n: int) -> float:
        a, b = (torch.rand(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
        out = torch.empty(m, n, device=device, dtype=dtype)
        return 2 * m * k * n / best_s(lambda: torch.mm(a, b, out=out), device)

    return max(rate(*size) for size in (card if device.type == "cuda" else core))


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    a, b = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
    return 2 * COPY_BYTES / best_s(lambda: b.copy_(a), device)


def host_to_device_bytes_per_s(device: torch.device) -> float:
    """Bytes per second from page-locked host memory to the GPU."""
    host = torch.ones(COPY_BYTES // 4).pin_memory()
    there = torch.empty_like(host, device=device)
    return COPY_BYTES / best_s(lambda: there.copy_(host, non_blocking=True), device)


def call_s(device: torch.device, calls: int = 1000) -> float:
    """Seconds of one torch call with negligible work; so many in sequence do not fill a GPU's queue of launches."""
    a = torch.ones(16, device=device)

    def many() -> None:
        for _ in range(calls):
            torch.add(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return best_s(many, torch.device("cpu")) / calls  # by the host's clock: the host launches


def best_s(work: Callable[[], Any], device: torch.device, budget_s: float = 0.4) -> float:
    """Seconds of the fastest call within the budget: disturbances only make a call slower."""
    once_s(work, device)
    end, best = time.perf_counter() + budget_s, float("inf")
    while time.perf_counter() < end:
        best = min(best, once_s(work, device))
    return best


def once_s(work: Callable[[], Any], device: torch.device) -> float:
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


def large_bytes(device: torch.device) -> int:
    """Bytes of the large message: a small GPT's gradient bucket on a CPU, enough to fill NVLink on a GPU."""
    return 2**28 if device.type == "cuda" else 2**22


def reduce_s(device: torch.device, group: dist.ProcessGroup | None, bytes_: int, calls: int) -> float:
    """Median seconds of `calls` all_reduces of `bytes_`, after as many to warm up: gloo's first calls are slow."""
    tensor = torch.zeros(bytes_ // 4, device=device)
    every = [once_s(lambda: dist.all_reduce(tensor, group=group), device) for _ in range(2 * calls)]
    return statistics.median(every[calls:])


def ring_bytes_per_s(bytes_: int, n: int, seconds: float) -> float:
    """What each of `n` ranks sends per second while a ring all_reduce of `bytes_` takes `seconds`.

    2 (n - 1) / n bytes / seconds, as nccl-tests defines bus bandwidth; over several hosts this is also what a whole
    host sends, because each ring enters and leaves it once. Left out: trees, which NCCL uses for small messages.
    """
    return 2 * (n - 1) / n * bytes_ / seconds
