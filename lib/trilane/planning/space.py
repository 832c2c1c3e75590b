"""Space: which topologies a search looks at, in blocks of one tp x pp x dp and all batch sizes."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import (
    ENGINES,
    default_attention,
    default_fp32_gradients,
    default_precision,
)
from trilane.config.model import ModelShape
from trilane.config.options import check_field, read_field
from trilane.config.parallelism import Topology, dividing, invalid_reason
from trilane.costmodel.columns import Columns, number_of
from trilane.utils.tables import Record
from trilane.utils.validation import require, require_known

ParallelSizes = tuple[int, int, int]  # tp, pp, dp
Point = dict[str, Any]  # what a topology is apart from its parallel sizes and batch sizes
VARIED = {f.name: tuple(f.metadata["search"]) for f in fields(Topology) if "search" in f.metadata}
SIZES = ("tp", "pp", "dp")
FREE = (*SIZES, "mbs", *VARIED)


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True, kw_only=True)
class Space(Record):
    """The topologies of some GPU counts and global batch sizes.

    pins    values of Topology's fields that a search varies; what is not named may take every value that makes sense
    fixed   the topology whose other fields all have: precision, attention, the sums of gradients, ...

    Raises ValueError for an empty or senseless choice.
    """

    gpus: tuple[int, ...]
    gbs: tuple[int, ...]
    pins: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    fixed: Topology = dataclasses.field(default_factory=lambda: Topology(precision="bf16"))
    engine: str = ENGINES[0]

    def __post_init__(self) -> None:
        require_known("engine", self.engine, ENGINES)
        for name, values in {"gpus": self.gpus, "gbs": self.gbs, **self.pins}.items():
            require(len(values) > 0, name, "()", "needs at least one value")
            for value in values:
                check_field(Topology, "dp" if name == "gpus" else name, value)
        cp, first = self.fixed.cp, self.gpus[0]
        require(any(n % cp == 0 for n in self.gpus), "cp", cp, f"must divide gpus={first}")
        pinned = {name: self.pins[name][0] for name in SIZES if name in self.pins}
        if pinned and next(self.sizes(), None) is None:
            field, value = next(iter(pinned.items()))
            rule = f"no tp x pp x dp with the pinned sizes makes gpus={first}"
            rule += dividing(first // cp, value) * (len(pinned) == 1)
            require(len(pinned) == len(SIZES), field, value, rule)
            product = "tp x pp x dp" if cp == 1 else "tp x cp x pp x dp"
            require(False, product, math.prod(pinned.values()) * cp, f"contradicts gpus={first}")

    @property
    def held_fixed(self) -> str:
        """What the search does not vary, in words."""
        t, usual = self.fixed, Topology()
        sums = "fp32" if t.fp32_gradients or self.engine == "megatron" else t.precision
        gradients = "" if t.precision == "fp32" else f" with gradients summed in {sums}"
        words = [f"engine {self.engine}", f"{t.precision}{gradients}", f"attention {t.attention}"]
        values = {name: self.pins.get(name, VARIED.get(name, ())) for name in FREE}
        words += [
            f"{name} {some[0]}"
            for name, some in values.items()
            if len(some) == 1 and (some[0] or some != VARIED.get(name))
        ]
        rest = {*vars(t)} - {"precision", "fp32_gradients", "attention", *FREE}
        return ", ".join(
            words + [f"{n} {v}" for n, v in vars(t).items() if n in rest and v != getattr(usual, n)]
        )

    def sizes(self) -> Iterator[ParallelSizes]:
        """Every (tp, pp, dp) of one of the GPU counts that the pins allow."""
        pins = [self.pins.get(name, ()) for name in SIZES]
        for gpus in (n // self.fixed.cp for n in self.gpus if n % self.fixed.cp == 0):
            for tp in divisors(gpus):
                for pp in divisors(gpus // tp):
                    found = tp, pp, gpus // tp // pp
                    if all(not pin or size in pin for size, pin in zip(found, pins, strict=True)):
                        yield found

    def batches(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Every (mbs, gbs) with gbs a multiple of mbs x dp, as two arrays."""
        pairs = [
            (m, g)
            for g in self.gbs
            if g % dp == 0
            for m in self.pins.get("mbs") or divisors(g // dp)
        ]
        array = np.array([(m, g) for m, g in pairs if g % (m * dp) == 0], float).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def points(self, held: int, has_tp: bool, has_pp: bool, has_dp: bool) -> list[Point]:
        """Every combination of the remaining choices that means something on stages of `held`
        layers.
        """
        values = {**VARIED, **{name: pin for name, pin in self.pins.items() if name in VARIED}}
        # neither means anything without a pipeline or tensor parallelism; where one is pinned there
        # is no other choice
        chunks = values["interleaving"] or tuple(divisors(held))
        values["interleaving"] = tuple(n for n in chunks if has_pp or n == 1)
        values["sequence_parallel"] = tuple(
            cut for cut in values["sequence_parallel"] if has_tp or not cut
        )
        grads, gather = "overlap_grad_reduce", "overlap_param_gather"
        able = (
            {"megatron": {grads, gather}, "deepspeed-3d": set()}.get(self.engine, {grads})
            if has_dp
            else set()
        )
        values |= {name: (False,) for name in {grads, gather} - {*self.pins} - able}
        # of a stage's layers a quarter, half and three quarters, as many of each chunk; all of them
        # are recompute full
        pinned = values["recompute_layers"]
        values["recompute_layers"] = pinned or tuple(sorted({held * k // 4 for k in range(4)}))
        rules = {  # of a choice and those before it in VARIED
            "recompute_layers": lambda p: (
                (p["recompute"] == "block") == (p["recompute_layers"] > 0)
            ),
            "interleaving": lambda p: pinned or p["recompute_layers"] * p["interleaving"] < held,
            gather: lambda p: gather in self.pins or not p[gather] or (p[grads] and p["zero"] == 1),
        }
        every = list[Point]([{}])
        for name, some in values.items():
            every = [
                *filter(
                    rules.get(name), [point | {name: value} for point in every for value in some]
                )
            ]
        return every


def space_for(
    shape: ModelShape,
    cluster: Cluster,
    *,
    gpus: int | Sequence[int],
    gbs: int | Sequence[int],
    engine: str = ENGINES[0],
    **choices: Any,
) -> Space:
    """The space of a model on a cluster: what `choices` pins, the cluster's and engine's defaults,
    the rest free.

    A choice is one value or several; None, "" and () leave it free, or at its default where the
    space holds it fixed (precision, attention, fp32_gradients, cp, ...). Raises ValueError for what
    no search can look at.
    """
    given = {
        name: value
        for name, value in choices.items()
        if value is not None and value not in ("", ())
    }
    for name in given:
        require_known("choice", name, [f.name for f in fields(Topology) if f.name != "gbs"])
    precision = given.get("precision", default_precision(cluster))
    cluster.gpu.flops_per_s(precision)
    sums = default_fp32_gradients(precision, _tuple(given.get("offload", "none"))[0])
    usual = {
        "attention": default_attention(shape, cluster, precision, engine),
        "fp32_gradients": sums,
        "precision": precision,
    }
    pins = {name: _tuple(value) for name, value in given.items() if name in FREE}
    fixed = Topology(
        **{**usual, **{name: value for name, value in given.items() if name not in pins}}
    )
    if reason := invalid_reason(shape, Topology(cp=fixed.cp)):
        raise ValueError(reason)
    return Space(gpus=_tuple(gpus), gbs=_tuple(gbs), engine=engine, pins=pins, fixed=fixed)


def read_choices(**texts: str) -> dict[str, Any]:
    """The choices of space_for() from texts, as parameters of a notebook and options give them.

    "" leaves a choice free (or at its default), "1,2,4" or "none,full" gives several values of what
    a search varies, yes and no are the values of what is true or false. Raises ValueError for a
    number or a word that cannot be.

        read_choices(mbs="1,2,4", recompute="full", sequence_parallel="yes")
    """
    found = {}
    for name, text in texts.items():
        words = [word.strip() for word in text.split(",")] if name in FREE else [text]
        found[name] = tuple(read_field(Topology, name, word) for word in words if text)
    return {name: values if name in FREE else values[0] for name, values in found.items() if values}


def word(value: Any) -> Any:
    """A value of a choice as an option takes it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list, range)) else (value,)


class Block(NamedTuple):
    """Topologies that differ in nothing but their batch sizes, two arrays."""

    sizes: ParallelSizes
    point: Point
    mbs: np.ndarray
    gbs: np.ndarray


def block_columns(fixed: Columns, blocks: Sequence[Block], which: np.ndarray) -> Columns:
    """The rows of some blocks as Columns, row i of the block which[i]; what is `fixed` or all share
    stays a number.
    """
    values = {name: [block.sizes[i] for block in blocks] for i, name in enumerate(SIZES)}
    values |= {name: [block.point[name] for block in blocks] for name in VARIED}
    shared = {
        name: number_of(name, some[0])
        for name, some in values.items()
        if some.count(some[0]) == len(some)
    }
    columns = {
        n: np.array([number_of(n, v) for v in some])[which]
        for n, some in values.items()
        if n not in shared
    }
    batches = {
        name: np.concatenate([getattr(block, name) for block in blocks]) for name in ("mbs", "gbs")
    }
    return dataclasses.replace(fixed, **shared, **columns, **batches)


def topology_of(
    space: Space, sizes: ParallelSizes, point: Point, mbs: float, gbs: float
) -> Topology:
    """One topology of a block. Raises ValueError where it cannot exist."""
    given = {**dict(zip(SIZES, sizes, strict=True)), "mbs": int(mbs), "gbs": int(gbs), **point}
    return dataclasses.replace(space.fixed, **given)
