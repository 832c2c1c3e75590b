"""Our tensors and transformers' GPT-2 are one model under two sets of names."""

from dataclasses import replace

import pytest
from plans import SHAPE

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


def canonical(tied: bool) -> dict:
    import torch

    from trilane.engine.model.parameters import whole_sizes

    generator = torch.Generator().manual_seed(1)
    sizes = whole_sizes(replace(SHAPE, tied_embeddings=tied))
    return {name: torch.randn(size, generator=generator) * 0.1 for name, size in sizes.items()}


def gpt2_state(canonical: dict, heads: int) -> dict:
    """The state dict of GPT2LMHeadModel; a tied head is named twice, as transformers does."""
    from trilane.engine.checkpoint.gpt2_names import HEAD, gpt2_name, gpt2_tensor

    state = {gpt2_name(name): gpt2_tensor(name, tensor, heads) for name, tensor in canonical.items()}
    state.setdefault(HEAD, state["transformer.wte.weight"])
    return state


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_is_the_same_state(tied: bool) -> None:
    import torch

    from trilane.engine.checkpoint.gpt2_names import canonical_state

    ours = canonical(tied)
    back = canonical_state(gpt2_state(ours, SHAPE.num_attention_heads), SHAPE.num_attention_heads, tied)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_the_sizes_add_up_to_the_shapes_parameters() -> None:
    from math import prod

    from trilane.engine.model.parameters import whole_sizes

    for tied in (True, False):
        for norm in (True, False):
            shape = replace(SHAPE, tied_embeddings=tied, embedding_layernorm=norm)
            assert sum(map(prod, whole_sizes(shape).values())) == shape.parameters


def test_transformers_gpt2_takes_every_tensor_and_gives_the_loss_of_the_reference() -> None:
    """All names and sizes fit, and the same tokens have the same loss: no head or matrix is turned the wrong way."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from trilane.engine.reference import loss

    sizes = {"n_embd": SHAPE.hidden_size, "n_layer": SHAPE.num_layers, "n_head": SHAPE.num_attention_heads}
    settings = GPT2Config(
        vocab_size=SHAPE.vocab_size, n_positions=SHAPE.seq_length, activation_function="gelu", **sizes
    )
    ours = canonical(True)
    model = GPT2LMHeadModel(settings).eval()
    model.load_state_dict(gpt2_state(ours, SHAPE.num_attention_heads))
    row = torch.arange(2 * 65).reshape(2, 65) * 7 % SHAPE.vocab_size
    scores = model(row[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(scores.flatten(0, 1), row[:, 1:].flatten())
    assert theirs.item() == pytest.approx(loss(ours, SHAPE, row[:, :-1], row[:, 1:]).item(), abs=1e-5)


def test_what_older_files_hold_besides_parameters_is_left_out() -> None:
    import torch

    from trilane.engine.checkpoint.gpt2_names import canonical_state

    ours = canonical(True)
    bare = {k.removeprefix("transformer."): v for k, v in gpt2_state(ours, 4).items() if k != "lm_head.weight"}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert canonical_state(bare | masks, 4, tied=True).keys() == ours.keys()


@pytest.mark.parametrize("name", ["embedding.layernorm.weight", "decoder.layers.x.mlp.linear_fc1.weight", "wte"])
def test_a_name_that_gpt2_has_not_is_refused(name: str) -> None:
    from trilane.engine.checkpoint.gpt2_names import gpt2_name

    with pytest.raises(ValueError, match="share none of this name"):
        gpt2_name(name)


def test_a_tied_head_must_be_the_embedding() -> None:
    import torch

    from trilane.engine.checkpoint.gpt2_names import HEAD, canonical_state

    state = gpt2_state(canonical(True), 4)
    with pytest.raises(ValueError, match="another matrix"):
        canonical_state({**state, HEAD: torch.zeros_like(state[HEAD])}, 4, tied=True)
