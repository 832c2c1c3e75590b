"""The first value that is not finite has a name: module, rank, microbatch, pass, precision."""

import json
from dataclasses import replace

import pytest
from plans import SHAPE, run_folder, small_plan

from trilane.workspace.run import NOT_FINITE, alarm

# The worker's program, with a fault in the second iteration: of the rank's `modules`, by their
# names in the model.
PROGRAM = """
from pathlib import Path
import torch
import parity
from trilane_engine.backends.megatron import Megatron
from trilane_engine.nonfinite import named

step, count = Megatron._step, []

def faulty(engine, microbatches):
    count.append(1)
    modules = {name: module for chunk in engine._chunks for name, module in named(chunk)}
    if len(count) == 2 and torch.distributed.get_rank() in RANKS:
        plant(modules, len(microbatches))
    return step(engine, microbatches)

def plant(modules, microbatches):
    FAULT

Megatron._step = faulty
parity.run_worker(1, Path(FOLDER))
"""
WEIGHT = 'modules["decoder.layers.1.mlp.linear_fc2"].weight.data.view(-1)[0] = float("nan")'
# in the second microbatch
OUTPUT = """calls = []
    def bad(module, _, out):
        calls.append(1)
        return (out[0] * float("inf"), *out[1:]) if len(calls) % microbatches == 2 % microbatches else out
    modules["decoder.layers.2.mlp"].register_forward_hook(bad)"""
# its values stay as they are
GRADIENT = """modules["decoder.layers.2.self_attention"].register_forward_hook(
        lambda module, _, out: ((out[0] * 0).sqrt() * 0 + out[0], *out[1:]))"""
LARGE = """modules["decoder.layers.1.mlp.linear_fc1"].weight.data.mul_(1e5)
    modules["decoder.layers.1.mlp.linear_fc2"].weight.data.mul_(100)"""
FC2, PROJ = "decoder.layers.1.mlp.linear_fc2", "decoder.layers.2.self_attention.linear_proj"
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FAULTS = {
    "a weight of a tensor rank": (
        *(WEIGHT, {1}, {"tp": 2}),
        f"NaN in {FC2}.weight on rank 1, torch.float32",
    ),
    "a value on the last of two stages": (
        *(OUTPUT, {2}, {"pp": 2, "dp": 2, "zero": 1, **OVERLAPS}),
        "Inf in the output of decoder.layers.2.mlp, forward pass of microbatch 1 on rank 2, torch.float32",
    ),
    "a gradient alone": (
        *(GRADIENT, {0}, {"recompute": "full"}),
        f"NaN in the gradient of the output of {PROJ}, backward pass on rank 0",
    ),
    "an overflow of fp16": (
        *(LARGE, {0, 1}, {"tp": 2, "precision": "fp16"}),
        ", torch.float16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_value_that_is_not_finite_is_named(name: str, fork, data, tmp_path):
    fault, ranks, topology, wanted = FAULTS[name]
    plan = small_plan(data, iters=3, source="mock", shape=replace(SHAPE, num_layers=4), **topology)
    folder = run_folder(plan, tmp_path / "run")
    program = PROGRAM.replace("FAULT", fault).replace("RANKS", str(ranks))
    (folder / "ask.py").write_text(program.replace("FOLDER", repr(str(folder))))
    fork(plan.topology.gpus, folder)
    lines = [line for line in (folder / "0.log").read_text().splitlines() if "NOT FINITE" in line]
    (line,) = (line.removeprefix("trilane: ") for line in lines)
    assert line.startswith("NOT FINITE since iteration 2: ") and wanted in line
    assert line in json.loads((folder / "status.json").read_text())["evidence"]
    assert line == alarm(folder, NOT_FINITE), "what `slurm status` shows while it runs"
