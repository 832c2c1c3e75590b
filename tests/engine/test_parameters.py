"""The planner's parameters are those of the engine's model, on every rank, to the last one."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from trilane.columns import columns_of
from trilane.engine import model
from trilane.hardware import cluster
from trilane.memory import stage_parameters
from trilane.plan import Plan
from trilane.shape import ModelShape
from trilane.topology import Topology

PLANS = [
    (1, 1, "uniform"),
    (2, 1, "uniform"),
    (4, 1, "uniform"),
    (1, 4, "uniform"),
    (2, 2, "uniform"),
    (4, 4, "uniform"),
]
PLANS += [(tp, 2, "type:transformer|embedding") for tp in (1, 2, 4)] + [(2, 5, "type:transformer|embedding")]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("tp", "pp", "partition"), PLANS)
def test_every_rank_holds_as_many_parameters_as_the_formula_says(monkeypatch, tp, pp, partition, tied):
    """Built on torch's meta device, where a tensor has a shape and no bytes; each rank in turn, nobody to talk to."""
    monkeypatch.setattr(model, "fill", lambda *_: None)
    monkeypatch.setattr(GPTModel, "setup_embeddings_and_output_layer", lambda _: None)  # it only shares values
    shape = ModelShape(
        num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=384, tied_embeddings=tied
    )
    topology = Topology(tp=tp, pp=pp, gbs=pp, partition=partition)
    plan = Plan(label="count", shape=shape, cluster=cluster("jz-a100-80g"), topology=topology)
    expected = [int(stage_parameters(columns_of(shape, topology), stage)) for stage in range(pp)]
    for rank in range(tp * pp):
        dist.init_process_group("fake", rank=rank, world_size=tp * pp, store=FakeStore())
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        try:
            with torch.device("meta"):
                chunk = model.build_chunk(plan, model.config(plan), None)
            assert sum(p.numel() for p in chunk.parameters()) == expected[rank // tp], f"rank {rank}"
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
