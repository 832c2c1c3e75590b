"""One transformer layer: megatron-core's parts and parameters without the cases that no training
here has.

megatron-core's own forward passes ask for inference, offload and experts in every layer of every
microbatch, and small kernels wait for that. S sequence, B microbatch, C hidden size.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import attention, mlp, transformer_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trilane.workspace.fingerprints import default_of
from trilane_engine.model import te
from trilane_engine.model.fused import activate, add_dropped, add_product, compiled

# what a matrix gives, and the bias that is still to be added to it
Pair = tuple[Tensor, Tensor | None]


class _AddingProduct(torch.autograd.Function):
    """F.linear, whose product for the weight's gradient adds into DDP's fp32 buffer, and is not
    written and read.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        add_product(x.flatten(0, -2), rows, weight.main_grad)
        added = None
        if hasattr(weight, "grad_added_to_main_grad"):  # DDP's hook waits for one, and drops it
            weight.grad_added_to_main_grad = True
            added = torch.empty_like(weight)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, added, of_bias


class _Linear(torch.nn.Module):
    """A linear layer of megatron-core; where no other rank has a part of it, without its way over
    messages.
    """

    def forward(self: Any, x: Tensor) -> Pair:
        if self.tp_group.size() > 1:
            return super().forward(x)
        adds = self.gradient_accumulation_fusion and hasattr(self.weight, "main_grad")
        product = _AddingProduct.apply if adds else F.linear
        if self.skip_bias_add:
            return product(x, self.weight, None), self.bias
        return product(x, self.weight, self.bias), None


class ColumnLinear(_Linear, layers.ColumnParallelLinear):
    """(S, B, inputs) -> (S, B, this rank's outputs)."""


class RowLinear(_Linear, layers.RowParallelLinear):
    """(S, B, this rank's inputs) -> (S, B, outputs)."""


class MLP(mlp.MLP):
    """megatron-core's; a bias that no kernel adds is the product's. Its own fusion has tanh GELU:
    losses 2.5e-4 off.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        linears = mlp.MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        if te.is_chosen(config):
            linears = mlp.MLPSubmodules(linear_fc1=te.ColumnLinear, linear_fc2=te.RowLinear)
        super().__init__(config, linears, tp_group=parallel_state.get_tensor_model_parallel_group())
        self.linear_fc1.skip_bias_add = config.bias_activation_fusion
        self.linear_fc2.skip_bias_add = config.bias_activation_fusion
        if isinstance(config.activation_func, type):  # one with parameters
            self.activation_func = config.activation_func(config)
        self.activate = compiled(activate) if config.bias_activation_fusion else activate

    def forward(self, hidden_states: Tensor, **_: Any) -> Pair:
        """(S, B, C) -> (S, B, C)."""
        inner, bias = self.linear_fc1(hidden_states)
        gated = self.config.gated_linear_unit
        return self.linear_fc2(self.activate(inner, bias, self.activation_func, gated))


class XIELU(torch.nn.Module):
    """An activation with two trained numbers, a_p and a_n before softplus:

        x > 0   softplus(a_p) x^2 + x / 2
        else    (softplus(a_n) + 1/2) (e^x - 1 - x) + x / 2

    Huang and Schlag 2024, arXiv:2411.13010. Computed again in the backward pass, which keeps x.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        for name in ("alpha_p", "alpha_n"):
            start = torch.tensor([default_of(f".{name}")], dtype=config.params_dtype)
            setattr(self, name, torch.nn.Parameter(start))

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> as many values."""
        return checkpoint(xielu, x, self.alpha_p, self.alpha_n, use_reentrant=False)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """What XIELU computes."""
    right = F.softplus(alpha_p) * x * x
    left = (F.softplus(alpha_n) + 0.5) * (torch.expm1(x.clamp(max=0)) - x)
    return torch.where(x > 0, right, left) + 0.5 * x


class SelfAttention(attention.SelfAttention):
    """megatron-core's attention among the tokens of a sequence; `head_norm` makes norms of each
    head's queries and keys.
    """

    def __init__(
        self, config: TransformerConfig, *parts: Any, head_norm: Any = None, **options: Any
    ) -> None:
        super().__init__(config, *parts, **options)
        self.linear_proj.skip_bias_add = config.bias_dropout_fusion
        if head_norm:
            for name in ("q_layernorm", "k_layernorm"):
                norm = head_norm(config, config.kv_channels, config.layernorm_epsilon)
                # it keeps its input: a view of all channels would keep values, too
                norm.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())
                setattr(self, name, norm)

    def forward(self, hidden_states: Tensor, **_: Any) -> Pair:
        """(S, B, C) -> (S, B, C)."""
        heads = list(self.get_query_key_value_tensors(hidden_states))
        if self.q_layernorm is not None:
            heads[2] = heads[2].contiguous()  # as in the norms
        if self.checkpoint_core_attention and self.training:
            core = partial(self.core_attention, attention_mask=None)
            return self.linear_proj(tensor_parallel.checkpoint(core, False, *heads))
        return self.linear_proj(self.core_attention(*heads, None))


class Layer(transformer_layer.TransformerLayer):
    """Norm, attention, norm, MLP."""

    __call__ = torch.nn.Module.__call__  # without asking each time for a graph of CUDA kernels

    def __init__(self, config: TransformerConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        self.add = compiled(add_dropped) if config.bias_dropout_fusion else add_dropped

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """(S, B, C) -> (S, B, C)."""
        x = self._added(self.self_attention(self.input_layernorm(hidden_states)), hidden_states)
        return self._added(self.mlp(self.pre_mlp_layernorm(x)), x), None

    def _added(self, pair: Pair, residual: Tensor) -> Tensor:
        return self.add(*pair, residual, self.hidden_dropout, self.training)
