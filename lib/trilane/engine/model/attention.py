"""The attention core of every engine: causal, with rotary positions or ALiBi, and keys that groups of heads share.

S sequence, B microbatch, H query heads of this rank, G heads of keys and values, D channels of a head.
"""

import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.config.model import ModelShape
from trilane.engine.model.fused import compiled


class Attention(torch.nn.Module):
    """Causal attention by torch's scaled_dot_product_attention: flash, memory-efficient or plain, by device.

    ALiBi's mask keeps it from the flash kernel: on a GPU the memory-efficient one is left.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        shape: ModelShape,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.splits_sequence = config.sequence_parallel
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.turn = compiled(rotated) if config.bias_activation_fusion else rotated  # one pass instead of five

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **_: Any
    ) -> torch.Tensor:
        """Query (S, B, H, D), key and value (S, B, G, D) -> (S, B, H D)."""
        if self.shape.positions == "rotary":
            cos, sin = rotations(len(query), self.shape.head_dim, self.shape.rotary_base, query.device, query.dtype)
            query, key = self.turn(query, cos, sin), self.turn(key, cos, sin)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (B, H or G, S, D)
        # The tracker's generator differs on each tensor-parallel rank, as its heads do; recomputation rewinds it. Under
        # sequence parallelism the whole layer already draws from it: forked twice it would be rewound wrongly.
        forked = self.dropout and self.training and not self.splits_sequence
        with tensor_parallel.get_cuda_rng_tracker().fork() if forked else nullcontext():
            out = self._attend(q, k, v, self.dropout if self.training else 0.0)
        return out.permute(2, 0, 1, 3).flatten(2)  # (S, B, H D)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
        grouped = k.size(1) < q.size(1)
        if grouped and not has_grouped_kernel(q, self.shape):
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
            grouped = False
        mask = self._mask(q) if self.shape.positions == "alibi" else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=self.scale, enable_gqa=grouped
        )

    def _mask(self, q: torch.Tensor) -> torch.Tensor:
        """ALiBi of this rank's heads, (B, H, S, S)."""
        heads = q.size(1)
        first = heads * parallel_state.get_tensor_model_parallel_rank()
        slopes = alibi_slopes(self.shape.num_attention_heads)[first : first + heads]
        return alibi(slopes, q.size(2), q.device, q.dtype).expand(len(q), -1, -1, -1)


def has_grouped_kernel(q: torch.Tensor, shape: ModelShape) -> bool:
    """Whether torch has a kernel that reads shared keys once: flash alone, in 16 bits, from Ampere on, unmasked.

    Elsewhere its plain attention would write the s x s scores (torch.nn.functional.scaled_dot_product_attention on
    `enable_gqa`); repeated keys keep the memory-efficient kernel.
    """
    plain = not q.is_cuda or q.dtype == torch.float32 or shape.positions == "alibi"
    return not plain and torch.cuda.get_device_capability(q.device) >= (8, 0)


@functools.lru_cache(maxsize=4)
def rotations(
    length: int, channels: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angle at each position and channel, each (S, 1, 1, D); the halves of D are alike.

    Position p turns channels i and i + D / 2 by p base^(-2 i / D). Su et al. 2021, arXiv:2104.09864, equation 15, with
    the pairs of Llama in transformers and megatron-core, whose two halves are the paper's even and odd channels.
    """
    steps = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(places, base**-steps).repeat(1, 2)[:, None, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(S, B, heads, D), each pair of channels turned by its angle."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head of the whole model: 2^(-8 i / n), i = 1 .. n, for n heads, a power of two.

    For another number those of the power of two below it, then every other slope of twice that power. Press, Smith and
    Lewis 2022, arXiv:2108.12409, section 3 and its code; BLOOM, 112 heads, has them so.
    """
    whole = 1 << heads.bit_length() - 1
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return (*slopes, *(2 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole), 2)))


@functools.lru_cache(maxsize=2)
def alibi(slopes: tuple[float, ...], length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores: slope x (key - query) up to the query, -inf after it, (1, H, S, S).

    BLOOM adds slope x key, which is the same to softmax; these values are near 0 where the weights are not, so that 16
    bits hold them. Kept for all layers: 2 H S^2 bytes in 16 bits, which the planner does not count.
    """
    places = torch.arange(length, dtype=torch.float32, device=device)
    distance = places[None, :] - places[:, None]
    distance = distance.masked_fill(distance > 0, math.inf)
    added = torch.empty(1, len(slopes), length, length, dtype=dtype, device=device)
    for head, slope in enumerate(slopes):
        added[0, head] = (slope * distance).where(distance <= 0, -math.inf)
    return added
