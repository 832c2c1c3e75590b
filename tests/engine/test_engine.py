"""What holds inside one process: the initial state, the order of samples, the groups of the
optimizer.
"""

import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from plans import LLAMA, SHAPE, changed, small_plan

from trilane.config.model import ModelShape
from trilane.config.training import Part

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


GATED = replace(SHAPE, activation="swiglu", ffn_hidden_size=128)
PARTS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.3.mlp.linear_fc2.weight",
    "a.mlp.linear_fc1.weight",
]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_matrix_is_drawn_alone_as_it_stands_in_the_whole(name: str, data: Path) -> None:
    """By rows for the embedding, by columns for the second matrix of the MLP, by rows of gate and
    up for a gated one; and of each the numbers that a replica has under ZeRO-3, from an odd one to
    an odd one.
    """
    import torch

    from trilane_engine.model.parameters import initial_range, initial_tensor, split_dim

    gated = "fc1" in name
    plan = small_plan(data, shape=GATED)
    whole = initial_tensor(name, (2, 128, 66) if gated else (64, 264), plan)
    dim, local = (
        split_dim(name, gated),
        (64, 66) if gated else (16, 264) if "word" in name else (64, 66),
    )
    parts = [initial_range(name, local, rank, 4, plan, 0, local[0] * local[1]) for rank in range(4)]
    pieces = [part.view((2, 32, 66) if gated else local) for part in parts]
    assert torch.equal(torch.cat(pieces, dim), whole)
    for first, end in ((0, 1), (65, 131), (1001, len(parts[3]))):
        assert torch.equal(initial_range(name, local, 3, 4, plan, first, end), parts[3][first:end])
    vectors = [
        initial_range(f"a.{kind}", (9,), 0, 1, plan, 2, 9).tolist()
        for kind in ("bias", "layernorm.weight")
    ]
    assert vectors == [[0.0] * 7, [1.0] * 7]


def test_initial_values_are_normal_and_differ_by_name_and_seed_and_not_by_call(data: Path) -> None:
    """Mean, deviation and fourth moment of a normal distribution; neighbours in a row or a column
    are unrelated.

    What writes to the residual stream has 0.02 / sqrt(2 L) with L = 4: Radford et al. 2019, section
    2.3.
    """
    import torch

    from trilane_engine.model.parameters import initial_tensor

    plan = changed(small_plan(data), "optimizer", init_std=0.006)
    one, again = (initial_tensor("a.linear_fc1.weight", (1024, 512), plan) for _ in range(2))
    other = initial_tensor("b.linear_fc1.weight", (1024, 512), plan)
    seed = initial_tensor("a.linear_fc1.weight", (1024, 512), changed(plan, "run", seed=2))
    assert torch.equal(one, again)
    assert [round(x * 1e6) for x in one[1021, 509:].tolist()] == [-9054, 3772, 988], (
        "as every release has drawn them"
    )
    z = one.double() / 0.006
    assert z.mean().item() == pytest.approx(0, abs=6e-3) and z.std().item() == pytest.approx(
        1, rel=4e-3
    )
    assert z.pow(4).mean().item() == pytest.approx(3, rel=0.02) and 4.5 < z.abs().max() < 6.8
    for x, y in (
        (z[1:], z[:-1]),
        (z[:, 1:], z[:, :-1]),
        (z, other / 0.006),
        (z, seed / 0.006),
        (z[:, ::2], z[:, 1::2]),
    ):
        assert (x * y).mean().item() == pytest.approx(0, abs=7e-3)
        assert ((x * x - 1) * (y * y - 1)).mean().item() == pytest.approx(0, abs=0.015)
    tensor = initial_tensor(
        "decoder.layers.0.self_attention.linear_proj.weight", (256, 256), small_plan(data)
    )
    assert tensor.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.02)


DRAWN = """
import math
from trilane_engine.backends.base import build
from trilane_engine.model import parameters
draw, drawn = parameters.normals, []
parameters.normals = lambda *given: drawn.append(draw(*given)) or drawn[-1]
engine = build(plan, world)
states, wrong = engine.states, 0
for number, piece in enumerate(states.pieces):
    whole = parameters.initial_tensor(piece.name, piece.shape, plan)
    wrong += not (states.read(number, "weight") == whole.view(-1)).all()
print(sum(values.size for values in drawn[: -sum(len(p.shape) > 1 for p in states.pieces)]), wrong)
"""


QWEN = replace(LLAMA, biases="qkv")


@pytest.mark.parametrize("shape", [SHAPE, QWEN], ids=["GPT-2", "Qwen 2"])
def test_a_rank_of_hf_zero3_draws_its_share_of_each_matrix(
    shape: ModelShape, data: Path, ask: Callable
) -> None:
    """And the parts of two more rows at its ends, where a share does not begin with one; together
    they are the whole.

    GPT-2's matrices of transformers are ours transposed, of Llama and Qwen 2 queries, keys and
    values are apart.
    """
    plan = small_plan(data, engine="hf-zero3", dp=3, gbs=6, zero=3, shape=shape)
    found = [tuple(map(int, line.split())) for line in ask(plan, DRAWN).splitlines()]
    assert [wrong for _, wrong in found] == [0, 0, 0]
    assert all(drawn < 1.1 * shape.parameters / 3 for drawn, _ in found)


@pytest.mark.parametrize("decays", [[0.1, 0.0], [0.1, 0.1], [0.0, 0.0], [None, 0.0]], ids=str)
def test_an_optimizer_that_lets_a_norm_decay_or_no_matrix_is_refused(decays: list) -> None:
    from trilane_engine.backends.base import audited
    from trilane_engine.model.parameters import Piece

    boxes = {"mlp.weight": ((0, 3), (0, 4)), "layernorm.weight": ((0, 3),)}
    pieces = [Piece(name=name, shape=(9,) * len(box), box=box) for name, box in boxes.items()]
    states = types.SimpleNamespace(pieces=pieces, decays=lambda: decays, divided=False)
    is_right = decays == [0.1, 0.0]
    with nullcontext() if is_right else pytest.raises(AssertionError, match="has weight decay"):
        audited(states, 0.1)


MIX = """
from collections import Counter
from trilane_engine.data.samples import SampleLoader
from trilane.config.batch_rampup import Batch
feed = SampleLoader(plan, world, (0, 1))
counts = [Counter(int(feed._samples[k]["dataset_id"]) for k in range(n)) for n in (10, plan.samples)]
print(*([count[part] for part in range(len(plan.data.blend))] for count in counts), sep="; ")
for cut in [(0, 1), (0, 2), (1, 2)]:
    part = SampleLoader(plan, world, cut)
    print(*(hash(tuple(row)) for b in part.microbatches(Batch(number=1, first=8, gbs=8)) for row in b.tokens.tolist()))
"""


def test_a_blend_keeps_its_weights_from_the_first_samples_on_and_one_order(
    ask: Callable, data: Path
) -> None:
    """3 : 1 over text and mock, 20 iterations of 8 samples, by megatron-core's blending; dp only
    deals them out.

    Seven sources of one percent are each asked for a whole sample of 16: megatron-core's own margin
    is too thin.
    """
    parts = (Part(source="stdlib", weight=3), Part(source="mock", weight=1))
    lines = ask(changed(small_plan(data), "data", source="blend", blend=parts), MIX).splitlines()
    assert lines[0] in ("[8, 2]; [120, 40]", "[7, 3]; [120, 40]")
    one, first, second = (line.split() for line in lines[1:])
    assert sorted(one) == sorted(first + second) and len(set(one)) == 8
    assert one[:2] + one[4:6] == first


OUTPUTS = """
import torch
from trilane_engine.backends.base import Microbatch, build
engine, kept = build(plan, world), []
engine.modules[0].register_forward_hook(lambda module, given, out: kept.append(out))
text = torch.randint(plan.shape.vocab_size, (2, plan.shape.seq_length + 1))
engine.step([Microbatch(tokens=text[:, :-1].contiguous(), labels=text[:, 1:].contiguous())] * 4, 1e-3)
buffers = engine._engine.pipe_buffers["outputs"] if hasattr(engine, "_engine") else []
print(world.rank, {out.numel() for out in kept}, buffers)
"""


@pytest.mark.parametrize(
    ("engine", "left"),
    [("megatron", "0 {1} []\n1 {128} []\n"), ("deepspeed-3d", "[None, None]\n")],
    ids=str,
)
def test_what_a_stage_has_sent_or_differentiated_is_let_go(
    ask: Callable, engine: str, left: str
) -> None:
    """Of what megatron-core has sent a value is left, of its losses all 2 x 64; DeepSpeed keeps no
    logits.
    """
    plan = small_plan(Path("data"), engine=engine, pp=2, zero=int(engine != "megatron"))
    assert ask(plan, OUTPUTS).endswith(left)
