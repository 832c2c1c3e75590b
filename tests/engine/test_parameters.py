"""The formula for a stage's parameters, which memory is predicted from, against the model that the
engine builds.
"""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plans import HERE

from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import stage_parameters
from trilane.launch.local import environment

EMBEDDING = "type:transformer|embedding"
# 16 pipeline layers in both: embedding and head count as one each under type:transformer|embedding.
LAYERS = {"uniform": 16, EMBEDDING: 14}


def formula(shape: ModelShape, topology: Topology) -> list[float]:
    """The prediction's parameters of one GPU of each stage: the only line that knows its signature."""
    return [
        float(stage_parameters(columns_of(shape, topology), stage)) for stage in range(topology.pp)
    ]


RMS = {"normalization": "rmsnorm", "positions": "rotary"}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        **RMS,
        "activation": "swiglu",
        "biases": "none",
        "num_key_value_heads": 4,
        "ffn_hidden_size": 1216,
    },
    "qwen": {**RMS, "activation": "swiglu", "biases": "qkv", "num_key_value_heads": 2},
    "bloom": {"positions": "alibi", "embedding_layernorm": True, "activation": "gelu-tanh"},
    "shared": {
        "positions": "none",
        "activation": "geglu",
        "num_key_value_heads": 1,
        "tied_embeddings": False,
    },
    "nemotron": {
        "positions": "rotary",
        "activation": "squared-relu",
        "biases": "none",
        "ffn_hidden_size": 2176,
    },
    "opt": {"activation": "relu", "ffn_hidden_size": 1088, "biases": "qkv"},
}


def kind_of(name: str, tp: int, pp: int, **fields: Any) -> Plan:
    """A plan for a decoder of another kind than GPT-2."""
    small = plan("uniform", True, tp, pp, 1, 4)
    shape = dataclasses.replace(
        small.shape, **{"embedding_layernorm": False, "num_attention_heads": 8, **fields}
    )
    return dataclasses.replace(small, label=f"{name}-tp{tp}-pp{pp}", shape=shape)


def plan(
    partition: str,
    tied: bool,
    tp: int,
    pp: int,
    interleaving: int,
    layers: int,
    first: int = 0,
    last: int = 0,
) -> Plan:
    """A plan whose sizes have no common factor but what tp asks for, so that no term can hide in
    another.
    """
    sizes = {"num_layers": layers, "hidden_size": 1088, "num_attention_heads": 4}
    normed = layers < 14
    shape = ModelShape(
        **sizes, seq_length=77, vocab_size=50260, tied_embeddings=tied, embedding_layernorm=normed
    )
    own = {"first_stage_layers": first, "last_stage_layers": last}
    topology = Topology(tp=tp, pp=pp, gbs=pp, interleaving=interleaving, partition=partition, **own)
    cluster = dataclasses.replace(HERE, max_nodes=2)
    ends = "tied" if tied else "untied"
    label = f"{topology.label}-{partition.replace('|', '-')}-{ends}-L{layers}-{first}-{last}"
    return Plan(label=label, shape=shape, cluster=cluster, topology=topology)


PLANS = [
    *(
        plan(partition, tied, tp, pp, interleaving, layers)
        for (partition, layers), tied, tp in itertools.product(
            LAYERS.items(), (True, False), (1, 4)
        )
        for pp, interleaving in [(1, 1), (4, 1), (2, 2)]
    ),
    plan(EMBEDDING, True, 2, 4, 1, 2),  # the embedding and the head each have a stage to themselves
    # Stages with a number of their own, and with less than 14 layers a norm of the embedding.
    plan("uniform", True, 2, 2, 1, 16, first=5),
    plan("uniform", False, 1, 4, 2, 12, last=6),
    plan("uniform", True, 1, 4, 2, 12, first=2, last=2),
    plan("uniform", True, 1, 4, 1, 11, first=1, last=4),
    *(
        kind_of(name, tp, pp, **fields)
        for name, fields in KINDS.items()
        for tp, pp in ((1, 2), (4, 1))
    ),
]


@pytest.mark.slow
def test_the_formula_counts_the_parameters_of_every_rank_exactly() -> None:
    """sum(p.numel()) of the engine's GPTModel, on the meta device: one process is every rank in
    turn.
    """
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "count.py")]
    asked = json.dumps([p.to_json() for p in PLANS])
    done = subprocess.run(
        command, input=asked, env=environment(8), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip((p.label for p in PLANS), json.loads(done.stdout), strict=True))
    predicted = {
        p.label: [[stage] * p.topology.tp for stage in formula(p.shape, p.topology)] for p in PLANS
    }
    assert found == predicted


def test_the_canonical_tensors_are_as_many_numbers_as_the_shape_counts() -> None:
    from trilane_engine.model.parameters import whole_sizes

    for shape in {p.shape for p in PLANS}:
        assert sum(map(math.prod, whole_sizes(shape).values())) == shape.parameters, shape
