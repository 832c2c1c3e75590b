"""Search: every topology of a space predicted, the refused counted by rule, the rest ranked."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, engine_rules, label_of
from trilane.config.model import ModelShape
from trilane.config.parallelism import CHOICES, Topology, cluster_rules, shape_rules, size_rules
from trilane.config.plan import Plan
from trilane.config.shapes import read_shape
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import iteration_columns
from trilane.costmodel.memory import memory_bytes, memory_for, oom_probability
from trilane.costmodel.predict import IMPOSSIBLE, SAFE
from trilane.costmodel.shipped import calibration_for
from trilane.planning.search_result import Candidate, SearchResult, first_per_lane
from trilane.planning.space import (
    SIZES,
    ParallelSizes,
    Space,
    space_for,
)
from trilane.utils.validation import require_integer
from trilane.workspace.study import load_cluster

MEMORY_RULE = "memory must fit the card"


def lane_of(sizes: ParallelSizes) -> tuple[int, ...]:
    """tp, pp and GPUs."""
    return *sizes[:2], math.prod(sizes[:4])


class Row(NamedTuple):
    """One topology that can run, with the seconds of an iteration: a place in the numbers of its
    tp x pp x dp x cp x ep x etp.
    """

    seconds: float
    sizes: ParallelSizes
    numbers: dict[str, np.ndarray]
    place: int

    @property
    def lane(self) -> tuple[int, ...]:
        return lane_of(self.sizes)

    def topology(self, fixed: Topology) -> Topology:
        """The topology itself: a word is its place among the choices, as in Columns."""
        values: dict[str, Any] = dict(zip(SIZES, self.sizes, strict=True))
        for name, column in self.numbers.items():
            number = column[self.place]
            if name in CHOICES:
                values[name] = CHOICES[name][int(number)]
            else:
                values[name] = type(getattr(fixed, name))(number)
        return replace(fixed, **values)


class _Search:
    """One pass over a space: the best `top` of the safe and of the risky, and the fastest of each
    kind, kept on the way.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        space: Space,
        calibration: Calibration,
        top: int,
        distinct: bool,
    ):
        self.shape = shape
        self.cluster = cluster
        self.space = space
        self.calibration = calibration
        self.top = top
        # variants of one tp x pp x dp are no different answers, unless there is no other
        self.distinct = distinct and len({size[:2] for size in space.sizes()}) > 1
        self.best = dict[bool, list[Row]]({False: [], True: []})  # of those at risk: True
        # the fastest of each tp x pp x dp, ZeRO stage and recomputation, and of those at risk
        self.fastest = dict[Any, Row]()
        self.least = dict[Any, float]()  # seconds of the fastest safe one of each tp x pp x GPUs
        self.fixed = replace(space.fixed, gbs=space.gbs)
        self.columns = columns_of(shape, self.fixed, space.engine)
        self.memory = memory_for(calibration, space.engine, cluster)
        self.points = functools.cache(space.points)
        self.refused = Counter[str]()
        self.runnable = 0

    def block(self, sizes: ParallelSizes) -> dict[str, np.ndarray]:
        """What no rule refuses of one tp x pp x dp x cp x ep x etp, as numbers of Columns,
        (R,); the refused are counted under the first rule that they break.
        """
        tp, pp, dp, cp = sizes[:4]
        mbs = self.space.batches(dp)
        points = self.points(self.shape, pp, tp > 1, dp * cp > 1, self.cluster.gpu.kind == "cuda")
        t: Any = SimpleNamespace(**vars(self.fixed) | points.values)
        vars(t).update(zip(SIZES, sizes, strict=True), mbs=mbs, gpus=math.prod(sizes[:4]))
        # a remainder of floats takes four times as long
        t.microbatches = (t.gbs / (mbs * dp)).astype(np.int32)
        keep = np.full((len(points.rows), len(mbs)), True)
        left = keep.size
        for holds, field, rule in chain(
            cluster_rules(t, self.cluster),
            size_rules(t, self.shape),
            shape_rules(t, self.shape),
            Topology.rules(t),
            engine_rules(self.space.engine, self.shape, t),
        ):
            if np.all(holds):
                continue
            keep &= holds
            before = left
            left = int(np.count_nonzero(keep))
            self.refused[f"{field}: {rule}"] += before - left
            if not left:
                break
        point, batch = np.nonzero(keep)
        numbers = {name: column[point] for name, column in points.numbers.items()}
        return {**numbers, "mbs": mbs[batch]}

    def predict(self, sizes: ParallelSizes, numbers: dict[str, np.ndarray]) -> None:
        """Predict what block() left of these sizes, and keep the best of it; and with states shared
        out among fewer replicas, where that may be faster: it shortens their messages alone.
        """
        columns = self.columns.changed(**{**dict(zip(SIZES, sizes, strict=True)), **numbers})
        memory = memory_bytes(columns, self.cluster, self.memory)
        probability = oom_probability(memory, self.cluster, self.memory.spread)
        fits = np.flatnonzero(probability <= IMPOSSIBLE)
        self.refused[MEMORY_RULE] += len(probability) - len(fits)
        self.runnable += len(fits)
        columns = columns.take(fits)
        time = iteration_columns(columns, self.cluster, self.calibration)
        seconds = time.total
        is_risky = probability[fits] > SAFE
        order = np.argsort(seconds, kind="stable")
        kinds = (columns.zero * 8 + columns.recompute) * 2 + is_risky

        def row(n: int) -> Row:
            return Row(seconds[n], sizes, numbers, fits[n])

        for at_risk, best in self.best.items():
            own = order[is_risky[order] == at_risk][: self.top]
            ranked = sorted([*best, *map(row, own)], key=lambda row: row.seconds)
            self.best[at_risk] = ranked[: self.top]
        for kind, first in zip(*np.unique(kinds[order], return_index=True), strict=True):
            new = row(order[first])
            rival = self.fastest.get((new.lane, kind), new)
            self.fastest[new.lane, kind] = min(rival, new, key=lambda row: row.seconds)
        lane = lane_of(sizes)
        least = seconds[~is_risky].min(initial=self.least.get(lane, math.inf))
        self.least[lane] = least
        may_win = (columns.zero > 0) & ~is_risky & (seconds - time.data_parallel < least)
        shards = self.space.shards(sizes)
        if shards and may_win.any() and "shards" not in numbers:
            left = np.tile(fits[may_win], len(shards))
            again = {name: column[left] for name, column in numbers.items()}
            again["shards"] = np.repeat(shards, np.count_nonzero(may_win))
            self.predict(sizes, again)

    def run(self) -> SearchResult:
        """All topologies; what no rule refuses is predicted."""
        for sizes in self.space.sizes():
            if not len(self.space.batches(sizes[2])):
                continue
            numbers = self.block(sizes)
            if len(numbers["mbs"]):
                self.predict(sizes, numbers)
        return SearchResult(
            space=self.space,
            rows=self.ranked(False),
            risky=self.ranked(True),
            runnable=self.runnable,
            refused_by_rule={rule: count for rule, count in self.refused.most_common() if count},
            kinds=self.kinds,
        )

    def ranked(self, at_risk: bool) -> tuple[Candidate, ...]:
        """The best that are at risk, or not; where asked one of each tp x pp x dp."""
        rows = self.best[at_risk]
        if self.distinct:
            rows = [row for (_, kind), row in self.fastest.items() if kind % 2 == at_risk]
            rows = first_per_lane(sorted(rows, key=lambda row: row.seconds))
        return tuple(self.candidates(rows[: self.top]))

    def kinds(self) -> list[Candidate]:
        return self.candidates(sorted(self.fastest.values(), key=lambda row: row.seconds))

    def candidates(self, rows: Iterable[Row]) -> list[Candidate]:
        """Each row as a plan."""
        found = []
        kept = self.calibration.kept()
        for row in rows:
            t = row.topology(self.fixed)
            label = label_of(self.shape, self.cluster, t, self.space.engine)
            plan = Plan(
                label=label,
                topology=t,
                shape=self.shape,
                cluster=self.cluster,
                engine=self.space.engine,
                calibration=kept,
            )
            found.append(Candidate(plan=plan, calibration=self.calibration))
        return found


def search(
    shape: ModelShape | str,
    cluster: Cluster | str,
    *,
    gpus: int | Sequence[int],
    gbs: int,
    engine: str = ENGINES[0],
    calibration: Calibration | str | None = None,
    top: int = 200,
    distinct: bool = False,
    **choices: Any,
) -> SearchResult:
    """Every topology of `gpus` GPUs (one or more counts) and `gbs` sequences an iteration that the
    engine can train.

    `choices` pins what the search would vary, by Topology's names, each to one value or several, or
    sets what it holds fixed (precision, attention, fp32_gradients, ...).
    SearchResult.space.held_fixed names what was not varied. With `distinct`, the `top` best are of
    as many tp x pp x dp; where there is only one, they are its variants.

        search(shape, load_cluster("jz-a100-80g"), gpus=384, gbs=2048, mbs=(1, 2), recompute="full")
    """
    require_integer("top", top, 1)
    shape = read_shape(shape)
    cluster = load_cluster(cluster)
    known = calibration_for(cluster, calibration or "")
    space = space_for(shape, cluster, gpus=gpus, gbs=gbs, engine=engine, **choices)
    return _Search(shape, cluster, space, known, top, distinct).run()
