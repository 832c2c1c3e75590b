"""Gpu and Cluster: what a machine can do, from the catalogue in data/clusters/ or one JSON file of yours."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from trilane.utils.tables import Columns
from trilane.utils.validation import (
    DATA,
    from_mapping,
    read_json,
    require,
    require_integer,
    require_known,
    require_line,
    require_not_negative,
    require_positive,
)

PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
SLOWEST, FASTEST = 1.0, 1e20  # bytes or FLOPs per second: beyond these a file has its units wrong
LARGEST = 1e16  # bytes, or bytes per second, of one card: beyond it a file has its units wrong
LARGEST_COUNT = 1_000_000  # nodes of a cluster, GPUs or cores of a node


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator, or one process of a CPU machine (`kind` "cpu").

    Rates are peaks for dense matmuls with fp32 accumulation. A precision that the card lacks has rate 0. In fp8 only
    the linear layers' matmuls are of 8 bits; weights, activations and gradients are kept in bf16.
    `context_bytes` is what the driver and the loaded kernels take before the first tensor.
    """

    name: str
    kind: str
    memory_bytes: float
    memory_bytes_per_s: float
    fp32_flops_per_s: float
    fp16_flops_per_s: float
    bf16_flops_per_s: float
    context_bytes: float
    compute_capability: tuple[int, ...] = (0, 0)
    num_sms: int = 1
    fp8_flops_per_s: float = 0.0

    def __post_init__(self) -> None:
        require_line("gpu.name", self.name)
        require_known("gpu.kind", self.kind, ("cuda", "cpu"))
        for name in ("memory_bytes", "memory_bytes_per_s", "fp32_flops_per_s"):
            require_positive(f"gpu.{name}", getattr(self, name))
        for name in ("fp16_flops_per_s", "bf16_flops_per_s", "fp8_flops_per_s", "context_bytes"):
            require_not_negative(f"gpu.{name}", getattr(self, name))
        for name in ("memory_bytes_per_s", *(f"{precision}_flops_per_s" for precision in PRECISIONS)):
            _require_rate(f"gpu.{name}", getattr(self, name))
        require_integer("gpu.num_sms", self.num_sms, 1, LARGEST_COUNT)
        version = self.compute_capability
        rule = "must be two whole numbers, such as [9, 0]"
        require(len(version) == 2 and min(version) >= 0, "gpu.compute_capability", list(version), rule)
        rule = f"must be at most {LARGEST:g}, a thousand times what a card has"
        for name in ("memory_bytes", "memory_bytes_per_s", "context_bytes"):
            require(getattr(self, name) <= LARGEST, f"gpu.{name}", getattr(self, name), rule)

    def flops_per_s(self, precision: str) -> float:
        """Peak matmul rate in `precision`; ValueError where the card has no such units."""
        require_known("precision", precision, PRECISIONS)
        rate = getattr(self, f"{precision}_flops_per_s")
        require(rate > 0, "precision", precision, f"{self.name} has no {precision} matrix units")
        return rate


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs.

    `node_bytes_per_s` is the bus between two GPUs of a node, per GPU and direction; `network_bytes_per_s` what a whole
    node can send; `pcie_bytes_per_s` GPU to host memory. `sources` is where each number comes from.
    `cores_per_node` matters for a CPU machine: its processes share them. `pair_bytes_per_s` is the bus of a group of
    two where it is slower than that of a whole node; `ring_bytes_per_s` what one ring of a collective can draw from the
    network where it is less than its share (one ring, one link).
    """

    name: str
    gpu: Gpu
    gpus_per_node: int
    max_nodes: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    pcie_bytes_per_s: float
    latency_s: float
    cores_per_node: int
    host_memory_bytes: float
    launch_overhead_s: float
    pair_bytes_per_s: float | None = None
    ring_bytes_per_s: float | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_line("cluster.name", self.name)
        for name in ("gpus_per_node", "max_nodes", "cores_per_node"):
            require_integer(f"cluster.{name}", getattr(self, name), 1)
            rule = f"must be at most {LARGEST_COUNT}"
            require(getattr(self, name) <= LARGEST_COUNT, f"cluster.{name}", getattr(self, name), rule)
        for name in ("node_bytes_per_s", "network_bytes_per_s", "pcie_bytes_per_s", "host_memory_bytes"):
            require_positive(f"cluster.{name}", getattr(self, name))
        for name in ("node_bytes_per_s", "network_bytes_per_s", "pcie_bytes_per_s"):
            _require_rate(f"cluster.{name}", getattr(self, name))
        for name in ("latency_s", "launch_overhead_s"):
            require_not_negative(f"cluster.{name}", getattr(self, name))
        for name in ("pair_bytes_per_s", "ring_bytes_per_s"):
            if getattr(self, name) is not None:
                require_positive(f"cluster.{name}", getattr(self, name))
                _require_rate(f"cluster.{name}", getattr(self, name))

    def facts(self) -> Columns:
        """What one process of the machine can do, and where the numbers come from."""
        gpu = self.gpu
        facts = {
            "machine": f"{self.name}: {gpu.name}, {self.cores_per_node} cores a node",
            "fp32 matmul": f"{gpu.fp32_flops_per_s / 1e9:,.0f} GFLOP/s",
            "memory": f"{gpu.memory_bytes / 2**30:.1f} GiB per process, {gpu.memory_bytes_per_s / 1e9:.0f} GB/s",
            "between processes": f"{self.node_bytes_per_s / 1e9:.2f} GB/s, {self.latency_s * 1e6:.0f} µs",
            "sources": "; ".join(dict.fromkeys(self.sources.values())),
        }
        return Columns({"": list(facts), " ": list(facts.values())})

    @property
    def max_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.gpus_per_node * self.max_nodes


def _require_rate(field: str, value: float) -> None:
    """Raise ValueError for a rate that no machine has; 0 is a precision that a card lacks."""
    require(value == 0 or SLOWEST <= value <= FASTEST, field, value, f"must lie between {SLOWEST:g} and {FASTEST:g}")


def catalogue() -> list[str]:
    """Names of the clusters that ship with trilane."""
    return sorted(path.stem for path in (DATA / "clusters").iterdir())


def cluster(name_or_path: str) -> Cluster:
    """The cluster of that name in the catalogue, or of the JSON file at that path; ValueError lists the known names."""
    path = Path(name_or_path)
    if not name_or_path.endswith(".json"):
        require_known("cluster", name_or_path, catalogue())
        path = DATA / f"clusters/{name_or_path}.json"
    return from_mapping(Cluster, read_json(path, "cluster"), "cluster")


def card_words(name: str) -> set[str]:
    """What a card's name says: "NVIDIA A100-SXM4-80GB" and "A100-80GB" are one card, "A100" may be either size."""
    words = {word.removesuffix("GB") for word in re.split(r"[\s_-]+", name.upper()) if word}
    return words - {"NVIDIA", "TESLA", "SXM", "SXM2", "SXM3", "SXM4", "SXM5", "HBM2", "HBM2E", "HBM3", "GPU"}
