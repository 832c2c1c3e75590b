"""Weight decay by name: the optimizer group that each parameter really landed in, checked against the rule."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def must_decay(name: str) -> bool:
    """The rule: everything decays but norms and biases. Word and position embeddings decay, as in Megatron-LM."""
    return not (name.endswith(".bias") or "layernorm" in name)


def decay_audit(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], decay: float) -> dict[str, str]:
    """Parameter name -> "decay" or "no decay", read from megatron-core's optimizers; ours to call once they are built.

    AssertionError where a parameter is in no group or in the wrong one. With the distributed optimizer a rank audits
    the parameters of which it updates a part.
    """
    groups: dict[str, str] = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            for found in _weight_decays(parameter, optimizers):
                assert found == (decay if must_decay(name) else 0.0), f"{name} has weight decay {found}"
                groups[f"{number}.{name}"] = "decay" if must_decay(name) else "no decay"
    return groups


def _weight_decays(parameter: torch.nn.Parameter, optimizers: Sequence[Any]) -> Iterator[float]:
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
