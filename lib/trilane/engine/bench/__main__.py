"""Measure this machine or cluster within seconds: `trilane measure machine [OUT.json]`.

All ranks of torchrun or srun, one per GPU (on CPUs per core), measure together and rank 0 writes one file. A single
process becomes a torchrun: on a machine with GPUs of a rank each, on a CPU of two, which stand for the eight processes
that it may run; there one of them measures the core while the other waits.
"""

import os
import platform
import statistics
import sys
from collections.abc import MutableMapping
from datetime import date
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster, Gpu
from trilane.utils.process import python
from trilane.utils.validation import print_refusal, require, to_mapping


def main(argv: list[str]) -> int:
    """Arguments `[OUT [NAME [PROCESSES]]]`. 0 when the file is written, else 2 with one line."""
    out, name, processes = [*argv, "", "", ""][:3]
    try:
        require(out.endswith(".json") or not out, "out", out, "must end in .json")
        if world_size(os.environ) == 1 and "RANK" not in os.environ:
            _start_ranks(destination(out, name or "local"), name or "local")  # refused before torch is imported
        _measure_together(out, name, int(processes or "0"))
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    return 0


def world_size(env: MutableMapping[str, str]) -> int:
    """Processes that torchrun or srun started. A batch script has SLURM_PROCID too, but no step: it is one process."""
    return int(env["WORLD_SIZE"] if "RANK" in env else env.get("SLURM_STEP_NUM_TASKS", "1"))


def destination(out: str, name: str) -> Path:
    """The file to write, which must not exist yet, in a folder that does; ValueError otherwise."""
    path = Path(out or f"{name}.json")
    require(not path.exists(), "out", path, "exists")
    require(path.absolute().parent.is_dir(), "out", path, "its folder does not exist")
    return path


def _start_ranks(path: Path, name: str) -> None:
    """Become torchrun."""
    import torch

    from trilane.engine.world import own_device

    cards = torch.cuda.device_count()
    if not cards:
        own_device("fp32")  # raises where there is a GPU that torch cannot use
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cards or 2}"]
    this = ["-m", "trilane.engine.bench.__main__", str(path), name, str(0 if cards else 8)]
    os.execvp("env", python(*ranks, *this))


def _measure_together(out: str, name: str, processes: int) -> None:
    import torch

    from trilane.engine import world as worlds

    worlds.from_slurm(os.environ)
    context = context_bytes()
    world = worlds.start_process_group("fp32")
    try:
        chosen = name or plain_name(platform.node())
        path = worlds.call_on_first(world, lambda: destination(out, chosen))
        cluster = measured(world, context, chosen, processes)
    except ValueError:  # on all ranks; after any other error the peers may be gone, and this could wait for them
        torch.distributed.destroy_process_group()
        raise
    if world.is_first:
        from trilane.engine.report import write_json

        write_json(path, to_mapping(cluster))
    torch.distributed.destroy_process_group()


def plain_name(host: str) -> str:
    """A host's name without domain and digits, "local" where nothing is left: 'r1i4n2.example' -> 'rin'."""
    return "".join(c for c in host.split(".")[0] if not c.isdigit()).strip("-_") or "local"


def context_bytes() -> float:
    """Bytes that the driver (on a CPU this process, once megatron-core is imported) takes before the first tensor.

    Call it first: on a GPU it is total - free, so everything allocated before counts too.
    """
    import torch

    from trilane.engine.world import own_device

    if own_device("fp32").type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    from trilane.engine.cpu import enable_cpu

    enable_cpu()
    from trilane.engine.report import resident_bytes

    return float(resident_bytes())


def measured(world: Any, context: float, name: str, processes: int = 0) -> Cluster:
    """The cluster, on every rank: medians over ranks; rank 0 prints a warning for each slow rank. Collective.

    `processes` above 0: the ranks stand for so many on one host. ValueError, on all ranks, where the hosts have
    different numbers of ranks.
    """
    from trilane.engine.bench.rates import available_memory_bytes, of_device
    from trilane.engine.world import core_numbers, gather_values

    hosts = gather_values(world, platform.node())
    per_host, counts = hosts.count(hosts[0]), ", ".join(f"{h} {hosts.count(h)}" for h in dict.fromkeys(hosts))
    require(len(set(map(hosts.count, hosts))) == 1, "ranks per host", counts, "must be the same on every host")
    memory = available_memory_bytes()
    here = {"host_memory_bytes": (memory, "memory free on the host")}
    here |= of_memory(world.device, memory / (processes or per_host), context)
    here |= of_device(world.device) if world.is_first or not processes else {}
    every = gather_values(world, here)
    for warning in slow_ranks(every, hosts) if world.is_first and not processes else ():
        print(f"trilane: {warning}", file=sys.stderr)
    origin = f"measured on {hosts[0]} at {date.today().isoformat()}: "
    many = f", median of {world.size} ranks measuring at once" if not processes and world.size > 1 else ""
    facts = {k: (_median(every, k), f"{origin}{how}{many}" if v else how) for k, (v, how) in every[0].items()}
    facts |= {k: (v, f"{origin}{how}") for k, (v, how) in links(world, hosts, bool(processes)).items()}
    instead = {"node_bytes_per_s": ["network_bytes_per_s", "pcie_bytes_per_s"], "latency_s": ["launch_overhead_s"]}
    instead["network_bytes_per_s"] = ["node_bytes_per_s"]
    for field, others in instead.items():
        other = next(other for other in others if other in facts)
        facts.setdefault(field, (facts[other][0], f"one rank, one host or one rank a host: as {other}"))
    cores = [own for h, own in zip(hosts, gather_values(world, core_numbers()), strict=True) if h == hosts[0]]
    # srun may bind each rank to its own cores: a node has those of all its ranks
    sizes = {"cores_per_node": (len(set().union(*cores)), "cores that the ranks of a host may use")}
    sizes["gpus_per_node"] = (processes or per_host, "processes allowed at once" if processes else "ranks per host")
    sizes["max_nodes"] = (len(set(hosts)), "hosts seen; the whole cluster may have more")
    facts |= {k: (v, f"{origin}{how}") for k, (v, how) in sizes.items()}
    return as_cluster(name, world.device, hosts[0], facts)


def of_memory(device: Any, share: float, context: float) -> dict[str, tuple[float, str]]:
    """The memory of a card, or a rank's share of the host's, and what is taken before the first tensor."""
    import torch

    if device.type == "cuda":
        total = float(torch.cuda.get_device_properties(device).total_memory)
        taken = (context, "memory that is not free before the first tensor")
        return {"gpu.memory_bytes": (total, "the card's total, as its driver reports it"), "gpu.context_bytes": taken}
    taken = (context, "resident memory of a rank that imported torch and megatron-core")
    return {"gpu.memory_bytes": (share, "free host memory / processes of the host"), "gpu.context_bytes": taken}


def links(world: Any, hosts: list[str], shares_cores: bool) -> dict[str, tuple[float, str]]:
    """Rates of an all_reduce within the hosts, all of them at once, and among all ranks, where there are several."""
    import torch.distributed as dist

    from trilane.engine.bench.rates import large_bytes, reduce_s, ring_bytes_per_s
    from trilane.engine.world import gather_values

    names, size = list(dict.fromkeys(hosts)), large_bytes(world.device)
    # new_group is collective over all ranks.
    groups = {host: dist.new_group([rank for rank, h in enumerate(hosts) if h == host]) for host in names}
    found: dict[str, tuple[float, str]] = {}
    for field, group, n in (
        ("node_bytes_per_s", groups[hosts[world.rank]], hosts.count(hosts[0])),
        ("network_bytes_per_s", None, len(hosts) if len(names) > 1 else 1),
    ):
        if n == 1:
            continue
        large_s, small_s = reduce_s(world.device, group, size, 40), reduce_s(world.device, group, 4, 200)
        # Processes that share cores wait for a core as well: there the whole small all_reduce counts as one hop.
        mine = {"rate": ring_bytes_per_s(size, n, large_s), "hop": small_s / (1 if shares_cores else 2 * (n - 1))}
        every, reduced = gather_values(world, mine), f"{dist.get_backend()} all_reduce of"
        how = f"{reduced} {size >> 20} MiB by {n} ranks, 2 (n - 1) / n bytes / seconds"
        found[field] = (statistics.median(each["rate"] for each in every), how)
        how = f"{reduced} 4 bytes by {n} ranks" + ("" if shares_cores else " / (2 (n - 1))")
        found.setdefault("latency_s", (statistics.median(each["hop"] for each in every), how))
    return found


def _median(every: list[dict[str, tuple[float, str]]], field: str) -> float:
    return statistics.median(found[field][0] for found in every if field in found)


def slow_ranks(every: list[dict[str, tuple[float, str]]], hosts: list[str], share: float = 0.9) -> list[str]:
    """One line for each rank with a rate more than 10 % below the median: its host and those rates."""
    lines = []
    for rank, found in enumerate(every):
        rates = {k: v / _median(every, k) for k, (v, _) in found.items() if k.endswith("_per_s") and v}
        details = ", ".join(f"{k} {1 - part:.0%} below the median" for k, part in rates.items() if part < share)
        lines += [f"rank {rank} on {hosts[rank]} is slow: {details}"] if details else []
    return lines


def as_cluster(name: str, device: Any, host: str, facts: dict[str, tuple[float, str]]) -> Cluster:
    """The facts as a Cluster, with the source of each."""
    import torch

    values: dict[str, Any] = {field: value for field, (value, _) in facts.items()}
    card: dict[str, Any] = {"name": f"core of {host}", "kind": "cpu"}
    if device.type == "cuda":
        own = torch.cuda.get_device_properties(device)
        card = {"name": own.name, "kind": "cuda", "compute_capability": (own.major, own.minor)}
        card["num_sms"] = own.multi_processor_count
    rates = {field.removeprefix("gpu."): value for field, value in values.items() if field.startswith("gpu.")}
    rest = {field: value for field, value in values.items() if not field.startswith("gpu.")}
    sources = {field: how for field, (_, how) in facts.items()}
    return Cluster(name=name, gpu=Gpu(**card, **rates), sources=sources, **rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
