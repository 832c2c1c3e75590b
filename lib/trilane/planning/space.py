"""Space: which topologies a search looks at, as blocks of numbers, and the rules that refuse a whole block at once."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import OFFLOADS, PARTITIONS, RECOMPUTE, Topology
from trilane.costmodel.columns import Columns, columns_of
from trilane.utils.validation import require, require_integer, require_known

MEMORY_RULE = "memory must fit the card"


SCHEDULE_RULE = "interleaving needs microbatches % pp == 0"


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that each choice may take; an empty tuple means every value that makes sense.

    `gbs` lists global batch sizes. Raises ValueError for an empty or senseless choice.
    """

    gpus: tuple[int, ...]
    gbs: tuple[int, ...]
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    mbs: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    interleaving: tuple[int, ...] = ()
    partition: tuple[str, ...] = PARTITIONS
    sequence_parallel: tuple[bool, ...] = (False, True)
    offload: tuple[str, ...] = ("none",)
    precision: str = "bf16"
    fp32_gradients: bool = False
    attention: str = "fused"

    def __post_init__(self) -> None:
        for name in ("gpus", "gbs", "zero", "recompute", "partition", "sequence_parallel", "offload"):
            require(len(getattr(self, name)) > 0, name, "()", "needs at least one value")
        for name in ("gpus", "gbs", "tp", "pp", "dp", "mbs", "interleaving"):
            for value in getattr(self, name):
                require_integer(name, value, 1)
        for zero in self.zero:
            require(zero in (0, 1, 2, 3), "zero", zero, "ZeRO stages are 0, 1, 2 and 3")
        for name, known in (("recompute", RECOMPUTE), ("partition", PARTITIONS), ("offload", OFFLOADS)):
            for value in getattr(self, name):
                require_known(name, value, known)
        pinned = [self.tp, self.pp, self.dp]
        if all(pinned):
            products = sorted({t * p * d for t, p, d in product(*pinned)})
            ok = bool(set(products) & set(self.gpus))
            require(ok, "tp x pp x dp", products[0], f"contradicts gpus={self.gpus[0]}")

        pins = [(name, getattr(self, name)) for name in ("tp", "pp", "dp") if getattr(self, name)]
        if pins and next(self.lanes(), None) is None:
            name, values = pins[0]
            raise ValueError(f"{name}={values[0]}: no tp x pp x dp with the pinned sizes makes gpus={self.gpus[0]}")

    def lanes(self) -> Iterator[tuple[int, int, int]]:
        """Every (tp, pp, dp) of one of the GPU counts that the pins allow."""
        for gpus in self.gpus:
            for tp in divisors(gpus):
                for pp in divisors(gpus // tp):
                    dp = gpus // tp // pp
                    if (
                        (not self.tp or tp in self.tp)
                        and (not self.pp or pp in self.pp)
                        and (not self.dp or dp in self.dp)
                    ):
                        yield tp, pp, dp

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

    def choices(self, shape: ModelShape, tp: int, pp: int) -> list["SearchPoint"]:
        """Every combination of the remaining choices that means something on tp x pp."""
        most = max(shape.num_layers // pp, 1)
        chunks = (self.interleaving or tuple(divisors(most))) if pp > 1 else (1,)
        parallel = self.sequence_parallel if tp > 1 else (False,)
        return [
            SearchPoint(zero, recompute, v, partition, sp, offload)
            for zero, recompute, v, partition, sp, offload in product(
                self.zero, self.recompute, chunks, self.partition, parallel, self.offload
            )
            if (offload == "none" or zero > 0) and (offload != "full" or zero == 3)
        ]

    def base(self) -> Topology:
        """A topology with the choices that are the same for all."""
        return Topology(precision=self.precision, fp32_gradients=self.fp32_gradients, attention=self.attention)


def space_around(base: Topology, gpus: Sequence[int], gbs: Sequence[int], mbs: Sequence[int] = ()) -> Space:
    """Every tp x pp x dp of those GPU counts and batch sizes; all other choices are those of `base`."""
    return Space(
        gpus=tuple(gpus),
        gbs=tuple(gbs),
        mbs=tuple(mbs),
        zero=(base.zero,),
        recompute=(base.recompute,),
        interleaving=(base.interleaving,),
        partition=(base.partition,),
        sequence_parallel=(base.sequence_parallel,),
        offload=(base.offload,),
        precision=base.precision,
        fp32_gradients=base.fp32_gradients,
        attention=base.attention,
    )


@dataclass(frozen=True)
class SearchPoint:
    """What a topology is beside its lanes and batch sizes."""

    zero: int
    recompute: str
    interleaving: int
    partition: str
    sequence_parallel: bool
    offload: str


def lane_rule(shape: ModelShape, cluster: Cluster, tp: int, pp: int, dp: int) -> str:
    """The rule that refuses every topology of tp x pp x dp, or ""."""
    node, gpus = cluster.gpus_per_node, tp * pp * dp
    rules = [
        (gpus <= cluster.max_gpus, f"{cluster.name} has {cluster.max_gpus} GPUs"),
        (node % tp == 0 or gpus <= node, "a tensor-parallel group must stay inside a node"),
        (shape.num_attention_heads % tp == 0, "tp must divide num_attention_heads"),
        (shape.vocab_size % tp == 0, "tp must divide vocab_size (pad the vocabulary)"),
        (shape.hidden_size % tp == 0, "tp must divide hidden_size"),
    ]
    return next((rule for ok, rule in rules if not ok), "")


def choice_rule(shape: ModelShape, tp: int, pp: int, choice: SearchPoint) -> str:
    """The rule that refuses every batch size of one choice, or ""."""
    layers = shape.num_layers + (0 if choice.partition == "uniform" else 2)
    rules = [
        (pp == 1 or choice.zero < 2, "ZeRO 2 and 3 cannot run with a pipeline"),
        (layers % (pp * choice.interleaving) == 0, "pp x interleaving must divide the layers"),
        (not choice.sequence_parallel or shape.seq_length % tp == 0, "tp must divide seq_length"),
    ]
    return next((rule for ok, rule in rules if not ok), "")


def block_columns(shape: ModelShape, space: Space, lane: tuple[int, int, int], choice: SearchPoint) -> Columns:
    """All batch sizes of one lane and choice as Columns; only mbs and gbs are arrays."""
    tp, pp, dp = lane
    mbs, gbs = space.batches(dp)
    one = columns_of(shape, space.base())
    return dataclasses.replace(
        one,
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=mbs,
        gbs=gbs,
        zero=choice.zero,
        recompute=RECOMPUTE.index(choice.recompute),
        interleaving=choice.interleaving,
        embedding_layers=int(choice.partition != "uniform"),
        sequence_parallel=int(choice.sequence_parallel),
        offload=OFFLOADS.index(choice.offload),
    )


def topology_of(space: Space, lane: tuple[int, int, int], choice: SearchPoint, mbs: float, gbs: float) -> Topology:
    """One topology of a block. Raises ValueError where it cannot exist."""
    tp, pp, dp = lane
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "mbs": int(mbs), "gbs": int(gbs)}
    return dataclasses.replace(space.base(), **fields, **dataclasses.asdict(choice))
