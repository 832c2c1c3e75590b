"""What a trace counts can be derived by hand; the engine that it ran is the one that trains."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity import SHAPE
from plans import small_plan

from trilane.config.cluster import cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import stage_parameters
from trilane.costmodel.trace import Trace, trace_of
from trilane.utils.process import python
from trilane_engine.trace.__main__ import main

HALF: dict[str, Any] = {"precision": "bf16", "fp32_gradients": True}


def plan_of(
    folder: Path, engine: str = "megatron", shape: ModelShape = SHAPE, **topology: Any
) -> Plan:
    """A plan for A100s, which need not be here."""
    plan, machine = small_plan(folder, zero=1), replace(cluster("jz-a100-80g"), max_nodes=8192)
    chosen = Topology(**{"mbs": 2, "gbs": 64, **HALF, **topology})
    return replace(plan, cluster=machine, topology=chosen, shape=shape, engine=engine)


def trace_by_command(plan: Plan, folder: Path, *options: str) -> Trace:
    """The trace that the command leaves beside the plan."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    command = python(
        "-m", "trilane", "measure", "plan", str(path), "--trace", *options, program=sys.executable
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = trace_of(plan, path)
    assert found and ("--json" not in options or json.loads(done.stdout) == found.to_json())
    return found


def test_the_stages_of_a_pipeline(tmp_path):
    """4 stages of one layer, TP 2 with sequence parallelism, DP 2 with a distributed optimizer, 16
    microbatches.

    A layer gathers the sequence before its two column-parallel products and scatters it after its
    two row-parallel ones: forward 2 and 2, backward 2 and 2, and 2 more gather again what the
    products of the weights read. Korthikanti et al. 2022, section 4.2.2.
    """
    plan = plan_of(tmp_path, tp=2, pp=4, dp=2, zero=1, sequence_parallel=True)
    trace = trace_by_command(plan, tmp_path, "--json")
    assert [(stage.stage, stage.rank) for stage in trace.stages] == [(0, 0), (1, 4), (3, 12)]
    columns, s = columns_of(plan.shape, plan.topology, plan.engine), trace.stages[1]
    for stage in trace.stages:
        parameters = stage_parameters(columns, stage.stage)
        # buffers are padded to multiples of DP: 64 values a parameter at most
        assert stage.weights_bytes == pytest.approx(2 * parameters, rel=0.01)
        assert stage.gradients_bytes == pytest.approx(4 * parameters, rel=0.01)
        assert stage.optimizer_bytes == pytest.approx(12 * parameters / 2, rel=0.01)
        parts = ("weights", "gradients", "optimizer", "activations", "buffers", "temporary")
        assert sum(getattr(stage, f"{part}_bytes") for part in parts) == stage.peak_bytes
    microbatches = 16
    # bytes of bf16
    hidden = 2 * plan.shape.seq_length * plan.topology.mbs * plan.shape.hidden_size
    sent = {(c.kind, c.group): (c.count, c.bytes) for c in s.collectives}
    for kind, times in {"all-gather": 6, "reduce-scatter": 4}.items():
        assert sent[kind, "tp"] == (times * microbatches, times * microbatches * hidden)
    assert sent["send", "pp"] == sent["receive", "pp"] == (2 * microbatches, microbatches * hidden)
    # three microbatches in flight on the second stage of four
    assert s.activations_bytes == pytest.approx(3 * s.activations_each_bytes, rel=0.1)
    order = "".join(p.kind[0] for p in s.schedule)
    assert order == "ff" + "fb" * 3 + "bb" + "o"


def test_what_no_trace_can_run_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(plan_of(tmp_path, "deepspeed-zero", zero=2, offload="optimizer").to_json())
    )
    assert main([str(path)]) == 2
    found = capsys.readouterr().err
    assert (
        "offload=optimizer: its optimizer is compiled for the host" in found
        and found.count("\n") == 1
        and len(list(tmp_path.iterdir())) == 1
    )
