"""Measure this machine or cluster within seconds: `trilane measure machine [OUT.json]`.

All ranks of torchrun or srun, one per GPU (on CPUs per core), measure together and rank 0 writes
one file. A single process becomes a torchrun: on a machine with GPUs of a rank each, on a CPU of
four, which stand for the eight processes that it may run: they measure what each gets of the cores
beside the others.
"""

import importlib
import json
import os
import platform
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster, Gpu, known_card
from trilane.utils.files import write_new
from trilane.utils.process import core_numbers
from trilane.utils.validation import print_refusal, require, require_new, to_mapping

PROCESSES = 8  # of a machine without GPUs
RANKS = 4  # that measure it


def main(argv: list[str]) -> int:
    """Arguments `[OUT [PROCESSES]]`. 0 when the file is written, else 2 with one line."""
    out, processes = [*argv, "", ""][:2]
    path = Path(out or "local.json")
    # a batch script has SLURM_PROCID too, but no step: it is one process
    is_alone = "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    try:
        require(path.suffix == ".json", "out", out, "must end in .json")
        require_new("out", path)
        require(path.absolute().parent.is_dir(), "out", path, "its folder does not exist")
        if is_alone:  # torch is not imported yet
            _start_ranks(path)
        else:
            _measure(path, int(processes or "0"))
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    return 0


def _start_ranks(path: Path) -> None:
    import torch
    from torch.distributed.run import main as torchrun

    from trilane_engine.world import own_device

    cards = torch.cuda.device_count()
    processes = 0
    if not cards:
        own_device("fp32")  # raises where there is a GPU that torch cannot use
        # without a thread for each, torchrun warns; megatron-core warns of what no CPU has
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        processes = PROCESSES
    ranks = ["--standalone", f"--nproc-per-node={cards or RANKS}", "--module"]
    torchrun([*ranks, "trilane_engine.bench.__main__", str(path), str(processes)])


def _measure(path: Path, processes: int) -> None:
    import torch

    from trilane_engine import world as worlds

    worlds.from_slurm(os.environ)
    context = _context_bytes()
    world = worlds.start_process_group("fp32")
    cluster = measured(world, context, path.stem, processes)
    if world.is_first:
        write_new(path, json.dumps(to_mapping(cluster), indent=2) + "\n")
    torch.distributed.destroy_process_group()


def _context_bytes() -> float:
    """Bytes that the driver (on a CPU the first process, once the engine is imported) takes before
    the first tensor.
    """
    import psutil
    import torch

    from trilane_engine.cpu import enable_cpu
    from trilane_engine.world import own_device

    if own_device("fp32").type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    if os.environ["RANK"] != "0":  # the import takes a core for seconds
        return 0.0
    enable_cpu()
    importlib.import_module("trilane_engine.loop")
    return float(psutil.Process().memory_info().rss)


def measured(world: Any, context: float, name: str, processes: int) -> Cluster:
    """The cluster: medians over ranks, which may stand for `processes` on one host. Collective."""
    import psutil
    import torch

    from trilane_engine.bench.rates import of_device
    from trilane_engine.world import gather_values

    hosts = gather_values(world, platform.node())
    of_host = hosts.count(hosts[world.rank])
    free = float(psutil.virtual_memory().available)
    own = {"host_memory_bytes": free, "gpu.memory_bytes": free / (processes or of_host)}
    if world.device.type == "cuda":
        own["gpu.memory_bytes"] = float(torch.cuda.get_device_properties(world.device).total_memory)
    world.barrier()  # so that all ranks of a host measure at once
    own |= of_device(world.device)
    own |= _links(world, hosts, processes)
    every = gather_values(world, own)
    facts = {"gpu.context_bytes": context}
    for field in own:
        facts[field] = statistics.median(of_rank[field] for of_rank in every)
    # what no link could show: one rank, one host, or one rank a host
    node = facts.get("network_bytes_per_s", facts["pcie_bytes_per_s"])
    facts.setdefault("node_bytes_per_s", node)
    facts.setdefault("network_bytes_per_s", facts["node_bytes_per_s"])
    facts.setdefault("latency_s", facts["launch_overhead_s"])
    # srun may bind each rank to its own cores: a node has those of all its ranks
    cores: set[int] = set()
    for host, numbers in zip(hosts, gather_values(world, core_numbers()), strict=True):
        if host == hosts[0]:
            cores |= numbers
    if world.device.type != "cuda":  # as if each had a core: a plan's processes share them anew
        crowd = max(of_host / len(cores), 1.0)
        for field in facts:
            if field.endswith("_per_s"):
                facts[field] *= crowd
            elif field.endswith("_s"):
                facts[field] /= crowd
    facts |= {"cores_per_node": len(cores), "gpus_per_node": processes or of_host}
    facts["max_nodes"] = len(set(hosts))
    source = f"measured on {hosts[0]} by `trilane measure machine` at {date.today().isoformat()}"
    return _cluster(name, world.device, facts, source)


def _links(world: Any, hosts: list[str], processes: int) -> dict[str, float]:
    """Bytes per second within this rank's host and between all ranks, and a latency. Collective."""
    import torch.distributed as dist

    from trilane_engine.bench.rates import all_reduce

    links: list[tuple[str, Any, int]] = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        group = dist.new_group(ranks)  # collective over all ranks
        if world.rank in ranks:
            links.append(("node", group, len(ranks)))
    if len(set(hosts)) > 1:
        links.append(("network", None, world.size))
    world.barrier()  # all hosts at once, as they train, and none before another has its group
    rates: dict[str, float] = {}
    for link, group, n in links:
        if n > 1:
            rates[f"{link}_bytes_per_s"], small_s = all_reduce(world.device, group, n, 40)
            # processes that share cores wait for a core as well: there the whole small all_reduce
            # counts as one hop
            rates.setdefault("latency_s", small_s / (1 if processes else 2 * (n - 1)))
    return rates


def _cluster(name: str, device: Any, facts: dict[str, Any], source: str) -> Cluster:
    """The facts as a Cluster."""
    import torch

    gpu: dict[str, Any] = {"name": f"core of {platform.node()}", "kind": "cpu"}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        gpu = {"name": card.name, "kind": "cuda", "compute_capability": (card.major, card.minor)}
        gpu["num_sms"] = card.multi_processor_count
        if known := known_card(card.name):
            gpu["name"] = known.name
            source += f"; peaks: {known.name} of the catalogue"
    owners: dict[str, dict[str, Any]] = {"": {}, "gpu": gpu, "gpu.shares": {}}
    for field, value in facts.items():
        owner, _, field_name = field.rpartition(".")
        owners[owner][field_name] = value
    gpu["shares"] = owners["gpu.shares"] or None
    return Cluster(name=name, gpu=Gpu(**gpu), sources={"all": source}, **owners[""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
