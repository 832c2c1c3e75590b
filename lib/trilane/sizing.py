"""How big a model: candidate shapes, bytes of their states, days and GPU-hours."""

from collections.abc import Iterable
from dataclasses import dataclass

from trilane.checks import require_positive
from trilane.shape import ModelShape

STATE_BYTES_PER_PARAMETER = 18  # fp16 weights 2, gradients 4, fp32 masters 4, Adam's moments 8: BigScience chronicles
PLANNING_VOCABULARY = 150_257  # the chronicles' first estimate of the multilingual vocabulary


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model of the 200B planning table: who, its shape, and the TP x PP of one replica."""

    origin: str
    shape: ModelShape
    tp: int
    pp: int

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def embedding_bytes_per_gpu(self) -> float:
        """Bytes of weights, gradients and optimizer of the word embedding on one GPU."""
        return STATE_BYTES_PER_PARAMETER * self.shape.embedding_parameters / self.tp

    @property
    def block_bytes_per_gpu(self) -> float:
        """The same of one transformer layer."""
        return STATE_BYTES_PER_PARAMETER * self.shape.layer_parameters / self.tp

    @property
    def layers_per_stage(self) -> float:
        """Transformer layers of one pipeline stage, embedding not counted."""
        return self.shape.num_layers / self.pp


def planned_models() -> list[PlannedModel]:
    """The models of the BigScience chronicles' prequel, sections 'Existing models' and 'Possible 200B models'."""
    rows = [
        ("bs 104B", 64, 11600, 80, 50_257, 4, 32),
        ("meg-lm 145B", 80, 12288, 96, 50_257, 8, 8),
        ("meg-lm 310B", 96, 16384, 128, 50_257, 8, 16),
        ("msft 530B", 105, 20480, 128, 50_257, 8, 35),
        ("199B, wide", 80, 14336, 64, PLANNING_VOCABULARY, 8, 10),
        ("206B, deep", 96, 13312, 64, PLANNING_VOCABULARY, 8, 12),
    ]
    return [
        PlannedModel(
            origin=origin,
            shape=ModelShape(num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=2048, vocab_size=V),
            tp=tp,
            pp=pp,
        )
        for origin, L, h, a, V, tp, pp in rows
    ]


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
