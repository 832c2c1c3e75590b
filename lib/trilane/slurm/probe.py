"""A site read off SLURM: what sinfo, scontrol and sacctmgr report of nodes, limits and accounts, and what they lack."""

import getpass
import json
import math
import re
from collections.abc import Mapping, Sequence
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

NODE_FIELDS = "%P|%a|%l|%D|%z|%m|%G|%f"
NOT_PROBED = (
    "modules: what the scripts must load (module avail)",
    "offline: whether compute nodes have no internet; false is assumed",
    "service_partition: a partition in which a job that only monitors costs nothing",
    "hint: whether --hint=nomultithread is wanted",
    "account_ending: whether the accounts of these nodes end alike",
)


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
    """The kinds of nodes that sinfo -o NODE_FIELDS prints, of partitions that are up; a site may print other lines."""
    found = []
    for row in ([word.strip() for word in line.split("|")] for line in text.splitlines()):
        sockets = re.fullmatch(r"(\d{1,4}):(\d{1,5}):\d{1,3}", row[4]) if len(row) == 8 else None
        if sockets is None or row[1] != "up" or not (row[3].isdecimal() and row[5].isdecimal()):
            continue
        gpu_type, gpus = gpus_of(row[6])
        kind = NodeKind(
            partition=row[0].removesuffix("*"),
            is_default=row[0].endswith("*"),
            longest_s=_seconds(row[2]),
            nodes=int(row[3]),
            cores=int(sockets[1]) * int(sockets[2]),
            memory_bytes=float(row[5]) * 2**20,
            gpu_type=gpu_type,
            gpus=gpus,
            features=tuple(word for word in row[7].split(",") if word not in ("", "(null)")),
        )
        found.append(kind)
    return found


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
    kinds = node_kinds(client.call(["sinfo", "-h", "-e", "--noconvert", "-o", NODE_FIELDS]))
    require(bool(kinds), "slurm", "sinfo", "lists no partition that is up")
    if partition:
        require_known("partition", partition, {kind.partition for kind in kinds})
    asked = _Asked()
    mine = [kind for kind in kinds if partition in ("", kind.partition)]
    own = [kind for kind in mine if kind.is_default and kind.gpus and not partition]
    chosen = max(own or mine, key=lambda kind: (kind.nodes * kind.gpus, kind.nodes))
    limits = asked("limits of the partition", "scontrol", "show", "partition", "-o", chosen.partition)
    options = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", limits))
    config = asked("cluster name", "scontrol", "show", "config")
    settings = {name: value.strip() for name, value in re.findall(r"^(\w+)\s*=\s*(.*)$", config, re.M)}
    chosen = replace(chosen, nodes=min(chosen.nodes, _count(options.get("MaxNodes", "")) or chosen.nodes))
    words = ("-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos,defaultqos")
    rows = [line.split("|") for line in asked("accounts", "sacctmgr", *words).splitlines() if line.count("|") == 2]
    asked.unknown += [] if rows else ["accounts: sacctmgr lists none of yours"]
    qos = _limits(chosen, {word for row in rows for word in row[1].split(",") if word}, asked)
    nodes = _cluster(chosen, card, settings.get("ClusterName", ""), asked.unknown)
    valid = asked.valid(_fields(chosen, kinds, options, settings, asked.unknown))
    asked.unknown += NOT_PROBED
    sources = {
        "all": f"{client.call(['sinfo', '--version']).strip()}: sinfo, scontrol and sacctmgr",
        "partitions": "sinfo, those that are up; the default one: "
        + next((kind.partition for kind in kinds if kind.is_default), "none"),
        "accounts": ", ".join(dict.fromkeys(row[0] for row in rows)),
        "unknown": "; ".join(asked.unknown),
    }
    sources = {key: one_line(text)[:4000] for key, text in sources.items() if text}
    defaults = {row[2] for row in rows}
    default = defaults.pop() if len(defaults) == 1 and defaults <= {q.name for q in qos} else ""
    site = Site(**valid, qos=qos, default_qos=default, sources=sources)
    return Probe(site=site, cluster=nodes, unknown=tuple(map(one_line, asked.unknown)))


class _Asked:
    """SLURM's commands, with a line about what each was asked for in vain."""

    def __init__(self) -> None:
        self.unknown: list[str] = []

    def __call__(self, what: str, *command: str) -> str:
        try:
            return client.call(command, again=False)
        except ValueError as error:
            self.unknown.append(f"{what}: {error}")
            return ""

    def valid(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are valid for a site; SLURM's texts are anybody's."""
        valid: dict[str, Any] = {"name": "probed"}
        for key, value in found.items():
            try:
                Site(**{"name": "probed", key: value})
                valid[key] = value
            except ValueError as error:
                self.unknown.append(str(error))
        return valid


def _count(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


def _limits(kind: NodeKind, allowed: set[str], asked: _Asked) -> tuple[Qos, ...]:
    """The QoS that the user may use; where one has no limit of its own, those of the partition count."""
    found = list[Qos]()
    text = asked("qos", "sacctmgr", "-nP", "show", "qos", "format=name,maxwall,maxtres,maxtrespu")
    for row in (line.split("|") for line in text.splitlines() if line.count("|") == 3):
        hours = min(_seconds(row[1]), kind.longest_s) / 3600
        gpus = min([kind.nodes * kind.gpus, *(_most_gpus(tres, kind.gpus) for tres in row[2:])])
        if not allowed or row[0] in allowed:
            try:
                found.append(Qos(name=row[0], hours=hours, gpus=gpus))
            except ValueError as error:  # no limit, or a name that no script may hold
                asked.unknown.append(f"qos {row[0]}: {error}")
    return tuple(found)


def _most_gpus(tres: str, per_node: int) -> int:
    """The most GPUs that a TRES limit such as "gres/gpu=512,node=64" allows; a large number where it limits none."""
    pairs = dict(word.split("=", 1) for word in tres.split(",") if "=" in word)
    gpus = [_count(value) for name, value in pairs.items() if re.fullmatch(r"gres/gpu(:.+)?", name)]
    return min(filter(None, [*gpus, _count(pairs.get("node", "")) * per_node]), default=1 << 40)


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
    how = "--gpu" if card else "the type and features that SLURM lists"
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
            "gpu": f"the catalogue's {likely[0]}, by {how}",
            "node_bytes_per_s, network_bytes_per_s, pcie_bytes_per_s, latency_s, launch_overhead_s": assumed,
        },
    )


def _fields(
    kind: NodeKind, kinds: Sequence[NodeKind], options: Mapping[str, str], config: Mapping[str, str], unknown: list[str]
) -> dict[str, Any]:
    """The site's fields that SLURM knows."""
    facts = (kind.gpu_type, kind.gpus, kind.features)
    same = [one for one in kinds if one.partition == kind.partition]
    others = [one for one in same if (one.gpu_type, one.gpus, one.features) != facts]
    own = [word for word in kind.features if all(word not in one.features for one in others)]
    if others and not own:
        unknown.append(f"constraint: {kind.partition} has several kinds of nodes, and no feature selects one of them")
    return {
        "name": "-".join(filter(None, (config.get("ClusterName", ""), kind.partition)))[:100],
        "partition": kind.partition,
        "partitions": tuple(dict.fromkeys(one.partition for one in kinds if re.fullmatch(r"[\w-]+", one.partition))),
        "constraint": own[0] if others and own else "",
        "gpu_type": kind.gpu_type,
        "exclusive": options.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        "local": tuple(dict.fromkeys(["/tmp", "/dev/shm", *re.findall(r"^/.*", config.get("TmpFS", ""))])),
    }
