"""What would change the best plan of a search: other links, a node less, one microbatch size."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.shipped import default
from trilane.planning.search import search_space
from trilane.planning.search_result import Candidate
from trilane.planning.space import Space
from trilane.utils.tables import Columns, DataFrame, Table


@dataclass(frozen=True, kw_only=True)
class WhatIf(Table):
    """The best plan for each change; None where nothing can run then. "as it is" comes first."""

    best: dict[str, Candidate | None]

    def to_frame(self) -> DataFrame:
        """A row for each change under which some plan can run: the best one, its seconds, and how these change."""
        able = {change: c for change, c in self.best.items() if c is not None}
        seconds = [c.prediction.sec_per_it for c in able.values()]
        columns: dict[str, Any] = {
            "what": list(able),
            "best plan": [c.label for c in able.values()],
            "s/it": [round(t, 3) for t in seconds],
            "change": [f"{t / seconds[0] - 1:+.1%}" for t in seconds],
        }
        return Columns(columns).to_frame()


def what_if(shape: ModelShape, cluster: Cluster, space: Space, calibration: Calibration | None = None) -> WhatIf:
    """The best plan as it is, and with other links, a node less, one microbatch size, launches blocked or not."""
    known = calibration or default(cluster)
    changed = {
        "as it is": (cluster, space),
        "network at half its speed": (_scaled(cluster, network_bytes_per_s=0.5), space),
        "network at twice its speed": (_scaled(cluster, network_bytes_per_s=2.0), space),
        "node bus at half its speed": (_scaled(cluster, node_bytes_per_s=0.5), space),
        "memory rate up by a tenth": (_scaled(cluster, gpu_rate=1.1), space),
    }
    fewer = tuple(g - cluster.gpus_per_node for g in space.gpus if g > cluster.gpus_per_node)
    if fewer and not (space.tp and space.pp and space.dp):
        changed["one node less"] = (cluster, dataclasses.replace(space, gpus=fewer))
    for mbs in (1, 2, 4, 8):
        changed[f"mbs {mbs}"] = (cluster, dataclasses.replace(space, mbs=(mbs,)))
    results = {name: search_space(shape, c, s, known, top=1).candidates for name, (c, s) in changed.items()}
    for blocking in (True, False) if cluster.gpu.kind == "cuda" else ():
        other = known.with_launch_blocking(blocking)
        results[f"CUDA_LAUNCH_BLOCKING={int(blocking)}"] = search_space(shape, cluster, space, other, top=1).candidates
    return WhatIf(best={name: found[0] if found else None for name, found in results.items()})


def _scaled(cluster: Cluster, gpu_rate: float = 1.0, **factors: float) -> Cluster:
    gpu = dataclasses.replace(cluster.gpu, memory_bytes_per_s=cluster.gpu.memory_bytes_per_s * gpu_rate)
    if "network_bytes_per_s" in factors and cluster.ring_bytes_per_s:
        factors["ring_bytes_per_s"] = factors["network_bytes_per_s"]
    return dataclasses.replace(cluster, gpu=gpu, **{n: getattr(cluster, n) * f for n, f in factors.items()})
