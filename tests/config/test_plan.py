"""The learning rate: a linear warm-up, half a cosine, then the least rate."""

import pytest

from trilane.config.training import Optimizer


@pytest.mark.parametrize(
    ("samples", "rate"),
    [(50, 0.5), (100, 1.0), (350, 0.8681980), (600, 0.55), (850, 0.2318020), (1100, 0.1), (5000, 0.1)],
)
def test_the_rate_is_that_of_megatrons_cosine(samples: int, rate: float) -> None:
    """Warm-up over 100 samples to 1, cosine to 0.1 at 1100: the mean at 600, and cos 45 degrees between."""
    optimizer = Optimizer(lr=1.0, min_lr=0.1, warmup_samples=100, decay_samples=1100)
    assert optimizer.learning_rate(samples, 9999) == pytest.approx(rate, rel=1e-6)


def test_without_a_length_of_its_own_the_decay_lasts_the_whole_run() -> None:
    optimizer = Optimizer(lr=1.0, min_lr=0.0)
    assert optimizer.learning_rate(400, 800) == pytest.approx(0.5)
    assert optimizer.learning_rate(800, 800) == 0.0
