"""A site read off SLURM: what sinfo and scontrol report of nodes and partitions, and what is left to be filled in."""

import contextlib
import math
import re
from dataclasses import dataclass

from trilane.slurm import client
from trilane.slurm.sites import Site, seconds_of
from trilane.utils.validation import require, require_known

# what neither sinfo nor scontrol knows
UNKNOWN = (
    "constraint: features that select nodes of one kind (sinfo -o '%P %G %f')",
    "qos, default_qos: limits of the QoS that you may use (sacctmgr show qos format=name,maxwall,maxtres)",
    "account_ending: whether the accounts of these nodes end alike (sacctmgr show assoc user=$USER)",
    "modules: what the scripts must load (module avail)",
    "offline: whether compute nodes have no internet; false is assumed",
    "local: folders that each node has for itself, besides /tmp and /dev/shm",
    "exclusive, service_partition, hint: as the site's documentation has them",
)


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Equal nodes of one partition, as sinfo lists them: memory in bytes, `hours` infinite without a limit."""

    partition: str
    is_default: bool
    hours: float
    nodes: int
    cores: int
    memory_bytes: float
    gpu_type: str
    gpus: int


def node_kinds(text: str) -> list[NodeKind]:
    """The kinds of nodes that sinfo -o "%P|%a|%l|%D|%z|%m|%G" prints, of partitions that are up."""
    # a site's own sinfo may print other lines, too
    form = r"^([\w-]+)(\*?)\|up\|([^|\n]*)\|(\d+)\|(\d{1,4}):(\d{1,5}):\d{1,3}\|(\d+)\|([^|\n]*)$"
    return [
        NodeKind(
            partition=name,
            is_default=bool(star),
            hours=_hours(limit),
            nodes=int(nodes),
            cores=int(sockets) * int(cores),
            memory_bytes=float(memory) * 2**20,
            gpu_type=gpus_of(gres)[0],
            gpus=gpus_of(gres)[1],
        )
        for name, star, limit, nodes, sockets, cores, memory, gres in re.findall(form, text, re.M)
    ]


def _hours(limit: str) -> float:
    with contextlib.suppress(ValueError):  # "", n/a
        return seconds_of(limit) / 3600
    return math.inf


def gpus_of(gres: str) -> tuple[str, int]:
    """Type ("" for none) and number of a node's GPUs, by sinfo's %G: "gpu:a100:4(S:0-1),nvme:1"; ("", 0) without."""
    words = re.sub(r"\([^)]*\)", "", gres).split(",")
    found = [match for word in words if (match := re.fullmatch(r"gpu(?::([\w.+-]+))?:(\d+)", word))]
    return (found[0][1] or "", sum(int(match[2]) for match in found)) if found else ("", 0)


def probe(partition: str = "") -> tuple[Site, list[str]]:
    """The site of a partition on the cluster at hand ("": the default one if it has GPUs, else that with the most), and
    a line for each value that SLURM does not know. ValueError where it does not answer, or lists no such partition.
    """
    kinds = node_kinds(client.call(["sinfo", "-h", "-e", "--noconvert", "-o", "%P|%a|%l|%D|%z|%m|%G"]))
    require(bool(kinds), "slurm", "sinfo", "lists no partition that is up")
    if partition:
        require_known("partition", partition, {kind.partition for kind in kinds})
    mine = [kind for kind in kinds if partition in ("", kind.partition)]
    default = [kind for kind in mine if kind.is_default and kind.gpus and not partition]
    kind = max(default or mine, key=lambda kind: (kind.nodes * kind.gpus, kind.nodes))
    named = re.search(r"^ClusterName\s*=\s*([\w.-]+)", client.call(["scontrol", "show", "config"]), re.M)
    has = f"{kind.nodes} nodes of {kind.gpus} GPUs ({kind.gpu_type or 'no type'}), {kind.cores} cores and "
    has += f"{kind.memory_bytes / 1e9:.0f} GB, for {kind.hours:g} h"
    unknown = [f"cluster: a name of the catalogue, or a file; {kind.partition} has {has}", *UNKNOWN]
    site = Site(
        name="-".join([*([named[1]] if named else []), kind.partition])[:100],
        partition=kind.partition,
        partitions=tuple(dict.fromkeys(one.partition for one in kinds)),
        gpu_type=kind.gpu_type,
        sources={"all": "sinfo and scontrol", "unknown": "; ".join(unknown)},
    )
    return site, unknown
