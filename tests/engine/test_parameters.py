"""The formula for a stage's parameters, which memory is predicted from, against the model that the
engine builds.
"""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from plans import HERE, small_plan

from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import expert_parameters, stage_parameters

EXPERTS = {"experts": 6, "top_k": 2, "expert_ffn": 352, "shared_ffn": 224, "shared_experts": 3}
EXPERTS |= {"first_dense": 3, "shared_gate": True, "biases": "qkv"}
EMBEDDING = "type:transformer|embedding"  # embedding and head count as a layer each
RMS = {"normalization": "rmsnorm", "positions": "rotary", "activation": "swiglu"}
# fields of the shape, of the topology. The sizes have no common factor but what tp asks for, so
# that no term can hide in another
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_layers": 14, "tied_embeddings": False}, {"partition": EMBEDDING, "pp": 4}),
    (
        {"num_layers": 16, "qk_layernorm": True, "activation": "xielu"},
        {"pp": 2, "interleaving": 2, "tp": 4},
    ),
    (
        {"num_layers": 12, "tied_embeddings": False},
        {"pp": 4, "interleaving": 2, "last_stage_layers": 6},
    ),
    ({**RMS, "biases": "none", "num_key_value_heads": 2, "ffn_hidden_size": 1216}, {"tp": 2}),
    ({**RMS, "biases": "qkv", "num_key_value_heads": 2, "kv_channels": 86}, {"pp": 2}),
    ({"positions": "alibi", "embedding_layernorm": True, "activation": "gelu-tanh"}, {"tp": 4}),
    ({**RMS, **EXPERTS}, {"pp": 2}),
    ({"positions": "none", "activation": "geglu", "num_key_value_heads": 1}, {"pp": 2}),
]


def plan_of(fields: dict[str, Any], topology: dict[str, Any]) -> Plan:
    sizes = {"num_layers": 4, "hidden_size": 1088, "num_attention_heads": 4, **fields}
    shape = ModelShape(seq_length=77, vocab_size=50260, **sizes)
    t = Topology(gbs=topology.get("pp", 1), **topology)
    return Plan(label="count", shape=shape, cluster=replace(HERE, max_nodes=2), topology=t)


PLANS = [plan_of(*case) for case in CASES]
# sum(p.numel()) of the model chunks of each rank, [stage][tensor-parallel rank], by one process
# that is each in turn, on the meta device
COUNT = """
import json
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from trilane.config.plan import plan_from_json
from trilane_engine.cpu import enable_cpu
from trilane_engine.model import gpt
from trilane_engine.patches import join_fake_group

enable_cpu()
gpt.fill_parameters = lambda named, plan: None  # it adds no parameter, and meta tensors hold none

def count(plan, rank):
    t = plan.topology
    join_fake_group(rank, t.gpus)
    chunks = t.interleaving if t.interleaving > 1 else None
    parallel_state.initialize_model_parallel(
        t.tp, t.pp, virtual_pipeline_model_parallel_size=chunks, create_gloo_process_groups=False
    )
    with torch.device("meta"):
        built = gpt.build_chunks(plan, gpt.transformer_config(plan))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return sum(p.numel() for chunk in built for p in chunk.parameters())

for values in json.loads(PLANS):
    plan = plan_from_json(values)
    tp = plan.topology.tp
    print(json.dumps([[count(plan, stage * tp + i) for i in range(tp)] for stage in range(plan.topology.pp)]))
"""


@pytest.mark.slow
def test_the_formula_counts_the_parameters_of_every_rank_exactly(ask, data):
    given = json.dumps([plan.to_json() for plan in PLANS])
    lines = ask(small_plan(data), f"PLANS = {given!r}\n{COUNT}", joined=False).splitlines()
    for plan, line in zip(PLANS, lines, strict=True):
        columns = columns_of(plan.shape, plan.topology)
        stages = []
        for stage in range(plan.topology.pp):
            own = stage_parameters(columns, stage) + expert_parameters(columns, stage)
            stages.append(float(own))
        assert json.loads(line) == [[stage] * plan.topology.tp for stage in stages], plan


def test_the_canonical_tensors_are_as_many_numbers_as_the_shape_counts():
    from trilane_engine.model.parameters import whole_sizes

    for plan in PLANS:
        sizes = whole_sizes(plan.shape).values()
        assert sum(map(math.prod, sizes)) == plan.shape.parameters, plan
