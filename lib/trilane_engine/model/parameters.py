"""The parameters of the whole model by name: size, tensor-parallel split, a rank's pieces, and
initial values.

The initial state depends on a parameter's name, its place in the canonical matrix and the seed
alone, so it is the same on any topology; a rank draws what it holds and nothing else. C columns of
a matrix, R rows that are drawn.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch

from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.utils.frozen import frozen
from trilane.workspace.fingerprints import SPLITMIX, default_of

# What megatron-core splits by columns, the inputs; both write to the residual stream.
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
Box = tuple[tuple[int, int], ...]  # (first, last + 1) in each dimension of the whole tensor


def is_gated_fc1(name: str, shape: ModelShape) -> bool:
    """Whether parameter `name` holds two matrices, gate and up, of a gated MLP."""
    return shape.is_gated and ".linear_fc1." in name


def split_dim(name: str) -> int | None:
    """The dimension of parameter `name` that tensor parallelism splits; None where every rank holds
    the whole.
    """
    rows = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.", "linear_fc1.")
    if any(part in name for part in rows):
        return 0
    return 1 if name.endswith(COLUMNS) else None


def paired(size: Iterable[int], gated: bool) -> tuple[int, ...]:
    """The canonical shape of a parameter, or of a part of it, that a module holds as `size`."""
    rows, *rest = size
    if gated:
        return (2, rows // 2, *rest)
    return (rows, *rest)


def whole_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter of the whole model; a tied head is not listed
    separately.
    """
    h = shape.hidden_size
    kinds = ("weight", "bias") if shape.normalization == "layernorm" else ("weight",)
    sizes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (shape.vocab_size, h)}
    if shape.positions == "learned":
        sizes["embedding.position_embeddings.weight"] = (shape.seq_length, h)
    if shape.embedding_layernorm:
        sizes |= {f"embedding.layernorm.{kind}": (h,) for kind in kinds}
    for number in range(shape.num_layers):
        layer = f"decoder.layers.{number}"
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            sizes |= {f"{layer}.{norm}.{kind}": (h,) for kind in kinds}
        if shape.qk_layernorm:
            for norm in ("self_attention.q_layernorm", "self_attention.k_layernorm"):
                sizes |= {f"{layer}.{norm}.{kind}": (shape.head_dim,) for kind in kinds}
        if shape.activation == "xielu":
            sizes |= {f"{layer}.mlp.activation_func.alpha_{sign}": (1,) for sign in "pn"}
        # parameter -> shape of its bias, columns of its matrix
        linears: dict[str, tuple[tuple[int, ...], int]] = {
            "self_attention.linear_qkv": ((shape.qkv_channels,), h),
            "self_attention.linear_proj": ((h,), shape.query_channels),
        }
        mlps = {"mlp": shape.ffn}
        if number >= shape.num_layers - shape.expert_layers:
            sizes[f"{layer}.mlp.router.weight"] = (shape.experts, h)
            mlps = {f"mlp.experts.{n}": shape.expert_ffn for n in range(shape.experts)}
            if shape.shared_experts:
                mlps["mlp.shared_experts"] = shape.shared_channels
            if shape.shared_gate:
                sizes[f"{layer}.mlp.shared_experts.gate_weight"] = (1, h)
        for mlp, ffn in mlps.items():
            linears[f"{mlp}.linear_fc1"] = ((2, ffn) if shape.is_gated else (ffn,), h)
            linears[f"{mlp}.linear_fc2"] = ((h,), ffn)
        for name, (out, columns) in linears.items():
            sizes[f"{layer}.{name}.weight"] = (*out, columns)
            if shape.biases == "all" or (shape.biases == "qkv" and "linear_qkv" in name):
                sizes[f"{layer}.{name}.bias"] = out
    sizes |= {f"decoder.final_layernorm.{kind}": (h,) for kind in kinds}
    if not shape.tied_embeddings:
        sizes["output_layer.weight"] = (shape.vocab_size, h)
    return sizes


@frozen
class Piece:
    """The part `box` of parameter `name`, whose whole has `shape`; `written_elsewhere` where
    another rank writes it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    written_elsewhere: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of this part."""
        return tuple(end - first for first, end in self.box)


def initial_tensor(name: str, size: Iterable[int], plan: Plan) -> torch.Tensor:
    """The whole parameter `name` of canonical `size`, fp32, on the CPU."""
    size = tuple(size)
    held = size
    if is_gated_fc1(name, plan.shape):
        held = (2 * size[1], *size[2:])
    last = math.prod(size)
    return initial_range(name, held, 0, 1, plan, 0, last, split_dim(name)).view(size)


def initial_range(
    name: str,
    local: tuple[int, ...],
    rank: int,
    tp: int,
    plan: Plan,
    first: int,
    end: int,
    dim: int | None,
) -> torch.Tensor:
    """The values `first` to `end` of the part, `local` in size, that tensor-parallel rank `rank` of
    `tp` holds.

    `dim` is the dimension that is split, None for none. Weights are
    normal with deviation optimizer.init_std, those split by columns, which write to the residual
    stream init_std / sqrt(2 L); others as default_of() has them. Radford et al. 2019 (GPT-2),
    section 2.3, with 0.02. The names are megatron-core's, with the layer's number in the whole
    model. `linear_qkv` holds its rows by group of heads that share keys and values, in GPT-2 one
    head each: (group, [its queries ..., key, value], channel).
    """
    default = default_of(name)
    if default is not None:
        return torch.full((end - first,), default)
    # gate and up count as one above the other
    *counts, held = paired(local, is_gated_fc1(name, plan.shape))
    if dim is None:
        rank = 0
        tp = 1
    deviation = plan.optimizer.init_std
    columns = (0, held)
    width = held
    if dim == 1:
        rows = np.arange(counts[0])
        columns = (held * rank, held * (rank + 1))
        width = held * tp
        deviation /= math.sqrt(2 * plan.shape.num_layers)
    else:
        each = counts[-1]
        starts = each * (rank + tp * np.arange(math.prod(counts[:-1])))
        rows = (starts[:, None] + np.arange(each)).reshape(-1)
    top = first // held
    digest = hashlib.sha256(f"{plan.run.seed}/{name}".encode()).digest()[:16]
    key = np.frombuffer(digest, np.uint64)
    drawn = normals(key, rows[top : -(-end // held)], columns, width)
    drawn *= np.float32(deviation)
    return torch.from_numpy(drawn).view(-1)[first - top * held : end - top * held]


def normals(key: np.ndarray, rows: np.ndarray, columns: tuple[int, int], width: int) -> np.ndarray:
    """Standard normal values, (R, columns), fp32: a pair of columns comes of the hash of its place
    in the matrix.

    Box and Muller 1958 of 31 and 32 bits: none beyond 6.7. The hash is splitmix64 with the second
    key between its two multiplications, so that the values of two keys are not one sequence,
    shifted.
    """
    low = columns[0] // 2
    high = -(-columns[1] // 2)
    pairs = -(-width // 2)
    values = np.empty((len(rows), high - low, 2), np.float32)
    # 2^14 pairs at a time, so that temporary arrays fit in the processor's cache: 4.7 ns a value,
    # torch.randn has 6.1
    step = max(1, (1 << 14) // (high - low))
    places = np.arange(low, high, dtype=np.uint64) * SPLITMIX[0] + key[0]
    for at in range(0, len(rows), step):
        z = rows[at : at + step, None].astype(np.uint64) * np.uint64(pairs) * SPLITMIX[0] + places
        z ^= z >> np.uint64(30)
        z *= SPLITMIX[1]
        z += key[1]
        z ^= z >> np.uint64(27)
        z *= SPLITMIX[2]
        z ^= z >> np.uint64(31)
        bits = z.view(np.int32).reshape(*z.shape, 2)
        radius = (bits[..., 1] & np.int32(0x7FFFFFFF)).astype(np.float32)
        radius += np.float32(0.5)
        radius *= np.float32(2**-31)
        np.log(radius, out=radius)
        radius *= np.float32(-2)
        np.sqrt(radius, out=radius)
        angle = bits[..., 0].astype(np.float32)
        angle *= np.float32(math.pi / 2**31)
        np.multiply(radius, np.cos(angle), out=values[at : at + step, :, 0])
        np.multiply(radius, np.sin(angle), out=values[at : at + step, :, 1])
    return values.reshape(len(rows), -1)[:, columns[0] - 2 * low : columns[1] - 2 * low]
