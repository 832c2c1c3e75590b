"""predict(): the one answer to what a plan is expected to take, seconds and bytes, each with its
uncertainty; and the measured rows that it rests on.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.parallelism import invalid_reason
from trilane.config.plan import Plan, read_plan
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.fit import posterior_width
from trilane.costmodel.iteration import IterationTime, iteration_time, seconds_per_stage
from trilane.costmodel.measured_rows import (
    MeasuredRow,
    Skipped,
    each_row,
    ignored_columns,
)
from trilane.costmodel.memory import (
    MemoryConstants,
    StageMemory,
    host_bytes,
    memory_for,
    memory_of,
    memory_per_stage,
    oom_probability,
)
from trilane.costmodel.shipped import calibration_for, constants_of, default
from trilane.costmodel.support import Support, support
from trilane.utils.frozen import frozen
from trilane.utils.numbers import with_bounds
from trilane.utils.tables import DataFrame, Json, Record, as_json
from trilane.workspace.study import load_cluster

# probability of running out of memory above which a plan is listed apart, and never recommended
SAFE = 0.01
IMPOSSIBLE = 0.5  # from here on a search refuses it


@frozen
class Prediction(Record):
    """Seconds per iteration with a 90 % interval, and memory of the fullest stage with a
    probability of running out.

    sec_per_it, sec_lo, sec_hi   seconds of an iteration at the plan's batch, and their 90 %
                                 interval
    memory_bytes        bytes on one GPU of the fullest stage; oom_probability: that they pass the
                        card's
    host_memory_bytes   what the offload of one GPU takes of its host, 0 without offload
    time                the seconds by part; stages: the memory of each pipeline stage by part,
                        first to last
    stage_seconds       seconds of one microbatch, forward and backward, on each pipeline stage
    support             the measured runs nearest to the plan; the interval widens with their
                        distance
    calibration         the constants that made it
    """

    sec_per_it: float
    sec_lo: float
    sec_hi: float
    memory_bytes: float
    host_memory_bytes: float
    oom_probability: float
    time: IterationTime
    stages: tuple[StageMemory, ...]
    stage_seconds: tuple[float, ...]
    support: Support
    calibration: Calibration = field(repr=False)

    def summary(self) -> str:
        seconds = with_bounds(self.sec_per_it, self.sec_lo, self.sec_hi)
        memory = f"{self.memory_bytes / 2**30:.1f} GiB, P(OOM) {self.oom_probability:.1%}"
        return f"{seconds} s/it, {memory}"

    @property
    def numbers(self) -> dict[str, float]:
        """Its numbers as columns of a frame: seconds, GiB, of the fullest stage also what torch
        calls reserved and allocated, and the seconds of each part of an iteration.
        """
        fullest = max(self.stages, key=lambda stage: stage.total)
        numbers = {
            "sec_per_it": self.sec_per_it,
            "sec_lo": self.sec_lo,
            "sec_hi": self.sec_hi,
            "memory_gib": self.memory_bytes / 2**30,
            "reserved_gib": fullest.reserved / 2**30,
            "allocated_gib": fullest.allocated / 2**30,
            "host_memory_gib": self.host_memory_bytes / 2**30,
            "oom_probability": self.oom_probability,
        }
        parts = vars(self.time).items()
        return numbers | {f"{part}_s": seconds for part, seconds in parts}

    def to_frame(self) -> DataFrame:
        """A row: `numbers`."""
        import pandas as pd

        return pd.DataFrame([self.numbers])

    def plot(self) -> Any:
        """Seconds by part, by pandas."""
        parts = self.to_frame().filter(regex="_s$")
        return parts.T.plot.barh(legend=False, xlabel="seconds an iteration")

    @property
    def is_risky(self) -> bool:
        """Whether it runs out of memory with a probability above SAFE."""
        return self.oom_probability > SAFE

    def to_json(self) -> Json:
        """The prediction with what it rests on in words, without the constants."""
        values = as_json(self)
        del values["calibration"]
        return values

    def beside(self) -> Json:
        """What stands beside a plan's own fields in a file: its prediction, and the constants that
        made it.
        """
        return {"prediction": self.to_json(), "calibration": self.calibration.kept()}


def predict(
    plan: Plan | Configuration | Path | str | DataFrame | Mapping[str, Any] | list[Plan],
    cluster: Cluster | str | Calibration | None = None,
    calibration: Calibration | str | None = None,
) -> Any:
    """Seconds and bytes of a plan that its model and engine can run (see invalid_reason and
    unsupported_reason).

        predict(read_plan("plan.json")).sec_per_it
        predict(frame, "jz-a100-80g")[["predicted_sec_per_it", "oom_probability", "reason"]]

    On another `cluster` than the plan's by that one's constants. Without a `calibration` (which may
    stand in place of the cluster): the constants that the plan carries, else those that ship for
    the cluster. Every command, notebook and report shows what comes from here, so that one plan
    (Plan.id) has one number.

    Of each row of a DataFrame, in the columns of measured_rows.read_rows(): the frame with
    predicted_sec_per_it and its 90 % interval predicted_sec_lo and predicted_sec_hi,
    predicted_memory_gib, oom_probability, and the `reason` why a row cannot run, "" where it can. A
    dictionary is such a row; of a list of plans a frame with a row of numbers for each.
    """
    machine = None
    if isinstance(cluster, Calibration):
        calibration = cluster
    elif cluster:
        machine = load_cluster(cluster)
    if isinstance(plan, Path | str):
        plan = read_plan(plan)
    if isinstance(plan, Plan | Configuration):
        known = constants_of(plan, calibration or "", machine)
        case = Configuration(
            shape=plan.shape,
            topology=plan.topology,
            cluster=machine or plan.cluster,
            engine=plan.engine,
            dropout=plan.dropout,
        )
        return predict_case(case, known)
    import pandas as pd

    if isinstance(plan, list):
        each = [{"label": p.label, **predict(p, cluster, calibration).numbers} for p in plan]
        return pd.DataFrame(each)
    if isinstance(plan, Mapping):
        plan = pd.DataFrame([plan])
    for line in ignored_columns(plan):
        warnings.warn(f"predict: ignored {line}", stacklevel=2)
    rows = [_row_numbers(row, calibration) for row in each_row(plan, machine)]
    columns = {}
    for name in ("sec_per_it", "sec_lo", "sec_hi", "memory_gib", "oom_probability"):
        head = name if name == "oom_probability" else f"predicted_{name}"
        columns[head] = [row.get(name, math.nan) for row in rows]
    return plan.assign(**columns, reason=[row.get("reason", "") for row in rows])


def _row_numbers(
    row: MeasuredRow | Skipped, calibration: Calibration | str | None
) -> dict[str, Any]:
    """The numbers of a prediction, or the reason why there is none."""
    if isinstance(row, Skipped):
        return {"reason": row.reason}
    reason = invalid_reason(row.case.shape, row.case.topology)
    if reason:
        return {"reason": reason}
    return predict_rows([row], calibration or "")[0].numbers


# what experts add to the half-width: with it intervals hold 85 % of 75 public rows at least
# (benchmarks/mixtures.py)
UNROUTED = 0.25
BALANCED = "Routing is balanced; learned, the busiest rank has 1.3 to 2 times its share."
EXCHANGED = 4


def half_width(case: Configuration, known: Calibration, nearest: Support) -> float:
    """Half-width of the 90 % interval of ln(seconds), of every prediction: what rows showed that
    were left out of the fit; without any what the posterior of the constants leaves open. Either
    widens with the distance from measured rows of the same software, or from those of one's own,
    and for experts, whose dispatcher and routing differ from run to run.
    """
    width = known.half_width
    is_card = case.cluster.gpu.kind == "cuda"
    if is_card and known.rows == 0:
        # rows that did not move the constants may still have shown how far these miss
        width = max(width, posterior_width(case, known))
    if is_card or known.own:  # no shipped row is near to a core
        width = math.hypot(width, nearest.widening)
    if case.shape.experts and not known.own:
        width = math.hypot(width, UNROUTED)
    return width


def predict_rows(rows: Sequence[MeasuredRow], source: str | Calibration = "") -> list[Prediction]:
    """The predictions of rows, by constants of `source` (see calibration_for); else a row of an
    engine here as a plan of it, and another by what ships for its cluster and stack.
    """
    constants = {}
    predictions = []
    for row in rows:
        case = row.case
        stack = "" if case.engine else row.stack
        key = (case.cluster.name, stack)
        if key not in constants:
            is_shipped = stack and not source
            known = default(case.cluster, stack) if is_shipped else source
            constants[key] = calibration_for(case.cluster, known)
        memory = memory_of(stack) if stack else None
        predictions.append(predict_case(case, constants[key], memory))
    return predictions


def predict_case(
    case: Configuration,
    known: Calibration,
    memory: MemoryConstants | None = None,
) -> Prediction:
    """The prediction of a case by these constants as they were on its day."""
    known = known.on(case.day, case.topology.gpus)
    memory = memory or memory_for(known, case.engine, case.cluster, case.dropout)
    columns = columns_of(case.shape, case.topology, case.engine)
    time = iteration_time(columns, case.cluster, known)
    stages = memory_per_stage(columns, case.cluster, memory)
    fullest = max(stage.total for stage in stages)
    nearest = support(case, known, time.total)
    width = half_width(case, known, nearest)
    return Prediction(
        sec_per_it=time.total,
        sec_lo=time.total / math.exp(width),
        sec_hi=time.total * math.exp(width),
        memory_bytes=fullest,
        host_memory_bytes=float(np.max(host_bytes(columns, np.arange(columns.pp), memory))),
        oom_probability=float(oom_probability(fullest, case.cluster, memory.spread)),
        time=time,
        stages=tuple(stages),
        stage_seconds=tuple(seconds_per_stage(columns, case.cluster, known)),
        support=nearest,
        calibration=known,
    )
