"""NodeKind: equal nodes of a partition, as sinfo lists them; the cluster that they are where their card is known."""

import math
import re
from dataclasses import dataclass, replace

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.slurm.sites import seconds_of
from trilane.utils.validation import require_known

NODE_FIELDS = "%P|%a|%l|%D|%z|%m|%G|%f"
GRES = re.compile(r"gpu(?::([^:,()]+))?:(\d+)$")
NONE = ("", "(null)", "N/A", "n/a", "UNLIMITED", "infinite", "INFINITE")


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Equal nodes of one partition, as sinfo lists them: memory in bytes, `longest_s` infinite without a limit."""

    partition: str
    is_default: bool
    longest_s: float
    nodes: int
    cores: int
    memory_bytes: float
    gpu_type: str
    gpus: int
    features: tuple[str, ...]


def node_kinds(text: str) -> list[NodeKind]:
    """The kinds of nodes in the output of sinfo -o NODE_FIELDS; lines of another form and partitions that are down are
    left out."""
    found = []
    for line in text.splitlines():
        row = line.split("|")
        if len(row) != 8 or row[1] != "up":
            continue
        name, _, longest, count, shape, memory, gres, features = map(str.strip, row)
        sockets = re.fullmatch(r"(\d{1,4}):(\d{1,5}):(\d{1,3})", shape)
        if not (sockets and count.isdecimal() and memory.isdecimal()):
            continue
        gpu_type, gpus = gpus_of(gres)
        found.append(
            NodeKind(
                partition=name.removesuffix("*"),
                is_default=name.endswith("*"),
                longest_s=seconds_or_inf(longest),
                nodes=int(count),
                cores=int(sockets[1]) * int(sockets[2]),
                memory_bytes=float(memory) * 2**20,
                gpu_type=gpu_type,
                gpus=gpus,
                features=tuple(word for word in features.split(",") if word not in NONE),
            )
        )
    return found


def gpus_of(gres: str) -> tuple[str, int]:
    """Type ("" for none) and number of a node's GPUs, by sinfo's %G: "gpu:a100:4(S:0-1),nvme:1"; ("", 0) without."""
    words = re.sub(r"\([^)]*\)", "", gres).split(",")
    found = [match for word in words if (match := GRES.fullmatch(word.strip()))]
    return (found[0][1] or "", sum(int(match[2]) for match in found)) if found else ("", 0)


def seconds_or_inf(limit: str) -> float:
    """A time of sinfo or sacctmgr in seconds, infinite where there is no limit or it cannot be read."""
    try:
        return math.inf if limit in NONE else seconds_of(limit)
    except ValueError:
        return math.inf


def cluster_of(kind: NodeKind, card: str, name: str, unknown: list[str]) -> Cluster | None:
    """The nodes, where the card is known: SLURM's counts, and of the catalogue what the card and its bus can do."""
    shipped = [hardware.cluster(one) for one in hardware.catalogue()]
    cards = sorted({one.gpu.name for one in shipped})
    if card:
        require_known("gpu", card, cards)
    listed = re.split(r"[^A-Z0-9]+", " ".join([kind.gpu_type, *kind.features]).upper())
    words = {re.sub(r"^(?:HBM)?(\d+)GB?$", r"\1", word) for word in listed}
    alike = [one for one in cards if one.split("-")[0] in words]
    exact = [one for one in alike if card_words(one) <= words]
    likely = [card] if card else exact if len(exact) == 1 else alike
    if not kind.gpus or len(likely) != 1:
        why = f"name one with --gpu: {', '.join(likely or cards)}" if kind.gpus else "its nodes have no GPU"
        unknown.append(f"cluster: of {kind.partition}: {why}")
        return None
    known = [one for one in shipped if one.gpu.name == likely[0]]
    model = min(known, key=lambda one: (one.gpus_per_node != kind.gpus, one.network_bytes_per_s))
    assumed = f"assumed, as on {model.name}: SLURM does not know it; `trilane measure machine` measures it"
    unknown.append(f"cluster: its bus, network, PCIe and latency are {assumed}")
    return replace(
        model,
        name=f"{name or 'probed'}-{kind.partition}"[:100],
        gpus_per_node=kind.gpus,
        max_nodes=kind.nodes,
        cores_per_node=kind.cores,
        host_memory_bytes=kind.memory_bytes,
        pair_bytes_per_s=None,
        ring_bytes_per_s=None,
        sources={
            "nodes": "sinfo: nodes, GPUs, cores and memory of a node",
            "gpu": f"the catalogue's {likely[0]}, by {'--gpu' if card else 'the type and features that SLURM lists'}",
            "node_bytes_per_s, network_bytes_per_s, pcie_bytes_per_s, latency_s, launch_overhead_s": assumed,
        },
    )
