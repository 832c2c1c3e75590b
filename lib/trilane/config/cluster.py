"""Gpu and Cluster: what a machine can do, from the catalogue in data/clusters/ or one JSON file of
yours.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from trilane.config.options import Rules, check, option
from trilane.utils.frozen import frozen
from trilane.utils.tables import Columns, Record
from trilane.utils.validation import (
    DATA,
    from_mapping,
    is_number,
    read_json,
    require,
    require_known,
    require_line,
)

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "fp4")
SHARES = ("matmul", "flash", "memory", "fp8", "fp4")  # of an entry of data/cards.json
# of a card's name, which tell no cards apart
COMMON_WORD = r"NVIDIA|TESLA|GPU|SXM\d?|HBM\w*"


def _rate(help: str, default: Any = dataclasses.MISSING, **facts: Any) -> Any:
    # bytes or FLOPs per second: beyond these a file has its units wrong
    return option(default, help, minimum=1, maximum=1e20, **facts)


def _peak(precision: str, default: Any = dataclasses.MISSING) -> Any:
    help = f"peak rate of dense matmuls in {precision} with fp32 accumulation; 0: the card has none"
    return option(default, help, maximum=1e20)


def _count(help: str, **facts: Any) -> Any:
    return option(help=help, minimum=1, maximum=1_000_000, **facts)


@frozen
class Gpu:
    """One accelerator, or one process of a CPU machine (`kind` "cpu").

    In fp8 and fp4 only the linear layers' matmuls are of so few bits; weights, activations and
    gradients are kept in bf16.
    """

    name: str = option(help="card and memory, such as A100-80GB")
    kind: str = option(
        help="a card, or one process of a machine without GPUs", choices=("cuda", "cpu")
    )
    # a thousand times what a card has: beyond it a file has its units wrong
    memory_bytes: float = option(help="memory of one card", above=0, maximum=1e16)
    memory_bytes_per_s: float = _rate("bandwidth of this memory")
    fp32_flops_per_s: float = _rate("peak rate of dense matmuls in fp32")
    fp16_flops_per_s: float = _peak("fp16")
    bf16_flops_per_s: float = _peak("bf16")
    context_bytes: float = option(
        help="what the driver and the loaded kernels take before the first tensor",
        maximum=1e16,
    )
    compute_capability: tuple[int, ...] = option((0, 0), "of a CUDA card; from 8.0 on it has bf16")
    num_sms: int = option(1, "streaming multiprocessors", minimum=1, maximum=1_000_000)
    fp8_flops_per_s: float = _peak("fp8", 0.0)
    fp4_flops_per_s: float = _peak("fp4", 0.0)
    shares: dict[str, Any] | None = option(
        None, "a table of this card's own, as `data/cards.json` has one: it comes first"
    )

    def __post_init__(self) -> None:
        require_line("gpu.name", self.name)
        check(self, "gpu.")
        for name, value in (self.shares or {}).items():
            require_known("gpu.shares", name, SHARES)
            pair = value if isinstance(value, list | tuple) else (value, 1)
            is_right = len(pair) == 2 and all(is_number(each) and 0 < each <= 1 for each in pair)
            rule = "must be a share, or a list of one and its deviation: above 0, at most 1"
            require(is_right, f"gpu.shares.{name}", value, rule)

    def rules(self) -> Rules:
        """Its generation has two numbers."""
        rule = "must be two whole numbers, such as [9, 0]"
        yield len(self.compute_capability) == 2, "compute_capability", rule
        yield self.kind == "cuda" or not self.shares, "shares", "are of a card (kind cuda)"

    def flops_per_s(self, precision: str) -> float:
        """Peak matmul rate in `precision`; ValueError where the card has no such units, or a table
        of its own has not their share.
        """
        require_known("precision", precision, PRECISIONS)
        is_given = not self.shares or precision not in SHARES or precision in self.shares
        require(is_given, "precision", precision, f"gpu.shares of {self.name} lacks it")
        rate = getattr(self, f"{precision}_flops_per_s")
        require(rate >= 1, "precision", precision, f"{self.name} has no {precision} matrix units")
        return rate


@frozen
class Cluster(Record):
    """Nodes of equal GPUs; `sources` is where each number comes from."""

    name: str = option(help="the cluster's name")
    gpu: Gpu = option(help="each of its GPUs")
    gpus_per_node: int = _count("GPUs of a node")
    max_nodes: int = _count("nodes that a run may use", predicts=False)
    node_bytes_per_s: float = _rate("the bus between two GPUs of a node, per GPU and direction")
    network_bytes_per_s: float = _rate("what a whole node can send")
    pcie_bytes_per_s: float = _rate("GPU to host memory")
    latency_s: float = option(help="of a message between two nodes")
    cores_per_node: int = _count("cores of a node, which the processes of a CPU machine share")
    host_memory_bytes: float = option(help="memory of a node", above=0)
    launch_overhead_s: float = option(help="CPU time to start one kernel")
    pair_bytes_per_s: float | None = _rate(
        "the bus of two GPUs, where it is slower than that of a whole node", None
    )
    ring_bytes_per_s: float | None = _rate(
        "what one ring of a collective can draw from the network, where it is less than its share",
        None,
    )
    domain_gpus: int = option(0, "GPUs of an NVLink domain over nodes; 0: those of a node")
    write_bytes_per_s: float | None = _rate(
        "what a node writes of a checkpoint while all do: by the line of a save",
        None,
        predicts=False,
    )
    storage_nodes: int = option(0, "nodes that wrote together in that save", predicts=False)
    sources: dict[str, str] = option(
        dict, "where each number comes from; copied into every plan", predicts=False
    )

    def __post_init__(self) -> None:
        require_line("cluster.name", self.name)
        check(self, "cluster.")

    def rules(self) -> Rules:
        """Nodes are whole parts of a domain."""
        rule = "must be a multiple of gpus_per_node"
        yield self.domain_gpus % self.gpus_per_node == 0, "domain_gpus", rule

    @property
    def domain(self) -> int:
        """GPUs that one bus joins: of a node, or of an NVLink domain over nodes."""
        return self.domain_gpus or self.gpus_per_node

    @property
    def domain_bytes_per_s(self) -> float:
        """What all nodes of a domain can send out of it."""
        return self.network_bytes_per_s * self.domain / self.gpus_per_node

    def facts(self) -> Columns:
        """What its GPUs and its nodes can do, and where the numbers come from."""
        rows = [*vars(self.gpu).items(), *vars(self).items()]
        return Columns.of_rows(("what", "value"), [row for row in rows if row[0] != "gpu"])

    @property
    def max_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.gpus_per_node * self.max_nodes

    def free_nodes(self, gpus: int) -> int:
        """The nodes that jobs of so many GPUs leave free."""
        return max(0, self.max_nodes - math.ceil(gpus / self.gpus_per_node))

    def require_spares(self, spare_nodes: int | None, gpus: int) -> None:
        """ValueError where more nodes are to be in reserve than jobs of so many GPUs leave free."""
        free = self.free_nodes(gpus)
        rule = f"must be at most {free}, the nodes that the jobs leave free"
        require((spare_nodes or 0) <= free, "spare_nodes", spare_nodes, rule)


def catalogue() -> list[str]:
    """Names of the clusters that ship with trilane."""
    return sorted(path.stem for path in (DATA / "clusters").iterdir())


def cluster(name_or_path: str) -> Cluster:
    """The cluster of that name in the catalogue, or of the JSON file at that path; ValueError lists
    the known names.
    """
    path = Path(name_or_path)
    if not name_or_path.endswith(".json"):
        require_known("cluster", name_or_path, catalogue())
        path = DATA / f"clusters/{name_or_path}.json"
    return from_mapping(Cluster, read_json(path, "cluster"), "cluster")


def clusters() -> Columns:
    """Every cluster of the catalogue: its card and sizes.

    clusters().to_frame().sort_values("max_gpus")
    """
    rows = []
    for name in catalogue():
        c = cluster(name)
        gib = c.gpu.memory_bytes / 2**30
        rows.append((name, c.gpu.name, round(gib, 1), c.gpus_per_node, c.max_nodes, c.max_gpus))
    names = ("cluster", "gpu", "memory_gib", "gpus_per_node", "max_nodes", "max_gpus")
    return Columns.of_rows(names, rows)


def known_card(name: str) -> Gpu | None:
    """The first card of the catalogue with that name, as a driver has it, None where there is none:
    an "NVIDIA H100 PCIe" has other peaks than an H100-80GB.
    """
    for each in catalogue():
        gpu = cluster(each).gpu
        if card_words(name) <= card_words(gpu.name):
            return gpu
    return None


def card_words(name: str) -> set[str]:
    """What a card's name says: "NVIDIA A100-SXM4-80GB" and "A100-80GB" are one card, "A100" may be
    either size.
    """
    words = re.findall(r"[^\s_-]+", name.upper())
    return {word.removesuffix("GB") for word in words if not re.fullmatch(COMMON_WORD, word)}
