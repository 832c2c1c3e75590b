"""Adam's state in any of its makes: torch's, DeepSpeed's fused and CPU ones, apex's."""

from collections.abc import Iterable
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


def begin(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Give each of the optimizer's parameters that has no moments yet those of step 0: zeros, as its first step would.

    Each gets a `step` of its own: a shared one would count once for each parameter.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if "exp_avg" not in state:
            state["step"] = _step(optimizer, 0.0)
            state |= {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in MOMENTS}


def step_of(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Steps taken, which all parameters share; 0 where this rank updates none. apex counts by group."""
    counted = [counts for optimizer in optimizers for counts in [*optimizer.state.values(), *optimizer.param_groups]]
    return max((float(counts.get("step", 0)) for counts in counted), default=0.0)


def set_step(optimizers: Iterable[torch.optim.Optimizer], step: float) -> None:
    """So many steps are taken."""
    for optimizer in optimizers:
        counted: list[Any] = [*optimizer.state.values()]
        counted += [] if isinstance(optimizer, torch.optim.Adam) else optimizer.param_groups
        for counts in counted:
            counts["step"] = _step(optimizer, step)


def _step(optimizer: torch.optim.Optimizer, step: float) -> Any:
    """torch counts in a tensor, the others in an int."""
    is_torch = isinstance(optimizer, torch.optim.Adam)  # AdamW is one of them
    return torch.tensor(step, dtype=torch.float32) if is_torch else int(step)
