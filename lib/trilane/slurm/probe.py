"""A site read off SLURM: what sinfo, scontrol and sacctmgr report of nodes, limits and accounts, and what they lack."""

import getpass
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.slurm import client
from trilane.slurm.sites import Qos, Site, seconds_of
from trilane.utils.files import replace_text
from trilane.utils.tables import one_line
from trilane.utils.validation import require, require_known, to_mapping


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
    """The kinds of nodes that sinfo -o "%P|%a|%l|%D|%z|%m|%G|%f" prints, of partitions that are up."""
    # a site's own sinfo may print other lines, too
    form = r"^([^|*\n]*)(\*?)\|up\|([^|\n]*)\|(\d+)\|(\d{1,4}):(\d{1,5}):\d{1,3}\|(\d+)\|([^|\n]*)\|([^|\n]*)$"
    return [
        NodeKind(
            partition=name,
            is_default=bool(star),
            longest_s=_seconds(limit),
            nodes=int(nodes),
            cores=int(sockets) * int(cores),
            memory_bytes=float(memory) * 2**20,
            gpu_type=gpus_of(gres)[0],
            gpus=gpus_of(gres)[1],
            features=tuple(word for word in features.split(",") if word not in ("", "(null)")),
        )
        for name, star, limit, nodes, sockets, cores, memory, gres, features in re.findall(form, text, re.M)
    ]


def gpus_of(gres: str) -> tuple[str, int]:
    """Type ("" for none) and number of a node's GPUs, by sinfo's %G: "gpu:a100:4(S:0-1),nvme:1"; ("", 0) without."""
    words = re.sub(r"\([^)]*\)", "", gres).split(",")
    found = [match for word in words if (match := re.fullmatch(r"gpu(?::([^:,()]+))?:(\d+)", word))]
    return (found[0][1] or "", sum(int(match[2]) for match in found)) if found else ("", 0)


def _seconds(limit: str) -> float:
    try:
        return seconds_of(limit)
    except ValueError:
        return math.inf  # "", n/a


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
    sinfo is not installed, does not answer, or lists no such partition.
    """
    kinds = node_kinds(client.call(["sinfo", "-h", "-e", "--noconvert", "-o", "%P|%a|%l|%D|%z|%m|%G|%f"]))
    require(bool(kinds), "slurm", "sinfo", "lists no partition that is up")
    if partition:
        require_known("partition", partition, {kind.partition for kind in kinds})
    mine = [kind for kind in kinds if partition in ("", kind.partition)]
    own = [kind for kind in mine if kind.is_default and kind.gpus and not partition]
    kind, unknown = max(own or mine, key=lambda kind: (kind.nodes * kind.gpus, kind.nodes)), list[str]()

    def ask(what: str, *command: str) -> str:
        try:
            return client.call(command, again=False)
        except ValueError as error:
            unknown.append(f"{what}: {error}")
            return ""

    shown = ask("limits of the partition", "scontrol", "show", "partition", "-o", kind.partition)
    shown += "\n" + ask("cluster name", "scontrol", "show", "config")
    facts = dict(re.findall(r"\b(MaxNodes|OverSubscribe|ClusterName|TmpFS)\s*=\s*(\S+)", shown))
    if facts.get("MaxNodes", "").isdecimal():
        kind = replace(kind, nodes=min(kind.nodes, int(facts["MaxNodes"])))
    words = ("-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos,defaultqos")
    rows = [line.split("|") for line in ask("accounts", "sacctmgr", *words).splitlines() if line.count("|") == 2]
    unknown += [] if rows else ["accounts: sacctmgr lists none of yours"]
    limits = ask("qos", "sacctmgr", "-nP", "show", "qos", "format=name,maxwall,maxtres,maxtrespu")
    qos = _limits(limits, kind, {word for row in rows for word in row[1].split(",") if word}, unknown)
    nodes = _cluster(kind, card, facts.get("ClusterName", ""), unknown)
    fields = _fields(kind, kinds, facts, unknown)
    # what no command of SLURM knows
    unknown += [
        "modules: what the scripts must load (module avail)",
        "offline: whether compute nodes have no internet; false is assumed",
        "service_partition: a partition in which a job that only monitors costs nothing",
        "hint: whether --hint=nomultithread is wanted",
        "account_ending: whether the accounts of these nodes end alike",
    ]
    sources = {
        "all": f"{client.call(['sinfo', '--version']).strip()}: sinfo, scontrol and sacctmgr",
        "accounts": ", ".join(dict.fromkeys(row[0] for row in rows)),
        "unknown": "; ".join(unknown),
    }
    sources = {key: one_line(text)[:4000] for key, text in sources.items() if text}
    defaults = {row[2] for row in rows} & {q.name for q in qos}
    site = Site(**fields, qos=qos, default_qos=defaults.pop() if len(defaults) == 1 else "", sources=sources)
    return Probe(site=site, cluster=nodes, unknown=tuple(map(one_line, unknown)))


def _limits(text: str, kind: NodeKind, allowed: set[str], unknown: list[str]) -> tuple[Qos, ...]:
    """The QoS that the user may use; where one has no limit of its own, those of the partition count."""
    found = list[Qos]()
    for name, wall, *tres in (line.split("|") for line in text.splitlines() if line.count("|") == 3):
        hours = min(_seconds(wall), kind.longest_s) / 3600
        # TRES limits such as "gres/gpu=512,node=64"
        gpus = [int(n) for n in re.findall(r"gres/gpu(?::[^=,]+)?=(\d+)", ",".join(tres))]
        gpus += [int(n) * kind.gpus for n in re.findall(r"\bnode=(\d+)", ",".join(tres))]
        if not allowed or name in allowed:
            try:
                found.append(Qos(name=name, hours=hours, gpus=min([kind.nodes * kind.gpus, *gpus])))
            except ValueError as error:  # no limit, or a name that no script may hold
                unknown.append(f"qos {name}: {error}")
    return tuple(found)


def _cluster(kind: NodeKind, card: str, name: str, unknown: list[str]) -> Cluster | None:
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
            "gpu": f"the catalogue's {likely[0]}, by {'--gpu' if card else 'what SLURM lists'}",
            "node_bytes_per_s, network_bytes_per_s, pcie_bytes_per_s, latency_s, launch_overhead_s": assumed,
        },
    )


def _fields(kind: NodeKind, kinds: list[NodeKind], facts: dict[str, str], unknown: list[str]) -> dict[str, Any]:
    """The site's fields that SLURM knows, and that are valid for a site: SLURM's texts are anybody's."""
    same = [one for one in kinds if one.partition == kind.partition]
    others = [one for one in same if (one.gpu_type, one.features) != (kind.gpu_type, kind.features)]
    own = [word for word in kind.features if all(word not in one.features for one in others)]
    if others and not own:
        unknown.append(f"constraint: {kind.partition} has several kinds of nodes, and no feature selects one of them")
    found: dict[str, Any] = {
        "name": "-".join(filter(None, (facts.get("ClusterName", ""), kind.partition)))[:100],
        "partition": kind.partition,
        "partitions": tuple(dict.fromkeys(one.partition for one in kinds if re.fullmatch(r"[\w-]+", one.partition))),
        "constraint": own[0] if others and own else "",
        "gpu_type": kind.gpu_type,
        "exclusive": facts.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        "local": tuple(dict.fromkeys(["/tmp", "/dev/shm", *re.findall(r"^/.*", facts.get("TmpFS", ""))])),
    }
    for key in list(found):
        try:
            Site(**{"name": "probed", key: found[key]})
        except ValueError as error:
            del found[key]
            unknown.append(str(error))
    return {"name": "probed", **found}
