"""Initial values of parameters: any part of a matrix is drawn alone, and is the same whoever draws it.

The state depends on a parameter's name, its place in the canonical matrix and the seed alone, so it is the same for any
topology; a rank draws what it holds and nothing else. C columns of a matrix, R rows that are drawn.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch

from trilane.config.plan import Plan
from trilane.engine.model.parameters import COLUMNS, is_gated_fc1, paired, split_dim
from trilane.workspace.fingerprints import FIRST, SECOND, STEP

BLOCK = 1 << 14  # pairs of values at a time, so that temporary arrays fit in the processor's cache


def initial_tensor(name: str, size: Iterable[int], plan: Plan) -> torch.Tensor:
    """The whole parameter `name` of canonical `size`, fp32, on the CPU."""
    size = tuple(size)
    held = (2 * size[1], *size[2:]) if is_gated_fc1(name, plan.shape) else size
    return initial_range(name, held, 0, 1, plan, 0, math.prod(size)).view(size)


def initial_range(
    name: str, local: tuple[int, ...], rank: int, tp: int, plan: Plan, first: int, end: int
) -> torch.Tensor:
    """The values `first` to `end` of the part, `local` in size, that tensor-parallel rank `rank` of `tp` holds.

    Weights are normal with deviation optimizer.init_std, the two that write to the residual stream
    init_std / sqrt(2 L); biases are 0, norm weights 1. Radford et al. 2019 (GPT-2), section 2.3, with 0.02; the names
    are megatron-core's, with the layer's number in the whole model. `linear_qkv` holds its rows by group of heads that
    share keys and values, in GPT-2 one head each: (group, [its queries ..., key, value], channel).
    """
    if name.endswith(".bias"):
        return torch.zeros(end - first)
    if "layernorm" in name:
        return torch.ones(end - first)
    rows, columns, width = _place(name, local, rank, tp, is_gated_fc1(name, plan.shape))
    held = columns[1] - columns[0]
    top = first // held
    drawn = normals(_key(name, plan.run.seed), rows[top : -(-end // held)], columns, width)
    drawn *= np.float32(
        plan.optimizer.init_std / (math.sqrt(2 * plan.shape.num_layers) if name.endswith(COLUMNS) else 1)
    )
    return torch.from_numpy(drawn.reshape(-1)[first - top * held : end - top * held])


def _place(
    name: str, local: tuple[int, ...], rank: int, tp: int, gated: bool
) -> tuple[np.ndarray, tuple[int, int], int]:
    """Of a part of size `local`: its rows' numbers in the whole matrix, its first column and last + 1, and the width.

    The two matrices of a gated MLP count as one above the other.
    """
    *counts, width = paired(local, gated)
    if name.endswith(COLUMNS):
        return np.arange(counts[0]), (width * rank, width * (rank + 1)), width * tp
    if split_dim(name) is None:
        rank, tp = 0, 1
    rows = np.arange(counts[-1]) + counts[-1] * rank
    return np.concatenate([rows + i * counts[-1] * tp for i in range(math.prod(counts[:-1]))]), (0, width), width


def _key(name: str, seed: int) -> np.ndarray:
    """Two numbers of 64 bits that no other parameter and seed have."""
    return np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], np.uint64)


def normals(key: np.ndarray, rows: np.ndarray, columns: tuple[int, int], width: int) -> np.ndarray:
    """Standard normal values, (R, columns), fp32: a pair of columns comes of the hash of its place in the matrix.

    Box and Muller 1958 of 31 and 32 bits: none beyond 6.7. The hash is splitmix64 with the second key between its two
    multiplications, so that the values of two keys are not one sequence, shifted.
    """
    low, high, pairs = columns[0] // 2, -(-columns[1] // 2), -(-width // 2)
    found = np.empty((len(rows), high - low, 2), np.float32)
    step = max(1, BLOCK // (high - low))
    places = np.arange(low, high, dtype=np.uint64) * STEP + key[0]
    for at in range(0, len(rows), step):
        starts = rows[at : at + step].astype(np.uint64) * np.uint64(pairs) * STEP
        _pairs(starts[:, None] + places, key[1], found[at : at + step])
    return found.reshape(len(rows), -1)[:, columns[0] - 2 * low : columns[1] - 2 * low]


def _pairs(z: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
    """Two normal values in `out`, (R, C / 2, 2), for each counter in `z`, (R, C / 2), which is overwritten."""
    z ^= z >> np.uint64(30)
    z *= FIRST
    z += key
    z ^= z >> np.uint64(27)
    z *= SECOND
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
    np.multiply(radius, np.cos(angle), out=out[..., 0])
    np.multiply(radius, np.sin(angle), out=out[..., 1])
