"""Sizing: every size and memory line that the documents print, and the way back from a size to shapes."""

import json
from dataclasses import replace

import pytest

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.config.model import ModelShape, padded_vocab_size, parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import shipped
from trilane.planning.published import planned_models, published_models, size_line, state_lines
from trilane.planning.shape_rules import broken_rules, softmax_note, usable_heads, wave_loss
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import propose, propose_shapes, survey
from trilane.utils.tables import Text

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)
ARGUMENTS = ["--params", "200e9", "--vocab", "250880", "--gpus", "384", "--cluster", "jz-a100-80g"]


@pytest.mark.parametrize("model", published_models(), ids=lambda m: f"{m.shape.num_layers}x{m.shape.hidden_size}")
def test_every_published_size_comes_out_as_printed(model):
    """Prequel, 'Size' (104B to 530B; 145B prints as 146B), 'Possible 200B models', and the headings of its tables."""
    assert round(model.shape.parameters / 1e9) == model.printed_b


@pytest.mark.parametrize(
    ("layers", "hidden", "vocab", "line"),
    [
        (80, 12288, 50257, "Model size: 146B, ratio=153"),
        (96, 16384, 50257, "Model size: 310B, ratio=170"),
        (105, 20480, 50257, "Model size: 530B, ratio=195"),  # the document repeats the line of 310B here
        (80, 14336, 150257, "Model size: 199B, ratio=179"),
        (96, 13312, 150257, "Model size: 206B, ratio=138"),
    ],
)
def test_the_size_lines_are_those_of_the_prequel(layers, hidden, vocab, line):
    assert size_line(parse_shape(f"{layers},{hidden},64,2048,{vocab}")) == line


@pytest.mark.parametrize(
    ("hidden", "vocab", "emb", "blk"),
    [
        (12288, 50257, ("617.56M", 11116.04, "77.19M", 1389.51), ("1812.10M", 32617.78, "226.51M", 4077.22)),
        (16384, 50257, ("823.41M", 14821.39, "102.93M", 1852.67), ("3221.44M", 57985.89, "402.68M", 7248.24)),
        (20480, 50257, ("1029.26M", 18526.74, "128.66M", 2315.84), ("5033.43M", 90601.76, "629.18M", 11325.22)),
        (14336, 150257, ("2154.08M", 38773.52, "269.26M", 4846.69), ("2466.44M", 44395.87, "308.30M", 5549.48)),
        (13312, 150257, ("2000.22M", 36003.98, "250.03M", 4500.50), ("2126.69M", 38280.33, "265.84M", 4785.04)),
    ],
)
def test_embedding_and_block_lines_are_those_of_the_prequel_in_the_right_unit(hidden, vocab, emb, blk):
    """Prequel, 'Existing models': "emb size: 617.56M/11116.04GB, per gpu 77.19M/1389.51GB" (its GB are MB)."""
    lines = state_lines(parse_shape(f"1,{hidden},64,2048,{vocab}"), tp=8)
    for line, (whole, whole_mb, each, each_mb) in zip(lines, (emb, blk), strict=True):
        assert line[4:] == f"size: {whole}/{whole_mb / 1e3:.2f}GB, per gpu {each}/{each_mb / 1e3:.2f}GB"


def test_a_gpu_of_104b_holds_953_million_parameters_with_the_embedding_and_807_without():
    """Prequel, '104B topology / memory usage': TP 4, PP 32, vocabulary 50257."""
    model = next(m for m in planned_models() if m.origin == "bs 104B")
    layers = model.layers_per_stage * model.shape.layer_parameters / model.tp
    assert (layers + model.shape.embedding_parameters / model.tp, layers) == (953_180_700, 807_435_400)


def test_a_head_size_that_is_no_multiple_of_eight_and_a_lost_softmax_are_named():
    """Prequel, 'NHEADs comparison': 128 heads of 13824 (108 channels); (HEADS/TP)*MBS % 4 = 0."""
    t = Topology(tp=8, pp=6, dp=8, mbs=4, gbs=2048, precision="fp16", recompute="full", attention="scores")
    assert any(
        note.startswith("head_dim=108") for note in broken_rules(parse_shape("78,13824,128,2048,250880"), t, A100)
    )
    assert softmax_note(parse_shape("72,14336,64,2048,250880"), t) == ""
    one = Topology(tp=8, pp=6, dp=8, mbs=1, gbs=2048, attention="scores")
    assert softmax_note(parse_shape("72,14336,56,2048,250880"), one).startswith("num_attention_heads=56")
    assert softmax_note(parse_shape("72,14336,64,8192,250880"), t).startswith("seq_length=8192")
    note = "tp=8: must divide num_attention_heads=108"
    assert broken_rules(parse_shape("78,13824,108,2048,250880"), t, A100)[0] == note


def test_tiles_waves_and_a_large_embedding_are_named():
    t = Topology(tp=8, pp=10, dp=4, mbs=1, gbs=2048, precision="fp16", recompute="full")
    notes = broken_rules(parse_shape("80,14400,96,2048,250880"), t, A100)
    assert any(note.startswith("hidden_size=14400") for note in notes), "14400 / 8 is no multiple of 128"
    assert any(note.startswith("partition=uniform") for note in notes), "250k rows are 1.4 layers"


def test_waves_that_fill_all_multiprocessors_lose_nothing():
    """NVIDIA, wave quantization: 27648 wide on TP 1 is 108 x 256, so 8 x 108 tiles of 256 x 128 for 1024 tokens."""
    whole = parse_shape("2,27648,216,1024,384")
    assert wave_loss(whole, Topology(gbs=1), A100) == pytest.approx(0, abs=1e-12)
    assert wave_loss(parse_shape("2,1024,8,256,384"), Topology(gbs=1), A100) > 0.5


def test_heads_are_multiples_of_eight_channels_nearest_to_128_first():
    assert usable_heads(14336, 8)[0] == 112
    assert all((13824 // a) % 8 == 0 and a % 8 == 0 and 64 <= 13824 // a <= 256 for a in usable_heads(13824, 8))


def test_shapes_of_a_target_lie_within_the_tolerance_and_the_published_ratios():
    request = SizeRequest(parameters=200e9, vocabulary=250_680, gpus=384, cluster=A100, calibration=K)
    shapes = request.shapes()
    assert len(shapes) > 20
    for shape in shapes:
        assert abs(shape.parameters / 200e9 - 1) <= 0.03
        assert shape.vocab_size == padded_vocab_size(250_680) == 250_752
        assert 98 < shape.hidden_size / shape.num_layers < 256
        assert shape.hidden_size % 128 == 0 and shape.head_dim % 8 == 0


def _shapes(size: float, **asked):
    H100 = cluster("dgx-h100")
    return SizeRequest(parameters=size, vocabulary=128_256, gpus=64, cluster=H100, seq_length=4096, **asked).shapes()


@pytest.mark.parametrize(
    ("size", "layers", "hidden", "heads", "ffn"), [(8.03e9, 32, 4096, 32, 14336), (70.55e9, 80, 8192, 64, 28672)]
)
def test_llama_3_is_among_the_shapes_like_llama_of_its_size(size, layers, hidden, heads, ffn, tmp_path):
    """arXiv:2407.21783, table 3; and the kind of a config.json is the same kind."""
    llama = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 128_256}
    llama |= {"seq_length": 4096, "num_key_value_heads": 8, "ffn_hidden_size": ffn, "tied_embeddings": False}
    llama |= {"activation": "swiglu", "normalization": "rmsnorm", "positions": "rotary", "biases": "none"}
    found = _shapes(size, like="llama")
    assert ModelShape(**llama) in found
    (tmp_path / "shape.json").write_text(json.dumps(llama))
    assert _shapes(size, like=str(tmp_path / "shape.json")) == found
    assert all(abs(shape.parameters / size - 1) <= 0.03 and shape.ffn % 128 == 0 for shape in found)


def test_few_heads_are_not_shared_and_bloom_has_its_positions_and_norm():
    """Eight heads have keys and values of their own, and then an MLP of 8/3 h: 1024 wide, 2816 (11 x 256)."""
    small = next(s for s in _shapes(0.5e9, like="llama", tolerance=0.2) if s.hidden_size == 1024)
    assert (small.num_attention_heads, small.num_key_value_heads, small.ffn) == (8, None, 2816)
    assert {s.kind for s in _shapes(8e9, like="bloom")} == {"alibi, embedding norm"}
    assert {s.kind for s in _shapes(8e9)} == {""}


def test_a_wide_mlp_is_whole_tiles_for_eight_gpus():
    """3.5 x 5120 = 17920 is 140 tiles, of which 8 GPUs do not get whole ones: 18432."""
    assert {s.ffn for s in _shapes(14e9, like="llama") if s.hidden_size == 5120} == {18432}


def test_a_proposal_has_as_many_shared_heads_as_its_shape():
    """More heads of fewer channels would have smaller keys and values: another size of model."""
    H100 = cluster("dgx-h100")
    request = SizeRequest(
        parameters=1.5e9, vocabulary=32_000, gpus=1, cluster=H100, gbs=64, like="llama", choices={"mbs": 1}
    )
    shapes = [s for s in request.shapes() if s.num_key_value_heads][:2]
    assert shapes and {p.shape for p in survey(request, shapes)[0]} == set(shapes)


def test_an_mlp_off_the_tiles_and_key_value_heads_fewer_than_ranks_are_named():
    shape = replace(parse_shape("32,4096,32,4096,128256"), activation="swiglu", num_key_value_heads=4)
    t = Topology(tp=8, gbs=8, precision="bf16", zero=1)
    notes = broken_rules(replace(shape, ffn_hidden_size=11008), t, A100)
    assert "ffn_hidden_size=11008: 11008 / tp 8 should be a multiple of the 128-wide tile" in notes
    assert "num_key_value_heads=4: should be a multiple of tp 8: GPUs use the same, and gather them" in notes
    even = broken_rules(replace(shape, ffn_hidden_size=14336, num_key_value_heads=8), t, A100)
    assert not [note for note in even if note.startswith(("ffn", "num_key"))]


def test_proposals_can_run_and_are_ranked_by_days_at_the_target_size():
    request = SizeRequest(
        parameters=20e9, vocabulary=50_257, gpus=32, cluster=A100, calibration=K, gbs=512, tokens=20e9, tolerance=0.02
    )
    found = propose(request)
    days = [p.days_at_target for p in found]
    assert days == sorted(days) and len(found) > 3
    best = found[0]
    assert best.topology.gpus == 32 and best.prediction.oom_probability <= 0.5
    assert best.gpu_hours == pytest.approx(best.days * 24 * 32)
    flops = best.shape.flops_per_iteration(512, best.topology.recompute == "full")
    assert best.tflops[0] * 1e12 * 32 * best.prediction.sec_per_it == pytest.approx(flops)


def test_the_command_answers_the_question_of_the_chronicles(capsys):
    """200B on 384 A100s: the prequel settled on 13 to 15 thousand wide, 70 to 106 layers, TP 4 or 8, PP 6 or 12."""
    assert (
        main(["plan", "size", *ARGUMENTS, "--attention", "scores", "--recompute", "full", "--top", "6", "--json"]) == 0
    )
    values = json.loads(capsys.readouterr().out)
    first = values["candidates"][0]
    assert first["cost_beside_best"] == 1 and len(values["candidates"]) == 6
    assert first["tflops_interval"][0] < first["tflops"] < first["tflops_interval"][1]
    assert 140 < first["tflops"] < 175 and 60 < first["days"] < 110 and first["topology"]["tp"] in (4, 8)
    assert first["gpu_hours"] == pytest.approx(first["days"] * 24 * 384)
    assert first["head_dim"] % 8 == 0 and first["states"][0].startswith("emb size: ")
    assert {m["line"] for m in values["published"]} >= {"Model size: 530B, ratio=195"}


def test_a_shape_that_may_run_out_of_memory_is_marked_and_comes_after_the_safe_ones():
    request = SizeRequest(parameters=33e9, vocabulary=50_257, gpus=8, cluster=A100, calibration=K)
    found = propose(request)
    risky = [p.prediction.oom_probability > 0.1 for p in found]
    assert any(risky) and risky == sorted(risky), "the safe ones first"
    for p, doubted in zip(found, risky, strict=True):
        warning = f"may run out of memory (P {100 * p.prediction.oom_probability:.0f} %)"
        assert (warning in p.notes) is doubted
    assert found[risky.index(True)].days_at_target < found[risky.index(True) - 1].days_at_target


def test_where_nothing_can_run_the_reason_is_given(capsys):
    large = dict(zip(ARGUMENTS[::2], ARGUMENTS[1::2], strict=True)) | {
        "--params": "1e12",
        "--gpus": "8",
        "--gbs": "64",
        "--tolerance": "0.003",
    }
    words = [word for pair in large.items() for word in pair]
    assert main(["plan", "size", *words]) == 1
    assert "topologies are refused: memory must fit the card" in capsys.readouterr().out
    assert main(["plan", "size", *words, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["candidates"] == [] and values["refused"]["memory must fit the card"] > 0
    request = SizeRequest(
        parameters=1e12, vocabulary=50_257, gpus=7, cluster=A100, calibration=K, gbs=64, tolerance=0.003
    )
    with pytest.raises(
        ValueError, match=r"^params=1e\+12: no shape can run on 7 GPUs of jz-a100-80g and a batch of 64; "
    ):
        propose(request)


def test_a_small_model_is_counted_in_millions(capsys):
    assert (
        main(["plan", "size", "--params", "20e6", "--vocab", "50257", "--gpus", "8", "--cluster", "jz-a100-80g"]) == 0
    )
    assert "20.5M ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--params 0", "params=0: must be a number above zero"),
        ("--params nan", "params=nan: must be a number above zero"),
        ("--params 1e18", "params=1e+18: must be at most 1e+14"),
        ("--params 1e8", "params=1e+08: at every usual width an embedding of 250880"),
        ("--vocab 0", "vocab=0: must be a whole number of at least 1"),
        ("--gpus 1000", "gpus=1000: jz-a100-80g has 416"),
        ("--cluster nowhere", "cluster=nowhere: known: a100-800gbps"),
        ("--tokens 100", "tokens=100.0: one iteration takes gbs x seq_length = 4194304"),
        ("--tolerance 0.9", "tolerance=0.9: must be below 0.5"),
        ("--like lama", "like=lama: did you mean llama? known: bloom, gpt2, llama"),
        ("--like none.json", "shape=none.json: no such file"),
        ("--top 0", "top=0: must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, given, message):
    options = dict(zip(ARGUMENTS[::2], ARGUMENTS[1::2], strict=True)) | dict([given.split()])
    assert main(["plan", "size", *(word for pair in options.items() for word in pair)]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("seq", "heads", "mbs", "fused"),
    [
        *((4096, 16, 1, True), (8192, 16, 1, False), (16, 16, 1, False), (20, 16, 1, True), (2046, 16, 1, False)),
        *((2048, 6, 1, False), (2048, 6, 2, True), (128, 12, 1, False), (128, 12, 2, True), (132, 12, 1, True)),
    ],
)
def test_the_fused_softmax_takes_what_megatrons_kernel_takes(seq, heads, mbs, fused):
    """megatron/core/fusions/fused_softmax.py, is_kernel_available: 16 < sk <= 4096, sk % 4 == 0, b x a % 4 == 0, 8 up
    to 128 keys."""
    shape = parse_shape(f"2,{heads * 64},{heads},{seq},384")
    assert (softmax_note(shape, Topology(mbs=mbs, gbs=mbs)) == "") is fused


def test_the_proposals_name_the_measured_runs_that_the_best_of_them_rests_on():
    asked = {"parameters": 7e9, "gpus": 8, "gbs": 512, "vocabulary": 32000, "tokens": 1e11, "like": "llama"}
    found = propose_shapes(cluster("dgx-h100"), **asked, choices={"cp": 2})
    words = found.best.prediction.support.words
    assert Text.of("The first of them: {}.", words) in found.support() and "Predicted only: cp=2" in found.support()
