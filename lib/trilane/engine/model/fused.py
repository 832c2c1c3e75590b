"""The fused parts of a layer and of the loss: MLP, residual, products with their bias, cross-entropy.

Each is a plain function that `compiled` makes one kernel of. Unfused, they are megatron-core's. The parameters are the
same, so checkpoints are. S sequence, B microbatch, C hidden size, F channels inside the MLP (2 F with a gate), V rows
of the vocabulary on this rank.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.engine.distributed.cpu import COMPILE
from trilane.workspace.profiles import HEAD, MARK

Activation = Callable[[torch.Tensor], torch.Tensor]
UNCOMPILED = "TORCH_COMPILE_DISABLE"  # torch's own switch


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by torch.compile, or itself where TORCH_COMPILE_DISABLE=1; shapes are fixed, as in a training."""
    if os.environ.get(UNCOMPILED) == "1":
        return function
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a handful of kernels needs no processes beside ours
    return COMPILE(function, dynamic=False)


def activate(x: torch.Tensor, bias: torch.Tensor | None, function: Activation, gated: bool) -> torch.Tensor:
    """function(x + bias), (S, B, F); gated, of the first half of (S, B, 2 F), times the second. GELU is the exact one.

    Shazeer 2020, arXiv:2002.05202, equations 5 and 6: SwiGLU and GEGLU.
    """
    x = x if bias is None else x + bias
    if not gated:
        return function(x)
    gate, up = x.chunk(2, -1)
    return function(gate) * up


def add_dropped(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, share: float, training: bool
) -> torch.Tensor:
    """residual + dropout(x + bias), (S, B, C)."""
    x = x if bias is None else x + bias
    return residual + F.dropout(x, share, training)


def bias_dropout_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """megatron-core's interface of the residual connection: called with ((x, bias), residual, share)."""
    if not fused:
        return get_bias_dropout_add(training, False)

    def added(pair: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, share: float) -> torch.Tensor:
        return compiled(add_dropped)(*pair, residual, share, training)

    return added


class _LinearWithBias(LinearWithGradAccumulationAndAsyncCommunication):
    """megatron-core's product with its communication, the bias in the product instead of added to its result."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # the inherited backward expects it
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> Any:
        """(S, B, C) -> (S, B, rows of `weight`); under sequence parallelism S is divided, and gathered first."""
        fuses, reduces, divided, grad_output_buffer, deferral_limit, group = options
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if fuses else None
        ctx.use_bias, ctx.gradient_accumulation_fusion = bias is not None, fuses
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = reduces, divided, group
        ctx.grad_output_buffer, ctx.wgrad_deferral_limit = grad_output_buffer, deferral_limit
        if divided:
            whole = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
            dist.all_gather_into_tensor(whole, x, group=group)
            x = whole
        return F.linear(x, weight, bias)


class BiasLinear(ColumnParallelLinear):
    """A column-parallel layer whose bias is added inside the product, where it adds one."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if options["bias"] is None:
            return super()._forward_impl(input, weight, *args, **options)
        names = ["bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"]
        names += ["grad_output_buffer", "wgrad_deferral_limit", "tp_group"]
        return _LinearWithBias.apply(input, weight, *(options[name] for name in names))


class RowLinear(RowParallelLinear):
    """A row-parallel layer; on one rank its bias is added inside the product, where others first sum their parts."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(S, B, channels of this rank) -> (S, B, C), and the bias where it is still to be added."""
        if self.bias is None or self.tp_group.size() > 1:
            return super().forward(input_)
        options = (self.gradient_accumulation_fusion, False, False, None, None, self.tp_group)
        return _LinearWithBias.apply(input_, self.weight, self.bias, *options), None


class FusedMLP(MLP):
    """megatron-core's MLP; where config.bias_activation_fusion, bias and activation are one kernel.

    Otherwise the product adds the bias, which spares a pass over the widest tensor. megatron-core's own fusion has GELU
    in the tanh form (losses 2.5e-4 off), and adds the bias before it calls another function.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(
            config,
            MLPSubmodules(linear_fc1=BiasLinear, linear_fc2=RowLinear),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        self.linear_fc1.skip_bias_add = config.bias_activation_fusion  # unfused, the product adds it

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """(S, B, C) -> (S, B, C) and the bias to be added to it."""
        if not self.config.bias_activation_fusion:
            return super().forward(hidden_states, *args, **options)
        inner, bias = self.linear_fc1(hidden_states)
        config = self.config
        return self.linear_fc2(compiled(activate)(inner, bias, config.activation_func, config.gated_linear_unit))


def partial_sums(
    logits: torch.Tensor, labels: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit m, sum of exp(logit - m) and the label's logit (0 elsewhere), (S, B) in fp32, over this rank's V.

    `first` is the rank's first row of the vocabulary. The logits are read in their own precision, and not kept in fp32.
    """
    x = logits.float()
    largest = x.amax(-1)
    total = (x - largest.unsqueeze(-1)).exp().sum(-1)
    local = labels - first
    here = (local >= 0) & (local < logits.shape[-1])
    found = logits.gather(-1, torch.where(here, local, 0).unsqueeze(-1)).squeeze(-1).float()
    return largest, total, torch.where(here, found, 0.0)


def logit_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """grad (softmax (1 + 2 z_loss log_sum) - one hot), (S, B, V) in the precision of the logits.

    The second term is the gradient of z_loss x log_sum^2.
    """
    share = (logits.float() - log_sum.unsqueeze(-1)).exp() * (1 + 2 * z_loss * log_sum).unsqueeze(-1)
    rows = torch.arange(first, first + logits.shape[-1], device=logits.device)
    return ((share - (rows == labels.unsqueeze(-1)).float()) * grad.unsqueeze(-1)).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Vocabulary-parallel cross-entropy that keeps the logits themselves for the backward pass.

    megatron-core keeps their softmax in fp32, twice the bytes; its fused one rounds every gradient to bf16. A z-loss is
    in the gradient, and not in the value.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, fused: bool, z_loss: float) -> torch.Tensor:
        """Logits (S, B, V), labels (S, B) -> losses (S, B), fp32."""
        group = parallel_state.get_tensor_model_parallel_group()
        first = group.rank() * logits.shape[-1]
        largest, total, found = (compiled(partial_sums) if fused else partial_sums)(logits, labels, first)
        if group.size() > 1:
            local = largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            both = torch.stack([total * (local - largest).exp(), found])
            dist.all_reduce(both, group=group)
            total, found = both
        log_sum = largest + total.log()
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.first, ctx.fused, ctx.z_loss = first, fused, z_loss
        return log_sum - found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradient of the logits."""
        gradient: Callable[..., torch.Tensor] = compiled(logit_gradient) if ctx.fused else logit_gradient
        return gradient(*ctx.saved_tensors, grad, ctx.first, ctx.z_loss), None, None, None


def token_losses(logits: torch.Tensor, labels: torch.Tensor, fused: bool, z_loss: float = 0.0) -> torch.Tensor:
    """Cross-entropy in nats of each token (S, B), fp32; logits (S, B, V) of this rank's part of the vocabulary.

    Its gradient is that of the cross-entropy + z_loss x logsumexp(logits)^2.
    """
    with torch.profiler.record_function(MARK + HEAD):
        if fused or z_loss:
            return _CrossEntropy.apply(logits, labels, fused, z_loss)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels)
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels)


class GPT(GPTModel):
    """megatron-core's GPT with its loss, fused where config.cross_entropy_loss_fusion, and a z-loss."""

    z_loss = 0.0

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Labels (B, S), logits (S, B, V) -> losses (B, S)."""
        fused = self.config.cross_entropy_loss_fusion
        losses = token_losses(logits, labels.transpose(0, 1).contiguous(), fused, self.z_loss)
        return losses.transpose(0, 1).contiguous()
