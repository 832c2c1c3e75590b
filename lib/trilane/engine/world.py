"""World: which process this is among how many, on which device; from torchrun's or SLURM's environment."""

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trilane.checks import require
from trilane.plan import Plan

# Longer than the slowest thing that one rank does while the others wait: preparing a corpus on a shared disk.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process: rank of size, local_rank of local_size on this host, and its device."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 says what is said once, and prepares what is prepared once."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The last rank sits on the last pipeline stage, where the loss is; it prints the iterations."""
        return self.rank == self.size - 1


def from_slurm(env: MutableMapping[str, str]) -> None:
    """Fill RANK, WORLD_SIZE, LOCAL_*, MASTER_ADDR and MASTER_PORT from SLURM_*, unless torchrun did.

    One task per GPU is assumed. The master is the first host of the list, its port follows from the job's number, so
    that two jobs on one node do not meet.
    """
    if "RANK" in env or "SLURM_PROCID" not in env:
        return
    env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_NTASKS"], env["SLURM_LOCALID"]
    env.setdefault("LOCAL_WORLD_SIZE", env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"]))
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_NODELIST"]))
    env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: 'gpu[003-006,9],x1' -> 'gpu003', as `scontrol show hostnames` expands it."""
    head, bracket, rest = nodelist.partition("[")
    if "," in head or not bracket:
        return nodelist.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + tail.split(",")[0]


def alone(env: MutableMapping[str, str]) -> None:
    """Without torchrun or SLURM this is a world of one process, on a port that is free."""
    if "RANK" in env:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def join(plan: Plan) -> World:
    """Start the process group (NCCL with a GPU, gloo without) and return this process's place in it.

    Raises ValueError where the world is not tp x pp x dp processes, or the card lacks the plan's precision.
    """
    size, t = int(os.environ["WORLD_SIZE"]), plan.topology
    require(size == t.gpus, "world size", size, f"must be tp x pp x dp = {t.tp} x {t.pp} x {t.dp} = {t.gpus}")
    return enter(t.precision)


def enter(precision: str) -> World:
    """Start the process group of however many processes there are; ValueError where the card lacks `precision`."""
    env = os.environ
    size, local_size = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", "1"))
    rank, local_rank = int(env["RANK"]), int(env.get("LOCAL_RANK", "0"))
    device = own_device(precision)
    torch.set_num_threads(threads(local_size))
    if device.type == "cuda":
        dist.init_process_group("nccl", rank=rank, world_size=size, timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device)


def own_device(precision: str) -> torch.device:
    """This process's GPU, made the current one, or the CPU. ValueError where it is missing or lacks `precision`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_size, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    cards = torch.cuda.device_count()
    require(local_size <= cards, "processes per host", local_size, f"this host shows {cards} GPUs")
    torch.cuda.set_device(local_rank)
    # is_bf16_supported() answers True on a V100, which emulates it; only the capability tells the truth.
    capability = torch.cuda.get_device_capability()
    rule = f"needs compute capability 8.0, this card has {'.'.join(map(str, capability))}; use fp16"
    require(precision != "bf16" or capability >= (8, 0), "precision", precision, rule)
    return torch.device("cuda", local_rank)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(core_numbers())


def core_numbers() -> set[int]:
    """Which CPU cores this process may use; counted from 0 where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def threads(local_size: int) -> int:
    """Threads of one process when `local_size` of them share this host's cores."""
    return max(1, cores() // local_size)
