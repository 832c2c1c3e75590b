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
from trilane.config.parallelism import Topology, cluster_rules, shape_rules, size_rules
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
    topology_of,
)
from trilane.utils.progress import progress
from trilane.utils.validation import require_integer
from trilane.workspace.study import load_cluster

MEMORY_RULE = "memory must fit the card"
TOGETHER = 1 << 14  # topologies predicted at once: 128 KiB a column, which stays in the cache


class Row(NamedTuple):
    """One topology that can run, as numbers of Columns, with the seconds of an iteration."""

    seconds: float
    numbers: dict[str, float]
    lane: tuple[int, ...]  # tp, pp and GPUs


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
        self.fixed = replace(space.fixed, gbs=space.gbs)
        self.columns = columns_of(shape, self.fixed, space.engine)
        self.memory = memory_for(calibration, space.engine, cluster)
        self.points = functools.cache(space.points)
        self.refused = Counter[str]()
        self.runnable = 0

    def block(self, sizes: ParallelSizes) -> dict[str, np.ndarray]:
        """What no rule refuses of one tp x pp x dp x cp, as numbers of Columns, (R,); the refused
        are counted under the first rule that they break.
        """
        tp, pp, dp, cp = sizes
        mbs = self.space.batches(dp)
        points = self.points(self.shape, pp, tp > 1, dp * cp > 1, self.cluster.gpu.kind == "cuda")
        t: Any = SimpleNamespace(**vars(self.fixed) | points.values)
        vars(t).update(zip(SIZES, sizes, strict=True), mbs=mbs, gpus=math.prod(sizes))
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
        for name, size in zip(SIZES, sizes, strict=True):
            numbers[name] = np.full(len(point), size, float)
        return {**numbers, "mbs": mbs[batch]}

    def predict(self, blocks: Sequence[dict[str, np.ndarray]]) -> None:
        """Predict the topologies of some blocks together, and keep the best of them."""
        rows = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        # what all share is a number, which formulas take faster than an array
        shared = {name: column[0] for name, column in rows.items() if np.all(column == column[0])}
        columns = self.columns.changed(**rows | shared | {"mbs": rows["mbs"]})
        memory = memory_bytes(columns, self.cluster, self.memory)
        probability = oom_probability(memory, self.cluster, self.memory.spread)
        probability = np.broadcast_to(probability, len(rows["mbs"]))
        fits = np.flatnonzero(probability <= IMPOSSIBLE)
        self.refused[MEMORY_RULE] += len(probability) - len(fits)
        self.runnable += len(fits)
        if not len(fits):
            return
        columns = columns.take(fits)
        rows = {name: column[fits] for name, column in rows.items()}
        seconds = iteration_columns(columns, self.cluster, self.calibration).total
        is_risky = probability[fits] > SAFE
        gpus = rows["tp"] * rows["pp"] * rows["dp"] * rows["cp"]
        lanes = np.array([rows["tp"], rows["pp"], gpus], int)
        order = np.argsort(seconds, kind="stable")

        def row(place: int) -> Row:
            numbers = {name: column[place] for name, column in rows.items()}
            return Row(seconds[place], numbers, tuple(lanes[:, place].tolist()))

        for at_risk, best in self.best.items():
            index = order[is_risky[order] == at_risk][: self.top]
            ranked = sorted([*best, *map(row, index)], key=lambda row: row.seconds)
            self.best[at_risk] = ranked[: self.top]
        kinds = np.array([*lanes, rows["zero"], rows["recompute"], is_risky], int)[:, order]
        kinds, firsts = np.unique(kinds, axis=1, return_index=True)
        for kind, first in zip(kinds.T.tolist(), order[firsts], strict=True):
            own = row(first)
            best = self.fastest.get(tuple(kind), own)
            self.fastest[tuple(kind)] = min(best, own, key=lambda row: row.seconds)

    def run(self) -> SearchResult:
        """All topologies, some thousands at a time; what no rule refuses is predicted."""
        able = [sizes for sizes in self.space.sizes() if len(self.space.batches(sizes[2]))]
        together = []
        for sizes in progress(able, "search", "size"):
            block = self.block(sizes)
            if len(block["mbs"]):
                together.append(block)
            if sum(len(one["mbs"]) for one in together) > TOGETHER:
                self.predict(together)
                together = []
        if together:
            self.predict(together)
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
            rows = [row for (*_, risk), row in self.fastest.items() if risk == at_risk]
            rows = first_per_lane(sorted(rows, key=lambda row: row.seconds))
        return tuple(self.candidates(rows[: self.top]))

    def kinds(self) -> list[Candidate]:
        return self.candidates(sorted(self.fastest.values(), key=lambda row: row.seconds))

    def candidates(self, rows: Iterable[Row]) -> list[Candidate]:
        """Each row as a plan."""
        found = []
        kept = self.calibration.kept()
        for row in rows:
            t = topology_of(self.fixed, row.numbers)
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
