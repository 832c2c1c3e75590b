"""The tensors of a model of transformers in our layout, and ours in theirs, for each family of config/hf_families.py.

Canonical: a matrix is (out, in); the rows of `linear_qkv` go by group of heads that share keys and values: (group, its
queries ... | key | value, channel); a gated `linear_fc1` is (gate | up, channel, in). Where a family keeps such parts
apart, its table has a name for each; where it joins them, kind after kind. Rotary positions turn channels i and i + D/2
of a head, in megatron-core and in transformers alike, so that no channel moves. The conversions are permutations, valid
for an optimizer's moments as well as for weights.
"""

from collections.abc import Sequence

import torch

from trilane.config.hf_families import Family
from trilane.config.model import ModelShape
from trilane.engine.model.parameters import whole_sizes


def theirs(family: Family, name: str, tensor: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """The tensors of their_names() of the canonical parameter `name`; they share memory where nothing moves."""
    parts = [tensor]
    if "linear_qkv." in name and not family.by_group:
        parts = _split_qkv(tensor, shape)
    elif "linear_fc1." in name and shape.is_gated:
        parts = list(tensor)
    if len(family.their_names(name)) < len(parts):
        parts = [torch.cat(parts)]
    return [part.t().contiguous() if _is_turned(family, name) else part for part in parts]


def ours(family: Family, name: str, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """The inverse of theirs()."""
    parts = [part.t().contiguous() if _is_turned(family, name) else part for part in tensors]
    if "linear_qkv." in name and not family.by_group:
        keys = shape.kv_heads * shape.head_dim
        q, k, v = parts if len(parts) == 3 else parts[0].split([shape.hidden_size, keys, keys])
        return _joined_qkv(q, k, v, shape)
    if "linear_fc1." in name and shape.is_gated:
        return torch.stack(parts) if len(parts) == 2 else parts[0].view(2, shape.ffn, *parts[0].shape[1:])
    return parts[0]


def canonical_names(family: Family, shape: ModelShape) -> dict[str, str]:
    """Their name of each parameter of the model -> the canonical one, which several may share."""
    return {n: name for name in whole_sizes(shape) for n in family.their_names(name)}


def _is_turned(family: Family, name: str) -> bool:
    return family.transposed and ".linear_" in name and name.endswith(".weight")


def _split_qkv(tensor: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """Rows (group, queries | key | value, channel) -> queries, keys, values, each (head, channel)."""
    rows = tensor.unflatten(0, (shape.kv_heads, -1, shape.head_dim))
    return [part.flatten(0, 2) for part in rows.split([rows.shape[1] - 2, 1, 1], 1)]


def _joined_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    rows = [part.unflatten(0, (shape.kv_heads, -1, shape.head_dim)) for part in (q, k, v)]
    return torch.cat(rows, 1).flatten(0, 2)
