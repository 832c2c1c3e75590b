"""Space: which topologies a search looks at, in blocks of one tp x pp x dp and all batch sizes."""

import dataclasses
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
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.columns import Columns, number_of
from trilane.utils.tables import Record
from trilane.utils.validation import require, require_known

ParallelSizes = tuple[int, int, int]  # tp, pp, dp
Point = dict[str, Any]  # what a topology is apart from its parallel sizes and batch sizes
VARIED = {f.name: tuple(f.metadata["search"]) for f in fields(Topology) if "search" in f.metadata}
SIZES = ("tp", "pp", "dp")
ANY = "any"  # engine
FREE = (*SIZES, "mbs", *VARIED)
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
# which of them each engine has
OVERLAPPED = {
    "megatron": OVERLAPS,
    "deepspeed-3d": (),
    "deepspeed-zero": OVERLAPS[:1],
    "hf-zero3": OVERLAPS[:1],
}


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True, kw_only=True)
class Space(Record):
    """The topologies of some GPU counts and global batch sizes.

    pins    values of Topology's fields that a search varies; what is not named may take every value
            that makes sense
    fixed   the topology whose other fields all have: precision, attention, the sums of gradients,
            ...

    Raises ValueError for an empty or senseless choice.
    """

    gpus: tuple[int, ...]
    gbs: tuple[int, ...]
    pins: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    fixed: Topology = dataclasses.field(default_factory=lambda: Topology(precision="bf16"))
    engine: str = ENGINES[0]

    def __post_init__(self) -> None:
        require_known("engine", self.engine, (*ENGINES, ANY))
        for name, values in {"gpus": self.gpus, "gbs": self.gbs, **self.pins}.items():
            require(len(values) > 0, name, "()", "needs at least one value")
            for value in values:
                check_field(Topology, "dp" if name == "gpus" else name, value)
        if not any(self.sizes()):
            name = [*(size for size in SIZES if size in self.pins), "cp"][0]
            value = self.pins.get(name, (self.fixed.cp,))[0]
            rule = f"no tp x pp x dp with the pinned sizes makes gpus={self.gpus[0]}"
            require(False, name, value, rule)

    @property
    def held_fixed(self) -> str:
        """What the search does not vary, in words."""
        t = self.fixed
        held = {"engine": self.engine, "precision": t.precision, "attention": t.attention}
        usual = Topology()
        for name, value in vars(t).items():
            if name not in FREE and value != getattr(usual, name):
                held[name] = value
        for name, values in self.pins.items():
            if len(values) == 1:
                held[name] = values[0]
        return ", ".join(f"{name} {value}" for name, value in held.items())

    def sizes(self) -> Iterator[ParallelSizes]:
        """Every (tp, pp, dp) of one of the GPU counts that the pins allow."""
        for gpus in self.gpus:
            if gpus % self.fixed.cp:
                continue
            ranks = gpus // self.fixed.cp
            for tp in divisors(ranks):
                for pp in divisors(ranks // tp):
                    sizes = (tp, pp, ranks // tp // pp)
                    if all(
                        size in self.pins.get(n, (size,))
                        for n, size in zip(SIZES, sizes, strict=True)
                    ):
                        yield sizes

    def batches(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Every (mbs, gbs) with gbs a multiple of mbs x dp, as two arrays."""
        mbs = list[float]()
        gbs = list[float]()
        for batch in self.gbs:
            if batch % dp:
                continue
            for size in self.pins.get("mbs") or divisors(batch // dp):
                if batch % (size * dp) == 0:
                    mbs.append(size)
                    gbs.append(batch)
        return np.array(mbs, float), np.array(gbs, float)

    def points(self, held: int, has_tp: bool, has_pp: bool, has_dp: bool) -> list[Point]:
        """Every combination of the remaining choices that means something on stages of `held`
        layers.
        """
        values = {name: self.pins.get(name, usual) for name, usual in VARIED.items()}
        # neither means anything without a pipeline or tensor parallelism; where one is pinned there
        # is no other choice
        values["interleaving"] = values["interleaving"] or tuple(divisors(held))
        if not has_pp:
            values["interleaving"] = _only(1, values["interleaving"])
        if not has_tp:
            values["sequence_parallel"] = _only(False, values["sequence_parallel"])
        for name in OVERLAPS:
            if name not in self.pins and not (has_dp and name in OVERLAPPED[self.engine]):
                values[name] = (False,)
        # of a stage's layers a quarter, half and three quarters, as many of each chunk; all of them
        # are recompute full
        is_pinned = bool(values["recompute_layers"])
        if not is_pinned:
            values["recompute_layers"] = tuple(sorted({held * k // 4 for k in range(4)}))

        def is_useful(name: str, point: Point) -> bool:
            """Whether a value means something with those before it in VARIED."""
            if name == "recompute_layers":
                return (point["recompute"] == "block") == (point["recompute_layers"] > 0)
            if name == "interleaving" and not is_pinned:
                return point["recompute_layers"] * point["interleaving"] < held
            if name == OVERLAPS[1] and point[name] and name not in self.pins:
                return point[OVERLAPS[0]] and point["zero"] == 1
            return True

        points = list[Point]([{}])
        for name, choices in values.items():
            longer = []
            for point in points:
                for value in choices:
                    candidate = {**point, name: value}
                    if is_useful(name, candidate):
                        longer.append(candidate)
            points = longer
        return points


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
    names = [f.name for f in fields(Topology) if f.name != "gbs"]
    given = {}
    for name, value in choices.items():
        if value is not None and value not in ("", ()):
            require_known("choice", name, names)
            given[name] = value
    for count in _tuple(gpus):
        require(count <= cluster.max_gpus, "gpus", count, f"{cluster.name} has {cluster.max_gpus}")
    precision = given.get("precision", default_precision(cluster))
    cluster.gpu.flops_per_s(precision)
    offload = _tuple(given.get("offload", "none"))[0]
    settings = {
        "attention": default_attention(shape, cluster, precision, engine),
        "fp32_gradients": default_fp32_gradients(precision, offload),
        "precision": precision,
    }
    pins = {}
    for name, value in given.items():
        if name in FREE:
            pins[name] = _tuple(value)
        else:
            settings[name] = value
    fixed = Topology(**settings)
    reason = invalid_reason(shape, Topology(cp=fixed.cp))
    if reason:
        raise ValueError(reason)
    return Space(gpus=_tuple(gpus), gbs=_tuple(gbs), engine=engine, pins=pins, fixed=fixed)


def read_choices(**texts: str) -> dict[str, Any]:
    """The choices of space_for() from texts, as parameters of a notebook and options give them.

    "" leaves a choice free (or at its default), "1,2,4" or "none,full" gives several values of what
    a search varies, yes and no are the values of what is true or false. Raises ValueError for a
    number or a word that cannot be.

        read_choices(mbs="1,2,4", recompute="full", sequence_parallel="yes")
    """
    choices = dict[str, Any]()
    for name, text in texts.items():
        if not text:
            continue
        if name in FREE:
            words = [word.strip() for word in text.split(",")]
            choices[name] = tuple(read_field(Topology, name, word) for word in words)
        else:
            choices[name] = read_field(Topology, name, text)
    return choices


def _only(value: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The value alone where it is among them; else none."""
    return (value,) if value in values else ()


def _tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list, range)):
        return tuple(value)
    return (value,)


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
    columns = dict[str, Any]()
    for name in (*SIZES, *VARIED):
        if name in SIZES:
            values = [block.sizes[SIZES.index(name)] for block in blocks]
        else:
            values = [number_of(name, block.point[name]) for block in blocks]
        is_shared = values.count(values[0]) == len(values)
        columns[name] = values[0] if is_shared else np.array(values)[which]
    columns["mbs"] = np.concatenate([block.mbs for block in blocks])
    columns["gbs"] = np.concatenate([block.gbs for block in blocks])
    return fixed.changed(**columns)


def topology_of(
    space: Space, sizes: ParallelSizes, point: Point, mbs: float, gbs: float
) -> Topology:
    """One topology of a block. Raises ValueError where it cannot exist."""
    tp, pp, dp = sizes
    return dataclasses.replace(
        space.fixed, tp=tp, pp=pp, dp=dp, mbs=int(mbs), gbs=int(gbs), **point
    )
