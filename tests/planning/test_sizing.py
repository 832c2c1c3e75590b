"""Sizing: every size and memory line that the documents print, and the way back from a size to
shapes.
"""

import json
from dataclasses import replace

import pytest
from recorded import compare

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import ModelShape, parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import shipped
from trilane.planning.published import sizes
from trilane.planning.size_request import SizeRequest, usable_heads
from trilane.planning.sizing import broken_rules, propose_shapes, survey, survey_shapes
from trilane.utils.numbers import with_bounds
from trilane.utils.tables import Text

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)


def test_every_published_size_comes_out_as_printed():
    """Prequel, 'Size' (104B to 530B; 145B prints as 146B), 'Possible 200B models', and the headings
    of its tables.
    """
    table = sizes().columns
    assert [round(size) for size in table["by formula (B)"]] == table["printed (B)"] and len(
        table["origin"]
    ) == 20


@pytest.mark.parametrize(
    ("shape", "embedding", "layer"),
    [
        ("80,12288,96,2048,50257", 617.56, 1812.10),
        ("96,16384,128,2048,50257", 823.41, 3221.44),
        ("105,20480,128,2048,50257", 1029.26, 5033.43),
        ("80,14336,64,2048,150257", 2154.08, 2466.44),
        ("96,13312,64,2048,150257", 2000.22, 2126.69),
    ],
)
def test_embedding_and_layer_have_the_parameters_that_the_prequel_prints(shape, embedding, layer):
    """'Existing models' and 'Possible 200B models', in millions."""
    s = parse_shape(shape)
    found = s.embedding_parameters / 1e6, s.layer_parameters / 1e6
    assert found == pytest.approx((embedding, layer), abs=0.005)


def test_a_gpu_of_104b_holds_953_million_parameters_with_the_embedding_and_807_without():
    """Prequel, '104B topology / memory usage': TP 4, PP 32, vocabulary 50257."""
    s = parse_shape("64,11600,80,2048,50257")
    layers = s.num_layers / 32 * s.layer_parameters / 4
    assert (layers + s.embedding_parameters / 4, layers) == (953_180_700, 807_435_400)


T = Topology(
    tp=8, pp=6, dp=8, mbs=4, gbs=2048, precision="fp16", recompute="full", attention="scores"
)
GQA = replace(parse_shape("32,4096,32,4096,128256"), activation="swiglu", num_key_value_heads=4)
RULES = [  # a shape, how the topology differs, how the line begins
    (parse_shape("78,13824,128,2048,250880"), {}, "head_dim=108"),  # prequel, 'NHEADs comparison'
    (parse_shape("78,13824,108,2048,250880"), {}, "tp=8: must divide num_attention_heads=108"),
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


def test_good_heads_have_nearly_128_channels():
    assert usable_heads(14336, 8) == [112, 128, 224, 64, 56] and usable_heads(2040, 1) == [15, 17]


def _shapes(size: float, **asked):
    H100 = cluster("dgx-h100")
    return SizeRequest(
        parameters=size, vocabulary=128_256, gpus=64, cluster=H100, seq_length=4096, **asked
    ).shapes()


@pytest.mark.parametrize(
    ("size", "layers", "hidden", "heads", "ffn"),
    [(8.03e9, 32, 4096, 32, 14336), (70.55e9, 80, 8192, 64, 28672)],
)
def test_llama_3_is_among_the_shapes_like_llama_of_its_size(
    size, layers, hidden, heads, ffn, tmp_path
):
    """arXiv:2407.21783, table 3; and the kind of a config.json is the same kind."""
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
    found = _shapes(size, like="llama")
    assert ModelShape(**llama) in found
    (tmp_path / "shape.json").write_text(json.dumps(llama))
    assert _shapes(size, like=str(tmp_path / "shape.json")) == found
    assert all(abs(shape.parameters / size - 1) <= 0.03 and shape.ffn % 128 == 0 for shape in found)
    (tmp_path / "shape.json").write_text(
        json.dumps(vars(parse_shape("24,2048,16,4096,50304")))
    )  # no width of its own
    assert _shapes(size, like=str(tmp_path / "shape.json")) == _shapes(size, like="gpt2")


def test_a_proposal_has_as_many_shared_heads_as_its_shape():
    """More heads of fewer channels would have smaller keys and values: another size of model."""
    H100 = cluster("dgx-h100")
    request = SizeRequest(
        parameters=1.5e9,
        vocabulary=32_000,
        gpus=1,
        cluster=H100,
        gbs=64,
        like="llama",
        choices={"mbs": 1},
    )
    shapes = [s for s in request.shapes() if s.num_key_value_heads][:2]
    assert shapes and {p.shape for p in survey(request, shapes).rows} == set(shapes)


def test_a_shape_that_may_run_out_of_memory_is_marked_and_comes_after_the_safe_ones():
    request = SizeRequest(parameters=33e9, vocabulary=50_257, gpus=8, cluster=A100, calibration=K)
    found = survey(request).rows
    risky = [p.prediction.oom_probability > 0.1 for p in found]
    assert any(risky) and risky == sorted(risky), "the safe ones first"
    for p, doubted in zip(found, risky, strict=True):
        warning = f"may run out of memory (P {100 * p.prediction.oom_probability:.0f} %)"
        assert (warning in p.notes) is doubted
    assert found[risky.index(True)].cost < found[risky.index(True) - 1].cost


def test_where_nothing_can_run_the_reason_is_given(capsys):
    words = "--params 1e12 --vocab 50257 --gpus 8 --cluster jz-a100-80g --gbs 64 --tolerance 0.003 --json"
    assert main(["plan", "size", *words.split(" ")]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["candidates"] == [] and values["refused"]["memory must fit the card"] > 0
    asked = {"parameters": 1e12, "vocabulary": 50_257, "gpus": 7, "gbs": 64, "tolerance": 0.003}
    with pytest.raises(
        ValueError,
        match=r"^params=1e\+12: no shape can run on 7 GPUs of jz-a100-80g and a batch of 64; ",
    ):
        propose_shapes(A100, **asked)


def test_the_proposals_name_the_measured_runs_that_the_best_of_them_rests_on():
    asked = {
        "parameters": 7e9,
        "gpus": 8,
        "gbs": 512,
        "vocabulary": 32000,
        "tokens": 1e11,
        "like": "llama",
    }
    found = propose_shapes(cluster("dgx-h100"), **asked, choices={"precision": "fp8"})
    words = found.best.prediction.support.words
    assert Text.of("The first of them: {}.", words) in found.support()
    assert "Predicted only: precision=fp8" in found.support()


def test_the_finding_has_the_days_of_the_best_shape_with_their_interval_and_the_page_and_shell_one_table():
    found = propose_shapes(
        A100, parameters=7e9, gpus=64, gbs=512, vocabulary=32_000, tokens=1.4e11, calibration=K
    )
    p = found.best
    days = with_bounds(
        *(
            p.days * s / p.prediction.sec_per_it
            for s in (p.prediction.sec_per_it, p.prediction.sec_lo)
        ),
        p.days * p.prediction.sec_hi / p.prediction.sec_per_it,
    )
    assert (
        Text.of("**{} days**", days) in found.finding()
        and days in found._repr_html_()
        and days in found.to_text()
    )


@pytest.mark.parametrize("fastest", [True, False])
def test_of_this_machines_shapes_the_largest_in_time_is_chosen_else_the_fastest(fastest):
    asked = {"gbs": 8, "seq_length": 128, "vocabulary": 257, "head_dim": 32}
    times = [c.prediction.sec_per_it for c in survey_shapes(A100, seconds=1.0, **asked).rows]
    limit = min(times) / 2 if fastest else sorted(times)[len(times) // 2]
    found = survey_shapes(A100, seconds=limit, **asked)
    able = [c.plan.shape.parameters for c, s in zip(found.rows, times, strict=True) if s <= limit]
    assert (
        found.best.plan.shape.parameters == max(able)
        if able
        else found.best.prediction.sec_per_it == min(times)
    )
    assert found.summary().startswith(
        "The fastest shape; none is under" if fastest else "The largest shape under"
    )


def test_shapes_and_proposals_of_several_sizes_and_kinds_are_those_that_were_recorded():
    found = {}
    for like in ("gpt2", "bloom", "llama"):
        for size in (1e8, 1.3e9, 7e9, 19.9e9, 20e9, 70e9):
            request = SizeRequest(
                parameters=size, gpus=8, cluster=A100, like=like, gbs=8, tolerance=0.01
            )
            shapes = [
                (s.num_layers, s.hidden_size, s.num_attention_heads, s.kv_heads, s.ffn)
                for s in request.shapes()
            ]
            found[f"{like} {size:g}"] = {
                "widths": request.widths(),
                "shapes": shapes,
                "asked": request.to_json(),
            }
    asked = {
        "cluster": A100,
        "gpus": 16,
        "gbs": 64,
        "engine": "any",
        "tokens": "1.5e10",
        "tolerance": 0.02,
    }
    for like, size, attention in (
        ("gpt2", 9e9, "scores"),
        ("llama", 3e9, "fused"),
        ("bloom", 3.3e10, "fused"),
    ):
        choices = {"zero": (1, 3), "attention": attention}
        proposals = propose_shapes(parameters=size, like=like, choices=choices, **asked)
        found[f"{like}, proposed"] = json.loads(proposals.to_frame().to_json(orient="index"))
        found[f"{like}, as JSON"] = proposals.to_json(1)
        assert proposals.best is proposals.rows[0]
    compare("proposals", found)
