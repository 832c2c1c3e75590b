"""Definitions of FLOPs, told apart by what each counts."""

import pytest

from trilane.analysis import measure as flops
from trilane.config.model import parse_shape

SHAPE = parse_shape("24,2048,16,2048,50304")
LAYERS = 24 * (12 * 2048**2 + 13 * 2048)  # parameters


def of(definition: str, tp: int = 1, recompute: str = "none") -> float:
    return flops.iteration_flops(SHAPE, 8, tp, recompute)[definition]


def test_the_definition_of_2021_counts_each_ranks_copies_of_norms_and_biases() -> None:
    """8 s B N; of a layer's parameters 6 h are on every tensor-parallel rank: two norms and two
    biases.
    """
    one, four = (of("replicated", tp) for tp in (1, 4))
    assert one == 8 * 8 * 2048 * LAYERS
    assert four - one == 8 * 8 * 2048 * 24 * 6 * 2048 * 3


def test_six_flops_a_parameter_and_token_and_eight_with_full_recomputation() -> None:
    """Narayanan et al. 2021: F = 6 T P and 8 T P, for matrices; attention and logits are on top."""
    tokens = 8 * 2048
    matrices = 24 * 12 * 2048**2
    attention = 24 * 12 * 2048 * 2048  # 4 s h a layer and token forward, three times that in all
    logits = 6 * 50304 * 2048
    assert of("narayanan") == pytest.approx(tokens * (6 * matrices + attention + logits))
    full = of("narayanan", recompute="full")
    assert full == pytest.approx(tokens * (8 * matrices + attention * 4 / 3 + logits))
    causal = of("megatron_causal", recompute="full")
    assert causal == pytest.approx(tokens * (6 * matrices + attention / 2 + logits))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("selective", 3), ("full", 4)])
def test_size_times_factor_is_that_of_the_chronicles_tables(recompute: str, passes: int) -> None:
    """Prequel: size_B * 4 * 2 * seq * gbs / (sec * gpus * 1e3), 3 without recomputation."""
    assert of("size_factor", recompute=recompute) == 2 * passes * 8 * 2048 * SHAPE.parameters
