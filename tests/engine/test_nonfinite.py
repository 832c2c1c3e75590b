"""A run reports when its values are no longer finite."""

import json
from dataclasses import replace

import pytest
from plans import run_folder, small_plan

from trilane.launch.outcome import judge
from trilane.workspace.run import NOT_FINITE, alarm, iteration
from trilane.workspace.status import known_status

# The worker's program, with a fault in the second iteration on the last rank.
PROGRAM = """
from pathlib import Path
import torch
import parity
from trilane_engine.backends.base import Engine

step, count = Engine.step, []

def faulty(engine, microbatches, lr):
    count.append(1)
    if len(count) == 2 and torch.distributed.get_rank() == 1:
        next(engine.modules[0].parameters()).data.view(-1)[0] = float("nan")
    return step(engine, microbatches, lr)

Engine.step = faulty
if parity.run_worker(1, Path(FOLDER)):
    raise SystemExit(1)
"""
# DeepSpeed gives inf for both
ENGINES = {"megatron": ({"tp": 2}, "nan"), "deepspeed-zero": ({"dp": 2, "zero": 1}, "inf")}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_iteration_that_is_not_finite_is_reported(engine: str, fork, data, tmp_path):
    topology, norm = ENGINES[engine]
    plan = small_plan(data, engine=engine, iters=3, source="mock", **topology)
    folder = run_folder(plan, tmp_path / "run")
    (folder / "ask.py").write_text(PROGRAM.replace("FOLDER", repr(str(folder))))
    fork(plan.topology.gpus, folder)
    lines = [line for line in (folder / "0.log").read_text().splitlines() if "NOT FINITE" in line]
    (line,) = (line.removeprefix("trilane: ") for line in lines)
    assert line == "NOT FINITE since iteration 2: the gradient norm is " + norm
    assert line in json.loads((folder / "status.json").read_text())["evidence"]
    assert line == alarm(folder, NOT_FINITE), "what `slurm status` shows while it runs"


@pytest.mark.slow
def test_a_run_whose_weights_are_lost_ends_and_saves_no_more(fork, data, tmp_path):
    plan = small_plan(data, engine="megatron", iters=30, source="mock", tp=2)
    plan = replace(plan, run=replace(plan.run, save_interval=11))
    folder = run_folder(plan, tmp_path / "run")
    (folder / "ask.py").write_text(PROGRAM.replace("FOLDER", repr(str(folder))))
    fork(2, folder, 1)
    status = known_status(folder)
    assert (status.status, iteration(folder)) == ("NaN loss", 11)
    assert not list((folder / "checkpoints").glob("iter_*"))
    assert judge(folder, 1).status == "NaN loss"
