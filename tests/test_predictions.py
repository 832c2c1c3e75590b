"""Memory, time, calibration, search: laws that any planner must obey."""

import math

import pytest

from trilane import calibration
from trilane.hardware import cluster
from trilane.memory import memory_per_stage, stage_layers
from trilane.prediction import calibration_parts, predict
from trilane.search import search
from trilane.shape import parse_shape
from trilane.sizing import largest_within, planned_models, training_seconds
from trilane.timing import iteration_time
from trilane.topology import Topology

A100 = cluster("jz-a100-80g")
SHAPE = parse_shape("72,14336,64,2048,250880")
BF16 = {"precision": "bf16", "recompute": "full", "zero": 1}


def test_training_days_and_gpu_hours_are_those_of_the_chronicles():
    """Prequel, 'Train time estimation': 105.82 days; 'Allocated hours': 888888.89 compute hours."""
    assert training_seconds(200e9, 300e9, 350 * 150e12) / 86400 == pytest.approx(105.82, abs=0.005)
    assert training_seconds(200e9, 300e9, 150e12) / 3600 == pytest.approx(888_888.89, abs=0.005)


def test_the_planning_table_has_the_block_and_embedding_bytes_of_the_chronicles():
    """Prequel: 199B, TP 8: one block 308.30M / 5549.48 MB, embedding 269.26M / 4846.69 MB a GPU."""
    wide = next(m for m in planned_models() if m.origin.startswith("199B"))
    assert wide.block_bytes_per_gpu / 1e6 == pytest.approx(5549.48, abs=0.01)
    assert wide.embedding_bytes_per_gpu / 1e6 == pytest.approx(4846.69, abs=0.01)
    assert wide.replica_gpus == 80


def test_parts_sum_to_the_whole():
    topology = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, **BF16)
    prediction = predict(SHAPE, topology, A100, calibration.default(A100))
    assert prediction.sec_per_it == prediction.time.total
    assert prediction.sec_lo < prediction.sec_per_it < prediction.sec_hi
    assert prediction.memory_bytes == max(stage.total for stage in prediction.stages)


def test_layers_are_neither_lost_nor_invented_by_a_partition():
    for pp, partition in [(1, "uniform"), (12, "uniform"), (2, "type:transformer|embedding")]:
        assert sum(stage_layers(SHAPE, Topology(pp=pp, gbs=1, partition=partition))) == SHAPE.num_layers


def test_more_microbatches_shrink_the_share_of_the_bubble():
    """(p - 1) / m: Narayanan et al. 2021."""
    k = calibration.default(A100)
    shares = []
    for gbs in (64, 256, 1024):
        time = iteration_time(SHAPE, Topology(tp=8, pp=12, dp=4, mbs=1, gbs=gbs, **BF16), A100, k)
        shares.append(time.bubble / (time.matmul + time.overhead + time.tensor_parallel + time.pipeline_p2p))
    assert shares == pytest.approx([11 / 16, 11 / 64, 11 / 256])


def test_zero_shards_optimizer_then_gradients_then_weights():
    shape = parse_shape("24,2048,16,1024,50304")
    stages = [memory_per_stage(shape, Topology(dp=8, gbs=8, zero=zero, precision="bf16"), A100)[0] for zero in range(4)]
    assert stages[1].optimizer == stages[0].optimizer / 8
    assert stages[2].gradients == stages[1].gradients / 8
    assert stages[3].weights == stages[2].weights / 8


def test_calibration_recovers_the_factors_that_made_the_rows():
    """Rows made with known factors, from topologies that exercise every part."""
    truth = calibration.Calibration(matmul=1.6, overhead=2.0, communication=1.2)
    topologies = [
        Topology(tp=t, pp=p, dp=d, mbs=m, gbs=512, **BF16)
        for t, p, d, m in [(8, 12, 4, 1), (8, 6, 8, 2), (4, 12, 8, 1), (1, 12, 32, 1), (8, 12, 4, 8), (2, 12, 16, 2)]
    ]
    parts = [calibration_parts(SHAPE, t, A100) for t in topologies]
    seconds = [iteration_time(SHAPE, t, A100, truth).total for t in topologies]
    fitted = calibration.fit(parts, seconds, calibration.Calibration())
    after = [iteration_time(SHAPE, t, A100, fitted).total for t in topologies]
    assert max(abs(a / s - 1) for a, s in zip(after, seconds, strict=True)) < 0.02
    assert fitted.spread < calibration.Calibration().spread
    assert fitted.rows == 6


def test_one_wild_row_does_not_drag_the_others_along():
    topologies = [Topology(tp=8, pp=6, dp=8, mbs=m, gbs=2048, **BF16) for m in (1, 2, 4, 8)]
    parts = [calibration_parts(SHAPE, t, A100) for t in topologies]
    seconds = [1.5 * sum(p.values()) for p in parts]
    fitted = calibration.fit(parts, [*seconds[:3], 10 * seconds[3]], calibration.Calibration())
    after = [iteration_time(SHAPE, t, A100, fitted).total for t in topologies[:3]]
    assert max(abs(math.log(a / s)) for a, s in zip(after, seconds[:3], strict=True)) < 0.12


def test_search_ranks_what_can_run_and_gives_each_refused_topology_its_reason():
    found = search(
        SHAPE, A100, gpus=[384], gbs=2048, mbs=[1, 2, 4], calibration=calibration.default(A100), base=Topology(**BF16)
    )
    seconds = [c.prediction.sec_per_it for c in found.candidates]
    assert seconds == sorted(seconds) and seconds
    assert found.evaluated == len(found.candidates) + len(found.refused) == 216
    assert sum(found.refused_by_rule.values()) == len(found.refused)
    assert all(": " in reason for _, reason in found.refused)
    assert all(c.topology.tp <= 8 and 72 % c.topology.pp == 0 for c in found.candidates)
    lanes = [(c.topology.tp, c.topology.pp, c.topology.dp) for c in found.best_lanes(5)]
    assert len(set(lanes)) == 5


def test_the_largest_shape_that_is_fast_enough_is_chosen():
    shapes = [parse_shape(f"2,{h},2,64,384") for h in (64, 128, 256)]
    assert largest_within(shapes, [0.1, 0.2, 0.4], 0.3) == 1
    assert largest_within(shapes, [0.5, 0.6, 0.7], 0.3) == 0
