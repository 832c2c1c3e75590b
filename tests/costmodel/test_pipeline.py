"""The drawn schedule keeps the laws of a pipeline, and ends when the prediction says."""

from itertools import pairwise

import numpy as np
import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.costmodel.pipeline import passes, pipeline_schedule
from trilane.planning.search import search

MACHINE, SHAPE = cluster("jz-a100-80g"), parse_shape("72,14336,64,2048,250880")
SMALL = parse_shape("24,2048,16,2048,50304")
EQUAL = [
    (2, 1, 1),
    (4, 8, 1),
    (12, 24, 1),
    (8, 8, 6),
]  # stages, microbatches, chunks
UNEQUAL = [
    ([1.0, 1.2, 0.4, 2.0], 8, 1),
    ([1.0, 1.1, 1.3, 0.9], 12, 3),
    ([0.5, 2.0], 6, 2),
]


def _end(stages, microbatches, chunks, forward=1 / 3):
    return max(p.end for p in passes(stages, microbatches, chunks, forward))


@pytest.mark.parametrize("stages, microbatches, chunks", UNEQUAL)
def test_a_stage_computes_every_pass_once_and_one_at_a_time(stages, microbatches, chunks):
    found = passes(stages, microbatches, chunks)
    for i, seconds in enumerate(stages):
        own = [p for p in found if p.stage == i]
        assert (
            len({(p.is_forward, p.microbatch, p.chunk) for p in own})
            == len(own)
            == 2 * microbatches * chunks
        )
        assert all(a.end <= b.start for a, b in pairwise(own)), "no overlap"
        assert sum(p.end - p.start for p in own) == pytest.approx(microbatches * seconds)


@pytest.mark.parametrize("stages, microbatches, chunks", UNEQUAL)
def test_no_pass_starts_before_what_it_needs(stages, microbatches, chunks):
    """Forward down the stages, chunk after chunk, and backward the same way back."""
    found = {
        (p.microbatch, p.is_forward, p.chunk, p.stage): p
        for p in passes(stages, microbatches, chunks)
    }
    for microbatch in range(microbatches):
        way = [(True, chunk, stage) for chunk in range(chunks) for stage in range(len(stages))]
        way += [(False, chunk, stage) for _, chunk, stage in reversed(way)]
        own = [found[microbatch, *place] for place in way]
        assert all(a.end <= b.start for a, b in pairwise(own))


@pytest.mark.parametrize("stages, microbatches, chunks", EQUAL)
def test_equal_stages_have_the_bubble_of_the_paper(stages, microbatches, chunks):
    """(p - 1) (t_f + t_b) / v: Narayanan et al. 2021, section 2.2."""
    expected = microbatches + (stages - 1) / chunks
    assert _end([1.0] * stages, microbatches, chunks) == pytest.approx(expected)
    assert _end([1.0] * stages, microbatches, chunks, 0.25) == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_first_stage_keeps_as_many_microbatches_as_its_memory_is_predicted_for(chunks):
    """memory.in_flight: p in 1F1B, 1 + (p - 1) / (p v) as much with v chunks (Korthikanti et al.
    2022, 4.2.3).
    """
    found = passes([1.0, 1.5, 0.8, 1.1], 16, chunks)
    held = np.cumsum([1 if p.is_forward else -1 for p in found if p.stage == 0])
    assert held.max() == (4 if chunks == 1 else 4 * chunks + 3) and held[-1] == 0


@pytest.mark.parametrize("shape, gpus, gbs", [(SHAPE, 384, 2048), (SMALL, (16, 32), 128)])
def test_the_schedules_of_a_search_end_at_the_predicted_time(shape, gpus, gbs):
    """Within 0.1 % of the iteration (0.01 % was seen), never later; with interleaving, pressure and
    odd partitions. With lighter stages on the ends the formula is slower, by 7 % where stages of 14 and 10 layers have two chunks each.
    """
    found = search(shape, MACHINE, gpus=gpus, gbs=gbs, mbs=(2, 4), top=300)
    for c in (*found.rows, *found.risky)[::8]:
        p, made = c.prediction, pipeline_schedule(c.topology, c.prediction)
        early = 1 - made.end / p.sec_per_it
        is_even = not (c.topology.first_stage_layers or c.topology.last_stage_layers)
        assert -1e-9 <= early <= (1e-3 if is_even else 0.1), c.label
        assert made.end == pytest.approx(
            made.pipeline_end + p.time.data_parallel + p.time.optimizer
        )
