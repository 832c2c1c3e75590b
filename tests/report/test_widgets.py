"""One plan by hand: the sentence says what is predicted, or which rule forbids it."""

from ipywidgets import Widget

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel import shipped
from trilane.costmodel.predict import predict
from trilane.report.widgets import explore, sentence

MACHINE = cluster("jz-a100-80g")
KNOWN = shipped.default(MACHINE)
TOPOLOGY = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, zero=1, precision="bf16", recompute="full", fp32_gradients=True)
PLAN = Plan(label="p", shape=parse_shape("72,14336,64,2048,250880"), cluster=MACHINE, topology=TOPOLOGY)


def test_a_plan_that_can_be_is_the_prediction_that_every_command_shows():
    text, p = sentence(PLAN, KNOWN), predict(PLAN)
    assert f"<b>{p.sec_per_it:.3g} s</b> an iteration" in text and f"<b>{p.memory_bytes / 2**30:.3g} GiB</b>" in text
    assert PLAN.id in text and "on 384 GPUs" in text


def test_a_plan_that_cannot_be_names_the_rule_as_the_search_has_it():
    assert sentence(PLAN, KNOWN, tp=3, gbs=2112, dp=11).startswith("<b>refused</b>: tp=3: must divide num_attention")
    assert sentence(PLAN, KNOWN, mbs=3).startswith("<b>refused</b>: gbs=2048: must be a multiple")
    assert "must stay inside a node" in sentence(PLAN, KNOWN, tp=16, pp=3)
    assert sentence(PLAN, KNOWN, dp=16).startswith("<b>refused</b>: gpus=768: must not exceed the cluster")


def test_the_widgets_begin_at_the_plan_given_reach_every_size_and_say_what_is_chosen():
    explorer = explore(PLAN, KNOWN, 384)
    *boxes, said = explorer.children
    chosen = {w.description: w for w in boxes}
    assert {name: w.value for name, w in chosen.items()} == {"tp": 4, "pp": 12, "dp": 8, "mbs": 2, "recompute": "full"}
    assert 384 in chosen["dp"].options and "on 384 GPUs" in said.value
    chosen["dp"].value = 4
    assert "on 192 GPUs" in said.value and "on 192 GPUs" in explorer._repr_mimebundle_()["text/html"]
    chosen["tp"].value = 3
    assert said.value.startswith("<b>refused</b>: tp=3")
    Widget.close_all()  # or they look for their kernel when Python ends
