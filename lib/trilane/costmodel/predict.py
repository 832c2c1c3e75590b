"""Prediction: what a plan is expected to cost, each figure with its doubt."""

from dataclasses import dataclass
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import IterationTime, iteration_time
from trilane.costmodel.memory import (
    DEFAULT,
    MemoryConstants,
    StageMemory,
    host_bytes,
    memory_per_stage,
    oom_probability,
)
from trilane.utils.validation import to_mapping


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds per iteration with a 90 % interval, and memory of the fullest stage with a probability of running out.

    `host_memory_bytes` is what the offload of one GPU takes of its host, 0 without offload.
    """

    sec_per_it: float
    sec_lo: float
    sec_hi: float
    memory_bytes: float
    host_memory_bytes: float
    oom_probability: float
    time: IterationTime
    stages: tuple[StageMemory, ...]

    def to_json(self) -> dict[str, Any]:
        """The prediction as a JSON object."""
        return to_mapping(self)


def predict(
    shape: ModelShape,
    topology: Topology,
    cluster: Cluster,
    calibration: Calibration,
    memory: MemoryConstants = DEFAULT,
) -> Prediction:
    """Time and memory of one topology that the shape can run on (see topology.refusal)."""
    time = iteration_time(shape, topology, cluster, calibration)
    columns = columns_of(shape, topology)
    stages = memory_per_stage(shape, topology, cluster, memory)
    fullest = max(stage.total for stage in stages)
    low, high = calibration.interval(time.total)
    return Prediction(
        sec_per_it=time.total,
        sec_lo=low,
        sec_hi=high,
        memory_bytes=fullest,
        host_memory_bytes=max(float(host_bytes(columns, i, memory)) for i in range(topology.pp)),
        oom_probability=float(oom_probability(fullest, cluster, memory.spread)),
        time=time,
        stages=tuple(stages),
    )
