"""Measure this machine or cluster within seconds: `trilane measure machine [OUT.json]`.

All ranks of torchrun or srun, one per GPU (on CPUs per core), measure together and rank 0 writes
one file. A single process becomes a torchrun: on a machine with GPUs of a rank each, on a CPU of
two, which stand for the eight processes that it may run; there one of them measures the core while
the other waits.
"""

import os
import platform
import statistics
import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster, Gpu
from trilane.utils.process import python, replace_by
from trilane.utils.validation import print_refusal, require, to_mapping


def main(argv: list[str]) -> int:
    """Arguments `[OUT [NAME [STORAGE [PROCESSES]]]]`. 0 when the file is written, else 2 with one
    line.
    """
    out, name, storage, processes = [*argv, "", "", "", ""][:4]
    path = Path(out or f"{name or 'local'}.json")
    # a batch script has SLURM_PROCID too, but no step: it is one process
    is_alone = "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    try:
        require(Path(storage).is_dir(), "storage", storage, "is no folder")
        require(out.endswith(".json") or not out, "out", out, "must end in .json")
        if is_alone:
            _become_torchrun(
                _free(path), name or "local", storage
            )  # refused before torch is imported
        _measure(path, name or "local", Path(storage), int(processes or "0"))
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    return 0


def _free(path: Path) -> Path:
    """The file to write, which must not exist yet, in a folder that does; ValueError otherwise."""
    require(not path.exists(), "out", path, "exists")
    require(path.absolute().parent.is_dir(), "out", path, "its folder does not exist")
    return path


def _become_torchrun(path: Path, name: str, storage: str) -> None:
    import torch

    from trilane_engine.world import own_device

    cards = torch.cuda.device_count()
    if not cards:
        own_device("fp32")  # raises where there is a GPU that torch cannot use
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cards or 2}"]
    this = ["-m", "trilane_engine.bench.__main__", str(path), name, storage, str(0 if cards else 8)]
    replace_by(python(*ranks, *this))


def _measure(path: Path, name: str, storage: Path, processes: int) -> None:
    import torch

    from trilane_engine import world as worlds
    from trilane_engine.report import write_json

    worlds.from_slurm(os.environ)
    context = _context_bytes()
    world = worlds.start_process_group("fp32")
    try:
        worlds.call_on_first(world, lambda: _free(path))
        cluster = measured(world, context, name, storage, processes)
        if world.is_first:
            write_json(path, to_mapping(cluster))
    except (
        ValueError
    ):  # on all ranks; after any other error the peers may be gone, and this could wait for them
        torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


def _context_bytes() -> float:
    """Bytes that the driver (on a CPU this process, once megatron-core is imported) takes before
    the first tensor.
    """
    import psutil
    import torch

    from trilane_engine.cpu import enable_cpu
    from trilane_engine.world import own_device

    if own_device("fp32").type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    enable_cpu()
    return float(psutil.Process().memory_info().rss)


def measured(world: Any, context: float, name: str, folder: Path, processes: int = 0) -> Cluster:
    """The cluster: medians over ranks, which may stand for `processes` on one host. Collective."""
    import psutil
    import torch
    import torch.distributed as dist

    from trilane_engine.bench import storage
    from trilane_engine.bench.rates import all_reduce, of_device
    from trilane_engine.report import print_note
    from trilane_engine.world import core_numbers, gather_values

    hosts = gather_values(world, platform.node())
    counts, here = Counter(hosts), hosts[world.rank]
    text = ", ".join(f"{host} {count}" for host, count in counts.items())
    require(
        len(set(counts.values())) == 1, "ranks per host", text, "must be the same on every host"
    )
    free, is_card, of_host = (
        float(psutil.virtual_memory().available),
        world.device.type == "cuda",
        counts[here],
    )
    own = {
        "host_memory_bytes": free,
        "gpu.memory_bytes": free / (processes or of_host),
        "gpu.context_bytes": context,
    }
    if is_card:
        own["gpu.memory_bytes"] = float(torch.cuda.get_device_properties(world.device).total_memory)
    if (
        world.is_first or not processes
    ):  # where ranks stand for others only the first measures its device
        own |= of_device(world.device)
    # new_group is collective over all ranks
    groups = {
        host: dist.new_group([rank for rank, h in enumerate(hosts) if h == host]) for host in counts
    }
    links: list[tuple[str, Any, int]] = [("node", groups[here], of_host)]
    links += [("network", None, world.size)] * (len(counts) > 1)
    for link, group, n in links:
        if n > 1:
            own[f"{link}_bytes_per_s"], small_s = all_reduce(world.device, group, n, 40)
            # processes that share cores wait for a core as well: there the whole small all_reduce
            # counts as one hop
            own.setdefault("latency_s", small_s / (1 if processes else 2 * (n - 1)))
    saved, how = storage.measure(world, folder, len(counts))
    if world.is_first and not saved:
        print_note(f"storage is not measured: {how}")
    every = gather_values(world, own)
    facts = {field: statistics.median(f[field] for f in every if field in f) for field in every[0]}
    # what no link could show: one rank, one host, or one rank a host
    facts.setdefault(
        "node_bytes_per_s", facts.get("network_bytes_per_s", facts["pcie_bytes_per_s"])
    )
    facts.setdefault("network_bytes_per_s", facts["node_bytes_per_s"])
    facts.setdefault("latency_s", facts["launch_overhead_s"])
    cores = zip(hosts, gather_values(world, core_numbers()), strict=True)
    # srun may bind each rank to its own cores: a node has those of all its ranks
    of_node = set().union(*(numbers for host, numbers in cores if host == hosts[0]))
    facts |= {
        "cores_per_node": len(of_node),
        "gpus_per_node": processes or of_host,
        "max_nodes": len(counts),
        **saved,
    }
    ranks = f"median of {1 if processes else world.size} ranks by `trilane measure machine`"
    made = as_cluster(
        name, world.device, facts, f"measured on {text} at {date.today().isoformat()}, {ranks}"
    )
    return replace(
        made, sources={**made.sources, "storage": how if saved else f"not measured: {how}"}
    )


def as_cluster(name: str, device: Any, facts: dict[str, Any], source: str) -> Cluster:
    """The facts as a Cluster, with the source of all of them."""
    import torch

    card: dict[str, Any] = {"name": f"core of {platform.node()}", "kind": "cpu"}
    if device.type == "cuda":
        own = torch.cuda.get_device_properties(device)
        card = {"name": own.name, "kind": "cuda", "compute_capability": (own.major, own.minor)}
        card["num_sms"] = own.multi_processor_count
    rates = {
        field.removeprefix("gpu."): v for field, v in facts.items() if field.startswith("gpu.")
    }
    rest = {field: v for field, v in facts.items() if not field.startswith("gpu.")}
    return Cluster(name=name, gpu=Gpu(**card, **rates), sources={"all": source}, **rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
