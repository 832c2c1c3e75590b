"""The layer that megatron-core stacks: its linear layers around our norm and attention core, without TE or apex.

S sequence, B microbatch, H heads of this rank, D channels of a head.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.LayerNorm):
    """torch's LayerNorm that tells megatron-core about sequence parallelism (its own torch norm refuses it).

    Under sequence parallelism each rank sees a part of the sequence, so its gradients are partial: the mark on the
    parameters makes finalize_model_grads sum them over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(torch.nn.Module):
    """Causal attention by torch's scaled_dot_product_attention: flash, memory-efficient or plain, as the card can."""

    def __init__(
        self,
        config: TransformerConfig,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.shares_sequence = config.sequence_parallel
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **_: Any
    ) -> torch.Tensor:
        """(S, B, H, D) three times -> (S, B, H D)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (B, H, S, D)
        # The tracker's generator differs on each tensor-parallel rank, as its heads do; recomputation rewinds it. Under
        # sequence parallelism the whole layer draws from it already: taken out twice it would be rewound wrong.
        own = self.dropout and self.training and not self.shares_sequence
        with tensor_parallel.get_cuda_rng_tracker().fork() if own else nullcontext():
            out = self._attend(q, k, v, self.dropout if self.training else 0.0)
        return out.permute(2, 0, 1, 3).flatten(2)  # (S, B, H D)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=self.scale)


def layer_spec() -> ModuleSpec:
    """One GPT-2 layer: norm, attention, norm, MLP."""
    spec = get_gpt_layer_local_spec()
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = Attention
    return spec


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage (or of its chunk `vp_stage`), and the norm after the last layer."""
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer_spec()] * layers, layer_norm=Norm)
