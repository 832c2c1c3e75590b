"""predict(): the one answer to what a plan is expected to take, seconds and bytes, each with its uncertainty."""

from dataclasses import dataclass, field, replace
from typing import Any

from trilane.config.cluster import Cluster
from trilane.costmodel.calibration import Calibration, Configuration, default
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import IterationTime, iteration_time, seconds_per_stage
from trilane.costmodel.memory import DEFAULT, MemoryConstants, StageMemory, host_bytes, memory_per_stage
from trilane.costmodel.memory import oom_probability as probability_of
from trilane.costmodel.uncertainty import Case, Support, support, unmeasured_half_width
from trilane.utils.validation import to_mapping

RISKY = 0.1  # probability of running out of memory from which a plan is listed apart and never ranked first
IMPOSSIBLE = 0.5  # from here on a search refuses it


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds per iteration with a 90 % interval, and memory of the fullest stage with a probability of running out.

    sec_per_it, sec_lo, sec_hi   seconds of an iteration at the plan's batch, and their 90 % interval
    memory_bytes        bytes on one GPU of the fullest stage; oom_probability: that they pass the card's
    host_memory_bytes   what the offload of one GPU takes of its host, 0 without offload
    time                the seconds by part; stages: the memory of each pipeline stage by part, first to last
    stage_seconds       seconds of one microbatch, forward and backward, on each pipeline stage
    support             the measured runs nearest to the plan; the interval widens with their distance
    """

    sec_per_it: float
    sec_lo: float
    sec_hi: float
    memory_bytes: float
    host_memory_bytes: float
    oom_probability: float
    time: IterationTime
    stages: tuple[StageMemory, ...]
    stage_seconds: tuple[float, ...] = ()
    support: Support = field(default_factory=Support)

    @property
    def is_risky(self) -> bool:
        """Whether it may well run out of memory: more often than in one run of ten."""
        return self.oom_probability > RISKY

    def to_json(self) -> dict[str, Any]:
        """The prediction as a JSON object, with what it rests on in words."""
        return {**to_mapping(self), "support": {**to_mapping(self.support), "words": self.support.words}}


def predict(plan: Case, calibration: Calibration | None = None, memory: MemoryConstants = DEFAULT) -> Prediction:
    """Seconds and bytes of a plan that its model and engine can run (see invalid_reason and unsupported_reason).

    Without a `calibration`: the shipped constants of the plan's cluster. Every command, notebook and report shows what
    comes from here, so that one plan (Plan.id) has one number.
    """
    shape, t, cluster, engine = plan.shape, plan.topology, plan.cluster, plan.engine
    known = calibration or default(cluster)
    time = iteration_time(shape, t, cluster, known, engine)
    columns = columns_of(shape, t, engine)
    stages = memory_per_stage(shape, t, cluster, memory, engine)
    fullest = max(stage.total for stage in stages)
    case = Configuration(shape=shape, topology=t, cluster=cluster, engine=engine)
    low, high = replace(known, half_width=unmeasured_half_width(case, known)).interval(time.total)
    return Prediction(
        sec_per_it=time.total,
        sec_lo=low,
        sec_hi=high,
        memory_bytes=fullest,
        host_memory_bytes=max(float(host_bytes(columns, i, memory)) for i in range(t.pp)),
        oom_probability=float(probability_of(fullest, cluster, memory.spread)),
        time=time,
        stages=tuple(stages),
        stage_seconds=tuple(seconds_per_stage(shape, t, cluster, known, engine)),
        support=support(case, stack=known.stack),
    )


def predict_on(plan: Case, cluster: Cluster) -> Prediction:
    """The prediction of a plan on other nodes than its own: those that a SLURM site gives it."""
    return predict(Configuration(shape=plan.shape, topology=plan.topology, cluster=cluster, engine=plan.engine))
