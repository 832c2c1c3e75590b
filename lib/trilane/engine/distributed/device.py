"""The device of a process: its GPU or the CPU, and that all processes have one of a kind, and each its own."""

import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trilane.engine.distributed.rendezvous import TIMEOUT
from trilane.utils.validation import HostError

GPU = Path("/dev/nvidia0")  # exists where NVIDIA's driver has found a GPU


def require_one_kind(store: dist.Store, size: int, device: torch.device) -> None:
    """ValueError on all ranks where some have a GPU and some have none: NCCL and gloo would wait for each other."""
    store.add("trilane/gpus", int(device.type == "cuda"))
    if store.add("trilane/ranks", 1) == size:
        store.set("trilane/all", "here")
    store.wait(["trilane/all"], TIMEOUT)
    gpus = store.add("trilane/gpus", 0)
    if gpus in (0, size):
        return
    time.sleep(1.0)  # rank 0 may host the store that others still read
    if device.type == "cpu":
        raise HostError(f"no GPU here, while {gpus} of {size} ranks have one")
    raise ValueError(f"GPUs={gpus}: {size - gpus} of {size} ranks have none, and report it")


def require_own_card(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """HostError on each rank that shares its GPU: a task that sees one card may see that of another task."""
    if device.type != "cuda":
        return
    card = f"{platform.node()} {torch.cuda.get_device_properties(device).uuid}"
    store.add(f"trilane/card/{card}", 1)
    if store.add("trilane/cards", 1) == size:
        store.set("trilane/cards are known", "here")
    store.wait(["trilane/cards are known"], TIMEOUT)
    if store.add(f"trilane/card/{card}", 0) > 1:
        time.sleep(1.0)  # rank 0 may host the store that others still read
        raise HostError(f"rank={rank}: another process has its GPU {card}; start one task for each GPU")


def own_device(precision: str) -> torch.device:
    """This process's GPU, made the current device, or the CPU without one; HostError where the GPU cannot be used.

    That of its number on this host; the only one where it sees one, as under `srun --gpus-per-task=1`.
    """
    if not torch.cuda.is_available():
        _require_no_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return torch.device("cpu")
    local_size, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    cards = torch.cuda.device_count()
    if local_size > cards > 1:
        raise HostError(f"processes per host={local_size}: this host shows {cards} GPUs")
    own = local_rank if cards > 1 else 0
    torch.cuda.set_device(own)
    # is_bf16_supported() returns True on a V100, which emulates bf16; only the capability is reliable.
    capability = torch.cuda.get_device_capability()
    if precision == "bf16" and capability < (8, 0):
        found = ".".join(map(str, capability))
        raise HostError(f"precision=bf16: needs compute capability 8.0, this card has {found}; use fp16")
    return torch.device("cuda", own)


def _require_no_gpu(visible: str | None) -> None:
    """HostError where the host has a GPU that torch cannot use: a rank on its CPU would keep all others waiting.

    Only the device file is evidence: SLURM also sets its variables for simulated GPUs. CUDA_VISIBLE_DEVICES "" or "-1"
    selects the CPU; SLURM sets "NoDevFiles" for a job without GPUs.
    """
    if visible in ("", "-1", "NoDevFiles") or not GPU.exists():
        return
    why = "CUDA does not start (see nvidia-smi)" if torch.version.cuda else "install its CUDA build"
    raise HostError(f"torch={torch.__version__}: cannot use {GPU}: {why}; CUDA_VISIBLE_DEVICES=-1 asks for the CPU")
