"""A site read off SLURM: what sinfo and scontrol report of nodes and partitions, and what is left to be filled in."""

import contextlib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.slurm import client
from trilane.slurm.sites import Site, seconds_of
from trilane.utils.files import replace_text
from trilane.utils.tables import one_line
from trilane.utils.validation import require, require_known, to_mapping


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
    features: tuple[str, ...]


def node_kinds(text: str) -> list[NodeKind]:
    """The kinds of nodes that sinfo -o "%P|%a|%l|%D|%z|%m|%G|%f" prints, of partitions that are up."""
    # a site's own sinfo may print other lines, too
    form = r"^([\w-]+)(\*?)\|up\|([^|\n]*)\|(\d+)\|(\d{1,4}):(\d{1,5}):\d{1,3}\|(\d+)\|([^|\n]*)\|([^|\n]*)$"
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
            features=tuple(word for word in features.split(",") if re.fullmatch(r"[\w.+-]+", word)),
        )
        for name, star, limit, nodes, sockets, cores, memory, gres, features in re.findall(form, text, re.M)
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


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A site as SLURM describes it, its nodes where their card is known, and a line for each value that is not."""

    site: Site
    cluster: Cluster | None
    unknown: tuple[str, ...]

    def write(self, path: Path) -> list[Path]:
        """Write the site, and its nodes as NAME-cluster.json; the files. ValueError where one exists."""
        require(path.suffix == ".json", "output", path, "must end in .json")
        nodes = path.with_name(f"{path.stem}-cluster.json")
        texts = {nodes: to_mapping(self.cluster)} if self.cluster else {}
        texts[path] = to_mapping(replace(self.site, cluster=nodes.name if self.cluster else ""))
        for file in texts:
            require(not file.exists(), "output", file, "exists; nothing is overwritten")
        for file, values in texts.items():
            replace_text(file, json.dumps(values, indent=2) + "\n")
        return list(texts)


def probe(partition: str = "", card: str = "") -> Probe:
    """The site of a partition on the cluster at hand; "": the default one if it has GPUs, else that with the most.

    `card` is the catalogue's name of the GPU, where SLURM's own words leave more than one. Raises ValueError where
    SLURM does not answer, or lists no such partition.
    """
    kinds = node_kinds(client.call(["sinfo", "-h", "-e", "--noconvert", "-o", "%P|%a|%l|%D|%z|%m|%G|%f"]))
    require(bool(kinds), "slurm", "sinfo", "lists no partition that is up")
    if partition:
        require_known("partition", partition, {kind.partition for kind in kinds})
    mine = [kind for kind in kinds if partition in ("", kind.partition)]
    default = [kind for kind in mine if kind.is_default and kind.gpus and not partition]
    kind = max(default or mine, key=lambda kind: (kind.nodes * kind.gpus, kind.nodes))
    shown = client.call(["scontrol", "show", "partition", "-o", kind.partition])
    shown += "\n" + client.call(["scontrol", "show", "config"])
    facts = dict(re.findall(r"\b(MaxNodes|OverSubscribe|ClusterName|TmpFS)\s*=\s*([\w./-]+)", shown))
    most = facts.get("MaxNodes", "")
    kind = replace(kind, nodes=min(kind.nodes, int(most))) if most.isdecimal() else kind
    others = [one for one in mine if one.partition == kind.partition and one.features != kind.features]
    own = [word for word in kind.features if others and all(word not in one.features for one in others)]
    name = "-".join(filter(None, (facts.get("ClusterName"), kind.partition)))[:100]
    nodes, unknown = _cluster(kind, card, name)
    unknown += [f"constraint: no feature selects one of the kinds of nodes of {kind.partition}"] * bool(
        others and not own
    )
    unknown += [f"time_limit: {kind.partition} allows {kind.hours:g} h"] * (kind.hours < math.inf)
    # what neither sinfo nor scontrol knows
    unknown += [
        "qos, default_qos: limits of the QoS that you may use (sacctmgr show qos format=name,maxwall,maxtres)",
        "account_ending: whether the accounts of these nodes end alike (sacctmgr show assoc user=$USER)",
        "modules: what the scripts must load (module avail)",
        "offline: whether compute nodes have no internet; false is assumed",
        "service_partition: a partition in which a job that only monitors costs nothing",
        "hint: whether --hint=nomultithread is wanted",
    ]
    site = Site(
        name=name,
        partition=kind.partition,
        partitions=tuple(dict.fromkeys(one.partition for one in kinds)),
        constraint=own[0] if own else "",
        gpu_type=kind.gpu_type,
        exclusive=facts.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        local=tuple(dict.fromkeys(["/tmp", "/dev/shm", *re.findall(r"^/.*", facts.get("TmpFS", ""))])),
        sources={"all": "sinfo and scontrol", "unknown": one_line("; ".join(unknown))[:4000]},
    )
    return Probe(site=site, cluster=nodes, unknown=tuple(unknown))


def _cluster(kind: NodeKind, card: str, name: str) -> tuple[Cluster | None, list[str]]:
    """The nodes, where the card is known: SLURM's counts, and of the catalogue what the card and its bus can do."""
    shipped = [hardware.cluster(one) for one in hardware.catalogue()]
    cards = sorted({one.gpu.name for one in shipped})
    if card:
        require_known("gpu", card, cards)
    listed = re.split(r"[^A-Z0-9]+", " ".join([kind.gpu_type, *kind.features]).upper())
    words = {re.sub(r"^(?:HBM)?(\d+)GB?$", r"\1", word) for word in listed}
    exact = [one for one in cards if card_words(one) <= words]
    likely = [card] if card else exact or [one for one in cards if one.split("-")[0] in words]
    if not kind.gpus or len(likely) != 1:
        why = f"name one with --gpu: {', '.join(likely or cards)}" if kind.gpus else "its nodes have no GPU"
        return None, [f"cluster: of {kind.partition}: {why}"]
    known = [one for one in shipped if one.gpu.name == likely[0]]
    model = min(known, key=lambda one: (one.gpus_per_node != kind.gpus, one.network_bytes_per_s))
    assumed = f"assumed, as on {model.name}: SLURM does not know it; `trilane measure machine` measures it"
    found = replace(
        model,
        name=name,
        gpus_per_node=kind.gpus,
        max_nodes=kind.nodes,
        cores_per_node=kind.cores,
        host_memory_bytes=kind.memory_bytes,
        pair_bytes_per_s=None,
        ring_bytes_per_s=None,
        sources={
            "nodes": "sinfo: nodes, GPUs, cores and memory of a node",
            "gpu": f"the catalogue's {likely[0]}, by {'--gpu' if card else 'what SLURM lists'}",
            "node_bytes_per_s, network_bytes_per_s, pcie_bytes_per_s, latency_s, launch_overhead_s": assumed,
        },
    )
    return found, [f"cluster: its bus, network, PCIe and latency are {assumed}"]
