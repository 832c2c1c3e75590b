"""One plan by hand: the sentence says what is predicted, or which rule forbids it."""

from ipywidgets import Widget

from trilane import calibration
from trilane.explore import sentence, widgets
from trilane.hardware import cluster
from trilane.shape import parse_shape
from trilane.topology import Topology

SHAPE, MACHINE = parse_shape("72,14336,64,2048,250880"), cluster("jz-a100-80g")
KNOWN = calibration.default(MACHINE)


def test_a_plan_that_can_be_is_a_sentence_with_its_figures():
    said = sentence(
        SHAPE, MACHINE, KNOWN, tp=4, pp=12, dp=8, mbs=2, gbs=2048, zero=1, precision="bf16", recompute="full"
    )
    assert "on 384 GPUs" in said and " s** an iteration" in said and "GiB**" in said


def test_a_plan_that_cannot_be_names_the_rule():
    assert sentence(SHAPE, MACHINE, KNOWN, tp=3, gbs=1) == "**refused**: tp=3: must divide num_attention_heads=64"
    assert sentence(SHAPE, MACHINE, KNOWN, mbs=3, gbs=4).startswith("**refused**: gbs=4: must be a multiple")


def test_the_widgets_begin_at_the_plan_given_and_reach_every_size():
    base = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, zero=1, precision="bf16", recompute="full")
    chosen = {w.description: w for w in widgets(SHAPE, MACHINE, KNOWN, base, 384).children[:5]}
    assert {name: w.value for name, w in chosen.items()} == {"tp": 4, "pp": 12, "dp": 8, "mbs": 2, "recompute": "full"}
    assert 384 in chosen["dp"].options
    Widget.close_all()  # or they look for their kernel when Python ends
