"""The topology and nodes for each batch size of a ramp: predicted seconds, and the cost of each
restart included.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from trilane.config.batch_rampup import Phase
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.columns import stack as stacked
from trilane.costmodel.iteration import iteration_columns
from trilane.costmodel.memory import memory_bytes, memory_for, oom_probability
from trilane.costmodel.predict import IMPOSSIBLE
from trilane.planning.space import divisors
from trilane.utils.validation import require

SOONEST = 1e9  # GPU-hours that a day is worth where only the days count


@dataclass(frozen=True, kw_only=True)
class ScheduledTopology:
    """A topology for one batch size: `seconds` per iteration in whole `nodes`, and the memory of
    its fullest GPU.
    """

    topology: Topology
    nodes: int
    seconds: float
    memory_bytes: float = 0.0
    oom_probability: float = 0.0

    @cached_property
    def job(self) -> tuple[int | str, ...]:
        """What a job cannot change without a restart, of what differs between batch sizes."""
        return self.topology.dp, self.topology.mbs, self.topology.recompute


@dataclass(frozen=True, kw_only=True)
class ScheduleStep:
    """A phase of the ramp and its topology; `pause_s` is the restart before it, 0 where the job
    continues.
    """

    phase: Phase
    choice: ScheduledTopology
    pause_s: float


Schedule = tuple[ScheduleStep, ...]  # every phase of a run
Options = Sequence[ScheduledTopology]  # for one batch size


def optimize(
    phases: Sequence[Phase], choices: Sequence[Options], restart_s: float, day_worth: float
) -> Schedule:
    """The cheapest sequence of topologies, where a day is worth `day_worth` GPU-hours (0: only
    GPU-hours count).

    A change of job costs `restart_s`. Exact dynamic programming over the phases (Viterbi); of
    equally cheap ones the faster. Each phase needs a choice.
    """
    assert all(choices), "a phase without a choice"
    best = np.zeros(0)
    back: list[np.ndarray] = []
    for i, (phase, options) in enumerate(zip(phases, choices, strict=True)):
        # GPU-hours per second; the small term for time breaks ties
        price = np.array([c.topology.gpus / 3600 + (day_worth + 1e-6) / 86400 for c in options])
        own = phase.iterations * np.array([c.seconds for c in options]) * price
        if i:
            changes = np.array([[new.job != old.job for old in choices[i - 1]] for new in options])
            total = best + price[:, None] * changes * restart_s
            back.append(total.argmin(axis=1))
            own = own + total.min(axis=1)
        best = own
    chosen = [int(best.argmin())]
    for step in reversed(back):
        chosen.append(int(step[chosen[-1]]))
    picked = [options[i] for options, i in zip(choices, reversed(chosen), strict=True)]
    pauses = [0.0, *(restart_s * (a.job != b.job) for a, b in pairwise(picked))]
    parts = zip(phases, picked, pauses, strict=True)
    return tuple(
        ScheduleStep(phase=phase, choice=choice, pause_s=pause) for phase, choice, pause in parts
    )


def topologies(plan: Plan, gbs: int, adapt: bool) -> list[Topology]:
    """Topologies for `gbs` on at most the plan's GPUs, with its tp x pp, since checkpoints hold its
    shards.

    The plan's own topology unless `adapt`; else every DP and microbatch, with the plan's or full
    recomputation, since of fewer replicas each holds larger ZeRO shards.
    """
    t = plan.topology
    if not adapt:
        return [dataclasses.replace(t, gbs=gbs)]
    batches = [
        (mbs, dp)
        for mbs in sorted({1, 2, 4, 8, t.mbs})
        if gbs % mbs == 0
        for dp in divisors(gbs // mbs)
    ]
    found = list[Topology]()
    for mbs, dp in batches:
        for recompute in sorted({t.recompute, "full"}) if dp <= t.dp else ():
            with contextlib.suppress(ValueError):
                found.append(dataclasses.replace(t, gbs=gbs, dp=dp, mbs=mbs, recompute=recompute))
    return [one for one in found if invalid_reason(plan.shape, one) is None]


def scheduled(
    plan: Plan, options: Sequence[Topology], calibration: Calibration
) -> list[ScheduledTopology]:
    """The plan on each topology, predicted together, in whole nodes of its cluster."""
    if not options:
        return []
    columns, per_node = (
        stacked([columns_of(plan.shape, t, plan.engine) for t in options]),
        plan.cluster.gpus_per_node,
    )
    known = memory_for(calibration, plan.engine, plan.cluster, plan.dropout)
    seconds = iteration_columns(columns, plan.cluster, calibration).total
    memory = memory_bytes(columns, plan.cluster, known)
    probability = oom_probability(memory, plan.cluster, known.spread)
    numbers = (np.broadcast_to(v, len(options)).tolist() for v in (seconds, memory, probability))
    return [
        ScheduledTopology(
            topology=t, nodes=-(-t.gpus // per_node), seconds=s, memory_bytes=m, oom_probability=p
        )
        for t, s, m, p in zip(options, *numbers, strict=True)
    ]


def schedule_on(
    plan: Plan,
    phases: Sequence[Phase],
    calibration: Calibration,
    restart_s: float,
    adapt: bool = False,
    day_worth: float = SOONEST,
) -> Schedule:
    """The phases on at most the plan's GPUs, on its own topology unless `adapt`.

    ValueError names batch sizes that no DP and microbatch divide, or for which no replica fits the
    card's memory.
    """
    t = plan.topology
    batches = [phase.gbs for phase in phases]
    found = [topologies(plan, gbs, adapt) for gbs in batches]
    none = [gbs for gbs, options in zip(batches, found, strict=True) if not options]
    rule = f"no DP and microbatch of the plan's tp x pp divide it on {t.gpus} GPUs"
    require(not none, "ramp", ", ".join(map(str, none)), rule)
    predicted = iter(scheduled(plan, [each for options in found for each in options], calibration))
    kept: list[Options] = []
    for options in found:
        own = (
            None if options[0].gbs % (t.mbs * t.dp) else dataclasses.replace(t, gbs=options[0].gbs)
        )
        pairs = [(each, next(predicted)) for each in options]
        # the plan's own topology stays whatever memory it needs: its risk is shown with it
        kept.append(
            [
                choice
                for each, choice in pairs
                if choice.oom_probability <= IMPOSSIBLE or each == own
            ]
        )
    full = [gbs for gbs, options in zip(batches, kept, strict=True) if not options]
    require(
        not full,
        "ramp",
        ", ".join(map(str, full)),
        f"no replica on {t.gpus} GPUs fits the card's memory",
    )
    return optimize(phases, kept, restart_s, day_worth)
