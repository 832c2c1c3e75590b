"""World: this process's rank and device, from torchrun's or SLURM's environment, and small
collectives.
"""

import os
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from trilane.config.engines import shows_gpu
from trilane.config.plan import Plan
from trilane.slurm.client import hostnames
from trilane.utils.frozen import frozen
from trilane.utils.process import core_numbers, held_port
from trilane.utils.validation import HostError, require, shown
from trilane_engine.torchrun import WAIT_S

T = TypeVar("T")
# The least compute capability of a card for a precision, and what to use below.
# is_bf16_supported() returns True on a V100, which emulates bf16; only the capability is reliable.
CAPABILITY = {"bf16": ((8, 0), "fp16"), "fp8": ((8, 9), "bf16")}


@frozen
class World:
    """This process: rank of size, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 prints and prepares whatever is needed once."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The last rank is on the last pipeline stage, where the loss is; it prints the
        iterations.
        """
        return self.rank == self.size - 1

    def barrier(self) -> None:
        """Wait for all ranks; NCCL needs the device, which the process group does not know."""
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def from_slurm(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_*, MASTER_ADDR and MASTER_PORT in `env` from SLURM_*, unless
    torchrun did.

    Assumes one task per GPU, and as many on each node. The master is the first host of the list.
    """
    if "RANK" in env or "SLURM_PROCID" not in env:
        return
    tasks = env["SLURM_NTASKS"]
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = tasks
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    # "8(x2)"; `srun -N2 -n16` sets no SLURM_NTASKS_PER_NODE
    each = env.get("SLURM_STEP_TASKS_PER_NODE", tasks).partition("(")[0]
    env.setdefault("LOCAL_WORLD_SIZE", each)
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = hostnames(env["SLURM_NODELIST"])[0]
    # by the job, so that two jobs on one node do not collide
    env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))


def single_process(env: MutableMapping[str, str]) -> None:
    """Describe a world of one process on a free port in `env`, unless torchrun or SLURM did."""
    if "RANK" not in env:
        with held_port() as port:
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def join(plan: Plan) -> World:
    """Start the plan's process group; this process's World. ValueError where it has not tp x cp x
    pp x dp processes.
    """
    size = int(os.environ["WORLD_SIZE"])
    t = plan.topology
    sizes = f"{t.tp} x {t.cp} x {t.pp} x {t.dp} = {t.gpus}"
    require(size == t.gpus, "world size", size, f"must be tp x cp x pp x dp = {sizes}")
    return start_process_group(t.precision)


def start_process_group(precision: str) -> World:
    """Start the process group of all processes of the environment; HostError where the GPU lacks
    `precision`.
    """
    world = World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        device=own_device(precision),
    )
    _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # Longer than the slowest work of one rank while the others wait, preparing a corpus on a shared
    # disk.
    timeout = timedelta(minutes=30)
    store = _meet(world)
    store.set_timeout(timeout)
    # Without `device_id`, which would make NCCL's communicators at once: torch 2.13 then splits
    # every new_group() off the first (distributed_c10d._new_process_group_helper), also on the
    # ranks that are not in it, one after another: some 1,400 splits of 384 ranks for tp 4 x pp 12 x
    # dp 8. So each group gets its communicator in its first collective, and a group that is never
    # used gets none.
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    return world


def _meet(world: World) -> dist.Store:
    """The store of all ranks: that of torchrun's agents where there are some, else rank 0's, which
    waits for the others. HostError where they do not come within WAIT_S.
    """
    has_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_host = world.is_first and not has_agents
    wait = timedelta(seconds=WAIT_S)
    try:
        return dist.TCPStore(address, port, world.size, is_host, wait, multi_tenant=not has_agents)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise
        raise HostError(f"rendezvous={address}:{port}: {shown(error)}") from None


def own_device(precision: str) -> torch.device:
    """This process's GPU, made the current device, or the CPU without one; HostError where the GPU
    cannot be used.
    """
    if not torch.cuda.is_available():
        if shows_gpu():
            why = "cannot use the GPU (see nvidia-smi); CUDA_VISIBLE_DEVICES=-1 asks for the CPU"
            raise HostError(f"torch={torch.__version__}: {why}")
        return torch.device("cpu")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cards = torch.cuda.device_count()
    if local_size > cards > 1:
        raise HostError(f"processes per host={local_size}: this host shows {cards} GPUs")
    number = int(os.environ.get("LOCAL_RANK", "0")) if cards > 1 else 0
    torch.cuda.set_device(number)
    card = torch.cuda.get_device_capability()
    has = ".".join(map(str, card))
    if precision in CAPABILITY:
        least, other = CAPABILITY[precision]
        if card < least:
            rule = f"needs compute capability {least[0]}.{least[1]}, this card has {has}"
            raise HostError(f"precision={precision}: {rule}; use {other}")
    oldest = torch.cuda.get_arch_list()[0]  # torch's builds name the oldest card first
    if 10 * card[0] + card[1] < int(oldest.removeprefix("sm_")):
        why = f"has no kernels for this card of compute capability {has}"
        # PyTorch's CUDA support matrix (RELEASE.md)
        rule = "builds for CUDA 12.6 know cards before 7.5, as `make venv CUDA=126` installs"
        raise HostError(f"torch={torch.__version__}: {why}; {rule}")
    return torch.device("cuda", number)


def _share_cores(local_size: int) -> None:
    """Share the cores in sight among `local_size` processes, unless OMP_NUM_THREADS has a number,
    which torch follows itself.
    """
    requested = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1 where the user set nothing
    by_torchrun = requested == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if requested is None or by_torchrun:
        torch.set_num_threads(max(1, len(core_numbers()) // local_size))


def call_on_first(world: World, function: Callable[[], T]) -> T:
    """Rank 0's result of `function()` on every rank; where it raises ValueError or OSError, every
    rank does.
    """
    answer: list[T | Exception | None] = [None]
    if world.is_first:
        try:
            answer = [function()]
        except (ValueError, OSError) as error:
            answer = [error.with_traceback(None)]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def gather_values(world: World, value: T) -> list[T]:
    """The values of all ranks, on every rank."""
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
