"""Rates of one device, a GPU or one core, and of an all_reduce among ranks."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trilane.config.cluster import known_card
from trilane.costmodel.constants import Constants
from trilane.costmodel.layers import flash_reach, tiled_flops
from trilane_engine.world import World

BUDGET_S = 0.4  # of one measurement
COPY_BYTES = 2**28  # far beyond the caches
# (rows, inner, columns) of matmuls as a GPT has them. On a card tokens x hidden size x a quarter of
# the MLP (tp 4), four sequences of 2048 at hidden size 8192, and of a layer of 4096 QKV and the
# MLP's. On a core forward and the two of backward of a small GPT's MLP.
CARD = ((8192, 8192, 8192), (8192, 4096, 12288), (8192, 4096, 16384), (8192, 16384, 4096))
CORE = ((512, 128, 512), (512, 512, 128), (128, 512, 512))
LENGTHS = (2048, 8192)  # tokens of attention


def of_device(device: torch.device) -> dict[str, float]:
    """Fields of Cluster: of a card peaks and shares, else of one thread; 0 for a precision without
    units, so that no plan may choose it.
    """
    torch.set_num_threads(1)
    copied = copy_bytes_per_s(device)
    rates = {"gpu.memory_bytes_per_s": copied, "pcie_bytes_per_s": copied}
    rates |= {"gpu.fp16_flops_per_s": 0.0, "gpu.bf16_flops_per_s": 0.0, "gpu.fp8_flops_per_s": 0.0}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        types = matmul_types(device)
        if torch.version.cuda and (card.major, card.minor) >= (8, 9):
            types["fp8"] = torch.float8_e4m3fn
        rates |= of_card(device, types, card)
        rates["pcie_bytes_per_s"] = host_to_device_bytes_per_s(device)
    else:
        rates["gpu.fp32_flops_per_s"] = matmul_flops_per_s(device, torch.float32)
    return {**rates, "launch_overhead_s": call_s(device)}


def of_card(device: torch.device, types: dict[str, torch.dtype], card: Any) -> dict[str, float]:
    """Fields of a card's Gpu: peaks, of the catalogue where it has the card, else so that the
    fastest product and a copy reach the priors of their shares; and its shares, as data/cards.json
    has them: the formulas of layers.py predict by them the seconds measured, at the median of the
    shapes.
    """
    known = known_card(card.name)
    constants = Constants()
    copied = copy_bytes_per_s(device)
    memory = getattr(known, "memory_bytes_per_s", copied / constants.memory)
    rates = {"gpu.memory_bytes_per_s": memory, "gpu.shares.memory": copied / memory}
    reached = {}
    for name, kind in types.items():
        every = []
        for m, k, n, seconds in products(device, kind):
            flops = tiled_flops(m, n, k, card.multi_processor_count, constants)
            every.append(flops / seconds)
        field = f"{name}_flops_per_s"
        peak = getattr(known, field, max(every) / constants.matmul)
        rates[f"gpu.{field}"] = peak
        reached[name] = statistics.median(every) / peak
        if name in ("fp16", "bf16"):  # the last one counts
            rates["gpu.shares.matmul"] = reached[name]
            rates["gpu.shares.flash"] = attention_flops_per_s(device, kind) / peak
    if "fp8" in reached:
        share = reached["fp8"] / rates["gpu.shares.matmul"]
        rates["gpu.shares.fp8"] = min(share, 1.0)
    return rates


def attention_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """What long sequences with heads of 128 would reach by causal attention, forward and backward,
    which counts 2.5 times the FLOPs: the median of two lengths and two sizes of heads. Of s tokens
    in n values 3.5 times half of 4 s n FLOPs.
    """
    rates = []
    for s, d in itertools.product(LENGTHS, (64, 128)):
        q, k, v = torch.rand((3, 4, 16, s, d), device=device, dtype=dtype, requires_grad=True)
        flops = 7 * s * q.numel() / flash_reach(s, d)
        rates.append(flops / call_seconds(functools.partial(attend, q, k, v), device))
    return statistics.median(rates)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Causal attention, forward and backward."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(out, (q, k, v), out.detach())


def matmul_types(device: torch.device) -> dict[str, torch.dtype]:
    """Precision -> the type of a matmul in it, of those that the device has units for."""
    types = {"fp32": torch.float32}
    if device.type == "cuda":
        types["fp16"] = torch.float16
        # is_bf16_supported() is True on a V100 too
        if torch.cuda.get_device_capability(device) >= (8, 0):
            types["bf16"] = torch.bfloat16
    return types


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the fastest matmul; on a core of all, equally large, together."""
    rates = [2 * m * k * n / seconds for m, k, n, seconds in products(device, dtype)]
    return max(rates) if device.type == "cuda" else statistics.harmonic_mean(rates)


def products(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, int, float]]:
    """Rows, inner size, columns and seconds of matmuls; in 8 bits a matrix has one scale."""
    timed = []
    for m, k, n in CARD if device.type == "cuda" else CORE:
        a = torch.rand((m, k), device=device).to(dtype)
        b = torch.rand((n, k), device=device).to(dtype).t()
        if dtype.itemsize == 1:
            scale = (torch.ones((), device=device), F.ScalingType.TensorWise)
            multiply = functools.partial(F.scaled_mm, a, b, *scale, *scale)
        else:
            out = torch.empty(m, n, device=device, dtype=dtype)
            multiply = functools.partial(torch.mm, a, b.contiguous(), out=out)
        timed.append((m, k, n, call_seconds(multiply, device)))
    return timed


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    a = torch.ones(COPY_BYTES // 4, device=device)
    b = torch.ones_like(a)
    return 2 * COPY_BYTES / call_seconds(lambda: b.copy_(a), device)


def host_to_device_bytes_per_s(device: torch.device) -> float:
    """Bytes per second from page-locked host memory to the GPU."""
    host = torch.ones(COPY_BYTES // 4).pin_memory()
    there = torch.empty_like(host, device=device)
    return COPY_BYTES / call_seconds(lambda: there.copy_(host, non_blocking=True), device)


def call_s(device: torch.device) -> float:
    """Seconds of one torch call with negligible work; so many in sequence do not fill a GPU's queue
    of launches.
    """
    a = torch.ones(16, device=device)

    def many() -> None:
        for _ in range(1000):
            torch.add(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # by the host's clock: the host launches
    return call_seconds(many, torch.device("cpu")) / 1000


def call_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call by the device's clock: of the fastest on a card, as disturbances only make
    one slower; on a core their mean, as a rank of a training shares it with others that work.
    """
    once_s(work, device)
    end = time.perf_counter() + BUDGET_S
    every = [once_s(work, device)]  # one also where others have the core until the end
    while time.perf_counter() < end:
        every.append(once_s(work, device))
    return min(every) if device.type == "cuda" else statistics.mean(every)


def once_s(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, by the device's clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3  # milliseconds


def all_reduce(
    device: torch.device, group: dist.ProcessGroup | None, n: int, calls: int
) -> tuple[float, float]:
    """What each of `n` ranks sends per second in a large all_reduce, and the seconds of one of 4
    bytes, on cores the mean after some work, for the last of whose ranks it waits.

    2 (n - 1) / n bytes / seconds, as nccl-tests defines bus bandwidth; over several hosts this is
    also what a whole host sends, because each ring enters and leaves it once. Left out: trees,
    which NCCL uses for small messages.
    """
    is_card = device.type == "cuda"
    work = torch.zeros(0 if is_card else 512, 512, device=device)

    # a small GPT's gradient bucket on a CPU, enough to fill NVLink on a GPU
    large = torch.zeros(2**26 if is_card else 2**20, device=device)

    def seconds(tensor: torch.Tensor, calls: int) -> list[float]:
        every = []
        # after as many to warm up: gloo's first calls are slow
        for _ in range(2 * calls):
            if tensor is not large:
                torch.mm(work, work.t())
            every.append(once_s(lambda: dist.all_reduce(tensor, group=group), device))
        return every[calls:]

    rate = 2 * (n - 1) / n * large.nbytes / statistics.median(seconds(large, calls))
    middle = statistics.median if is_card else statistics.mean
    return rate, middle(seconds(large[:1], 5 * calls))


def of_rank(world: World) -> dict[str, float]:
    """Of this rank's device and of an all_reduce within its node."""
    device = world.device
    rates: dict[str, float] = {}
    if world.size > 1:
        rates["all_reduce within B/s"], _ = all_reduce(device, None, world.size, 8)
    if device.type == "cuda":
        rates["PCIe B/s"] = host_to_device_bytes_per_s(device)
    else:
        torch.set_num_threads(1)
    kind = list(matmul_types(device).values())[-1]
    rates["matmul FLOP/s"] = matmul_flops_per_s(device, kind)
    return {**rates, "memory B/s": copy_bytes_per_s(device)}


def wrong(world: World) -> list[str]:
    """Which results of this rank are wrong: of a matmul and of an all_reduce whose values are
    known.
    """
    device = world.device
    n = 4096 if device.type == "cuda" else 256
    faults = []
    for name, kind in matmul_types(device).items():
        # all partial sums of 4096 products (i % 4) (j % 4) / 1024 in powers of two are exact, in 8
        # bits too
        i = (torch.arange(n, device=device) % 4).to(kind)
        out = torch.mm(i[:, None].repeat(1, 4096), (i / 1024).repeat(4096, 1)).float()
        difference = (out - 4 * torch.outer(i, i).float()).abs()
        if not (difference <= 0.5).all():  # NaN is not <= 0.5 either
            faults.append(f"a matmul in {name} gives wrong results")
    if world.size > 1:
        ranks = torch.full((2**16,), world.rank + 1.0, device=device)
        dist.all_reduce(ranks)
        if not (ranks == world.size * (world.size + 1) / 2).all():
            faults.append("an all_reduce gives wrong sums")
    return faults
