"""Weight decay by name: the optimizer group that each parameter really landed in, checked against the rule."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from trilane.workspace.fingerprints import must_decay


def decay_audit(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], decay: float) -> dict[str, str]:
    """Parameter name -> "decay" or "no decay", read from megatron-core's optimizers; ours to call once they are built.

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
    """The weight decay of the group that holds `parameter` or what stands for it: an fp32 copy, this rank's part."""
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
    said = {}
    for name, parameter in named:
        assert id(parameter) in found, f"{name} is in no optimizer group"
        right = decay if must_decay(name) else 0.0
        assert found[id(parameter)] == right, f"{name} has weight decay {found[id(parameter)]}"
        said[name] = "decay" if must_decay(name) else "no decay"
    return said


def deepspeed_decays(optimizer: Any) -> dict[int, float]:
    """id of a parameter -> the weight decay of its group in DeepSpeed's `optimizer`.

    ZeRO replaces the parameters of a group by its own flat ones and keeps the lists beside it: bit16_groups in stages 1
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
