"""A cluster measured by all its ranks: one process per GPU, or per core, under torchrun or srun."""

import platform
import statistics
import sys

import torch

from trilane.config.cluster import Cluster
from trilane.engine.bench import device_rates
from trilane.engine.bench.collectives import Link, links
from trilane.engine.bench.report import MachineMeasurement, Rates, as_cluster
from trilane.engine.distributed.world import World, core_numbers, gather_values, own_device
from trilane.utils.validation import require

SLOW = 0.9  # of the median; a rank below it is reported


def context_bytes() -> float:
    """Bytes that the driver (on a CPU this process with its imports) takes before the first tensor.

    Call it first: on a GPU it is total - free, so everything allocated before counts too.
    """
    if own_device("fp32").type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    from trilane.engine.bench.single_process import context_bytes as resident

    return resident()


def measure(world: World, context: float, name: str) -> Cluster:
    """The measured cluster, on every rank: medians over ranks; rank 0 prints a warning for each slow rank. Collective.

    Raises ValueError on all ranks where the hosts have different numbers of ranks.
    """
    hosts = gather_values(world, platform.node())
    per_host = hosts.count(hosts[0])
    counts = ", ".join(f"{h} {hosts.count(h)}" for h in dict.fromkeys(hosts))
    require(len(set(map(hosts.count, hosts))) == 1, "ranks per host", counts, "must be the same on every host")
    here = _memory(world, context, per_host)
    here |= device_rates.of_gpu(world.device) if world.device.type == "cuda" else device_rates.of_core()
    inside, among = links(world, hosts)
    rates, numbers = gather_values(world, here), gather_values(world, core_numbers())
    for warning in slow_ranks(rates, hosts) if world.is_first else []:
        print(f"trilane: {warning}", file=sys.stderr)
    findings = MachineMeasurement(
        device=world.device,
        host=hosts[0],
        nodes=len(set(hosts)),
        per_node=per_host,
        # srun may bind each rank to its own cores: a node has those of all its ranks
        cores=len(set().union(*(own for host, own in zip(hosts, numbers, strict=True) if host == hosts[0]))),
        numbers=_medians(rates),
        inside=_median_link(world, inside),
        among=_median_link(world, among),
    )
    return as_cluster(findings, name)


def plain_name(host: str) -> str:
    """A host's name without domain and digits, "local" where nothing is left: 'r1i4n2.example' -> 'rin'."""
    return "".join(c for c in host.split(".")[0] if not c.isdigit()).strip("-_") or "local"


def slow_ranks(every: list[Rates], hosts: list[str]) -> list[str]:
    """One line for each rank with a rate more than 10 % below the median: its host and those rates."""
    medians, lines = _medians(every), []
    for rank, found in enumerate(every):
        rated = [name for name, median in medians.items() if name.endswith("_per_s") and median > 0]
        short = {name: found[name] / medians[name] for name in rated if found[name] < SLOW * medians[name]}
        details = ", ".join(f"{name} {1 - share:.0%} below the median" for name, share in short.items())
        lines += [f"rank {rank} on {hosts[rank]} is slow: {details}"] if short else []
    return lines


def _memory(world: World, context: float, per_host: int) -> Rates:
    host = device_rates.available_memory_bytes()
    gpu = world.device.type == "cuda"
    own = torch.cuda.get_device_properties(world.device).total_memory if gpu else host / per_host
    return {"gpu.memory_bytes": float(own), "gpu.context_bytes": context, "host_memory_bytes": host}


def _medians(every: list[Rates]) -> Rates:
    return {name: statistics.median(found[name] for found in every) for name in every[0]}


def _median_link(world: World, mine: Link | None) -> Link | None:
    """The link with medians over ranks, the same on all ranks."""
    every = [link for link in gather_values(world, mine) if link]
    if not every:
        return None
    names = ("bytes_per_s", "hop_s", "pair_bytes_per_s", "pair_s")
    return Link(ranks=every[0].ranks, **{n: statistics.median(getattr(link, n) for link in every) for n in names})
