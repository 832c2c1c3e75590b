"""The parameters of the whole model by name: size, tensor-parallel split, and a rank's pieces."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from trilane.config.model import ModelShape

# The dimension that megatron-core splits: rows of column-parallel layers, columns of row-parallel ones.
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.", "linear_fc1.")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
GATED = "mlp.linear_fc1."
EMBEDDING_NORM = "embedding.layernorm"  # BLOOM's, between the embedding and the first layer


def is_gated_fc1(name: str, shape: ModelShape) -> bool:
    """Whether parameter `name` holds two matrices, gate and up, of a gated MLP."""
    return shape.is_gated and GATED in name


def split_dim(name: str, gated: bool = False) -> int | None:
    """The dimension of parameter `name` that tensor parallelism splits; None where every rank holds the whole.

    A `gated` first matrix of the MLP is (2, ffn, h), gate and up: each rank has its rows of both.
    """
    if any(part in name for part in ROWS):
        return 1 if gated else 0
    return 1 if name.endswith(COLUMNS) else None


def paired(size: Iterable[int], gated: bool) -> tuple[int, ...]:
    """The canonical shape of a parameter, or of a part of it, that a module holds as `size`."""
    rows, *rest = size
    return (2, rows // 2, *rest) if gated else (rows, *rest)


def whole_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter of the whole model; a tied head is not listed separately."""
    sizes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (shape.vocab_size, shape.hidden_size)}
    if shape.positions == "learned":
        sizes["embedding.position_embeddings.weight"] = (shape.seq_length, shape.hidden_size)
    if shape.embedding_layernorm:
        sizes |= _norm(EMBEDDING_NORM, shape)
    for layer in (f"decoder.layers.{i}" for i in range(shape.num_layers)):
        sizes |= _norm(f"{layer}.input_layernorm", shape) | _norm(f"{layer}.pre_mlp_layernorm", shape)
        sizes |= {f"{layer}.{name}": size for name, size in _linears(shape).items()}
    sizes |= _norm("decoder.final_layernorm", shape)
    untied = {} if shape.tied_embeddings else {"output_layer.weight": (shape.vocab_size, shape.hidden_size)}
    return sizes | untied


def _norm(name: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if shape.normalization == "layernorm" else ("weight",)
    return {f"{name}.{kind}": (shape.hidden_size,) for kind in kinds}


def _linears(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The matrices of one layer, each (out, in), and their biases."""
    h, ffn = shape.hidden_size, shape.ffn
    up = (2, ffn) if shape.is_gated else (ffn,)
    outs = {
        "self_attention.linear_qkv": ((h + 2 * shape.kv_heads * shape.head_dim,), h),
        "self_attention.linear_proj": ((h,), h),
        "mlp.linear_fc1": (up, h),
        "mlp.linear_fc2": ((h,), ffn),
    }
    sizes: dict[str, tuple[int, ...]] = {}
    for name, (out, into) in outs.items():
        sizes[f"{name}.weight"] = (*out, into)
        if shape.biases == "all" or (shape.biases == "qkv" and "linear_qkv" in name):
            sizes[f"{name}.bias"] = out
    return sizes


Box = tuple[tuple[int, int], ...]  # (first, last + 1) in each dimension of the whole tensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part `box` of parameter `name`, whose whole has `shape`; `written_elsewhere` where another rank writes it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    written_elsewhere: bool

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of this part."""
        return tuple(end - first for first, end in self.box)


class States(Protocol):
    """Weights and optimizer of one rank, piece by piece in fp32, whatever the engine's own representation.

    A piece is the same on all replicas. Of its values, flattened, a rank reads those of `shard(number)`: where the
    states are `divided` (ZeRO, a distributed optimizer) the part that it updates itself, which no other replica has;
    else all of them. All replicas must read the same pieces in the same order, since an engine may have to gather them.
    """

    pieces: list[Piece]
    divided: bool

    def finish_step(self) -> None:
        """Complete what the last step deferred; collective, before any read."""

    def shard(self, number: int) -> tuple[int, int]:
        """(first, last + 1) of the values that read() returns; (0, 0) for none."""

    def read(self, number: int, kind: str) -> torch.Tensor:
        """These values of piece `number` of `kind` (checkpoints.KINDS), flat, fp32, on any device.

        They may be the engine's own storage, which its next step changes.
        """

    def write(self, number: int, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        """Set piece `number`: the whole `weight`, also in the engine's precision, and `moments` as read() has them."""

    def copy(self, number: int) -> torch.Tensor | None:
        """The weight that the model computes with, in the piece's shape; None where this rank does not hold it whole,
        or where it is the optimizer's own."""

    def decays(self) -> list[float | None]:
        """The current weight decay of each piece's optimizer group; None where this rank updates none of the piece."""

    def scalars(self) -> dict[str, float]:
        """Adam's step; in fp16 also loss_scale, good_steps since it last changed, and hysteresis."""

    def set_scalars(self, values: dict[str, float]) -> None:
        """Set them, after the pieces."""


def pieces(named: Iterable[tuple[str, torch.nn.Parameter]], tp_rank: int, tp: int, first_stage: bool) -> list[Piece]:
    """The pieces of parameters by their names in the whole model, in the order given.

    Parameters that tensor parallelism does not split are written by its ranks in turn, a tied embedding by the first
    stage. megatron-core marks the first matrix of a gated MLP, two matrices in one, by a `partition_stride` of 2.
    """
    found = []
    for number, (name, parameter) in enumerate(named):
        gated = getattr(parameter, "partition_stride", 1) == 2
        local = paired(getattr(parameter, "ds_shape", parameter.shape), gated)  # under ZeRO-3 itself is empty
        dim, twin = split_dim(name, gated), name.startswith("embedding.") and not first_stage
        cut = dim is not None and tp > 1
        box = tuple((n * tp_rank, n * (tp_rank + 1)) if cut and d == dim else (0, n) for d, n in enumerate(local))
        whole = tuple(n * tp if cut and d == dim else n for d, n in enumerate(local))
        found.append(
            Piece(name=name, shape=whole, box=box, written_elsewhere=twin or (not cut and number % tp != tp_rank))
        )
    return found
