"""A trace beside a plan is of that plan alone."""

import json
from dataclasses import replace

import pytest

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.plan import Plan
from trilane.costmodel.trace import Trace, TracedStage, trace_file, trace_of, trace_text
from trilane.planning.search import search


def traced(plan: Plan) -> Trace:
    """One of round numbers: 10 GiB on the first stage, 1 less on each that follows."""
    sizes = {
        f"{kind}_bytes": 2.0**30
        for kind in ("weights", "gradients", "optimizer", "activations", "buffers")
    }
    sizes |= {"activations_each_bytes": 1.0, "temporary_bytes": 0.0, "flops": 1.0}
    stages = tuple(
        TracedStage(
            **{"stage": i, "rank": 0, "layers": 1, "peak_at": "backward"},
            **{"peak_bytes": (10 - i) * 2.0**30, "operations": 1234, "collectives": (), **sizes},
        )
        for i in (0, 1, plan.topology.pp - 1)
    )
    counts = {"gpus": plan.topology.gpus, "microbatches": 8, "traced_microbatches": 3}
    return Trace(plan=plan.id, engine=plan.engine, stages=stages, **counts)


def test_what_was_traced_stands_beside_the_plan_and_no_other_plan_takes_it(tmp_path):
    machine, shape = cluster("jz-a100-80g"), parse_shape("24,2048,16,2048,50304")
    found = search(shape, machine, gpus=64, gbs=128, pp=4, mbs=1)
    plan = found.rows[0].plan
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    assert trace_of(plan, path) is None
    trace = traced(plan)
    trace_file(plan, path).write_text(trace_text(trace))
    assert trace_of(plan, path) == trace
    other = replace(plan, topology=replace(plan.topology, gbs=256))
    assert trace_of(other, path) is None
    trace_file(plan, path).write_text('{"plan": 3}')
    with pytest.raises(ValueError, match=r"^trace\."):
        trace_of(plan, path)
