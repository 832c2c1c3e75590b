"""Which path a run takes, fused or not, and with which attention kernel: by the card, and by what works on it."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from trilane.config.plan import Plan
from trilane.engine.distributed.world import World, gather_values
from trilane.engine.model.fused import activate, compiled
from trilane.engine.model.gpt import DTYPES

CAPABILITY = (8, 0)  # Triton, which torch.compile writes, makes good kernels from Ampere on
KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "plain",
}
_PREFERRED = contextlib.ExitStack()  # a context that is not kept is left at once


@dataclass(frozen=True, kw_only=True)
class KernelPath:
    """Whether the fused parts run, why, which kernel computes attention, and what does not work here."""

    fused: bool
    why: str
    attention: str
    adds_gradients: bool = False

    def __str__(self) -> str:
        apart = "" if self.adds_gradients or not self.fused else ", weight gradients added apart"
        return f"{'fused' if self.fused else 'unfused'} path ({self.why}), {self.attention} attention{apart}"


def choose(plan: Plan, world: World) -> KernelPath:
    """The path of all ranks: fused where the plan and the cards have it and no rank fails. Collective.

    Sets torch's order of attention kernels, the fastest of this card first.
    """
    wanted, why = _wanted(plan, world.device)
    problem = compile_problem(world.device) if wanted else ""
    problem = next((found for found in gather_values(world, problem) if found), "") if wanted else ""
    fused = wanted and not problem
    adds = plan.engine == "megatron" and (fused or plan.topology.precision == "fp32")
    adds = adds and all(gather_values(world, adds_into_gradients(world.device)))
    return KernelPath(fused=fused, why=problem or why, attention=_attention(plan, world.device), adds_gradients=adds)


def _wanted(plan: Plan, device: torch.device) -> tuple[bool, str]:
    """Whether the fused path is wanted, and why; the same on all ranks, whose cards are alike."""
    if plan.engine == "hf-zero3":
        return False, "transformers' own layers"
    if plan.topology.zero == 3:
        return False, "ZeRO-3 gathers parameters one module at a time"
    if plan.run.fused != "auto":
        return plan.run.fused == "on", f"run.fused={plan.run.fused}"
    if device.type == "cpu":
        return False, "no GPU"
    capability = torch.cuda.get_device_capability(device)
    found = f"compute capability {'.'.join(map(str, capability))}"
    return capability >= CAPABILITY, found if capability >= CAPABILITY else f"{found}, needs 8.0"


def compile_problem(device: torch.device) -> str:
    """Why torch.compile does not work here, tried on a small function and its gradient; "" where it does."""
    x = torch.ones(8, 16, device=device, requires_grad=True)
    try:
        compiled(activate)(x, None, F.gelu, False).sum().backward()
    except Exception as error:  # no compiler, no Triton, a driver too old: whatever it is, the unfused path works
        return f"torch.compile fails here: {(str(error).strip() or type(error).__name__).splitlines()[0][:150]}"
    return ""


def _attention(plan: Plan, device: torch.device) -> str:
    """The name of the kernel that attention uses, of those that work for the plan's heads the fastest of the card.

    Hopper: cuDNN; Ampere: flash; before: memory-efficient. The others stay allowed, for what the first cannot do.
    """
    if device.type == "cpu":
        return "torch's CPU"
    flash, efficient, plain = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    capability = torch.cuda.get_device_capability(device)
    order = [flash, efficient, SDPBackend.CUDNN_ATTENTION, plain]
    if capability >= (9, 0):
        order = [SDPBackend.CUDNN_ATTENTION, flash, efficient, plain]
    elif capability < CAPABILITY:
        order = [efficient, plain]
    if plan.shape.positions == "alibi":  # a mask, which flash attention does not take
        order = [efficient, plain]
    first = next(kernel for kernel in order if _works(kernel, plan))
    prefer([first, *(kernel for kernel in order if kernel is not first)])
    return KERNELS[first]


def prefer(kernels: list[Any]) -> None:
    """Let attention use these kernels alone from now on, the first that can; until the process ends."""
    _PREFERRED.enter_context(sdpa_kernel(kernels, set_priority=True))


def _works(kernel: Any, plan: Plan) -> bool:
    """Whether a kernel computes the plan's attention and its gradient, in our layout: causal, or with ALiBi's mask."""
    dtype, masked = DTYPES[plan.topology.precision], plan.shape.positions == "alibi"
    state = torch.cuda.get_rng_state()
    base = torch.randn(128, 1, 2, 3 * plan.shape.head_dim, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v = (x.permute(1, 2, 0, 3) for x in base.chunk(3, -1))  # of (S, B, H, 3 D)
    mask = torch.zeros(1, 2, 128, 128, device="cuda", dtype=dtype) if masked else None
    try:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v, mask, plan.dropout.attention, is_causal=not masked)
            out.sum().backward()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_rng_state(state)
    return True


class WeightGradients:
    """What megatron-core expects of apex's module `fused_weight_gradient_mlp_cuda`: products added into `main_grad`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        """main_grad += grad^T x; (N, C), (N, rows) and (rows, C), the last in fp32.

        In 16 bits on a GPU one product with an fp32 result (torch.addmm's out_dtype). A CPU has none: there the
        product is rounded to 16 bits and added, as without this.
        """
        if x.dtype == main_grad.dtype:
            main_grad.addmm_(grad.t(), x)
        elif x.is_cuda:
            torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)
        else:
            main_grad.add_(grad.t().matmul(x))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def adds_into_gradients(device: torch.device) -> bool:
    """Whether 16-bit products are added into fp32 sums here, tried on a small one."""
    x, grad = (torch.eye(16, device=device, dtype=torch.bfloat16) for _ in range(2))
    total = torch.ones(16, 16, device=device)
    try:
        WeightGradients.wgrad_gemm_accum_fp32(x, grad, total)
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(total, 1.0 + torch.eye(16, device=device))


def apply(path: KernelPath, settings: TransformerConfig) -> TransformerConfig:
    """`settings` with the fused parts on or off; ours read the same fields as megatron-core's own would.

    Weight gradients go into DDP's buffers by apex's module where it is installed, else by ours.
    """
    settings.bias_activation_fusion = settings.bias_dropout_fusion = path.fused
    settings.cross_entropy_loss_fusion = path.fused
    settings.gradient_accumulation_fusion = path.adds_gradients
    if path.adds_gradients and not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradients
        layers._grad_accum_fusion_available = True
    return settings
