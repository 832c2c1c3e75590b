"""Counts the parameters of the engine's model on every rank of every plan, in one process and
without memory.

Reads a JSON list of plans; prints a JSON list with, for each, the counts by pipeline stage and
tensor-parallel rank.
"""

import json
import sys

import torch
import torch.distributed as dist

from trilane.config.plan import Plan, plan_from_json
from trilane_engine.cpu import enable_cpu


def counts(plan: Plan) -> list[list[int]]:
    """sum(p.numel()) over the model chunks of each rank, [stage][tensor-parallel rank]."""
    t = plan.topology
    return [[on_rank(plan, stage * t.tp * t.dp + i) for i in range(t.tp)] for stage in range(t.pp)]


def on_rank(plan: Plan, rank: int) -> int:
    """The count on one rank: megatron-core believes in a world whose messages go nowhere."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trilane_engine.model.gpt import build_chunks, transformer_config

    t = plan.topology
    dist.init_process_group("fake", rank=rank, world_size=t.gpus, store=FakeStore())
    chunks = t.interleaving if t.interleaving > 1 else None
    parallel_state.initialize_model_parallel(
        t.tp, t.pp, virtual_pipeline_model_parallel_size=chunks, create_gloo_process_groups=False
    )
    with torch.device("meta"):
        built = build_chunks(plan, transformer_config(plan))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    assert all(p.is_meta for chunk in built for p in chunk.parameters())
    return sum(p.numel() for chunk in built for p in chunk.parameters())


if __name__ == "__main__":
    enable_cpu()
    from trilane_engine.model import gpt as model

    model.fill_parameters = lambda named, plan: (
        None
    )  # the initial state adds no parameter, and meta tensors hold none
    print(json.dumps([counts(plan_from_json(values)) for values in json.load(sys.stdin)]))
