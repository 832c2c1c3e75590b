"""Space: which topologies a search looks at."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import (
    ENGINES,
    default_attention,
    default_fp32_gradients,
    default_precision,
)
from trilane.config.model import ModelShape
from trilane.config.options import changed, check_field, read_field
from trilane.config.parallelism import PARTITION, Topology
from trilane.costmodel.columns import number_of
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import require, require_known

ParallelSizes = tuple[int, ...]
SIZES = ("tp", "pp", "dp", "cp", "ep", "etp", "shards")
SEARCHED: dict[str, tuple[Any, ...]] = {
    "zero": tuple(range(4)),
    "recompute": ("none", "selective", "full", "block"),
    "partition": PARTITION,
}
# how layers are dealt to stages, and how many are computed again: each depends on those before
ENDS = ("first_stage_layers", "last_stage_layers")
STAGES = ("partition", *ENDS, "interleaving", "recompute", "recompute_layers")
# the rest of what a search varies; of HELD the values that are asked for alone
HELD = ("offload", "offload_checkpoints", "precision", "overlap_tp")
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
OTHERS = ("zero", "sequence_parallel", *OVERLAPS, *HELD)
VARIED = (*STAGES, *OTHERS)
FREE = (*SIZES, "mbs", *VARIED)
# which overlaps engines have; the others sum gradients alone
OVERLAPPED = {"megatron": OVERLAPS, "deepspeed-3d": ()}


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


class Points:
    """What topologies are apart from their parallel sizes and batch sizes: rows of VARIED.

    `values` are those of VARIED, (P, 1), and `numbers` those of Columns, (P,).
    """

    def __init__(self, rows: Sequence[tuple[Any, ...]]):
        self.rows = rows
        self.values = dict[str, np.ndarray]()
        self.numbers = dict[str, np.ndarray]()
        for name, column in zip(VARIED, zip(*rows, strict=True), strict=True):
            self.values[name] = np.array(column)[:, None]
            self.numbers[name] = np.array([number_of(name, value) for value in column], float)


@frozen
class Space(Record):
    """The topologies of some GPU counts, of one global batch size.

    pins    values of Topology's fields that a search varies; what is not named may take every value
            that makes sense
    fixed   the topology whose other fields all have: precision, attention, the sums of gradients,
            ...

    Raises ValueError for an empty or senseless choice.
    """

    gpus: tuple[int, ...]
    gbs: int
    pins: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    fixed: Topology = dataclasses.field(default_factory=lambda: Topology(precision="bf16"))
    engine: str = ENGINES[0]

    def __post_init__(self) -> None:
        require_known("engine", self.engine, ENGINES)
        for name, values in {"gpus": self.gpus, "gbs": (self.gbs,), **self.pins}.items():
            require(len(values) > 0, name, "()", "needs at least one value")
            for value in values:
                check_field(Topology, "dp" if name == "gpus" else name, value)
        if not any(self.sizes()):
            name = next(size for size in SIZES if size in self.pins)
            rule = f"no tp x pp x dp with the pinned sizes makes gpus={self.gpus[0]}"
            require(False, name, self.pins[name][0], rule)

    @property
    def held_fixed(self) -> str:
        """What the search does not vary, in words."""
        t = self.fixed
        held = {"engine": self.engine, "attention": t.attention}
        held |= {name: getattr(t, name) for name in HELD[2:]}
        held |= {name: value for name, value in changed(t).items() if name not in FREE}
        for name, values in self.pins.items():
            held.pop(name, None)
            if len(values) == 1:
                held[name] = values[0]
        return ", ".join(f"{name} {value}" for name, value in held.items())

    def sizes(self) -> Iterator[ParallelSizes]:
        """Every (tp, pp, dp, cp, ep, etp, shards) of one of the GPU counts that the pins allow."""
        for gpus in self.gpus:
            for tp in self._sizes("tp", gpus):
                for pp in self._sizes("pp", gpus // tp):
                    for cp in self._sizes("cp", gpus // tp // pp):
                        dp = gpus // tp // pp // cp
                        if dp in self.pins.get("dp", (dp,)):
                            experts = [self.pins.get(name, (1,)) for name in SIZES[4:6]]
                            shards = self.pins.get("shards", (0,))
                            for shares in itertools.product(*experts, shards):
                                yield tp, pp, dp, cp, *shares

    def shards(self, sizes: ParallelSizes) -> list[int]:
        """Of sizes whose states all replicas share out: how many others may share them instead."""
        tp, _, dp, cp, ep, etp, pinned = sizes
        if pinned or "shards" in self.pins or self.engine != ENGINES[0]:
            return []
        return [size for size in divisors(dp * cp)[1:-1] if tp * size % (ep * etp) == 0]

    def _sizes(self, name: str, ranks: int) -> list[int]:
        usual = (1,) if name == "cp" and self.engine != ENGINES[0] else divisors(ranks)
        return [size for size in self.pins.get(name, usual) if ranks % size == 0]

    def batches(self, dp: int) -> np.ndarray:
        """Every mbs of which mbs x dp divides gbs."""
        if self.gbs % dp:
            return np.array([])
        sizes = self.pins.get("mbs") or divisors(self.gbs // dp)
        return np.array([size for size in sizes if self.gbs % (size * dp) == 0], float)

    def points(
        self, shape: ModelShape, pp: int, has_tp: bool, has_dp: bool, is_card: bool = True
    ) -> Points:
        """Every combination of the remaining choices that means something on `pp` stages. What
        never costs on a card is not varied: sequence parallelism, and Megatron-Core's overlaps.
        """
        others = [self._values(name, has_tp, has_dp) for name in OTHERS]
        if has_tp and is_card and "sequence_parallel" not in self.pins:
            others[1] = (True,)
        free = [row for row in itertools.product(*others) if self._is_useful(row)]
        rows = []
        for stage, layers in self._stages(shape, pp):
            for again, other in itertools.product(self._recomputed(layers), free):
                rows.append((*stage, *again, *other))
        return Points(rows)

    def _values(self, name: str, has_tp: bool, has_dp: bool) -> tuple[Any, ...]:
        """The values of a choice; without what it is about there is no other than the first."""
        usual = SEARCHED.get(name, (False, True))
        if name in HELD:
            usual = (getattr(self.fixed, name),)
        values = self.pins.get(name, usual)
        if name == "sequence_parallel" and not has_tp:
            return tuple(value for value in values if not value)
        if name in OVERLAPS and name not in self.pins:
            overlaps = has_dp and name in OVERLAPPED.get(self.engine, OVERLAPS[:1])
            is_free = self.engine == ENGINES[0] and name == OVERLAPS[0]
            return values[is_free:] if overlaps else (False,)
        return values

    def _is_useful(self, row: tuple[Any, ...]) -> bool:
        """Whether weights are gathered where they can be, if not pinned."""
        zero, _, reduces, gathers, *_ = row
        return OVERLAPS[1] in self.pins or gathers == (reduces and zero == 1)

    def _stages(self, shape: ModelShape, pp: int) -> Iterator[tuple[tuple[Any, ...], int]]:
        """How layers are dealt: evenly, with embedding and head as layers, or with less on the
        ends, by as many as the head weighs and two more at most; each with every number of chunks,
        and the layers of a chunk in the middle.

        What cannot be dealt is there once, with one chunk, so that a rule refuses it.
        """
        pinned = self.pins.get("interleaving")
        ends = [self.pins.get(name) for name in ENDS]
        # the head over a layer, in products of its hidden size: V h over 12 h^2
        head = math.ceil(shape.vocab_size / (12 * shape.hidden_size))
        for partition in self.pins.get("partition", SEARCHED["partition"]):
            units = shape.num_layers + 2 * (partition != "uniform")
            usual = [0]
            if pp > 1 and partition == "uniform":
                usual += range(max(units // pp - head - 2, 1), -(-units // pp))
            for first, last in itertools.product(*(end or usual for end in ends)):
                rest = units - first - last
                others = pp - (first > 0) - (last > 0)
                each = first or last
                even = rest == 0
                if others > 0:
                    each, left = divmod(rest, others)
                    even = left == 0 < each
                is_light = each - head - 2 <= min(first or each, last or each)
                if pinned or any(ends) or not (first or last) or (even and is_light):
                    chunks = math.gcd(first, last, each) if even else 1
                    for v in pinned or divisors(chunks if pp > 1 else 1):
                        yield (partition, first, last, v), rest // max(others, 1) // v

    def _recomputed(self, held: int) -> Iterator[tuple[str, int]]:
        """What is computed again: every number of layers of a chunk in the middle, which holds so
        many.
        """
        pinned = self.pins.get("recompute_layers")
        usual = range(1, held)
        for recompute in self.pins.get("recompute", SEARCHED["recompute"]):
            if recompute == "block":
                yield from ((recompute, layers) for layers in pinned or usual if layers)
            elif not pinned or 0 in pinned:
                yield recompute, 0


def space_for(
    shape: ModelShape,
    cluster: Cluster,
    *,
    gpus: int | Sequence[int],
    gbs: int,
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
    precisions = _tuple(given.get("precision", default_precision(cluster)))
    for one in precisions:
        cluster.gpu.flops_per_s(one)
    precision = precisions[0]
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
    if shape.experts:
        pins.setdefault("ep", tuple(divisors(shape.experts)))
    fixed = Topology(**settings)
    return Space(gpus=_tuple(gpus), gbs=gbs, engine=engine, pins=pins, fixed=fixed)


def read_choices(**texts: str) -> dict[str, Any]:
    """The choices of space_for() from texts, as parameters of a notebook and options give them.

    "" leaves a choice free (or at its default), "1,2,4" or "none,full" gives several values of what
    a search varies, yes and no are the values of what is true or false. Raises ValueError for a
    number or a word that cannot be.

        read_choices(mbs="1,2,4", recompute="full", sequence_parallel="yes")
    """
    choices = {}
    for name, text in texts.items():
        if not text:
            continue
        if name in FREE:
            words = [word.strip() for word in text.split(",")]
            choices[name] = tuple(read_field(Topology, name, word) for word in words)
        else:
            choices[name] = read_field(Topology, name, text)
    return choices


def _tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list, range)):
        return tuple(value)
    return (value,)
