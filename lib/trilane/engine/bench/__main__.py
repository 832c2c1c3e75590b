"""Measure this machine or cluster within seconds: `trilane measure machine [OUT.json]`.

All ranks of torchrun or srun, one per GPU (on CPUs per core), measure together and rank 0 writes one file. A single
process becomes a torchrun: on a machine with GPUs of a rank each, on a CPU of two, which stand for the eight processes
that it may run; there one of them measures the core while the other waits.
"""

import os
import platform
import statistics
import sys
from collections import Counter
from collections.abc import MutableMapping, Sequence
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
    # "r1i4n2.example" -> "rin": the host without domain and digits
    host = "".join(c for c in platform.node().split(".")[0] if not c.isdigit()).strip("-_")
    chosen = name or host or "local"
    try:
        path = worlds.call_on_first(world, lambda: destination(out, chosen))
        cluster = measured(world, context, chosen, processes)
    except ValueError:  # on all ranks; after any other error the peers may be gone, and this could wait for them
        torch.distributed.destroy_process_group()
        raise
    if world.is_first:
        from trilane.engine.report import write_json

        write_json(path, to_mapping(cluster))
    torch.distributed.destroy_process_group()


def context_bytes() -> float:
    """Bytes that the driver (on a CPU this process, once megatron-core is imported) takes before the first tensor."""
    import psutil
    import torch

    from trilane.engine.cpu import enable_cpu
    from trilane.engine.world import own_device

    if own_device("fp32").type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    enable_cpu()
    return float(psutil.Process().memory_info().rss)


def measured(world: Any, context: float, name: str, processes: int = 0) -> Cluster:
    """The cluster: medians over ranks, which may stand for `processes` on one host. Collective."""
    import psutil
    import torch

    from trilane.engine.bench.rates import of_device
    from trilane.engine.world import core_numbers, gather_values

    hosts = gather_values(world, platform.node())
    counts, per_host = Counter(hosts), hosts.count(hosts[0])
    text = ", ".join(f"{host} {count}" for host, count in counts.items())
    require(len(set(counts.values())) == 1, "ranks per host", text, "must be the same on every host")
    memory, is_card = float(psutil.virtual_memory().available), world.device.type == "cuda"
    total = torch.cuda.get_device_properties(world.device).total_memory if is_card else memory / (processes or per_host)
    here = {
        "host_memory_bytes": (memory, "memory free on the host"),
        "gpu.memory_bytes": (float(total), "of the card" if is_card else "free host memory / processes of the host"),
        "gpu.context_bytes": (context, "memory taken before the first tensor"),
    }
    here |= of_device(world.device) if world.is_first or not processes else {}
    every = gather_values(world, here)
    # Where the ranks stand for others, only the first has measured its device.
    facts = {k: (statistics.median(f[k][0] for f in every if k in f), how) for k, (_, how) in every[0].items()}
    facts |= links(world, hosts, bool(processes))
    # What no link could show: one rank, one host, or one rank a host.
    facts.setdefault("node_bytes_per_s", facts.get("network_bytes_per_s", facts["pcie_bytes_per_s"]))
    facts.setdefault("network_bytes_per_s", facts["node_bytes_per_s"])
    facts.setdefault("latency_s", facts["launch_overhead_s"])
    cores = zip(hosts, gather_values(world, core_numbers()), strict=True)
    # srun may bind each rank to its own cores: a node has those of all its ranks
    of_node = set().union(*(own for host, own in cores if host == hosts[0]))
    facts["cores_per_node"] = (len(of_node), "cores that the ranks of a host may use")
    facts["gpus_per_node"] = (processes or per_host, "processes allowed at once" if processes else "ranks per host")
    facts["max_nodes"] = (len(counts), "hosts seen; the whole cluster may have more")
    origin = f"measured on {hosts[0]} at {date.today().isoformat()}, median of {1 if processes else world.size} ranks"
    return as_cluster(name, world.device, {k: (v, f"{origin}: {how}") for k, (v, how) in facts.items()})


def links(world: Any, hosts: Sequence[str], shares_cores: bool) -> dict[str, tuple[float, str]]:
    """Rates of an all_reduce within the hosts, all of them at once, and among all ranks, where there are several."""
    import torch.distributed as dist

    from trilane.engine.bench.rates import large_bytes, reduce_s, ring_bytes_per_s
    from trilane.engine.world import gather_values

    counts, size = Counter(hosts), large_bytes(world.device)
    # new_group is collective over all ranks.
    groups = {host: dist.new_group([rank for rank, h in enumerate(hosts) if h == host]) for host in counts}
    found: dict[str, tuple[float, str]] = {}
    for field, group, n in (
        ("node_bytes_per_s", groups[hosts[world.rank]], counts[hosts[0]]),
        ("network_bytes_per_s", None, len(hosts) if len(counts) > 1 else 1),
    ):
        if n == 1:
            continue
        large_s, small_s = reduce_s(world.device, group, size, 40), reduce_s(world.device, group, 4, 200)
        # Processes that share cores wait for a core as well: there the whole small all_reduce counts as one hop.
        hops = 1 if shares_cores else 2 * (n - 1)
        every = gather_values(world, (ring_bytes_per_s(size, n, large_s), small_s / hops))
        rate, hop = (statistics.median(values) for values in zip(*every, strict=True))
        how = f"{dist.get_backend()} all_reduce of"
        found[field] = (rate, f"{how} {size >> 20} MiB by {n} ranks, 2 (n - 1) / n bytes / seconds")
        found.setdefault("latency_s", (hop, f"{how} 4 bytes by {n} ranks / {hops} hops"))
    return found


def as_cluster(name: str, device: Any, facts: dict[str, tuple[float, str]]) -> Cluster:
    """The facts as a Cluster, with the source of each."""
    import torch

    card: dict[str, Any] = {"name": f"core of {platform.node()}", "kind": "cpu"}
    if device.type == "cuda":
        own = torch.cuda.get_device_properties(device)
        card = {"name": own.name, "kind": "cuda", "compute_capability": (own.major, own.minor)}
        card["num_sms"] = own.multi_processor_count
    rates: dict[str, Any] = {
        field.removeprefix("gpu."): v for field, (v, _) in facts.items() if field.startswith("gpu.")
    }
    rest: dict[str, Any] = {field: v for field, (v, _) in facts.items() if not field.startswith("gpu.")}
    sources = {field: how for field, (_, how) in facts.items()}
    return Cluster(name=name, gpu=Gpu(**card, **rates), sources=sources, **rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
