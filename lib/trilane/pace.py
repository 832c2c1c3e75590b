"""Pace: predicted seconds at each batch size of a ramp, on the plan's own topology or on what some GPUs allow."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from trilane.calibration import Calibration
from trilane.checks import require
from trilane.columns import columns_of
from trilane.columns import stack as stacked
from trilane.memory import memory_bytes, oom_probability
from trilane.plan import Plan
from trilane.ramp import Phase, Ramp
from trilane.schedule import Choice, Schedule, optimize
from trilane.search import OOM_LIMIT
from trilane.space import divisors
from trilane.timing import iteration_columns
from trilane.topology import Topology

MICROBATCHES = (1, 2, 4, 8)
SOONEST = 1e9  # GPU-hours that a day is worth where only the days count


def require_divisible(ramp: Ramp, topology: Topology) -> None:
    """ValueError that names each batch size of the ramp that mbs x dp does not divide."""
    failing = ramp.failing(topology.gbs, topology.mbs * topology.dp)
    rule = f"every batch size must be a multiple of mbs x dp = {topology.mbs} x {topology.dp}"
    require(not failing, "ramp", ", ".join(map(str, failing)), rule)


def topologies(plan: Plan, gbs: int, gpus: int, adapt: bool) -> list[Topology]:
    """What `gbs` can run on with the plan's tp x pp and at most `gpus` GPUs.

    The plan's own topology where it fits and nothing is to be adapted; else every DP and microbatch.
    """
    t = plan.topology
    if t.gpus <= gpus and not adapt:
        return [dataclasses.replace(t, gbs=gbs)]
    most, sizes = gpus // (t.tp * t.pp), sorted({*MICROBATCHES, t.mbs})
    pairs = [(mbs, dp) for mbs in sizes if gbs % mbs == 0 for dp in divisors(gbs // mbs) if dp <= most]
    return [dataclasses.replace(t, gbs=gbs, mbs=mbs, dp=dp) for mbs, dp in pairs]


def choices(plan: Plan, batches: Sequence[int], gpus: int, calibration: Calibration, adapt: bool) -> list[list[Choice]]:
    """For each batch size every topology that fits the card, with its predicted seconds; all predicted at once."""
    found = [topologies(plan, gbs, gpus, adapt) for gbs in batches]
    flat = [t for group in found for t in group]
    if not flat:
        return [[] for _ in batches]
    columns = stacked([columns_of(plan.shape, t) for t in flat])
    seconds = np.broadcast_to(iteration_columns(columns, plan.cluster, calibration.constants).total, len(flat))
    fits = oom_probability(memory_bytes(columns, plan.cluster), plan.cluster) <= OOM_LIMIT
    rows = iter(zip(flat, seconds.tolist(), np.broadcast_to(fits, len(flat)).tolist(), strict=True))
    result = []
    for group in found:
        own = [next(rows) for _ in group]
        result.append([choice_of(t, plan, s) for t, s, ok in own if ok or t == _own(plan, t.gbs)])
    return result


def _own(plan: Plan, gbs: int) -> Topology | None:
    """The plan's topology at that batch size, which is not doubted; None where it does not divide."""
    t = plan.topology
    return dataclasses.replace(t, gbs=gbs) if gbs % (t.mbs * t.dp) == 0 else None


def choice_of(topology: Topology, plan: Plan, seconds: float) -> Choice:
    """A topology in whole nodes of the plan's cluster."""
    t = topology
    nodes = -(-t.gpus // plan.cluster.gpus_per_node)
    return Choice(tp=t.tp, pp=t.pp, dp=t.dp, mbs=t.mbs, nodes=nodes, seconds=seconds)


def schedule_on(
    plan: Plan,
    phases: Sequence[Phase],
    gpus: int,
    calibration: Calibration,
    restart_s: float,
    adapt: bool = False,
    day_worth: float = SOONEST,
) -> Schedule | None:
    """The phases on at most `gpus` GPUs, the plan's topology kept unless `adapt`; None where no replica fits.

    ValueError names each batch size that nothing can run.
    """
    if gpus < plan.topology.tp * plan.topology.pp:
        return None
    options = choices(plan, [phase.gbs for phase in phases], gpus, calibration, adapt)
    empty = ", ".join(str(phase.gbs) for phase, found in zip(phases, options, strict=True) if not found)
    require(not empty, "ramp", empty, f"no DP and microbatch of the plan's tp x pp divide it and fit {gpus} GPUs")
    return optimize(phases, options, restart_s, day_worth)
