"""What holds inside one process: the initial state, the order of samples, the groups of the
optimizer.
"""

from dataclasses import replace

import pytest
from parity import MIXTURE
from plans import LLAMA, SHAPE, changed, small_plan

from trilane.config.model import ModelShape
from trilane.config.training import Part

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


HELD = """
from trilane_engine.backends.base import build
from trilane_engine.model.parameters import initial_tensor
states = build(plan, world).states
for number, piece in enumerate(states.pieces):
    whole = initial_tensor(piece.name, piece.shape, plan).view(-1)
    assert (states.read(number, "weight") == whole).all(), piece.name
print("right")
"""


@pytest.mark.parametrize("shape", [SHAPE, replace(LLAMA, biases="qkv")], ids=["GPT-2", "Qwen 2"])
def test_the_ranks_of_hf_zero3_hold_the_initial_state(shape: ModelShape, data, ask):
    """GPT-2's matrices of transformers are ours transposed, of Qwen 2 queries, keys and values are
    apart.
    """
    plan = small_plan(data, engine="hf-zero3", dp=3, gbs=6, zero=3, shape=shape)
    assert ask(plan, HELD) == 3 * "right\n"


SPLIT = {"tp": 2, "sequence_parallel": True}
# fields of the shape, of the topology, and the one line
REFUSED = [
    ({}, {"tp": 2, "ep": 2}, "tp=2: needs sequence_parallel where a model has experts"),
    ({}, SPLIT, "etp=1: engine megatron trains experts with ep above 1, or etp equal to tp"),
    ({}, {**SPLIT, "dp": 2, "ep": 2, "etp": 2}, "topology.etp=2: must be 1 where ep is above 1"),
    ({}, {"engine": "deepspeed-zero", "zero": 1}, "experts=8: engine deepspeed-zero has none"),
    ({"activation": "geglu"}, {}, "activation=geglu: engine megatron has experts with swiglu"),
    ({"biases": "all"}, {}, "biases=all: engine megatron has experts without biases"),
    ({"top_k": 1}, {}, "top_k=1: engine megatron trains a choice of one with router_pre_softmax"),
]


@pytest.mark.parametrize(("fields", "topology", "message"), REFUSED)
def test_experts_that_cannot_be_trained_are_one_line(fields, topology, message, data):
    with pytest.raises(ValueError) as error:
        small_plan(data, shape=replace(MIXTURE, **fields), **topology)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("fused", ["te", "layer"])
def test_experts_have_no_compiled_layers_and_no_transformer_engine(fused, data):
    with pytest.raises(ValueError, match=f"fused={fused}"):
        changed(small_plan(data, shape=MIXTURE), "run", fused=fused)


MIX = """
from collections import Counter
from trilane_engine.data.samples import SampleLoader
from trilane.config.batch_rampup import Batch
feed = SampleLoader(plan, world, (0, 1))
for n in (10, plan.samples):
    count = Counter(int(feed._samples[k]["dataset_id"]) for k in range(n))
    print(count[0], count[1])
for cut in [(0, 1), (0, 2), (1, 2)]:
    part = SampleLoader(plan, world, cut)
    print(*(hash(tuple(row)) for b in part.microbatches(Batch(number=1, first=8, gbs=8)) for row in b.tokens.tolist()))
"""


def test_a_blend_keeps_its_weights_from_the_first_samples_on_and_one_order(ask, data):
    """3 : 1 over text and mock, 20 iterations of 8 samples, by megatron-core's blending; dp only
    deals them out.
    """
    parts = (Part(source="stdlib", weight=3), Part(source="mock", weight=1))
    lines = ask(changed(small_plan(data), "data", source="blend", blend=parts), MIX).splitlines()
    assert lines[0] in ("8 2", "7 3") and lines[1] == "120 40"
    one, first, second = (line.split() for line in lines[2:])
    assert sorted(one) == sorted(first + second) and len(set(one)) == 8
    assert one[:2] + one[4:6] == first


def test_initial_values_are_those_that_were_released(data):
    from trilane_engine.model.parameters import initial_tensor

    plan = changed(small_plan(data), "optimizer", init_std=0.006)
    one = initial_tensor("a.linear_fc1.weight", (1024, 512), plan)
    assert [round(x * 1e6) for x in one[1021, 509:].tolist()] == [-9054, 3772, 988]
    assert one.std().item() == pytest.approx(0.006, rel=4e-3)
