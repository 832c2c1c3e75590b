"""The fused parts of a layer and of the loss, and the choice of the path that a run takes, by its
card and plan.

Activation, residual and cross-entropy are each a plain function that `compiled` makes one kernel
of. Unfused, they are megatron-core's. The parameters are the same, so checkpoints are. S sequence,
B microbatch, C hidden size, F channels inside the MLP (2 F with a gate), V rows of the vocabulary
on this rank.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trilane.config.plan import Plan
from trilane.utils.frozen import frozen
from trilane.utils.validation import shown
from trilane_engine import patches
from trilane_engine.cpu import COMPILE
from trilane_engine.world import World, gather_values

# with fp8 products alone are in 8 bits
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by torch.compile, or itself where TORCH_COMPILE_DISABLE=1; shapes are fixed, as
    in a training.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return function
    # a handful of kernels needs no processes beside ours
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return COMPILE(function, dynamic=False)


def activate(x: Tensor, bias: Tensor | None, function: Callable[..., Any], gated: bool) -> Tensor:
    """function(x + bias), (S, B, F); gated, of the first half of (S, B, 2 F), times the second.
    GELU is the exact one.

    Shazeer 2020, arXiv:2002.05202, equations 5 and 6: SwiGLU and GEGLU.
    """
    if bias is not None:
        x = x + bias
    if not gated:
        return function(x)
    gate, up = x.chunk(2, -1)
    return function(gate) * up


def add_dropped(
    x: Tensor, bias: Tensor | None, residual: Tensor, share: float, training: bool
) -> Tensor:
    """residual + dropout(x + bias), (S, B, C)."""
    if bias is not None:
        x = x + bias
    if share:
        x = F.dropout(x, share, training)
    return residual + x


def partial_sums(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit m, sum of exp(logit - m) and the label's logit (0 elsewhere), (S, B) in fp32,
    over this rank's V.

    `first` is the rank's first row of the vocabulary. The logits are read in their own precision,
    and not kept in fp32.
    """
    x = logits.float()
    largest = x.amax(-1)
    total = (x - largest.unsqueeze(-1)).exp().sum(-1)
    local = labels - first
    here = (local >= 0) & (local < logits.shape[-1])
    label_logits = logits.gather(-1, torch.where(here, local, 0).unsqueeze(-1)).squeeze(-1).float()
    return largest, total, torch.where(here, label_logits, 0.0)


def logit_gradient(
    logits: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    first: int,
) -> Tensor:
    """grad (softmax - one hot), (S, B, V) in the precision of the logits."""
    share = (logits.float() - log_sum.unsqueeze(-1)).exp()
    rows = torch.arange(first, first + logits.shape[-1], device=logits.device)
    return ((share - (rows == labels.unsqueeze(-1)).float()) * grad.unsqueeze(-1)).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Vocabulary-parallel cross-entropy that keeps the logits themselves for the backward pass.

    megatron-core keeps their softmax in fp32, twice the bytes; its fused one rounds every gradient
    to bf16.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits (S, B, V), labels (S, B) -> losses (S, B), fp32."""
        group = parallel_state.get_tensor_model_parallel_group()
        first = group.rank() * logits.shape[-1]
        largest, total, of_labels = compiled(partial_sums)(logits, labels, first)
        if group.size() > 1:
            local = largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            both = torch.stack([total * (local - largest).exp(), of_labels])
            dist.all_reduce(both, group=group)
            total, of_labels = both
        log_sum = largest + total.log()
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.first = first
        return log_sum - of_labels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of the logits."""
        return compiled(logit_gradient)(*ctx.saved_tensors, grad, ctx.first), None


def token_losses(logits: Tensor, labels: Tensor, fused: bool) -> Tensor:
    """Cross-entropy in nats, (S, B), fp32, of logits (S, B, V)."""
    if fused:
        return _CrossEntropy.apply(logits, labels)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels)
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels)


def add_product(inputs: Tensor, grads: Tensor, total: Tensor) -> None:
    """total += grads^T inputs, (F, C) fp32 of (tokens, F) and (tokens, C): a gradient that is never
    rounded to 16 bits.

    What megatron-core otherwise takes from apex (wgrad_gemm_accum_fp32). On a CPU torch has no such
    product of 16 bits.
    """
    if capability(total.device) != (0, 0) and inputs.dtype != total.dtype:
        torch.addmm(total, grads.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(grads.t() @ inputs)


def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Let megatron-core's linear layers use add_product(), if it works for values of `dtype` here,
    which is tried.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        add_product(ones, ones, total)
    except Exception:  # of a card or a build of torch without such a product
        return False
    patches.use_weight_product(add_product)
    return True


class GPT(GPTModel):
    """megatron-core's GPT with its loss, fused where config.cross_entropy_loss_fusion."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Labels (B, S), logits (S, B, V) -> losses (B, S)."""
        fused = self.config.cross_entropy_loss_fusion
        losses = token_losses(logits, labels.transpose(0, 1).contiguous(), fused)
        return losses.transpose(0, 1).contiguous()


@frozen
class KernelPath:
    """Whether the compiled parts run, why, and whether products of weight gradients add them into
    the fp32 sums.
    """

    fused: bool
    why: str
    adds_gradients: bool

    def __str__(self) -> str:
        return f"{'fused' if self.fused else 'unfused'} path ({self.why})"


def choose(plan: Plan, world: World) -> KernelPath:
    """The path of all ranks: fused where plan and cards have it and no rank fails. Collective."""
    fused, why = _wanted(plan, world.device)
    if fused:
        problem = next(filter(None, gather_values(world, compile_problem(world.device))), "")
        if problem:
            fused = False
            why = problem
    # not for an own layer, which may use a weight elsewhere, too, nor on a CPU, where small kernels
    # wait for its Python
    is_worth_it = fused or capability(world.device) != (0, 0)
    adds = False
    if plan.engine == "megatron" and not plan.layer and is_worth_it:
        dtype = DTYPES[plan.topology.precision]
        adds = all(gather_values(world, adds_products(world.device, dtype)))
    return KernelPath(fused=fused, why=why, adds_gradients=adds)


def capability(device: torch.device) -> tuple[int, int]:
    """The card's compute capability, (0, 0) for a CPU; in a trace that of the plan's card."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return (0, 0)


def _wanted(plan: Plan, device: torch.device) -> tuple[bool, str]:
    """Whether the fused path is wanted, and why; the same on all ranks, whose cards are alike."""
    if plan.engine == "hf-zero3":
        return False, "transformers' own layers"
    if plan.topology.zero == 3:
        return False, "ZeRO-3 gathers parameters one module at a time"
    if plan.run.fused != "auto":
        return plan.run.fused in ("on", "te", "layer"), f"run.fused={plan.run.fused}"
    card = capability(device)
    if card == (0, 0):
        return False, "no GPU"
    why = f"compute capability {'.'.join(map(str, card))}"
    # Triton, which torch.compile writes, makes good kernels from Ampere on
    if card >= (8, 0):
        return (True, why)
    return (False, f"{why}, needs 8.0")


def compile_problem(device: torch.device) -> str:
    """Why torch.compile does not work here, tried on a small function and its gradient; "" where it
    does.
    """
    x = torch.ones(8, 16, device=device, requires_grad=True)
    try:
        compiled(activate)(x, None, F.gelu, False).sum().backward()
    except Exception as error:  # no compiler, no Triton, a driver too old: the unfused path works
        return f"torch.compile fails here: {type(error).__name__}: {shown(error)}"
    return ""


def apply(path: KernelPath, settings: TransformerConfig) -> TransformerConfig:
    """`settings` with the fused parts on or off; ours read the same fields as megatron-core's own
    would.
    """
    settings.bias_activation_fusion = settings.bias_dropout_fusion = path.fused
    settings.cross_entropy_loss_fusion = path.fused
    settings.gradient_accumulation_fusion = path.adds_gradients
    return settings
