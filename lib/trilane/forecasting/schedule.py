"""The topology and nodes for each batch size of a ramp: predicted seconds, and the cost of each
restart included.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trilane.config.batch_rampup import Phase
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of, stack
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
        return job_of(self.topology)


def job_of(topology: Topology) -> tuple[int | str, ...]:
    """Of what a schedule varies, what a job cannot change without a restart."""
    return topology.dp, topology.mbs, topology.recompute


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
    total = np.zeros(0)  # the cheapest way to each option of the last phase
    back: list[np.ndarray] = []  # from which option of the phase before that way comes
    for i, (phase, options) in enumerate(zip(phases, choices, strict=True)):
        seconds = np.array([option.seconds for option in options])
        gpus = np.array([option.topology.gpus for option in options])
        # GPU-hours per second; the small term for time breaks ties
        price = gpus / 3600 + (day_worth + 1e-6) / 86400
        cost = phase.iterations * seconds * price
        if i:
            before = choices[i - 1]
            is_change = np.array([[new.job != old.job for old in before] for new in options])
            ways = total + price[:, None] * is_change * restart_s
            back.append(ways.argmin(axis=1))
            cost = cost + ways.min(axis=1)
        total = cost
    place = int(total.argmin())
    places = [place]
    for step in reversed(back):
        place = int(step[place])
        places.insert(0, place)
    schedule = list[ScheduleStep]()
    for phase, options, place in zip(phases, choices, places, strict=True):
        choice = options[place]
        is_restart = bool(schedule) and schedule[-1].choice.job != choice.job
        pause_s = restart_s if is_restart else 0.0
        schedule.append(ScheduleStep(phase=phase, choice=choice, pause_s=pause_s))
    return tuple(schedule)


def topologies(plan: Plan, gbs: int, adapt: bool) -> list[Topology]:
    """Topologies for `gbs` on at most the plan's GPUs, with its tp x pp, since checkpoints hold its
    shards.

    The plan's own topology unless `adapt`; else every DP and microbatch, with the plan's or full
    recomputation, since of fewer replicas each holds larger ZeRO shards.
    """
    own = plan.topology
    if not adapt:
        return [replace(own, gbs=gbs)]
    found = list[Topology]()
    for mbs in sorted({1, 2, 4, 8, own.mbs}):
        for dp in divisors(gbs // mbs) if gbs % mbs == 0 else ():
            for recompute in sorted({own.recompute, "full"}) if dp <= own.dp else ():
                with contextlib.suppress(ValueError):
                    topology = replace(own, gbs=gbs, dp=dp, mbs=mbs, recompute=recompute)
                    if invalid_reason(plan.shape, topology) is None:
                        found.append(topology)
    return found


def scheduled(
    plan: Plan, options: Sequence[Topology], calibration: Calibration
) -> list[ScheduledTopology]:
    """The plan on each topology, predicted together, in whole nodes of its cluster."""
    if not options:
        return []
    columns = stack([columns_of(plan.shape, topology, plan.engine) for topology in options])
    known = memory_for(calibration, plan.engine, plan.cluster, plan.dropout)
    seconds = iteration_columns(columns, plan.cluster, calibration).total
    memory = memory_bytes(columns, plan.cluster, known)
    probability = oom_probability(memory, plan.cluster, known.spread)
    numbers = np.broadcast_arrays(seconds, memory, probability, np.zeros(len(options)))
    return [
        ScheduledTopology(
            topology=topology,
            nodes=-(-topology.gpus // plan.cluster.gpus_per_node),
            seconds=float(numbers[0][i]),
            memory_bytes=float(numbers[1][i]),
            oom_probability=float(numbers[2][i]),
        )
        for i, topology in enumerate(options)
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

    ValueError names a batch size that no DP and microbatch divide, or for which no replica fits the
    card's memory.
    """
    gpus = plan.topology.gpus
    options = [topologies(plan, phase.gbs, adapt) for phase in phases]
    predicted = scheduled(plan, [one for some in options for one in some], calibration)
    by_topology = {choice.topology: choice for choice in predicted}
    able = list[Options]()
    for phase, some in zip(phases, options, strict=True):
        rule = f"no DP and microbatch of the plan's tp x pp divide it on {gpus} GPUs"
        require(bool(some), "ramp", phase.gbs, rule)
        choices = [by_topology[topology] for topology in some]
        # the plan's own topology stays whatever memory it needs: its risk is shown with it
        own = job_of(plan.topology)
        fitting = [c for c in choices if c.oom_probability <= IMPOSSIBLE or c.job == own]
        rule = f"no replica on {gpus} GPUs fits the card's memory"
        require(bool(fitting), "ramp", phase.gbs, rule)
        able.append(fitting)
    return optimize(phases, able, restart_s, day_worth)
