"""A cluster measured by all its ranks together: one process a GPU, or a core, under torchrun or srun."""

import platform
import statistics
import sys

import torch

from trilane.config.cluster import Cluster
from trilane.engine.bench import device_rates
from trilane.engine.bench.collectives import Link, links
from trilane.engine.bench.report import Found, MachineMeasurement, as_cluster
from trilane.engine.distributed.gather import gathered
from trilane.engine.distributed.world import World, core_numbers, own_device
from trilane.utils.validation import require

SLOW = 0.9  # of the median: what a rank must reach to go unmentioned


def context_bytes() -> float:
    """What the driver (or on a CPU this process, once it imported all it needs) takes before the first tensor.

    Call it first: on a GPU it is total - free, so everything that was there before counts too.
    """
    if own_device("fp32").type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    from trilane.engine.bench.single_process import context_bytes as resident

    return resident()


def measure(world: World, context: float, name: str) -> Cluster:
    """The machine that these ranks see, on every rank: medians over ranks, and a warning of each slow one from rank 0.

    Raises ValueError on all ranks where the hosts have unlike numbers of them.
    """
    hosts = gathered(world, platform.node())
    per_host = hosts.count(hosts[0])
    counts = ", ".join(f"{h} {hosts.count(h)}" for h in dict.fromkeys(hosts))
    require(len(set(map(hosts.count, hosts))) == 1, "ranks per host", counts, "must be the same on every host")
    here = _memory(world, context, per_host)
    here |= device_rates.of_gpu(world.device) if world.device.type == "cuda" else device_rates.of_core()
    inside, among = links(world, hosts)
    every, numbers = gathered(world, here), gathered(world, core_numbers())
    for warning in slow_ranks(every, hosts) if world.is_first else []:
        print(f"trilane: {warning}", file=sys.stderr)
    findings = MachineMeasurement(
        device=world.device,
        host=hosts[0],
        nodes=len(set(hosts)),
        per_node=per_host,
        # srun may bind each rank to cores of its own: a node has those of all its ranks
        cores=len(set().union(*(own for host, own in zip(hosts, numbers, strict=True) if host == hosts[0]))),
        numbers=_medians(every),
        inside=_agreed(world, inside),
        among=_agreed(world, among),
    )
    return as_cluster(findings, name)


def plain_name(host: str) -> str:
    """A host's name without domain and digits, "local" where nothing is left: 'r1i4n2.example' -> 'rin'."""
    return "".join(c for c in host.split(".")[0] if not c.isdigit()).strip("-_") or "local"


def slow_ranks(every: list[Found], hosts: list[str]) -> list[str]:
    """One line for each rank that has a rate more than 10 % below the median, with its host and those rates."""
    medians, lines = _medians(every), []
    for rank, found in enumerate(every):
        rated = [name for name, median in medians.items() if name.endswith("_per_s") and median > 0]
        short = {name: found[name] / medians[name] for name in rated if found[name] < SLOW * medians[name]}
        said = ", ".join(f"{name} {1 - share:.0%} below the median" for name, share in short.items())
        lines += [f"rank {rank} on {hosts[rank]} is slow: {said}"] if short else []
    return lines


def _memory(world: World, context: float, per_host: int) -> Found:
    host = device_rates.available_memory_bytes()
    gpu = world.device.type == "cuda"
    own = torch.cuda.get_device_properties(world.device).total_memory if gpu else host / per_host
    return {"gpu.memory_bytes": float(own), "gpu.context_bytes": context, "host_memory_bytes": host}


def _medians(every: list[Found]) -> Found:
    return {name: statistics.median(found[name] for found in every) for name in every[0]}


def _agreed(world: World, mine: Link | None) -> Link | None:
    """The link with the medians over ranks, so that all ranks hold the same."""
    every = [link for link in gathered(world, mine) if link]
    if not every:
        return None
    names = ("bytes_per_s", "hop_s", "pair_bytes_per_s", "pair_s")
    return Link(ranks=every[0].ranks, **{n: statistics.median(getattr(link, n) for link in every) for n in names})
