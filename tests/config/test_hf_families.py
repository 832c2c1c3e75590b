"""Which shapes are models of transformers, and which field is named of those that are none."""

from dataclasses import replace

import pytest

from trilane.config.hf_families import family_of
from trilane.config.model import ModelShape, parse_shape

GPT2 = parse_shape("2,64,4,64,384")
BLOOM = replace(GPT2, positions="alibi", embedding_layernorm=True, activation="gelu-tanh")
LLAMA = replace(GPT2, positions="rotary", normalization="rmsnorm", activation="swiglu", biases="none")
QWEN2 = replace(LLAMA, biases="qkv")


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        (replace(GPT2, ffn_hidden_size=128, tied_embeddings=False), "GPT2LMHeadModel"),
        (BLOOM, "BloomForCausalLM"),
        (replace(LLAMA, num_key_value_heads=2, tied_embeddings=False), "LlamaForCausalLM"),
        (QWEN2, "Qwen2ForCausalLM"),
    ],
)
def test_a_shape_has_its_family(shape: ModelShape, model: str) -> None:
    assert family_of(shape).config(shape)["architectures"] == [model]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            replace(GPT2, positions="none"),
            "positions=none: GPT-2 has learned ones, BLOOM alibi, Llama rotary",
        ),
        (replace(BLOOM, activation="gelu"), "activation=gelu: BloomForCausalLM has gelu-tanh"),
        (replace(QWEN2, activation="geglu"), "activation=geglu: LlamaForCausalLM has swiglu"),
    ],
)
def test_a_shape_without_family_is_refused_by_the_name_of_a_field(shape: ModelShape, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        family_of(shape)
    assert str(caught.value) == message
