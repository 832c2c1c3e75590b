"""Search: nothing is lost, nothing impossible is ranked, and it is fast."""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trilane.config.cluster import cluster
from trilane.config.engines import engine_rules
from trilane.config.model import parse_shape
from trilane.config.parallelism import (
    Topology,
    cluster_rules,
    invalid_reason,
    shape_rules,
    size_rules,
)
from trilane.costmodel import shipped
from trilane.costmodel.calibration import Configuration
from trilane.costmodel.predict import predict
from trilane.planning.search import MEMORY_RULE, search
from trilane.planning.search_result import ranks
from trilane.planning.space import VARIED, space_for

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)
SHAPE = parse_shape("72,14336,64,2048,250880")
AS_THEN = {
    "precision": "fp16",
    "recompute": "full",
    "zero": 1,
    "attention": "scores",
    "partition": "uniform",
}
AS_THEN |= {"sequence_parallel": False, "interleaving": 1}


def test_search_ranks_what_can_run_and_counts_the_rest_by_rule():
    asked = {"gpus": [384], "gbs": 2048, "mbs": [1, 2, 4], "calibration": K, "top": 1000}
    found = search(SHAPE, A100, **asked, **AS_THEN)
    seconds = [c.prediction.sec_per_it for c in found.rows]
    assert seconds == sorted(seconds) and len(seconds) + len(found.risky) == found.runnable > 0
    assert found.evaluated == found.runnable + sum(found.refused_by_rule.values())
    assert all(invalid_reason(SHAPE, c.topology) is None for c in found.rows)
    assert all(c.prediction.oom_probability <= 0.01 for c in found.rows)
    assert all(0.01 < c.prediction.oom_probability <= 0.5 for c in found.risky)
    apart = search(SHAPE, A100, distinct=True, **asked, **AS_THEN)
    assert len({row.lane for row in apart.best(5)}) == 5 and apart.best() == found[0]


def test_plain_loops_refuse_each_topology_by_the_first_rule_that_it_breaks():
    """Rules of arrays are those of one topology: the cluster's, the model's, a topology's own, the
    engine's, and the memory.
    """
    shape, counts, engine = parse_shape("40,5120,40,2048,50304"), Counter(), "megatron"
    pins = {"zero": (0, 1, 2), "recompute": ("none", "full"), "mbs": (1, 2, 3)}
    pins |= {"sequence_parallel": (False, True), "last_stage_layers": (0, 2)}
    pins["shards"] = (0, 2)
    space = space_for(shape, A100, gpus=12, gbs=24, **pins)
    for tp, pp, dp, cp, *_, shards in space.sizes():
        rows = space.points(shape, pp, tp > 1, dp * cp > 1).rows
        for row, mbs in itertools.product(rows, space.batches(dp)):
            given = dict(zip(VARIED, row, strict=True)) | {"mbs": int(mbs), "gbs": 24}
            given |= {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "shards": shards}
            micro = 24 // (int(mbs) * dp)
            t = SimpleNamespace(**vars(space.fixed) | given, gpus=12, microbatches=micro)
            rules = itertools.chain(
                cluster_rules(t, A100),
                size_rules(t, shape),
                shape_rules(t, shape),
                Topology.rules(t),
                engine_rules(engine, shape, t),
            )
            broken = [f"{field}: {rule}" for holds, field, rule in rules if not holds]
            if not broken:
                chosen = dataclasses.replace(space.fixed, **given)
                case = Configuration(shape=shape, topology=chosen, cluster=A100, engine=engine)
                broken = [MEMORY_RULE if predict(case, K).oom_probability > 0.5 else "none"]
            counts[broken[0]] += 1
    found = search(shape, A100, gpus=12, gbs=24, calibration=K, **pins)
    assert {**found.refused_by_rule, "none": found.runnable} == counts and len(counts) >= 6


PINS: dict[str, tuple[Any, ...]] = {
    "pp": (4, 12),
    "cp": (1, 4),
    "zero": (0,),
    "recompute": ("none", "selective", "full", "block"),
    "recompute_layers": (1, 2, 3),
    "interleaving": (3, 8),
    "sequence_parallel": (False,),
    "partition": ("uniform", "type:transformer|embedding"),
    "first_stage_layers": (0, 3, 7),
    "last_stage_layers": (0, 2, 5),
    "overlap_grad_reduce": (False,),
    "adam": ("torch",),
    "shards": (2, 8, 32),
}


@pytest.mark.parametrize(
    ("shape", "machine", "gpus", "gbs"),
    [
        ("48,6144,48,2048,250880", "jz-a100-80g", 96, 512),
        ("126,16384,128,8192,128256", "eos-h100", 2048, 512),
        ("32,4096,32,8192,32000", "jz-v100-32g", 64, 256),
    ],
)
def test_no_pin_finds_what_the_free_search_misses(shape, machine, gpus, gbs):
    asked = {"gpus": gpus, "gbs": gbs, "top": 1}
    best = search(shape, machine, **asked).best().prediction.sec_per_it
    found = 0
    for name, values in PINS.items():
        for value in values:
            rows: Sequence[Any] = ()
            with contextlib.suppress(ValueError):  # no such sizes
                rows = search(shape, machine, **asked, **{name: value}).rows
            found += len(rows)
            assert not rows or rows[0].prediction.sec_per_it >= best * (1 - 1e-9), (name, value)
    assert found > 12


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ([92.39, 92.57, 100.0], [1, 1, 3]),
        ([100.0, 102.0, 104.0, 105.0, 120.0], [1, 1, 3, 3, 5]),
        ([], []),
    ],
)
def test_plans_that_differ_by_less_than_can_be_predicted_share_a_rank(seconds, shown):
    assert ranks(seconds) == shown
