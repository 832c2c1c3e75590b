"""The attention core: slopes of ALiBi as published, and its mask; rotary angles as Llama's."""

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


@pytest.mark.parametrize("heads", [1, 6, 8, 32, 112])
def test_slopes_of_alibi_are_those_of_bloom(heads: int) -> None:
    """Press, Smith and Lewis 2022, section 3: 1/2 to 1/2^8 for eight heads; for 112, BLOOM's, transformers' code."""
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from trilane.engine.model.gpt import alibi_slopes

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert alibi_slopes(heads) == pytest.approx(theirs.tolist(), rel=1e-6)
    assert heads != 8 or alibi_slopes(heads) == tuple(2.0**-i for i in range(1, 9))


def test_the_mask_of_alibi_is_zero_at_a_query_and_falls_with_distance_and_hides_what_follows() -> None:
    import torch

    from trilane.engine.model.gpt import alibi

    mask = alibi((0.5, 0.25), 3, torch.device("cpu"), torch.bfloat16)[0]
    hidden = float("-inf")
    assert mask[0].tolist() == [[0, hidden, hidden], [-0.5, 0, hidden], [-1, -0.5, 0]]
    assert mask[1, 2].tolist() == [-0.5, -0.25, 0]


def test_rotary_positions_are_those_of_transformers_llama() -> None:
    """Base 500,000 and heads of 16 channels: the same turn of queries, to fp32's rounding."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from trilane.engine.model.gpt import rotated, rotations

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    x = torch.randn(2, 4, 32, 16)  # (B, H, S, D)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(32)[None])
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = rotated(x.permute(2, 0, 1, 3), *rotations(32, 16, 5e5, x.device, x.dtype)).permute(1, 2, 0, 3)
    assert torch.allclose(ours, theirs, atol=1e-5)
