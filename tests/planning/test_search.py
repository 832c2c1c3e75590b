"""Search: nothing is lost, nothing impossible is ranked, and it is fast."""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from trilane.planning.search import MEMORY_RULE, search, search_space
from trilane.planning.search_result import ranks, sizes_of
from trilane.planning.space import Space

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)
SHAPE = parse_shape("72,14336,64,2048,250880")
SMALL = parse_shape("24,2048,16,2048,50304")
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
    assert [c.prediction.is_risky for c in (*found.rows, *found.risky)] == [
        *[False] * len(found.rows),
        *[True] * len(found.risky),
    ]
    asked = {"gpus": 384, "gbs": 2048, "mbs": [1, 2, 4], "calibration": K, **AS_THEN}
    apart = search(SHAPE, A100, distinct=True, **asked)
    assert len({*map(sizes_of, apart.best(5))}) == 5 and apart.best() == found[0]


def test_plain_loops_see_as_many_topologies_and_refuse_each_by_the_first_rule_that_it_breaks():
    """What decides for all batch sizes at once comes first, then the other rules, the engine's, and
    the memory.
    """
    shape, counts, engine = parse_shape("40,5120,40,2048,50304"), Counter(), "megatron"
    names = ("partition", "interleaving", "zero", "recompute")
    for tp, pp, cp in itertools.product((1, 2, 3, 4, 6, 12), repeat=3):
        if 12 % (tp * pp * cp):
            continue
        dp = 12 // tp // pp // cp
        layouts = []
        for partition, units in (("uniform", 40), ("type:transformer|embedding", 42)):
            each = units // pp if units % pp == 0 else 1
            chunks = [v for v in range(1, each + 1) if each % v == 0] if pp > 1 else [1]
            layouts += [(partition, v) for v in chunks]
        batches = [m for m in range(1, 25) if 24 % (dp * m) == 0]
        choices = (batches, layouts, (0, 1, 2), ("none", "full"))
        for mbs, layout, zero, recompute in itertools.product(*choices):
            given = dict(zip(names, (*layout, zero, recompute), strict=True))
            given |= {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "mbs": mbs, "gbs": 24}
            given |= {"precision": "bf16", "sequence_parallel": tp > 1}
            given["overlap_grad_reduce"] = dp * cp > 1
            given["overlap_param_gather"] = dp * cp > 1 and zero == 1
            t = SimpleNamespace(**vars(Topology()) | given, gpus=12, microbatches=24 // (mbs * dp))
            rules = itertools.chain(
                cluster_rules(t, A100),
                size_rules(t, shape),
                shape_rules(t, shape),
                Topology.rules(t),
                engine_rules(engine, shape, t),
            )
            broken = [f"{field}: {rule}" for holds, field, rule in rules if not holds]
            if not broken:
                case = Configuration(
                    shape=shape, topology=Topology(**given), cluster=A100, engine=engine
                )
                broken = [MEMORY_RULE if predict(case, K).oom_probability > 0.5 else "none"]
            counts[broken[0]] += 1
    pins = {"zero": (0, 1, 2), "recompute": ("none", "full")}
    pins |= {"first_stage_layers": (0,), "last_stage_layers": (0,)}
    found = search_space(shape, A100, Space(gpus=(12,), gbs=(24,), pins=pins), K)
    assert {**found.refused_by_rule, "none": found.runnable} == counts and len(counts) >= 6


PINS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "pp": (2, 4, 6, 12),
    "cp": (1, 2, 4),
    "mbs": (1, 2, 4),
    "zero": (0, 1),
    "recompute": ("none", "selective", "full", "block"),
    "recompute_layers": (1, 2, 3),
    "interleaving": (1, 2, 3, 8),
    "sequence_parallel": (False, True),
    "partition": ("uniform", "type:transformer|embedding"),
    "first_stage_layers": (0, 3, 7),
    "last_stage_layers": (0, 2, 5),
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "buckets": ("library",),
    "adam": ("torch",),
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
    assert found > 20


@pytest.mark.parametrize("host_s", [1e-4, 1e-2], ids=["bound by the GPU", "bound by the host"])
def test_the_vectorized_prediction_is_the_prediction_of_the_one_plan(host_s):
    """Ranked by arrays of many points at once, predicted one by one."""
    known = dataclasses.replace(K, host_s=host_s)
    pins = {
        "mbs": (1, 4),
        "interleaving": (1, 2),
        "pp": (1, 2),
        "offload": ("none", "optimizer", "full"),
        "recompute": ("none", "full"),
    }
    space = Space(gpus=(8,), gbs=(32,), pins=pins, engine="deepspeed-zero")
    found = search_space(SMALL, A100, space, known, top=10_000)
    plain = dataclasses.replace(space, pins={**pins, "offload": ("none",)}, engine="megatron")
    piped = search_space(SMALL, A100, plain, known, top=10_000)
    for result in (found, piped):
        assert len(result.rows) + len(result.risky) == result.runnable > 100
        for ranked in (result.rows, result.risky):
            assert np.all(np.diff([c.prediction.sec_per_it for c in ranked]) >= -1e-9)


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


@pytest.mark.parametrize(
    ("asked", "cure"),
    [
        ({"mbs": 8, "tp": 4, "pp": 12, "zero": 1, "recompute": "none"}, {"gpus": 384, "gbs": 2048}),
        ({"gpus": 36}, {"gpus": 72, "gbs": 2048}),
        ({"engine": "hf-zero3"}, {"gpus": 384, "gbs": 1920}),
    ],
)
def test_what_a_search_without_plans_names_would_run(asked, cure):
    asked = {"gpus": 384, "gbs": 2048, "calibration": K, **asked}
    found = search(SHAPE, A100, **asked)
    words = f"--gpus {cure['gpus']} --gbs {cure['gbs']} and no pins"
    assert not found.rows and found.cure.endswith(words)
    engine = asked.get("engine", "megatron")
    assert search(SHAPE, A100, **cure, engine=engine, calibration=K).rows
    with pytest.raises(ValueError, match=f"no topology can run; .*; what would run: {words}"):
        found.best(3)
