"""Why a plan takes what it takes, in sentences of its own prediction."""

from trilane.config.cluster import cluster
from trilane.config.engines import default_topology
from trilane.config.model import parse_shape
from trilane.config.plan import Plan
from trilane.costmodel.predict import predict
from trilane.planning.explain import explain

A100 = cluster("jz-a100-80g")
SMALL = parse_shape("24,2048,16,2048,50304")


def test_the_largest_part_and_the_fullest_stage_are_named():
    topology = default_topology(SMALL, A100, gbs=64, tp=2, pp=2, dp=4, mbs=2)
    plan = Plan(label="one", shape=SMALL, cluster=A100, topology=topology)
    p = predict(plan)
    time, memory, sure, support = explain(plan)
    parts = vars(p.time)
    first = max(parts, key=parts.__getitem__)
    share = parts[first] / p.sec_per_it
    assert time.startswith(f"Time: {first.replace('_', ' ')} {share:.0%}, ")
    assert f"{p.memory_bytes / 2**30:.1f} of 79.1 GiB on stage " in memory
    assert f"P(OOM) {p.oom_probability:.2f}" in sure and p.support.words in support
