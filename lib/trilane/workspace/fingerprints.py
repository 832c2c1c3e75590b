"""Fingerprints: a few numbers that identify a tensor, and the file in which a rank describes its
state; without torch.

The mark of a part of a tensor is a sum over its values, weighted by their position in the whole
tensor. So the marks of the parts add up to the mark of the whole, for any topology:

    hash      sum of bits(r, c) u(r) v(c) mod 2^64    equal for different bits in one case of 2^60
    sketch    sum of x(r, c) s_j(r) t_j(c), j < 8     mean of (sketch_a - sketch_b)^2: |a - b|^2

u, v are odd random integers, s, t random signs, determined by the row's or column's number. The
hash is universal hashing (Carter and Wegman 1979), the sketch that of Alon, Matias and Szegedy
1996, with signs of rows times signs of columns. With eight sketches the estimate of |a - b| is
about a quarter off. Left out: which of the values differ.
"""

import functools
import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trilane.utils.frozen import frozen
from trilane.utils.tables import Json
from trilane.utils.validation import from_mapping, require

COPY = "copy"  # the weight that the model computes with, where the optimizer holds a master weight
SKETCHES = 8
# splitmix64: Steele, Lea and Flood 2014, doi:10.1145/2714064.2660195, figure 16.
SPLITMIX = tuple(np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
Box = Sequence[Sequence[int]]
# xIELU begins with alphas of 0.8 and 0.3 + 0.5, given before softplus (transformers' activations)
CONSTANTS = {
    ".bias": 0.0,
    "layernorm.weight": 1.0,
    ".alpha_p": math.log(math.expm1(0.8)),
    ".alpha_n": math.log(math.expm1(0.3)),
}


def file_of(rank: int) -> str:
    """The file name of a rank's fingerprint."""
    return f"fingerprint_{rank:05d}.json"


def hashed(generators: Json) -> dict[str, str]:
    """Each random number generator's state as a hash; those of "tracked" by their own names."""
    states = dict(generators)
    states |= states.pop("tracked", {})
    return {
        name: hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
        for name, state in states.items()
    }


def must_decay(name: str, dims: int = 2) -> bool:
    """Whether a parameter decays: all but norms, biases and other vectors. Embeddings do, as in
    Megatron-LM.
    """
    return dims > 1 and default_of(name) is None


def is_expert(name: str) -> bool:
    """Whether a parameter is of an expert, of which other ranks are replicas than of all else."""
    return ".mlp.experts." in name


def default_of(name: str) -> float | None:
    """The initial value of every element of a norm, a bias or an activation; None for parameters
    with random initial values.
    """
    for end, value in CONSTANTS.items():
        if name.endswith(end):
            return value
    return None


@frozen
class Mark:
    """The fingerprint of a part of a tensor: hash, sum of squares, range and sketch."""

    hash: int
    squares: float
    low: float
    high: float
    sketch: tuple[float, ...]

    def __add__(self, other: "Mark") -> "Mark":
        """The mark of the union of two disjoint parts."""
        return Mark(
            hash=(self.hash + other.hash) % 2**64,
            squares=self.squares + other.squares,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            sketch=tuple(a + b for a, b in zip(self.sketch, other.sketch, strict=True)),
        )

    def constant(self, value: float | None) -> bool:
        """Whether every element is `value`."""
        return self.low == self.high == value

    def apart(self, other: "Mark") -> float:
        """An estimate of |a - b| relative to the larger norm: 0 for equal bits, about 1 for
        unrelated tensors.
        """
        if self.hash == other.hash:
            return 0.0
        # differences below 1e-6 are lost in the rounding of the sketches
        distance = np.mean(np.subtract(self.sketch, other.sketch) ** 2) ** 0.5
        norm = max(self.squares, other.squares) ** 0.5
        return float(distance / max(norm, 1e-38))

    def to_json(self) -> list[Any]:
        return [f"{self.hash:016x}", self.squares, self.low, self.high, *self.sketch]


def mark_from_json(values: Sequence[Any]) -> Mark:
    """The Mark of a list of to_json(); ValueError, TypeError or IndexError for other values."""
    squares, low, high, *sketch = map(float, values[1:])
    if len(sketch) != SKETCHES:
        raise ValueError(f"{len(sketch)} sketches")
    return Mark(
        hash=int(values[0], 16),
        squares=squares,
        low=low,
        high=high,
        sketch=tuple(sketch),
    )


def mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """64 random bits for each number, reproducible: splitmix64."""
    step, first, second = SPLITMIX
    z = (numbers.astype(np.uint64) + np.uint64(salt)) * step
    z = (z ^ (z >> np.uint64(30))) * first
    z = (z ^ (z >> np.uint64(27))) * second
    return z ^ (z >> np.uint64(31))


def weights(first: int, end: int, salt: int) -> tuple[np.ndarray, np.ndarray]:
    """For the rows or columns `first` to `end`: odd 64-bit weights (n,) int64, and signs (n,
    SKETCHES) float32.
    """
    numbers = np.arange(first, end)
    one = np.uint64(1)
    bits = mixed(numbers, salt)
    places = np.arange(SKETCHES, dtype=np.uint64)
    signs = (mixed(numbers, salt + (1 << 40))[:, None] >> places) & one
    return (bits | one).view(np.int64), 1.0 - 2.0 * signs.astype(np.float32)


def sides(box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a part; a vector is one row."""
    assert 1 <= len(box) <= 2, box
    rows, columns = ((0, 1), *box)[-2:]
    return (rows[0], rows[1]), (columns[0], columns[1])


def planes(box: Box) -> list[Box]:
    """A part of three dimensions as matrices, one for each index of the first, whose rows have
    numbers of their own.
    """
    (first, end), (top, bottom), columns = box
    return [((2**32 * i + top, 2**32 * i + bottom), columns) for i in range(first, end)]


@frozen
class Part:
    """The part `box` of tensor `name` of shape `shape`: a mark of each kind, and its weight decay
    (None: unknown, as where another replica updates it).

    Where replicas divide the part (ZeRO, a distributed optimizer), the marks of all kinds but COPY
    are those of the values `shard` of it, flattened, in the rank's file; whole_parts() adds them
    up.
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    decay: float | None
    marks: Mapping[str, Mark]
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        inside = [0 <= a <= b <= n for (a, b), n in zip(self.box, self.shape, strict=True)]
        require(all(inside) and 0 < len(inside) < 4, "part", self.name, "is damaged")

    def to_json(self) -> Json:
        return {**vars(self), "marks": {kind: mark.to_json() for kind, mark in self.marks.items()}}


def whole_parts(replicas: Sequence[Part]) -> list[Part]:
    """The same part on all replicas, in the order of their ranks, with the marks of their shards
    added up, in each group of ranks that share them out; without them where one is missing.
    """
    ranges = [part.shard or (0, 0) for part in replicas]
    groups = ranges.count(max(ranges))
    if groups > 1:
        each = len(replicas) // groups
        parts = [whole_parts(replicas[n : n + each]) for n in range(0, len(replicas), each)]
        return functools.reduce(operator.add, parts)
    size = math.prod(end - first for first, end in replicas[0].box)
    # a replica may hold nothing of it
    shards = [part for part in replicas if part.shard and part.shard[0] < part.shard[1]]
    shards.sort(key=lambda part: part.shard or (0, 0))
    begins = [part.shard[0] for part in shards if part.shard]
    ends = [part.shard[1] for part in shards if part.shard]
    sums = {}
    if shards and [0, *ends] == [*begins, size]:  # each begins where the one before it ends
        for kind in set.intersection(*(set(part.marks) for part in shards)) - {COPY}:
            sums[kind] = functools.reduce(operator.add, (part.marks[kind] for part in shards))
    wholes = []
    for part in replicas:
        copy = {kind: mark for kind, mark in part.marks.items() if kind == COPY}
        wholes.append(replace(part, marks={**sums, **copy}, shard=None))
    return wholes


def part_from_json(values: Json) -> Part:
    """The Part of an object of to_json(); ValueError, KeyError, TypeError or IndexError for other
    values.
    """
    marks = {str(kind): mark_from_json(numbers) for kind, numbers in values["marks"].items()}
    return from_mapping(Part, {**values, "marks": marks}, "part")
