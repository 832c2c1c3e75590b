"""How big a model: seconds of a training, and the shapes that a machine at hand can train fast enough."""

from collections.abc import Iterable

from trilane.checks import require_positive
from trilane.shape import ModelShape


def training_seconds(parameters: float, tokens: float, flops_per_s: float, recompute_full: bool = True) -> float:
    """Seconds of training at a total rate of `flops_per_s`: 8 T P / X, or 6 T P / X without full recomputation.

    Narayanan et al. 2021, arXiv:2104.04473, equation 4. Left out: attention's s x s part, evaluation, restarts.
    """
    for field, value in (("parameters", parameters), ("tokens", tokens), ("flops_per_s", flops_per_s)):
        require_positive(field, value)
    return (8 if recompute_full else 6) * tokens * parameters / flops_per_s


def candidates(layers: Iterable[int], hidden: Iterable[int], head_dim: int, seq: int, vocab: int) -> list[ModelShape]:
    """Shapes of every depth and width whose heads of `head_dim` channels fill the width, smallest first."""
    shapes = [
        ModelShape(num_layers=L, hidden_size=h, num_attention_heads=h // head_dim, seq_length=seq, vocab_size=vocab)
        for L in layers
        for h in hidden
        if h % head_dim == 0
    ]
    return sorted(shapes, key=lambda shape: shape.parameters)


def largest_within(shapes: Iterable[ModelShape], seconds: Iterable[float], limit: float) -> int:
    """Index of the shape with most parameters among those predicted to take at most `limit` seconds an iteration.

    Of several equal sizes the faster one. Where none is fast enough: the fastest.
    """
    pairs = list(zip(shapes, seconds, strict=True))
    fitting = [i for i, (_, time) in enumerate(pairs) if time <= limit]
    if not fitting:
        return min(range(len(pairs)), key=lambda i: pairs[i][1])
    return max(fitting, key=lambda i: (pairs[i][0].parameters, -pairs[i][1]))
