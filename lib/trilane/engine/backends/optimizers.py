"""What lies inside an optimizer of any make: Adam's moments and step, and the weight decay of each parameter.

And megatron-core's passes over all gradients, each as one operation over many tensors.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as megatron_optimizer

from trilane.workspace.fingerprints import must_decay

MOMENTS = ("exp_avg", "exp_avg_sq")


def init_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Give each of the optimizer's parameters without moments those of step 0: zeros, as the first step would.

    Each gets its own `step`: a shared one would count once for each parameter.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if "exp_avg" not in state:
            state["step"] = _step(optimizer, 0.0, parameter)
            state |= {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in MOMENTS}


def step_of(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Steps taken, the same for all parameters; 0 where this rank updates none. apex counts per group."""
    counted = [counts for optimizer in optimizers for counts in [*optimizer.state.values(), *optimizer.param_groups]]
    return max((float(counts.get("step", 0)) for counts in counted), default=0.0)


def set_step(optimizers: Iterable[torch.optim.Optimizer], step: float) -> None:
    """Set the number of steps taken to `step`."""
    for optimizer in optimizers:
        for parameter, counts in optimizer.state.items():
            counts["step"] = _step(optimizer, step, parameter)
        for group in [] if isinstance(optimizer, torch.optim.Adam) else optimizer.param_groups:
            group["step"] = _step(optimizer, step)


def _step(optimizer: torch.optim.Optimizer, step: float, parameter: torch.Tensor | None = None) -> Any:
    """torch counts in a tensor, the fused one on the parameter's device; the other optimizers in an int."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one of them
        return int(step)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return torch.tensor(step, dtype=torch.float32, device=parameter.device if fused and parameter is not None else None)


def fuse_adam(optimizers: Iterable[torch.optim.Optimizer | None]) -> None:
    """Let torch's AdamW, not yet stepped, update each parameter in one pass: every state is read and written once."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Adam):
            for group in [optimizer.defaults, *optimizer.param_groups]:
                group["fused"], group["foreach"] = True, False


def use_foreach() -> None:
    """Replace megatron-core's loops over gradients, where neither apex nor Transformer Engine did.

    Its own norm copies each tensor's to the host, which waits for the device as often as there are parameters; here
    the only wait is that for the result.
    """
    if clip_grads.l2_norm_impl is megatron_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = foreach_norm
        clip_grads.multi_tensor_scale_impl = megatron_optimizer.multi_tensor_scale_impl = foreach_scale
        megatron_optimizer._multi_tensor_copy_this_to_that = foreach_copy


def foreach_norm(chunk: int, noop: torch.Tensor, lists: Sequence[list[torch.Tensor]], *_: Any) -> tuple[Any, None]:
    """The 2-norm of all tensors of the first list together, (1,), by amp_C.multi_tensor_l2norm's interface."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().reshape(1), None


def foreach_scale(chunk: int, noop: torch.Tensor, lists: Sequence[list[torch.Tensor]], scale: float) -> None:
    """Write `scale` times each tensor of the first list into that of the second: amp_C.multi_tensor_scale."""
    source, target = lists
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    if scale != 1.0:
        torch._foreach_mul_(target, scale)


def foreach_copy(this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: torch.Tensor | None = None) -> None:
    """Copy each tensor of `this` into that of `that`, in its precision."""
    if this:
        torch._foreach_copy_(that, this)


def decay_audit(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], decay: float) -> dict[str, str]:
    """Parameter name -> "decay" or "no decay", read from megatron-core's optimizers once they are built.

    AssertionError where a parameter is in no group or in the wrong one. With the distributed optimizer a rank audits
    the parameters of which it updates a part.
    """
    groups: dict[str, str] = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            for found in weight_decays(parameter, optimizers):
                assert found == (decay if must_decay(name) else 0.0), f"{name} has weight decay {found}"
                groups[f"{number}.{name}"] = "decay" if must_decay(name) else "no decay"
    return groups


def weight_decays(parameter: torch.nn.Parameter, optimizers: Sequence[Any]) -> Iterator[float]:
    """The weight decay of the group that holds `parameter` or what represents it: an fp32 copy, this rank's part."""
    for optimizer in optimizers:
        if hasattr(optimizer, "model_param_group_index_map"):  # the distributed optimizer
            place = optimizer.model_param_group_index_map.get(parameter)
            if place is not None:
                yield optimizer.optimizer.param_groups[place[0]]["weight_decay"]
            continue
        held = getattr(parameter, "main_param", parameter)
        for group in optimizer.optimizer.param_groups:
            if any(held is other for other in group["params"]):
                yield group["weight_decay"]


def deepspeed_audit(named: Iterable[tuple[str, torch.nn.Parameter]], optimizer: Any, decay: float) -> dict[str, str]:
    """The same read from DeepSpeed's `optimizer`; `named` by the names of the whole model.

    AssertionError where a parameter is in no group or in the wrong one.
    """
    found = deepspeed_decays(optimizer)
    groups = {}
    for name, parameter in named:
        assert id(parameter) in found, f"{name} is in no optimizer group"
        right = decay if must_decay(name) else 0.0
        assert found[id(parameter)] == right, f"{name} has weight decay {found[id(parameter)]}"
        groups[name] = "decay" if must_decay(name) else "no decay"
    return groups


def deepspeed_decays(optimizer: Any) -> dict[int, float]:
    """id of a parameter -> the weight decay of its group in DeepSpeed's `optimizer`.

    ZeRO replaces the parameters of a group by its own flat ones and keeps the lists apart: bit16_groups in stages 1
    and 2, bf16_groups in BF16_Optimizer, fp16_groups, in sub-groups of a group, in stage 3.
    """
    found: dict[int, float] = {}
    for number, members in enumerate(_deepspeed_members(optimizer)):
        group = getattr(optimizer, "sub_group_to_group_id", {}).get(number, number)
        found |= {id(p): optimizer.param_groups[group]["weight_decay"] for p in members}
    return found


def _deepspeed_members(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    for lists in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, lists):
            return getattr(optimizer, lists)
    return [group["params"] for group in optimizer.param_groups]
