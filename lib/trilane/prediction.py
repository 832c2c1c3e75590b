"""Prediction: what a plan is expected to cost, each figure with its doubt."""

import math
from dataclasses import dataclass, replace
from typing import Any

from trilane.calibration import FITTED, Calibration
from trilane.checks import to_mapping
from trilane.hardware import Cluster
from trilane.memory import StageMemory, memory_per_stage
from trilane.shape import ModelShape
from trilane.timing import IterationTime, iteration_time
from trilane.topology import Topology

MEMORY_SPREAD = 0.08  # of the logarithm of the predicted bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds per iteration with a 90 % interval, and memory of the fullest stage with a probability of running out."""

    sec_per_it: float
    sec_lo: float
    sec_hi: float
    memory_bytes: float
    oom_probability: float
    time: IterationTime
    stages: tuple[StageMemory, ...]

    def to_json(self) -> dict[str, Any]:
        """The prediction as a JSON object."""
        return to_mapping(self)


def predict(shape: ModelShape, topology: Topology, cluster: Cluster, calibration: Calibration) -> Prediction:
    """Time and memory of one topology that the shape can run on (see topology.refusal)."""
    time = iteration_time(shape, topology, cluster, calibration)
    stages = memory_per_stage(shape, topology, cluster)
    memory = max(stage.total for stage in stages)
    low, high = calibration.interval(time.total)
    sigmas = math.log(cluster.gpu.memory_bytes / memory) / MEMORY_SPREAD
    return Prediction(
        sec_per_it=time.total,
        sec_lo=low,
        sec_hi=high,
        memory_bytes=memory,
        oom_probability=0.5 * math.erfc(sigmas / math.sqrt(2)),
        time=time,
        stages=tuple(stages),
    )


def calibration_parts(shape: ModelShape, topology: Topology, cluster: Cluster) -> dict[str, float]:
    """Seconds that each factor of a Calibration multiplies, for calibration.fit: its keys are FITTED and 'fixed'."""
    total = {}
    base = iteration_time(shape, topology, cluster, Calibration()).total
    for name in FITTED:
        doubled = iteration_time(shape, topology, cluster, replace(Calibration(), **{name: 2.0})).total  # type: ignore[arg-type]
        total[name] = doubled - base  # the time is linear in every factor
    return {**total, "fixed": base - sum(total.values())}
