"""Clipping by the norm of the whole model's gradients, where DeepSpeed clips by less and keeps no norm."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trilane.plan import Plan


class WholeClipping:
    """Takes the place of a DeepSpeed engine's clipping under ZeRO-0 in fp32; `norm` is the last one, before clipping.

    DeepSpeed 0.19.8 clips each pipeline stage by its own norm, which was 1.3e-2 off after 20 iterations. It asks for
    clipping only where the plan has a limit: without one `norm` stays 0.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.norm = 0.0
        self._module, self._limit = engine.module, plan.optimizer.clip_grad
        engine.clip_fp32_gradients = self

    def __call__(self) -> None:
        """Scale all gradients down together where their norm over all ranks of the model passes the limit."""
        held = [p for p in self._module.parameters() if p.grad is not None]
        counted = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in held if _is_counted(p)]
        squares = torch.stack(counted).square().sum()
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        self.norm = squares.sqrt().item()
        # As torch.nn.utils.clip_grad_norm_ does it.
        share = self._limit / (self.norm + 1e-6)
        if share < 1:
            for parameter in held:
                parameter.grad.mul_(share)


def _is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts it: a tied copy and what every tensor-parallel rank holds whole count once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    cut = getattr(parameter, "tensor_model_parallel", False)
    return cut or parallel_state.get_tensor_model_parallel_rank() == 0
