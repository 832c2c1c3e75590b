"""Schedules for a growing batch: both of document 004 from its benchmark tables, and the laws of
the optimizer.
"""

import itertools

import pytest

from trilane.config.batch_rampup import Phase, parse_ramp
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel import shipped
from trilane.forecasting.schedule import ScheduledTopology, optimize, schedule_on
from trilane.planning.space import divisors

# Document 004, '32GB node', GBS 512 on 2 nodes of 4: tp, pp, dp, mbs, seconds; the second half
# without recomputation
ON_32GB = [
    (1, 1, 8, 1, 29),
    (1, 1, 8, 2, 29),
    (1, 1, 8, 4, 28),
    (1, 1, 8, 8, 28),
    (1, 2, 4, 1, 30),
    (1, 2, 4, 2, 29),
]
ON_32GB += [(1, 2, 4, 8, 29), (1, 4, 2, 1, 32), (1, 4, 2, 8, 32), (2, 1, 4, 1, 53)]
ON_32GB += [
    (1, 1, 8, 1, 23),
    (1, 2, 4, 1, 23),
    (1, 4, 2, 1, 25),
    (1, 4, 2, 2, 24),
    (2, 1, 4, 1, 39),
]
# '16GB node', without the rows that ran out of memory
ON_16GB = [
    (1, 1, 8, 1, 29),
    (1, 1, 8, 2, 29),
    (1, 2, 4, 1, 30),
    (1, 2, 4, 2, 29),
    (1, 2, 4, 4, 28),
    (1, 4, 2, 1, 32),
]
ON_16GB += [(1, 4, 2, 4, 30), (1, 8, 1, 1, 37), (1, 8, 1, 4, 35)]
RESTART_S = 600.0


def fastest(rows):
    """The rows of the tp x pp that has the fastest row; of equals that with the smallest replica.

    A run that keeps its tp x pp keeps its checkpoints' shards; DP and microbatch may change.
    """
    tp, pp, *_ = min(rows, key=lambda r: (r[4], r[0] * r[1]))
    return [r for r in rows if r[:2] == (tp, pp)]


def ways(rows, gbs):
    """Every way to run `gbs` in whole nodes of 4 at the pace of the fastest rows, the work divided
    evenly.
    """
    found = []
    for tp, pp, own, mbs, seconds in fastest(rows):
        for dp in divisors(gbs // mbs) if gbs % mbs == 0 else []:
            nodes, rest = divmod(tp * pp * dp, 4)
            if rest == 0 and 1 <= nodes <= 128:
                pace = seconds * (own * gbs) / (512 * dp)
                t = Topology(tp=tp, pp=pp, dp=dp, mbs=mbs, gbs=gbs)
                found.append(ScheduledTopology(topology=t, nodes=nodes, seconds=pace))
    return found


def schedule(rows, batches, worth):
    samples = 80_000_000
    phases = [
        Phase(gbs=b, iterations=samples // b, first=i * samples) for i, b in enumerate(batches)
    ]
    return optimize(phases, [ways(rows, b) for b in batches], RESTART_S, worth)


def restarts(steps):
    return sum(step.pause_s > 0 for step in steps)


def table(found):
    """Nodes, batch size, microbatch: the columns of document 004."""
    return [(s.choice.nodes, s.phase.gbs, s.choice.topology.mbs) for s in found]


@pytest.mark.parametrize("worth", [60.0, 90.0, 105.0])
def test_both_node_schedules_of_document_004_come_out_of_its_benchmark_tables(worth):
    """004, "Here is a possible schedule": the rates are those of GBS 512, as its authors took them
    (no bubble).

    What a day is worth in GPU-hours: 0.6 to 1.1 V100 nodes for a day give both; a restart takes ten
    minutes.
    """
    one = schedule(ON_32GB, (32, 64, 128), worth=worth)
    assert table(one) == [(8, 32, 1), (16, 64, 1), (32, 128, 1)] and restarts(one) == 2
    two = schedule(ON_16GB, (32, 64, 128, 256, 512), worth=worth)
    assert (
        table(two) == [(16, 32, 1), (16, 64, 2), (16, 128, 4), (32, 256, 4), (64, 512, 4)]
        and restarts(two) == 4
    )


def test_the_optimizer_finds_what_trying_everything_finds():
    phases = [Phase(gbs=b, iterations=1000, first=0) for b in (8, 64, 512)]
    options = [
        [
            ScheduledTopology(topology=Topology(dp=d, gbs=b), nodes=d, seconds=b / d + 0.1 * d)
            for d in (1, 2, 4, 8)
        ]
        for b in (8, 64, 512)
    ]
    for worth, restart in itertools.product((0.0, 3.0, 30.0, 3000.0), (0.0, 500.0, 5000.0)):

        def cost(path, worth=worth, restart=restart):
            seconds = [
                1000 * c.seconds + restart * (i > 0 and c.job != path[i - 1].job)
                for i, c in enumerate(path)
            ]
            return sum(
                s * (c.topology.gpus / 3600 + worth / 86400)
                for s, c in zip(seconds, path, strict=True)
            )

        found = [step.choice for step in optimize(phases, options, restart, worth)]
        assert cost(found) == pytest.approx(min(map(cost, itertools.product(*options))), rel=1e-6)


A100 = cluster("jz-a100-80g")
TOPOLOGY = Topology(
    tp=4,
    pp=12,
    dp=8,
    mbs=2,
    gbs=2048,
    zero=1,
    recompute="full",
    precision="fp16",
    attention="scores",
)
PLAN = Plan(
    label="p", shape=parse_shape("72,14336,64,2048,250880"), cluster=A100, topology=TOPOLOGY
)
K = shipped.default(A100)


def phases_of(ramp, gbs, samples):
    return parse_ramp(ramp).between(gbs, 0, parse_ramp(ramp).iterations(samples, gbs))


@pytest.mark.parametrize("adapt", [False, True])
def test_dp_and_microbatch_follow_the_batch_and_tp_and_pp_never_do(adapt):
    """Checkpoints hold the shards of tp x pp."""
    phases = phases_of("16,16,9765625", 2048, 20_000_000)
    found = schedule_on(PLAN, phases, K, 1200.0, adapt=adapt)
    each = [s.choice.topology for s in found]
    assert {(t.tp, t.pp) for t in each} == {(4, 12)}
    assert (len({(t.dp, t.mbs) for t in each}) > 1) is adapt
