"""A cluster measured by all its ranks: one process per GPU, or per core, under torchrun or srun; its description as a
Cluster, with the source of every number.
"""

import platform
import statistics
import sys
from dataclasses import dataclass
from datetime import date

import torch

from trilane.config.cluster import Cluster, Gpu
from trilane.costmodel.constants import PRIOR
from trilane.engine.bench import device_rates
from trilane.engine.bench.collectives import Link, large_bytes, links
from trilane.engine.distributed.device import own_device
from trilane.engine.distributed.world import World, core_numbers, gather_values
from trilane.utils.validation import require

# Values by the field of Cluster that holds them.
Rates = dict[str, float]
# A Cluster holds peaks; a calibration expects these shares of them, and a measured rate is such a share.
SHARES: Rates = {
    "fp32_flops_per_s": float(PRIOR.matmul),
    "fp16_flops_per_s": float(PRIOR.matmul),
    "bf16_flops_per_s": float(PRIOR.matmul),
    "memory_bytes_per_s": float(PRIOR.memory),
}


@dataclass(frozen=True, kw_only=True)
class MachineMeasurement:
    """Medians over all ranks of `nodes` hosts like `host`, each with `per_node` ranks on devices like this rank's.

    `inside` is None where a host has one rank, `among` where there is one host.
    """

    device: torch.device
    host: str
    nodes: int
    per_node: int
    cores: int
    numbers: Rates
    inside: Link | None
    among: Link | None


def as_cluster(measured: MachineMeasurement, name: str) -> Cluster:
    """The measurement as a Cluster; what one rank, or one rank a host, cannot measure gets the nearest substitute."""
    numbers, link = measured.numbers, measured.inside or measured.among
    network = measured.among or measured.inside
    pcie = numbers["pcie_bytes_per_s"]
    return Cluster(
        name=name,
        gpu=_gpu(measured),
        gpus_per_node=measured.per_node,
        max_nodes=measured.nodes,
        node_bytes_per_s=link.bytes_per_s if link else pcie,
        network_bytes_per_s=network.bytes_per_s if network else pcie,
        pcie_bytes_per_s=pcie,
        latency_s=link.hop_s if link else numbers["launch_overhead_s"],
        cores_per_node=measured.cores,
        host_memory_bytes=numbers["host_memory_bytes"],
        launch_overhead_s=numbers["launch_overhead_s"],
        sources=_sources(measured),
    )


def _gpu(measured: MachineMeasurement) -> Gpu:
    numbers = {field.removeprefix("gpu."): n for field, n in measured.numbers.items() if field.startswith("gpu.")}
    if measured.device.type != "cuda":
        return Gpu(name=f"core of {measured.host}", kind="cpu", **numbers)  # type: ignore[arg-type]
    numbers = {field: n / SHARES.get(field, 1.0) for field, n in numbers.items()}
    card = torch.cuda.get_device_properties(measured.device)
    capability = (card.major, card.minor)
    sms = card.multi_processor_count
    return Gpu(name=card.name, kind="cuda", compute_capability=capability, num_sms=sms, **numbers)


CARD_LACKS = {"gpu.fp8_flops_per_s": "not measured: 0, so that no plan may choose it"}
# Fields that a core does not have.
CORE_LACKS = {
    "gpu.fp16_flops_per_s": "a core has no such units",
    "gpu.bf16_flops_per_s": "a core has no such units",
    "gpu.fp8_flops_per_s": "a core has no such units",
    "pcie_bytes_per_s": "no PCIe between a core and its memory: as gpu.memory_bytes_per_s",
}


def _sources(measured: MachineMeasurement) -> dict[str, str]:
    is_card = measured.device.type == "cuda"
    how, lacks = (_how_on_cuda(), CARD_LACKS) if is_card else (_how_on_cpu(), CORE_LACKS)
    origin = f"measured on {measured.host} at {date.today().isoformat()}"
    ranks = measured.nodes * measured.per_node
    many = f", median of {ranks} ranks measuring at once" if ranks > 1 else ""
    counted = {
        "gpus_per_node": f"{origin}: ranks per host",
        "max_nodes": f"{origin}: hosts seen; the whole cluster may have more",
        "cores_per_node": f"{origin}: cores that the ranks of a host may use",
        "host_memory_bytes": f"{origin}: memory free on the host{many}",
    }
    rates = {field: f"{origin}: {what}{many}" for field, what in how.items()}
    return {**rates, **lacks, **_link_sources(measured, origin), **counted}


def _how_on_cuda() -> dict[str, str]:
    sizes = " and ".join(" x ".join(map(str, size)) for size in device_rates.CUDA_SIZES)
    copied = f"{device_rates.COPY_BYTES >> 20} MiB"
    matmul = f"the fastest torch matmul of {sizes}, which reaches {PRIOR.matmul} of the peak"
    return {
        "gpu.memory_bytes": "the card's total, as its driver reports it",
        "gpu.context_bytes": "memory that is not free before the first tensor",
        "gpu.memory_bytes_per_s": f"copy of {copied} on the card, bytes read and written; {PRIOR.memory} of the peak",
        "gpu.fp32_flops_per_s": f"{matmul}, without TF32",
        "gpu.fp16_flops_per_s": matmul,
        "gpu.bf16_flops_per_s": f"{matmul}; 0 below compute capability 8.0",
        "pcie_bytes_per_s": f"copy of {copied} from page-locked host memory to the card",
        "launch_overhead_s": f"torch calls on 16 numbers, {device_rates.CALLS} in a row",
    }


def _how_on_cpu() -> dict[str, str]:
    copied = f"copy of {device_rates.COPY_BYTES >> 20} MiB by one thread, bytes read and written"
    return {
        "gpu.memory_bytes": "free host memory / ranks of the host",
        "gpu.context_bytes": "resident memory of a rank that imported torch and megatron-core",
        "gpu.memory_bytes_per_s": copied,
        "gpu.fp32_flops_per_s": "the fastest of two torch matmuls on one thread",
        "launch_overhead_s": f"torch calls on 16 numbers, {device_rates.CALLS} in a row",
    }


def _link_sources(measured: MachineMeasurement, origin: str) -> dict[str, str]:
    """Where node_bytes_per_s, network_bytes_per_s and latency_s come from."""
    backend = "nccl" if measured.device.type == "cuda" else "gloo"
    large = f"{large_bytes(measured.device) >> 20} MiB"

    def bandwidth_source(link: Link) -> str:
        pair = f"a message between two of them {link.pair_bytes_per_s / 1e9:.3g} GB/s"
        return f"{origin}: {backend} all_reduce of {large} by {link.ranks} ranks, 2 (n - 1) / n bytes / seconds; {pair}"

    def latency_source(link: Link) -> str:
        pair = f"a message between two of them {link.pair_s * 1e6:.3g} us"
        return f"{origin}: {backend} all_reduce of 4 bytes by {link.ranks} ranks / (2 (n - 1)); {pair}"

    link = measured.inside or measured.among
    if link is None:
        one = "a single rank: as"
        ways = dict.fromkeys(("node_bytes_per_s", "network_bytes_per_s"), f"{one} pcie_bytes_per_s")
        return {**ways, "latency_s": f"{one} launch_overhead_s"}
    outside = f"; among all {measured.among.hop_s * 1e6:.3g} us" if measured.inside and measured.among else ""
    return {
        "node_bytes_per_s": bandwidth_source(measured.inside)
        if measured.inside
        else "one rank a host: as network_bytes_per_s",
        "network_bytes_per_s": bandwidth_source(measured.among) if measured.among else "one host: as node_bytes_per_s",
        "latency_s": latency_source(link) + outside,
    }


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
