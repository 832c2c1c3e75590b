"""Pace: predicted seconds at each batch size of a ramp, on the plan's own topology or on what some GPUs allow."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from trilane.config.batch_rampup import Phase, Ramp
from trilane.config.parallelism import Topology, invalid_reason
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.columns import stack as stacked
from trilane.costmodel.iteration import iteration_columns
from trilane.costmodel.memory import memory_bytes, oom_probability
from trilane.forecasting.schedule import Schedule, ScheduledTopology, optimize
from trilane.planning.search import OOM_LIMIT, search_space
from trilane.planning.space import divisors, space_around
from trilane.utils.validation import require

MICROBATCHES = (1, 2, 4, 8)


SOONEST = 1e9  # GPU-hours that a day is worth where only the days count


def require_divisible(ramp: Ramp, topology: Topology) -> None:
    """ValueError that names each batch size of the ramp that mbs x dp does not divide."""
    failing = ramp.failing(topology.gbs, topology.mbs * topology.dp)
    rule = f"every batch size must be a multiple of mbs x dp = {topology.mbs} x {topology.dp}"
    require(not failing, "ramp", ", ".join(map(str, failing)), rule)


def first_full_gbs(topology: Topology) -> int:
    """The first batch size with a microbatch for every stage: pp x mbs x dp. Below it no stage is ever all at work.

    The prequel ('main-2') writes "12*2*4=384 (PP*MBS*DP)" for PP 12, MBS 2, DP 8; the product is 192, from where its
    later runs start ('main-5').
    """
    return topology.pp * topology.mbs * topology.dp


Lane = tuple[int, int]  # tp, pp


LANES = 4  # of the best tp x pp that are tried at the smallest and at the full batch size


def lanes(plan: Plan, batches: Sequence[int], gpus: int, calibration: Calibration) -> list[Lane]:
    """The plan's tp x pp, and the best others at the smallest and the largest batch size on that many GPUs."""
    t = plan.topology
    found = [(t.tp, t.pp)]
    for gbs in {min(batches), max(batches)}:
        space = space_around(t, [gpus], [gbs], MICROBATCHES)
        best = search_space(plan.shape, plan.cluster, space, calibration, top=60).best_lanes(LANES)
        found += [(c.topology.tp, c.topology.pp) for c in best]
    return list(dict.fromkeys(found))


def topologies(plan: Plan, gbs: int, gpus: int, adapt: bool, others: Sequence[Lane] = ()) -> list[Topology]:
    """What `gbs` can run on with at most `gpus` GPUs, on the plan's tp x pp or one of `others`.

    The plan's own topology where it fits and nothing is to be adapted; else every DP and microbatch, recomputing as the
    plan does or fully, since fewer replicas hold more of ZeRO's shards each.
    """
    t = plan.topology
    if t.gpus <= gpus and not adapt:
        return [dataclasses.replace(t, gbs=gbs)]
    pairs = [(mbs, dp) for mbs in sorted({*MICROBATCHES, t.mbs}) if gbs % mbs == 0 for dp in divisors(gbs // mbs)]
    found = [
        {"tp": tp, "pp": pp, "dp": dp, "mbs": mbs, "recompute": recompute}
        for tp, pp in others or [(t.tp, t.pp)]
        for mbs, dp in pairs
        for recompute in sorted({t.recompute, "full"})
        if tp * pp * dp <= gpus
    ]
    made = [dataclasses.replace(t, gbs=gbs, **fields) for fields in found]  # type: ignore[arg-type]
    return [topology for topology in made if invalid_reason(plan.shape, topology) is None]


def choices(
    plan: Plan,
    batches: Sequence[int],
    gpus: int,
    calibration: Calibration,
    adapt: bool,
    others: Sequence[Lane] = (),
) -> list[list[ScheduledTopology]]:
    """For each batch size every topology that fits the card, with its predicted seconds; all predicted at once."""
    found = [topologies(plan, gbs, gpus, adapt, others) for gbs in batches]
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


def choice_of(topology: Topology, plan: Plan, seconds: float) -> ScheduledTopology:
    """A topology in whole nodes of the plan's cluster."""
    t = topology
    nodes = -(-t.gpus // plan.cluster.gpus_per_node)
    return ScheduledTopology(tp=t.tp, pp=t.pp, dp=t.dp, mbs=t.mbs, nodes=nodes, seconds=seconds, recompute=t.recompute)


def schedule_on(
    plan: Plan,
    phases: Sequence[Phase],
    gpus: int,
    calibration: Calibration,
    restart_s: float,
    adapt: bool = False,
    day_worth: float = SOONEST,
    reshape_s: float | None = None,
) -> Schedule | None:
    """The phases on at most `gpus` GPUs, the plan's topology kept unless `adapt`; None where no replica fits.

    TP and PP stay unless a change of them is said to take `reshape_s`. None too where a batch size has replicas that
    divide it, but none that fits the card. ValueError names batch sizes that nothing divides.
    """
    if gpus < plan.topology.tp * plan.topology.pp:
        return None
    batches = [phase.gbs for phase in phases]
    others = [] if reshape_s is None else lanes(plan, batches, gpus, calibration)
    options = choices(plan, batches, gpus, calibration, adapt, others)
    empty = [gbs for gbs, found in zip(batches, options, strict=True) if not found]
    none = [gbs for gbs in empty if not topologies(plan, gbs, gpus, adapt, others)]
    require(
        not none,
        "ramp",
        ", ".join(map(str, none)),
        f"no DP and microbatch of the plan's tp x pp divide it on {gpus} GPUs",
    )
    if empty:
        return None
    return optimize(phases, options, restart_s, day_worth, reshape_s or 0.0)
