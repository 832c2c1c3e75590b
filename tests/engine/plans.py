"""Small plans for the engine's tests, and the folder that a run of one leaves."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from parity import LLAMA as LLAMA
from parity import OPTIMIZER, SHAPE
from support import small_cluster

from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Run

HERE = small_cluster()


def small_plan(
    data: Path,
    *,
    iters: int = 20,
    source: str = "stdlib",
    engine: str = "megatron",
    shape: ModelShape = SHAPE,
    **topology: Any,
) -> Plan:
    """A plan for a GPT of 4 x 64 over `source`, prepared in the folder `data`; the rest is the
    topology.
    """
    return Plan(
        label="small",
        engine=engine,
        shape=shape,
        cluster=HERE,
        topology=Topology(**{"mbs": 2, "gbs": 8, **topology}),
        data=Data(source=source, folder=str(data)),
        optimizer=OPTIMIZER,
        run=Run(train_iters=iters),
    )


def changed(plan: Plan, part: str, **fields: Any) -> Plan:
    """The plan with `fields` of its `part` replaced."""
    return dataclasses.replace(plan, **{part: dataclasses.replace(getattr(plan, part), **fields)})


def run_folder(plan: Plan, folder: Path) -> Path:
    """`folder`, made, with the plan in it."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    return folder


def steps(folder: Path) -> list[dict[str, Any]]:
    """The run's steps.jsonl."""
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def losses_and_norms(folder: Path) -> list[list[float]]:
    """[loss, gradient norm] of each line of the run's steps.jsonl."""
    return [[step["lm_loss"], step["grad_norm"]] for step in steps(folder)]


def evaluations(folder: Path) -> list[list[float]]:
    """[iteration, validation loss] of each line of the run's validation.jsonl."""
    lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    return [[line["iteration"], line["lm_loss"]] for line in lines]
