"""Schedules for a growing batch: both of document 004 from its benchmark tables, and the laws of the optimizer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from trilane.config.batch_rampup import Phase, parse_ramp
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel import shipped
from trilane.forecasting.schedule import ScheduledTopology, choices, first_full_gbs, optimize, phases_of, schedule_on
from trilane.planning.space import divisors


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A measured row: seconds an iteration of `gbs` sequences on tp x pp x dp GPUs at one microbatch size."""

    tp: int
    pp: int
    dp: int
    mbs: int
    gbs: int
    seconds: float

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds a sequence."""
        return self.seconds * self.tp * self.pp * self.dp / self.gbs

    def at(self, gbs: int, dp: int, fill: bool) -> float:
        """Seconds an iteration at another batch size and DP, the work divided evenly.

        With `fill` the pipeline's filling and draining is counted: (m + p - 1) / m, Narayanan et al. 2021, section 2.2.
        Left out: gradient reduction, which does not shrink with the batch.
        """
        idle = [(m + self.pp - 1) / m for m in (gbs / dp / self.mbs, self.gbs / self.dp / self.mbs)]
        return self.gpu_seconds * gbs / (self.tp * self.pp * dp) * (idle[0] / idle[1] if fill else 1.0)


def fastest(rows: Sequence[Benchmark]) -> list[Benchmark]:
    """The rows of the tp x pp that has the fastest row; of equals that with the smallest replica.

    A run that keeps its tp x pp keeps its checkpoints' shards; DP and microbatch may change.
    """
    first = min(rows, key=lambda r: (r.gpu_seconds, r.tp * r.pp))
    return [r for r in rows if (r.tp, r.pp) == (first.tp, first.pp)]


def benchmark_choices(
    rows: Sequence[Benchmark], gbs: int, gpus_per_node: int, max_nodes: int, fill: bool = True
) -> list[ScheduledTopology]:
    """Every way to run `gbs` in whole nodes at the pace of measured rows, faster by as many replicas as it allows."""
    found = []
    for row in rows:
        for dp in divisors(gbs // row.mbs) if gbs % row.mbs == 0 else []:
            nodes, rest = divmod(row.tp * row.pp * dp, gpus_per_node)
            if rest == 0 and 1 <= nodes <= max_nodes:
                seconds = row.at(gbs, dp, fill)
                found.append(ScheduledTopology(tp=row.tp, pp=row.pp, dp=dp, mbs=row.mbs, nodes=nodes, seconds=seconds))
    return found


# Document 004, '32GB node', GBS 512 on 2 nodes of 4: tp, pp, dp, mbs, seconds; the second half without recomputation
ON_32GB = [(1, 1, 8, 1, 29), (1, 1, 8, 2, 29), (1, 1, 8, 4, 28), (1, 1, 8, 8, 28), (1, 2, 4, 1, 30), (1, 2, 4, 2, 29)]
ON_32GB += [(1, 2, 4, 8, 29), (1, 4, 2, 1, 32), (1, 4, 2, 8, 32), (2, 1, 4, 1, 53)]
WITHOUT_RECOMPUTATION = [(1, 1, 8, 1, 23), (1, 2, 4, 1, 23), (1, 4, 2, 1, 25), (1, 4, 2, 2, 24), (2, 1, 4, 1, 39)]
# '16GB node', OOM rows left out
ON_16GB = [(1, 1, 8, 1, 29), (1, 1, 8, 2, 29), (1, 2, 4, 1, 30), (1, 2, 4, 2, 29), (1, 2, 4, 4, 28), (1, 4, 2, 1, 32)]
ON_16GB += [(1, 4, 2, 4, 30), (1, 8, 1, 1, 37), (1, 8, 1, 4, 35)]
# What a day is worth in GPU-hours: 0.6 to 1.1 V100 nodes for a day give both schedules; a restart takes ten minutes
DAY_WORTH, RESTART_S = 90.0, 600.0


def benchmarks(rows):
    return [Benchmark(tp=t, pp=p, dp=d, mbs=m, gbs=512, seconds=s) for t, p, d, m, s in rows]


def schedule(rows, batches, fill=False, samples=80_000_000, worth=DAY_WORTH):
    phases = [Phase(gbs=b, iterations=samples // b, first=i * samples) for i, b in enumerate(batches)]
    ways = [benchmark_choices(fastest(benchmarks(rows)), b, 4, 128, fill) for b in batches]
    return optimize(phases, ways, RESTART_S, worth)


def restarts(steps):
    return sum(step.pause_s > 0 for step in steps)


def days(steps):
    return sum(s.phase.iterations * s.choice.seconds + s.pause_s for s in steps) / 86400


def gpu_hours(steps):
    return sum((s.phase.iterations * s.choice.seconds + s.pause_s) * s.choice.gpus for s in steps) / 3600


def table(found):
    """Nodes, batch size, microbatch: the columns of document 004."""
    return [(s.choice.nodes, s.phase.gbs, s.choice.mbs) for s in found]


@pytest.mark.parametrize("worth", [60.0, 90.0, 105.0])
def test_both_node_schedules_of_document_004_come_out_of_its_benchmark_tables(worth):
    """004, "Here is a possible schedule": the rates are those of GBS 512, as its authors took them (no bubble)."""
    one = schedule(WITHOUT_RECOMPUTATION + ON_32GB, (32, 64, 128), worth=worth)
    assert table(one) == [(8, 32, 1), (16, 64, 1), (32, 128, 1)] and restarts(one) == 2
    two = schedule(ON_16GB, (32, 64, 128, 256, 512), worth=worth)
    assert table(two) == [(16, 32, 1), (16, 64, 2), (16, 128, 4), (32, 256, 4), (64, 512, 4)] and restarts(two) == 4


def test_the_topology_of_document_004_is_the_fastest_row_and_of_equals_the_smallest_replica():
    """ "So the best throughput is with PP_SIZE=1, TP_SIZE=1" and with "PP_SIZE=2, MICRO_BATCH_SIZE=4"."""
    first, second = fastest(benchmarks(WITHOUT_RECOMPUTATION)), fastest(benchmarks(ON_16GB))
    assert {(b.tp, b.pp) for b in first} == {(1, 1)} and {(b.tp, b.pp) for b in second} == {(1, 2)}


def test_with_the_bubble_counted_one_microbatch_through_two_stages_takes_twice_as_long():
    """Narayanan et al. 2021: (m + p - 1) / m; the second schedule of 004 runs one microbatch on each of its rows."""
    row = benchmarks([(1, 2, 4, 4, 28)])[0]
    assert row.at(32, 8, fill=True) / row.at(32, 8, fill=False) == pytest.approx(2 * 32 / 33)
    counted = schedule(ON_16GB, (32, 64, 128, 256, 512), fill=True)
    assert all(step.choice.mbs == 1 for step in counted), "then a small microbatch fills the pipeline better"


def test_the_optimizer_finds_what_trying_everything_finds():
    phases = [Phase(gbs=b, iterations=1000, first=0) for b in (8, 16, 32)]
    ways = [
        [ScheduledTopology(tp=1, pp=1, dp=d, mbs=1, nodes=d, seconds=b / d + 0.1 * d) for d in (1, 2, 4, 8)]
        for b in (8, 16, 32)
    ]
    for worth, restart in itertools.product((0.0, 3.0, 30.0, 3000.0), (0.0, 500.0, 5000.0)):
        found = optimize(phases, ways, restart, worth)

        def cost(path, worth=worth, restart=restart):
            seconds = [1000 * c.seconds + restart * (i > 0 and c.job != path[i - 1].job) for i, c in enumerate(path)]
            return sum(s * (c.gpus / 3600 + worth / 86400) for s, c in zip(seconds, path, strict=True))

        best = min(itertools.product(*ways), key=cost)
        assert cost([s.choice for s in found]) == pytest.approx(cost(best), rel=1e-6)


def test_a_dear_restart_is_not_made_and_a_dear_day_takes_more_nodes():
    batches = (32, 64, 128, 256, 512)
    assert len({s.choice.nodes for s in schedule(ON_16GB, batches, samples=100_000)}) == 1
    fast, cheap = (schedule(ON_16GB, batches, worth=worth) for worth in (1e9, 0))
    assert days(fast) < days(cheap)
    assert gpu_hours(fast) > gpu_hours(cheap)


def test_each_change_of_the_job_pauses_for_a_restart():
    found = schedule(ON_16GB, (32, 64, 128, 256, 512))
    changed = [a.choice.job != b.choice.job for a, b in itertools.pairwise(found)]
    assert [step.pause_s for step in found] == [0.0, *(RESTART_S * change for change in changed)] and any(changed)


A100 = cluster("jz-a100-80g")
TOPOLOGY = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, zero=1, recompute="full", precision="fp16", attention="scores")
PLAN = Plan(label="p", shape=parse_shape("72,14336,64,2048,250880"), cluster=A100, topology=TOPOLOGY)
K = shipped.default(A100)


def test_the_predicted_ramp_is_the_measured_one_within_two_percent():
    """Prequel, 'Batchsize Warmup', 02-26: 78 x 13824, 96 heads, TP 4, PP 12, DP 8, MBS 2 (the fit saw them)."""
    shape = parse_shape("78,13824,96,2048,250880")
    with pytest.raises(ValueError, match="must divide the 78 layers"):
        Plan(label="p", shape=shape, cluster=A100, topology=TOPOLOGY)  # it ran 11 x 7 + 1 layers, uneven
    from trilane.costmodel.iteration import iteration_time

    for gbs, measured in ((512, 35.77), (1024, 59.65), (1536, 83.11), (2048, 107.12)):
        seconds = iteration_time(shape, Topology(**{**vars(TOPOLOGY), "gbs": gbs}), A100, K).total
        assert seconds == pytest.approx(measured, rel=0.02)


def test_gbs_16_gives_about_8_tflops_and_2048_about_150_and_192_fills_the_pipeline_first():
    """Prequel, 'main-1' (8 TFLOPs at GBS 16) and 'main-2' (100 at GBS 384, 150 at 2048)."""
    shape = parse_shape("70,14336,112,2048,250880")
    changes = {"precision": "bf16", "fp32_gradients": True, "partition": "type:transformer|embedding"}
    topology = Topology(**{**vars(TOPOLOGY), **changes})
    plan = Plan(label="p", shape=shape, cluster=A100, topology=topology, engine="deepspeed-3d")
    batches = (16, 384, 2048)
    tflops = [
        shape.flops_per_iteration(gbs, True) / options[0].seconds / 384 / 1e12
        for gbs, options in zip(batches, choices(plan, batches, 384, K, adapt=False), strict=True)
    ]
    assert tflops[0] == pytest.approx(8, abs=1) and tflops[2] == pytest.approx(150, rel=0.05)
    assert tflops[1] == pytest.approx(100, rel=0.15)
    assert first_full_gbs(topology) == 192, "the document's 12*2*4=384 takes DP 4 and is 96"


def test_fewer_gpus_than_the_plan_has_mean_fewer_replicas():
    """Prequel, 'Hardware': 144 GPUs at first."""
    phases = phases_of(parse_ramp("192,64,100000"), 2048, 1_000_000)
    found = schedule_on(PLAN, phases, 144, K, 1200.0)
    assert all(s.choice.gpus <= 144 and s.phase.gbs % (s.choice.mbs * s.choice.dp) == 0 for s in found)
    assert schedule_on(PLAN, phases, 40, K, 1200.0) is None, "no replica of 48 fits"
    whole = schedule_on(PLAN, phases, 384, K, 1200.0)
    assert {(s.choice.dp, s.choice.mbs) for s in whole} == {(8, 2)} and restarts(whole) == 0
    adapted = schedule_on(PLAN, phases, 384, K, 1200.0, adapt=True)
    assert days(adapted) <= days(whole)


def test_tp_and_pp_change_only_where_that_is_worth_cutting_the_checkpoint_anew():
    phases = phases_of(parse_ramp("16,16,9765625"), 2048, 20_000_000)
    kept, free, dear = (
        schedule_on(PLAN, phases, 384, K, 1200.0, adapt=True, reshape_s=seconds) for seconds in (None, 0.0, 1e9)
    )
    assert days(free) < days(kept) and days(free) < days(dear)
    assert len({(s.choice.tp, s.choice.pp) for s in free}) > 1 == len({s.choice.tp for s in kept})
    assert len({(s.choice.tp, s.choice.pp) for s in dear}) == 1


def test_phases_of_a_run_hold_its_samples():
    ramp = parse_ramp("16,16,1000")
    for samples in (10, 16, 500, 1000, 5000):
        phases = phases_of(ramp, 256, samples)
        assert sum(p.iterations for p in phases) == ramp.iterations(samples, 256)
        assert phases[-1].first + phases[-1].samples >= samples
        assert [p.first for p in phases] == [0, *itertools.accumulate(p.samples for p in phases[:-1])]


@pytest.mark.parametrize("samples", [10, 16, 17, 500, 501, 999])
def test_a_run_that_ends_inside_its_ramp_never_has_the_full_batch(samples):
    """Its last iteration takes a few samples more than are left, at the batch size of the ramp."""
    phases = phases_of(parse_ramp("16,16,1000"), 256, samples)
    assert all(p.gbs < 256 and p.iterations > 0 for p in phases)
    assert 0 <= sum(p.samples for p in phases) - samples < phases[-1].gbs


@pytest.mark.parametrize(("change", "pause"), [({}, 0), ({"dp": 2}, 600), ({"pp": 2}, 4200), ({"tp": 2}, 4200)])
def test_a_checkpoint_is_converted_where_tp_or_pp_changes(change, pause):
    """A restart of ten minutes, and an hour for the conversion."""
    one = {"tp": 1, "pp": 1, "dp": 1, "mbs": 1, "nodes": 1, "seconds": 1.0}
    phases = [Phase(gbs=8, iterations=10, first=0), Phase(gbs=16, iterations=10, first=80)]
    found = optimize(phases, [[ScheduledTopology(**way)] for way in (one, one | change)], 600, 0.0, 3600)
    assert [step.pause_s for step in found] == [0, pause]
