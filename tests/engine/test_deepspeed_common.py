"""DeepSpeed's own Adam where every rank can have it, torch's where one cannot: no start dies of a missing compiler."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plans import small_plan

BUILD = """
import torch
from trilane.engine.backends import deepspeed_zero as start
class Card:
    def create_op_builder(self, name):
        print("tries", name, file=sys.__stdout__)
        return self
    def load(self):
        print("what DeepSpeed says meanwhile")
        if HERE:
            raise OSError(HERE + chr(10) + "and much more")
def gather(every, mine):
    every[:] = [mine, *OTHERS]
torch.cuda.is_available = lambda: True
start.get_accelerator = Card
start.dist.get_world_size = lambda: 1 + len(OTHERS)
start.dist.all_gather_object = gather
made = start.settings(plan)
print(made["optimizer"]["params"].get("torch_adam", False), made.get("zero_force_ds_cpu_optimizer", True))
"""
NOTE = "trilane: using torch's AdamW: 1 ranks cannot build DeepSpeed's, first rank"
CASES = [
    ("optimizer", "", ["", ""], "tries CPUAdamBuilder\nFalse True\n"),
    ("none", "no nvcc", [], f"tries FusedAdamBuilder\n{NOTE} 0: FusedAdamBuilder: OSError: no nvcc\nTrue False\n"),
    ("optimizer", "", ["", "no c++"], f"tries CPUAdamBuilder\n{NOTE} 2: no c++\nTrue False\n"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("offload", "here", "others", "output"), CASES, ids=["offload", "not here", "not there"])
def test_deepspeeds_adam_is_tried_and_all_ranks_take_the_same(
    offload: str, here: str, others: list[str], output: str, ask: Callable, data: Path
) -> None:
    plan = small_plan(data, engine="deepspeed-zero", zero=1, offload=offload)
    assert ask(plan, f"HERE, OTHERS = {here!r}, {others!r}\n{BUILD}") == output
