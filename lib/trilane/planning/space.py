"""Space: which topologies a search looks at, in blocks of one tp x pp x dp and all batch sizes."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from trilane.config.cluster import PRECISIONS, Cluster
from trilane.config.engines import ENGINES, default_attention, default_fp32_gradients, default_precision
from trilane.config.model import ModelShape
from trilane.config.parallelism import CHOICES, Topology, invalid_reason
from trilane.costmodel.columns import Columns
from trilane.utils.validation import parse_integers, require, require_integer, require_known

LARGEST_GBS = 1 << 20  # sequences: 64 times what anybody has trained with, and every divisor of it is tried

ParallelSizes = tuple[int, int, int]  # tp, pp, dp

VARIED = ("zero", "recompute", "interleaving", "partition", "sequence_parallel", "offload")


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that each choice may take; an empty tuple means every value that makes sense.

    `gbs` lists global batch sizes. Engine, precision, attention and the sums of gradients are held fixed. Raises
    ValueError for an empty or senseless choice.
    """

    gpus: tuple[int, ...]
    gbs: tuple[int, ...]
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    mbs: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = CHOICES["recompute"]
    interleaving: tuple[int, ...] = ()
    partition: tuple[str, ...] = CHOICES["partition"]
    sequence_parallel: tuple[bool, ...] = (False, True)
    offload: tuple[str, ...] = ("none",)
    precision: str = "bf16"
    fp32_gradients: bool = False
    attention: str = "fused"
    cp: int = 1
    engine: str = ENGINES[0]

    def __post_init__(self) -> None:
        for name in ("gpus", "gbs", "zero", "recompute", "partition", "sequence_parallel", "offload"):
            require(len(getattr(self, name)) > 0, name, "()", "needs at least one value")
        require_integer("cp", self.cp, 1)
        require(any(n % self.cp == 0 for n in self.gpus), "cp", self.cp, f"must divide gpus={self.gpus[0]}")
        for name in ("gpus", "gbs", "tp", "pp", "dp", "mbs", "interleaving"):
            for value in getattr(self, name):
                require_integer(name, value, 1)
                require(value <= LARGEST_GBS, name, value, f"must be at most {LARGEST_GBS}")
        for zero in self.zero:
            require(zero in (0, 1, 2, 3), "zero", zero, "ZeRO stages are 0, 1, 2 and 3")
        for name in ("recompute", "partition", "offload"):
            for value in getattr(self, name):
                require_known(name, value, CHOICES[name])
        require_known("engine", self.engine, ENGINES)
        self._check_pins()

    def _check_pins(self) -> None:
        pinned = [self.tp, self.pp, self.dp]
        if all(pinned):
            products = sorted({t * p * d * self.cp for t, p, d in product(*pinned)})
            ok = bool(set(products) & set(self.gpus))
            what = "tp x pp x dp" if self.cp == 1 else "tp x cp x pp x dp"
            require(ok, what, products[0], f"contradicts gpus={self.gpus[0]}")
        pins = [(name, getattr(self, name)) for name in ("tp", "pp", "dp") if getattr(self, name)]
        if pins and next(self.sizes(), None) is None:
            name, values = pins[0]
            raise ValueError(f"{name}={values[0]}: no tp x pp x dp with the pinned sizes makes gpus={self.gpus[0]}")

    @property
    def held_fixed(self) -> str:
        """What the search does not vary, in words."""
        sums = "fp32" if self.fp32_gradients or self.engine == "megatron" else self.precision
        gradients = "" if self.precision == "fp32" else f" with gradients summed in {sums}"
        words = [f"engine {self.engine}", f"{self.precision}{gradients}", f"attention {self.attention}"]
        varied = ("tp", "pp", "dp", "mbs", *VARIED)
        words += [f"{n} {getattr(self, n)[0]}" for n in varied if len(getattr(self, n)) == 1]
        words += [f"cp {self.cp}"] * (self.cp > 1)
        return ", ".join(words)

    def sizes(self) -> Iterator[ParallelSizes]:
        """Every (tp, pp, dp) of one of the GPU counts that the pins allow."""
        for gpus in (n // self.cp for n in self.gpus if n % self.cp == 0):
            for tp in divisors(gpus):
                for pp in divisors(gpus // tp):
                    found = tp, pp, gpus // tp // pp
                    pins = zip(found, (self.tp, self.pp, self.dp), strict=True)
                    if all(not pin or size in pin for size, pin in pins):
                        yield found

    @cached_property
    def _batches(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {}

    def batches(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Every (mbs, gbs) with gbs a multiple of mbs x dp, as two arrays."""
        if dp not in self._batches:
            pairs = [(m, g) for g in self.gbs if g % dp == 0 for m in self._divisors(g // dp)]
            array = np.array(pairs, float).reshape(-1, 2)
            self._batches[dp] = array[:, 0], array[:, 1]
        return self._batches[dp]

    def _divisors(self, n: int) -> list[int]:
        return [m for m in self.mbs if n % m == 0] if self.mbs else divisors(n)

    def points(self, shape: ModelShape, tp: int, pp: int) -> list["SearchPoint"]:
        """Every combination of the remaining choices that means something on tp x pp."""
        most = max(shape.num_layers // pp, 1)
        chunks = (self.interleaving or tuple(divisors(most))) if pp > 1 else (1,)
        parallel = self.sequence_parallel if tp > 1 else (False,)
        choices = product(self.zero, self.recompute, chunks, self.partition, parallel, self.offload)
        return [SearchPoint(*choice) for choice in choices]

    def base(self) -> Topology:
        """A topology with the choices that are the same for all."""
        return Topology(
            precision=self.precision, fp32_gradients=self.fp32_gradients, attention=self.attention, cp=self.cp
        )


def space_for(
    shape: ModelShape,
    cluster: Cluster,
    *,
    gpus: int | Sequence[int],
    gbs: int | Sequence[int],
    engine: str = ENGINES[0],
    **choices: Any,
) -> Space:
    """The space of a model on a cluster: what `choices` pins, the cluster's and engine's defaults, the rest free.

    A choice is one value or several; None, "" and () leave it free, or at its default where the space holds it fixed
    (precision, attention, fp32_gradients, cp). Raises ValueError for what no search can look at.
    """
    given = {name: value for name, value in choices.items() if value is not None and value not in ("", ())}
    for name in given:
        require_known("choice", name, sorted({f.name for f in dataclasses.fields(Space)} - {"gpus", "gbs", "engine"}))
    precision = given.pop("precision", default_precision(cluster))
    cluster.gpu.flops_per_s(precision)
    fixed: dict[str, Any] = {"attention": default_attention(shape, cluster, precision), "cp": 1}
    fixed["fp32_gradients"] = default_fp32_gradients(precision, _tuple(given.get("offload", "none"))[0])
    fixed |= {name: given.pop(name) for name in tuple(fixed) if name in given}
    if reason := invalid_reason(shape, Topology(cp=fixed["cp"])):
        raise ValueError(reason)
    free: dict[str, Any] = {name: _tuple(value) for name, value in given.items()}
    return Space(gpus=_tuple(gpus), gbs=_tuple(gbs), engine=engine, precision=precision, **fixed, **free)


def read_choices(**texts: str) -> dict[str, Any]:
    """The choices of space_for() from texts, as parameters of a notebook and options give them.

    "" leaves a choice free (or at its default), "1,2,4" or "none,full" gives several values, yes and no are the values
    of sequence_parallel and fp32_gradients. Raises ValueError for a number or a word that cannot be.
    """
    choices: dict[str, Any] = {}
    for name, text in texts.items():
        if not text:
            continue
        if name in ("tp", "pp", "dp", "mbs", "interleaving"):
            choices[name] = tuple(parse_integers(name, text))
        elif name == "zero":
            ok = all(part.strip() in ("0", "1", "2", "3") for part in text.split(","))
            require(ok, name, text, "must be ZeRO stages: 0, 1, 2 or 3, separated by commas")
            choices[name] = tuple(int(part) for part in text.split(","))
        elif name in ("sequence_parallel", "fp32_gradients"):
            require(text in ("yes", "no"), name, text, "must be yes or no")
            choices[name] = text == "yes"
        elif name == "cp":
            values = parse_integers(name, text)
            require(len(values) == 1, name, text, "is the same for all: one number")
            choices[name] = values[0]
        elif name in ("precision", "attention"):
            require_known(name, text, PRECISIONS if name == "precision" else CHOICES["attention"])
            choices[name] = text
        else:
            choices[name] = tuple(part.strip() for part in text.split(","))
    return choices


def space_around(
    base: Topology, gpus: Sequence[int], gbs: Sequence[int], mbs: Sequence[int] = (), engine: str = ENGINES[0]
) -> Space:
    """Every tp x pp x dp of those GPU counts and batch sizes; all other choices are those of `base`."""
    fixed: dict[str, Any] = {name: getattr(base, name) for name in ("precision", "fp32_gradients", "attention", "cp")}
    pinned: dict[str, Any] = {name: (getattr(base, name),) for name in VARIED}
    return Space(gpus=tuple(gpus), gbs=tuple(gbs), mbs=tuple(mbs), engine=engine, **fixed, **pinned)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list, range)) else (value,)


@dataclass(frozen=True)
class SearchPoint:
    """What a topology is apart from its parallel sizes and batch sizes."""

    zero: int
    recompute: str
    interleaving: int
    partition: str
    sequence_parallel: bool
    offload: str


def block_columns(
    fixed: Columns,
    sizes: ParallelSizes,
    points: Sequence[SearchPoint],
    which: np.ndarray,
    mbs: np.ndarray,
    gbs: np.ndarray,
) -> Columns:
    """Rows of one tp x pp x dp as Columns: row i has the batch sizes mbs[i] and gbs[i] and the choices of its point.

    `which[i]` is the row's place among the points; all that a search holds fixed comes from `fixed`.
    """
    tp, pp, dp = sizes
    columns = {
        "zero": [p.zero for p in points],
        "recompute": [CHOICES["recompute"].index(p.recompute) for p in points],
        "interleaving": [p.interleaving for p in points],
        "embedding_layers": [int(p.partition != "uniform") for p in points],
        "sequence_parallel": [int(p.sequence_parallel) for p in points],
        "offload": [CHOICES["offload"].index(p.offload) for p in points],
    }
    varied = {name: np.array(values)[which] for name, values in columns.items()}
    return dataclasses.replace(fixed, tp=tp, pp=pp, dp=dp, mbs=mbs, gbs=gbs, **varied)


def topology_of(space: Space, sizes: ParallelSizes, point: SearchPoint, mbs: float, gbs: float) -> Topology:
    """One topology of a block. Raises ValueError where it cannot exist."""
    tp, pp, dp = sizes
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "mbs": int(mbs), "gbs": int(gbs)}
    return dataclasses.replace(space.base(), **fields, **vars(point))
