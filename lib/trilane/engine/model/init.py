"""The one initial state: every tensor of the whole model by its name and the seed, cut for any topology.

A rank makes only the tensors that it holds, one at a time, so nobody ever holds the whole model.
"""

import hashlib
import math
from collections.abc import Iterable

import torch

from trilane.config.model import ModelShape

STD = 0.02  # GPT-2, section 2.3


# Which dimension megatron-core cuts: rows of what spreads out (column parallel), columns of what comes together.
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.", "linear_fc1.")


COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


EMBEDDING_NORM = "embedding.layernorm"  # BLOOM's, between the embedding and the first layer


def split_dim(name: str) -> int | None:
    """The dimension of parameter `name` that tensor parallelism cuts; None where every rank has the whole."""
    if any(part in name for part in ROWS):
        return 0
    return 1 if name.endswith(COLUMNS) else None


def whole_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every parameter of the whole model by its canonical name, and its size uncut; a tied head has none of its own."""
    h, norm = shape.hidden_size, lambda name: {f"{name}.weight": (h,), f"{name}.bias": (h,)}
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (shape.vocab_size, h),
        "embedding.position_embeddings.weight": (shape.seq_length, h),
    }
    linears = {"self_attention.linear_qkv": (3 * h, h), "self_attention.linear_proj": (h, h)}
    linears |= {"mlp.linear_fc1": (4 * h, h), "mlp.linear_fc2": (h, 4 * h)}
    if shape.embedding_layernorm:
        sizes |= norm(EMBEDDING_NORM)
    for layer in (f"decoder.layers.{i}" for i in range(shape.num_layers)):
        sizes |= norm(f"{layer}.input_layernorm") | norm(f"{layer}.pre_mlp_layernorm")
        for name, size in linears.items():
            sizes |= {f"{layer}.{name}.weight": size, f"{layer}.{name}.bias": size[:1]}
    sizes |= norm("decoder.final_layernorm")
    return sizes if shape.tied_embeddings else {**sizes, "output_layer.weight": (shape.vocab_size, h)}


def initial_tensor(name: str, size: Iterable[int], seed: int, shape: ModelShape) -> torch.Tensor:
    """The whole parameter `name`, fp32, on the CPU; the same on every machine and topology.

    Weights are normal with deviation 0.02, the two that write to the residual stream 0.02 / sqrt(2 L); biases are 0,
    norm weights 1. Radford et al. 2019 (GPT-2), section 2.3; the names are megatron-core's, with the layer's number in
    the whole model. `linear_qkv` holds its rows by head: (head, query | key | value, channel).
    """
    size = tuple(size)
    if name.endswith(".bias"):
        return torch.zeros(size)
    if "layernorm" in name:
        return torch.ones(size)
    std = STD / math.sqrt(2 * shape.num_layers) if name.endswith(COLUMNS) else STD
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(size, generator=generator) * std


def initial_slice(name: str, local: Iterable[int], rank: int, tp: int, seed: int, shape: ModelShape) -> torch.Tensor:
    """The part of parameter `name` that tensor-parallel rank `rank` of `tp` holds; `local` is the size of that part."""
    whole, dim = list(local), split_dim(name)
    if dim is None or tp == 1:
        return initial_tensor(name, whole, seed, shape)
    whole[dim] *= tp
    return initial_tensor(name, whole, seed, shape).chunk(tp, dim)[rank]
