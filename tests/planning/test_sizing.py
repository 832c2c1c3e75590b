"""Sizing: every size and memory line that the documents print, and the way back from a size to
shapes.
"""

import json
from dataclasses import replace

import pytest
from support import REPOSITORY

from trilane.config.cluster import cluster
from trilane.config.model import ModelShape, parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import shipped
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import (
    broken_rules,
    propose_shapes,
    survey,
    survey_shapes,
)

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)
PUBLISHED = json.loads((REPOSITORY / "tests/planning/published.json").read_text())


def test_every_published_size_comes_out_as_printed():
    """Prequel, 'Size' (104B to 530B; 145B prints as 146B), 'Possible 200B models', and the headings
    of its tables.
    """
    for model in PUBLISHED["models"]:
        assert round(ModelShape(**model["shape"]).parameters / 1e9) == model["printed_b"]


T = Topology(
    tp=8, pp=6, dp=8, mbs=4, gbs=2048, precision="fp16", recompute="full", attention="scores"
)
GQA = replace(parse_shape("32,4096,32,4096,128256"), activation="swiglu", num_key_value_heads=4)
RULES = [  # a shape, how the topology differs, how the line begins
    (parse_shape("78,13824,128,2048,250880"), {}, "head_dim=108"),  # prequel, 'NHEADs comparison'
    (parse_shape("78,13824,108,2048,250880"), {}, "tp=8: must divide num_attention_heads"),
    (
        parse_shape("80,14400,96,2048,250880"),
        {},
        "hidden_size=14400: 14400 / tp 8 should be a multiple of the 128",
    ),
    (parse_shape("80,14400,96,2048,250880"), {}, "partition=uniform: the embedding is 1."),
    (
        replace(GQA, ffn_hidden_size=11008),
        {"pp": 1},
        "ffn_hidden_size=11008: 11008 / tp 8 should be a multiple of the",
    ),
    (
        replace(GQA, ffn_hidden_size=14336),
        {"pp": 1},
        "num_key_value_heads=4: should be a multiple of tp 8",
    ),
]


@pytest.mark.parametrize(("shape", "changes", "line"), RULES)
def test_each_rule_that_a_shape_breaks_is_named(shape, changes, line):
    assert any(note.startswith(line) for note in broken_rules(shape, replace(T, **changes)))


@pytest.mark.parametrize(
    ("size", "layers", "hidden", "heads", "ffn"),
    [(8.03e9, 32, 4096, 32, 14336), (70.55e9, 80, 8192, 64, 28672)],
)
def test_llama_3_is_among_the_shapes_like_llama_of_its_size(size, layers, hidden, heads, ffn):
    """arXiv:2407.21783, table 3."""
    llama = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": 128_256,
    }
    llama |= {
        "seq_length": 4096,
        "num_key_value_heads": 8,
        "ffn_hidden_size": ffn,
        "tied_embeddings": False,
    }
    llama |= {
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "positions": "rotary",
        "biases": "none",
    }
    asked = {"gpus": 64, "cluster": cluster("dgx-h100"), "seq_length": 4096, "like": "llama"}
    found = SizeRequest(parameters=size, vocabulary=128_256, **asked).shapes()
    assert ModelShape(**llama) in found
    assert all(abs(shape.parameters / size - 1) <= 0.03 and shape.ffn % 128 == 0 for shape in found)


def test_a_shape_that_may_run_out_of_memory_is_marked_and_comes_after_the_safe_ones():
    request = SizeRequest(parameters=33e9, vocabulary=50_257, gpus=8, cluster=A100, calibration=K)
    found = survey(request).rows
    risky = [p.prediction.oom_probability > 0.01 for p in found]
    assert any(risky) and risky == sorted(risky), "the safe ones first"
    assert found[risky.index(True)].cost < found[risky.index(True) - 1].cost


def test_where_nothing_can_run_the_reason_is_given():
    asked = {"parameters": 1e12, "vocabulary": 50_257, "gpus": 7, "gbs": 64, "tolerance": 0.003}
    with pytest.raises(
        ValueError,
        match=r"^params=1e\+12: no shape can run on 7 GPUs of jz-a100-80g and a batch of 64; ",
    ):
        propose_shapes(A100, **asked)


def test_of_this_machines_shapes_the_largest_in_time_is_chosen_else_the_fastest():
    asked = {"gbs": 8, "seq_length": 128, "vocabulary": 257, "head_dim": 32}
    rows = survey_shapes(A100, seconds=1.0, **asked).rows
    seconds = sorted(row.prediction.sec_per_it for row in rows)
    limit = seconds[len(seconds) // 2]
    able = [c.plan.shape.parameters for c in rows if c.prediction.sec_per_it <= limit]
    assert survey_shapes(A100, seconds=limit, **asked).best.plan.shape.parameters == max(able)
    fastest = survey_shapes(A100, seconds=seconds[0] / 2, **asked).best
    assert fastest.prediction.sec_per_it == seconds[0]
