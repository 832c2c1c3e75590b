"""A model's parameters and padding: published counts, to the last one."""

from dataclasses import replace

import pytest

from trilane.config.model import ModelShape, padded_vocab_size, parse_shape

BLOOM = replace(parse_shape("70,14336,112,2048,250880"), embedding_layernorm=True)
PUBLISHED = [
    (parse_shape("12,768,12,1024,50257"), 124_439_808),  # Hugging Face's gpt2
    (parse_shape("48,1600,25,1024,50257"), 1_557_611_200),  # gpt2-xl
    (BLOOM, 176_247_271_424 + 2048 * 14336),  # bigscience/bloom's card, which has ALiBi in place of positions
]


@pytest.mark.parametrize(("shape", "parameters"), PUBLISHED, ids=["gpt2", "gpt2-xl", "bloom"])
def test_a_published_model_has_its_published_parameters(shape: ModelShape, parameters: int) -> None:
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    ("tokens", "tp", "rows"), [(50257, 1, 50304), (50257, 4, 50688), (50304, 1, 50304), (1, 1, 128), (50305, 1, 50432)]
)
def test_a_vocabulary_is_padded_up_and_no_further(tokens: int, tp: int, rows: int) -> None:
    """Megatron-LM prints 50304 for GPT-2 at TP 1 and 50688 at TP 4."""
    assert padded_vocab_size(tokens, tp) == rows
