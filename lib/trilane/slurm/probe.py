"""A site read off SLURM: what sinfo, scontrol and sacctmgr report of nodes, limits and accounts, and what they lack."""

import getpass
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.slurm import client
from trilane.slurm.node_kinds import NODE_FIELDS, NodeKind, cluster_of, node_kinds, seconds_or_inf
from trilane.slurm.site_options import PLAIN
from trilane.slurm.sites import Qos, Site
from trilane.utils.files import replace_text
from trilane.utils.tables import one_line
from trilane.utils.validation import require, require_known, to_mapping

NOT_PROBED = (
    "modules: what the scripts must load (module avail)",
    "offline: whether compute nodes have no internet; false is assumed",
    "service_partition: a partition in which a job that only monitors costs nothing",
    "hint: whether --hint=nomultithread is wanted",
    "account_ending: whether the accounts of these nodes end alike",
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A site as SLURM describes it, its nodes where their card is known, and a line for each value that is not."""

    site: Site
    cluster: Cluster | None
    unknown: tuple[str, ...]

    def write(self, path: Path) -> list[Path]:
        """Write the site, and beside it its nodes as NAME-cluster.json; the files. ValueError where one exists."""
        site, nodes = self.site, path.with_name(f"{path.stem}-cluster.json")
        require(path.suffix == ".json", "output", path, "must end in .json")
        texts = {nodes: to_mapping(self.cluster)} if self.cluster else {}
        texts[path] = to_mapping(replace(site, cluster=nodes.name if self.cluster else ""))
        for file in texts:
            require(not file.exists(), "output", file, "exists; nothing is overwritten")
        for file, values in texts.items():
            replace_text(file, json.dumps(values, indent=2) + "\n")
        return list(texts)


def probe(partition: str = "", card: str = "") -> Probe:
    """The site of a partition ("": the default one where it has GPUs, else that with most), on the cluster at hand.

    `card` is the catalogue's name of the GPU, where SLURM's own words leave more than one. Raises ValueError where
    sinfo is not installed, does not answer, or lists no such partition.
    """
    unknown: list[str] = []
    kinds = node_kinds(client.call(["sinfo", "-h", "-e", "--noconvert", "-o", NODE_FIELDS]))
    require(bool(kinds), "slurm", "sinfo", "lists no partition that is up")
    chosen = _chosen(kinds, partition)
    options = _pairs(
        _asked(["scontrol", "show", "partition", "-o", chosen.partition], "limits of the partition", unknown)
    )
    config = _pairs(_asked(["scontrol", "show", "config"], "cluster name", unknown), r"^(\w+)\s*=\s*(.*)$")
    most = _count(options.get("MaxNodes", ""))
    chosen = replace(chosen, nodes=min(chosen.nodes, most or chosen.nodes))
    accounts, allowed, default = _associations(unknown)
    limits = _limits(chosen, allowed, unknown)
    nodes = cluster_of(chosen, card, config.get("ClusterName", ""), unknown)
    found = _fields(chosen, kinds, options, config, unknown)
    valid = _site("-".join(filter(None, (config.get("ClusterName", ""), chosen.partition))), found, unknown)
    default = default if default in [q.name for q in limits] else ""
    unknown += NOT_PROBED
    sources = {"all": f"{client.call(['sinfo', '--version']).strip()}: sinfo, scontrol and sacctmgr"}
    usual = next((kind.partition for kind in kinds if kind.is_default), "none")
    sources["partitions"] = f"sinfo, those that are up; the default one: {usual}"
    sources |= {"accounts": ", ".join(accounts)} if accounts else {}
    sources = {key: one_line(text)[:4000] for key, text in (sources | {"unknown": "; ".join(unknown)}).items()}
    site = Site(**valid, qos=limits, default_qos=default, sources=sources)
    return Probe(site=site, cluster=nodes, unknown=tuple(map(one_line, unknown)))


def _chosen(kinds: Sequence[NodeKind], partition: str) -> NodeKind:
    """The most frequent kind of node, by GPUs, of that partition, or of the one with most GPUs."""
    if partition:
        require_known("partition", partition, {kind.partition for kind in kinds})
    mine = [kind for kind in kinds if kind.partition == partition] if partition else list(kinds)
    own = [kind for kind in mine if kind.is_default and kind.gpus]
    return max(own or mine, key=lambda kind: (kind.nodes * kind.gpus, kind.nodes))


def _asked(command: Sequence[str], what: str, unknown: list[str]) -> str:
    """The command's output; "" and a line about `what` where it fails or is not installed."""
    try:
        return client.call(command, again=False)
    except ValueError as error:
        unknown.append(f"{what}: {error}")
        return ""


def _pairs(text: str, form: str = r"(?:^|\s)(\w+)=(\S*)") -> dict[str, str]:
    return {name: value.strip() for name, value in re.findall(form, text, re.M)}


def _count(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


def _associations(unknown: list[str]) -> tuple[tuple[str, ...], set[str], str]:
    """The user's accounts, the QoS that they may use, and the only default among them ("" otherwise)."""
    command = ["sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos,defaultqos"]
    rows = [line.split("|") for line in _asked(command, "accounts", unknown).splitlines() if line.count("|") == 2]
    if not rows:
        unknown.append("accounts: sacctmgr lists none of yours")
    defaults = {row[2] for row in rows}
    default = defaults.pop() if len(defaults) == 1 else ""
    return (
        tuple(dict.fromkeys(row[0] for row in rows)),
        {word for row in rows for word in row[1].split(",") if word},
        default,
    )


def _limits(kind: NodeKind, allowed: Iterable[str], unknown: list[str]) -> tuple[Qos, ...]:
    """The QoS that the user may use; where one has no limit of its own, those of the partition count."""
    command = ["sacctmgr", "-nP", "show", "qos", "format=name,maxwall,maxtres,maxtrespu"]
    found = list[Qos]()
    names = set(allowed)
    for line in _asked(command, "qos", unknown).splitlines():
        row = line.split("|")
        if len(row) != 4 or (names and row[0] not in names):
            continue
        seconds = min(seconds_or_inf(row[1]), kind.longest_s)
        gpus = min([kind.nodes * kind.gpus, *(_most_gpus(tres, kind.gpus) for tres in row[2:])])
        if seconds == math.inf or gpus < 1:
            unknown.append(f"qos {row[0]}: its longest job" if gpus else f"qos {row[0]}: its most GPUs")
            continue
        try:
            found.append(Qos(name=row[0], hours=seconds / 3600, gpus=gpus))
        except ValueError as error:
            unknown.append(f"qos: {error}")
    return tuple(found)


def _most_gpus(tres: str, per_node: int) -> int:
    """The most GPUs that a TRES limit such as "gres/gpu=512,node=64" allows; a large number where it limits none."""
    pairs = dict(word.split("=", 1) for word in tres.split(",") if "=" in word)
    gpus = [_count(value) for name, value in pairs.items() if re.fullmatch(r"gres/gpu(:.+)?", name)]
    nodes = [_count(pairs["node"]) * per_node] if _count(pairs.get("node", "")) else []
    return min([*filter(None, gpus), *nodes], default=1 << 40)


def _fields(
    chosen: NodeKind,
    kinds: Sequence[NodeKind],
    options: Mapping[str, str],
    config: Mapping[str, str],
    unknown: list[str],
) -> dict[str, Any]:
    """The site's fields that SLURM knows."""
    others = [kind for kind in kinds if kind.partition == chosen.partition and kind != chosen]
    others = [
        kind
        for kind in others
        if (kind.gpu_type, kind.gpus) != (chosen.gpu_type, chosen.gpus) or kind.features != chosen.features
    ]
    own = [word for word in chosen.features if all(word not in kind.features for kind in others)]
    if others and not own:
        unknown.append(f"constraint: {chosen.partition} has several kinds of nodes, and no feature selects one of them")
    names = tuple(dict.fromkeys(kind.partition for kind in kinds if PLAIN.fullmatch(kind.partition)))
    places = dict.fromkeys(
        ["/tmp", "/dev/shm", *filter(lambda place: place.startswith("/"), [config.get("TmpFS", "")])]
    )
    return {
        "partition": chosen.partition,
        "partitions": names,
        "constraint": own[0] if others and own else "",
        "gpu_type": chosen.gpu_type,
        "exclusive": options.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        "local": tuple(places),
    }


def _site(name: str, found: Mapping[str, Any], unknown: list[str]) -> dict[str, Any]:
    """The fields that are valid for a site; a line for each that is not, since these texts are anybody's."""
    valid: dict[str, Any] = {"name": name if name and name.isprintable() and len(name) < 100 else "probed"}
    for key, value in found.items():
        try:
            Site(name="probed", **{key: value})
            valid[key] = value
        except ValueError as error:
            unknown.append(str(error))
    return valid
