"""One plan by hand: the sentence says what is predicted, or which rule forbids it."""

from ipywidgets import Widget

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import calibration
from trilane.report.widgets import sentence, widgets

SHAPE, MACHINE = parse_shape("72,14336,64,2048,250880"), cluster("jz-a100-80g")
KNOWN = calibration.default(MACHINE)


def test_a_plan_that_can_be_is_a_sentence_with_its_figures():
    said = sentence(
        SHAPE, MACHINE, KNOWN, tp=4, pp=12, dp=8, mbs=2, gbs=2048, zero=1, precision="bf16", recompute="full"
    )
    assert "on 384 GPUs" in said and " s</b> an iteration" in said and "GiB</b>" in said


def test_a_plan_that_cannot_be_names_the_rule():
    assert sentence(SHAPE, MACHINE, KNOWN, tp=3, gbs=1) == "<b>refused</b>: tp=3: must divide num_attention_heads=64"
    assert sentence(SHAPE, MACHINE, KNOWN, mbs=3, gbs=4).startswith("<b>refused</b>: gbs=4: must be a multiple")


def test_the_widgets_begin_at_the_plan_given_reach_every_size_and_say_what_is_chosen():
    base = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, zero=1, precision="bf16", recompute="full")
    explorer = widgets(SHAPE, MACHINE, KNOWN, base, 384)
    *boxes, said = explorer.children
    chosen = {w.description: w for w in boxes}
    assert {name: w.value for name, w in chosen.items()} == {"tp": 4, "pp": 12, "dp": 8, "mbs": 2, "recompute": "full"}
    assert 384 in chosen["dp"].options and "on 384 GPUs" in said.value
    chosen["dp"].value = 4
    assert "on 192 GPUs" in said.value and "on 192 GPUs" in explorer._repr_mimebundle_()["text/html"]
    chosen["tp"].value = 3
    assert said.value.startswith("<b>refused</b>: tp=3")
    Widget.close_all()  # or they look for their kernel when Python ends
