"""A site read off SLURM: what sinfo and scontrol report of nodes and partitions, and what is left to be filled in."""

import contextlib
import re

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
    "sbatch, service_partition: as the site's documentation has them",
)


def probe(partition: str = "") -> tuple[Site, list[str]]:
    """The site of a partition on the cluster at hand ("": the default one if it has GPUs, else that with the most), and
    a line for each value that SLURM does not know. ValueError where it does not answer, or lists no such partition.
    """
    listed = client.call(["sinfo", "-h", "-e", "--noconvert", "-o", "%P|%a|%l|%D|%z|%m|%G"])
    # of partitions that are up; a site's own sinfo may print other lines, too
    form = r"^([\w-]+)(\*?)\|up\|([^|\n]*)\|(\d+)\|(\d{1,4}):(\d{1,5}):\d{1,3}\|(\d+)\|([^|\n]*)$"
    rows = re.findall(form, listed, re.M)
    require(bool(rows), "slurm", "sinfo", "lists no partition that is up")
    if partition:
        require_known("partition", partition, {name for name, *_ in rows})

    def most(row: tuple[str, ...]) -> tuple[bool, int, int]:
        nodes, gpus = int(row[3]), gpus_of(row[-1])[1]
        return bool(row[1] and gpus), nodes * gpus, nodes

    name, _, limit, nodes, sockets, cores, memory, gres = max((r for r in rows if partition in ("", r[0])), key=most)
    named = re.search(r"^ClusterName\s*=\s*([\w.-]+)", client.call(["scontrol", "show", "config"]), re.M)
    kind, gpus = gpus_of(gres)
    has = f"{nodes} nodes of {gpus} GPUs ({kind or 'no type'}), {int(sockets) * int(cores)} cores and "
    has += f"{float(memory) * 2**20 / 1e9:.0f} GB"
    with contextlib.suppress(ValueError):  # "", n/a
        has += f", for {seconds_of(limit) / 3600:g} h"
    unknown = [f"cluster: a name of the catalogue, or a file; {name} has {has}", *UNKNOWN]
    site = Site(
        name="-".join([*([named[1]] if named else []), name])[:100],
        partition=name,
        partitions=tuple(dict.fromkeys(row[0] for row in rows)),
        gpu_type=kind,
        sources={"all": "sinfo and scontrol", "unknown": "; ".join(unknown)},
    )
    return site, unknown


def gpus_of(gres: str) -> tuple[str, int]:
    """Type ("" for none) and number of a node's GPUs, by sinfo's %G: "gpu:a100:4(S:0-1),nvme:1"; ("", 0) without."""
    words = re.sub(r"\([^)]*\)", "", gres).split(",")
    found = [match for word in words if (match := re.fullmatch(r"gpu(?::([\w.+-]+))?:(\d+)", word))]
    return (found[0][1] or "", sum(int(match[2]) for match in found)) if found else ("", 0)
