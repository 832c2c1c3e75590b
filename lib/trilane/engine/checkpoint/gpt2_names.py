"""GPT-2's tensors under two naming schemes: canonical (megatron-core's) and transformers' GPT2LMHeadModel.

Canonical: a matrix is (out, in); the rows of `linear_qkv` go by head: (head, query | key | value, channel). GPT-2's
Conv1D stores (in, out), and c_attn's columns go by kind: (query | key | value, head, channel). The conversion is a
permutation, valid for an optimizer's moments as well as for weights.
"""

import re
from collections.abc import Iterable, Mapping

import torch

from trilane.utils.validation import require

# canonical part -> GPT-2's, both after the layer's prefix
PARTS = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


ENDS = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}


HEAD = "lm_head.weight"
LAYER, GPT2_LAYER = "decoder.layers", "transformer.h"


# Causal masks that files of older transformers hold beside the parameters.
MASK = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")


def gpt2_name(name: str) -> str:
    """GPT-2's name of the canonical parameter `name`; ValueError where GPT-2 has none."""
    return _renamed(name, ENDS, PARTS, LAYER, GPT2_LAYER)


def canonical_name(name: str) -> str:
    """The canonical name of GPT-2's parameter `name`; ValueError for one that is not GPT-2's."""
    ends, parts = ({v: k for k, v in names.items()} for names in (ENDS, PARTS))
    return _renamed(name, ends, parts, GPT2_LAYER, LAYER)


def gpt2_tensor(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The canonical parameter `name` in GPT-2's layout; shares memory where nothing moves."""
    if "linear_qkv." in name:
        tensor = _swapped(tensor, heads, 3)
    return tensor.t().contiguous() if _is_conv(name) else tensor


def canonical_tensor(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of gpt2_tensor() for the canonical `name`."""
    if _is_conv(name):
        tensor = tensor.t().contiguous()
    return _swapped(tensor, 3, heads) if "linear_qkv." in name else tensor


def canonical_state(gpt2: Mapping[str, torch.Tensor], heads: int, tied: bool) -> dict[str, torch.Tensor]:
    """The canonical tensors of a state dict of GPT2LMHeadModel; a `tied` head is dropped.

    ValueError for a name that is not GPT-2's, and for a tied head that differs from the word embedding.
    """
    state = {}
    for name, tensor in _parameters(gpt2):
        if name == HEAD and tied:
            same = torch.equal(tensor, gpt2["transformer.wte.weight"])
            require(same, HEAD, "another matrix", "must be the word embedding, for the model's embeddings are tied")
            continue
        canonical = canonical_name(name)
        state[canonical] = canonical_tensor(canonical, tensor, heads)
    return state


def _parameters(gpt2: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """Every parameter by its full name: files of GPT2Model lack the prefix `transformer.`."""
    bare = not any(name.startswith("transformer.") for name in gpt2)
    named = ((f"transformer.{name}" if bare and name != HEAD else name, tensor) for name, tensor in gpt2.items())
    return [(name, tensor) for name, tensor in named if not MASK.fullmatch(name)]


def _renamed(name: str, ends: Mapping[str, str], parts: Mapping[str, str], layers: str, other: str) -> str:
    if name in ends:
        return ends[name]
    found = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    require(found is not None and found[2] in parts, "parameter", name, "GPT-2 and ours share none of this name")
    assert found is not None
    return f"{other}.{found[1]}.{parts[found[2]]}.{found[3]}"


def _is_conv(name: str) -> bool:
    return ".linear_" in name and name.endswith(".weight")


def _swapped(tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Rows by (first, second, channel) -> rows by (second, first, channel)."""
    rows = tensor.shape[0]
    blocks = tensor.reshape(first, second, rows // (first * second), *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)
