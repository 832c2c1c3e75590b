"""World: this process's rank and device, from torchrun's or SLURM's environment, and small collectives."""

import os
import platform
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from trilane.config.plan import Plan
from trilane.engine.distributed import rendezvous
from trilane.engine.distributed.device import own_device, require_one_kind, require_own_card
from trilane.utils.process import held_port
from trilane.utils.validation import HostError, require


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
        """Rank 0 prints and prepares whatever is needed once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks; NCCL needs the device, which the process group does not know."""
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    @property
    def is_last(self) -> bool:
        """The last rank is on the last pipeline stage, where the loss is; it prints the iterations."""
        return self.rank == self.size - 1


def from_slurm(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_*, MASTER_ADDR and MASTER_PORT in `env` from SLURM_*, unless torchrun did.

    Assumes one task per GPU. The master is the first host of the list; its port follows from the job id, so that two
    jobs on one node do not collide.
    """
    if "RANK" in env or "SLURM_PROCID" not in env:
        return
    env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_NTASKS"], env["SLURM_LOCALID"]
    env.setdefault("LOCAL_WORLD_SIZE", _tasks_here(env))
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_NODELIST"]))
    env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))


def _tasks_here(env: MutableMapping[str, str]) -> str:
    """Tasks of this step on this node: SLURM_STEP_TASKS_PER_NODE is "8(x2)" or "4,2(x3)", for its nodes in order."""
    each: list[str] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        each += [tasks] * int(times.rstrip(")") or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    here = each[node] if node < len(each) else ""
    return here or env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"])


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: 'gpu[003-006,9],x1' -> 'gpu003', as `scontrol show hostnames` expands it."""
    head, bracket, rest = nodelist.partition("[")
    if "," in head or not bracket:
        return nodelist.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + tail.split(",")[0]


def single_process(env: MutableMapping[str, str]) -> None:
    """Describe a world of one process on a free port in `env`, unless torchrun or SLURM did."""
    if "RANK" in env:
        return
    with held_port() as port:
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def join(plan: Plan) -> World:
    """Start the plan's process group (NCCL with a GPU, gloo without); this process's World.

    Raises ValueError where the world is not tp x pp x dp processes, or the GPU lacks the plan's precision.
    """
    size, t = int(os.environ["WORLD_SIZE"]), plan.topology
    require(size == t.gpus, "world size", size, f"must be tp x pp x dp = {t.tp} x {t.pp} x {t.dp} = {t.gpus}")
    world = start_process_group(t.precision)
    if world.is_first and world.device.type == "cpu" and plan.cluster.gpu.kind == "cuda":
        print(f"trilane: no GPU here: training a plan for {plan.cluster.name} on CPUs", flush=True)
    return world


def start_process_group(precision: str) -> World:
    """Start the process group of all processes of the environment; ValueError where the GPU lacks `precision`.

    Without `device_id`, which would make NCCL's communicators at once: torch 2.13 then splits every new_group() off the
    first (distributed_c10d._new_process_group_helper), also on the ranks that are not in it, one after another: some
    1,400 splits of 384 ranks for tp 4 x pp 12 x dp 8. So each group gets its communicator in its first collective, and
    a group that is never used gets none. Not measured: no GPU here.
    """
    env = os.environ
    size, local_size = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", "1"))
    rank, local_rank = int(env["RANK"]), int(env.get("LOCAL_RANK", "0"))
    device = own_device(precision)
    torch.set_num_threads(threads(local_size))
    store = _meet(rank, size, local_size)
    require_one_kind(store, size, device)
    require_own_card(store, rank, size, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=rendezvous.TIMEOUT)
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device)


def _meet(rank: int, size: int, local_size: int) -> dist.Store:
    """The store of all ranks, once all have come to it; HostError with those that have not within WAIT_S.

    It is that of torchrun's agents where there are some, else rank 0's. dist.rendezvous() ends without these names.
    """
    env, wait = os.environ, timedelta(seconds=rendezvous.WAIT_S)
    has_agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port, is_host = env["MASTER_ADDR"], int(env["MASTER_PORT"]), rank == 0 and not has_agents
    why = "rank 0 does not answer"
    try:
        store = dist.TCPStore(address, port, size, is_host, wait, wait_for_workers=False, multi_tenant=not has_agents)
        store.set(f"trilane/rank {rank}", platform.node())
        if store.add("trilane/came", 1) == size:
            store.set("trilane/all came", "here")
        try:
            store.wait(["trilane/all came"], wait)
        except dist.DistStoreError:  # the time is up
            came = [r for r in range(size) if store.check([f"trilane/rank {r}"])]
            why = rendezvous.absent_ranks(came, size, local_size)
            time.sleep(2.0 * is_host)  # others still read from this store
            raise
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise
        raise HostError(f"rendezvous={address}:{port}: {why} within {rendezvous.WAIT_S} s") from None
    store.set_timeout(rendezvous.TIMEOUT)
    return store


def cores() -> int:
    """CPU cores that this process may use."""
    return len(core_numbers())


def core_numbers() -> set[int]:
    """The CPU cores that this process may use; counted from 0 where the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def threads(local_size: int) -> int:
    """Threads of one process: OMP_NUM_THREADS, else its share of the cores that `local_size` processes see.

    torchrun sets OMP_NUM_THREADS to 1 where the user did not; that value is ignored. Where srun binds each task to its
    own cores, together they see no more than SLURM_CPUS_ON_NODE, and each process uses all that it sees.
    """
    requested, by_torchrun = os.environ.get("OMP_NUM_THREADS", ""), "TORCHELASTIC_RUN_ID" in os.environ
    if requested.isdecimal() and int(requested) > by_torchrun:
        return int(requested)
    of_node = 0 if by_torchrun else int(os.environ.get("SLURM_CPUS_ON_NODE", "0"))
    return cores() if cores() * local_size <= of_node else max(1, cores() // local_size)


T = TypeVar("T")


def call_on_first(world: World, function: Callable[[], T]) -> T:
    """Rank 0's result of `function()` on every rank; where it raises ValueError, every rank does."""
    answer: list[tuple[T | None, str]] = [(None, "")]
    if world.is_first:
        try:
            answer = [(function(), "")]
        except ValueError as error:
            answer = [(None, str(error))]
    dist.broadcast_object_list(answer, src=0)
    value, problem = answer[0]
    if problem:
        raise ValueError(problem)
    return value  # type: ignore[return-value]


def gather_values(world: World, value: T) -> list[T]:
    """The values of all ranks, on every rank."""
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
