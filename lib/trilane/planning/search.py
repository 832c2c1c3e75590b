"""Search: every topology of a space predicted, the refused counted by rule, the rest ranked."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, label_of, unsupported_rule
from trilane.config.model import ModelShape
from trilane.config.parallelism import CLUSTER_RULES, SHAPE_RULES, TOPOLOGY_RULES, Rule, Topology
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import Microbatches
from trilane.costmodel.memory import memory_bytes, oom_probability
from trilane.costmodel.predict import IMPOSSIBLE, RISKY, predict
from trilane.costmodel.shipped import calibration_for
from trilane.planning.blocks import BestBlocks, Block, front_of, merged_front
from trilane.planning.search_result import Candidate, SearchResult
from trilane.planning.space import ParallelSizes, SearchPoint, Space, block_columns, space_for, topology_of
from trilane.utils.progress import progress
from trilane.utils.validation import require_known

MEMORY_RULE = "memory must fit the card"
EXAMPLES_PER_RULE = 50
ROWS = 1 << 14  # topologies that are predicted together, a few more at most: 128 KiB a column
# Seconds per sequence (of an iteration where gbs is the same), also the order of the days of a fixed number of tokens;
# GPU-seconds per sequence; least memory of the fullest stage.
OBJECTIVES = ("seconds", "days", "gpu_hours", "headroom")


class _Search:
    """One pass over a space."""

    def __init__(self, shape: ModelShape, cluster: Cluster, space: Space, calibration: Calibration, objective: str):
        require_known("objective", objective, OBJECTIVES)
        self.shape, self.cluster, self.space, self.calibration = shape, cluster, space, calibration
        self.objective = objective
        batches = [space.batches(dp)[0] for dp in {dp for _, _, dp in space.sizes()}] or [np.ones(1)]
        self.microbatches = Microbatches(cluster, calibration, np.unique(np.concatenate(batches)))
        rules: list[tuple[Rule, tuple[Any, ...]]] = [(rule, (cluster,)) for rule in CLUSTER_RULES]
        rules += [(rule, (shape,)) for rule in SHAPE_RULES] + [(rule, ()) for rule in TOPOLOGY_RULES]
        self.size_rules = [pair for pair in rules if pair[0].of_sizes]
        self.rules = [pair for pair in rules if not pair[0].of_sizes]
        self.fixed, self.columns = vars(space.base()), columns_of(shape, space.base(), space.engine)
        self.refused: Counter[str] = Counter()
        self.examples: list[tuple[Topology, str]] = []
        self.runnable = 0

    def refuse(self, rule: str, sizes: ParallelSizes, point: SearchPoint, gone: np.ndarray | slice) -> None:
        """Count the rows `gone` of a block under a rule, and keep a few of them as examples."""
        batches = self.space.batches(sizes[2])
        count = len(batches[0][gone])
        shown = max(min(count, EXAMPLES_PER_RULE - self.refused[rule]), 0)
        self.refused[rule] += count
        for mbs, gbs in zip(*(column[gone][:shown] for column in batches), strict=True) if shown else ():
            try:
                topology = topology_of(self.space, sizes, point, mbs, gbs)
            except ValueError:
                return  # cannot even be written down
            self.examples.append((topology, f"{topology.label}: {rule}"))

    def allowed(self, sizes: ParallelSizes, point: SearchPoint) -> np.ndarray:
        """Which batch sizes of a block no rule refuses; the refused are counted under the first rule they break."""
        mbs, gbs = self.space.batches(sizes[2])
        names = dict(zip(("tp", "pp", "dp"), sizes, strict=True))
        block: Any = SimpleNamespace(**{**self.fixed, **vars(point), **names, "mbs": mbs, "gbs": gbs})
        keep = np.ones(len(mbs), bool)
        for rule, subjects in self.rules:
            holds = rule.holds(block, *subjects)
            if holds is True:  # most often: a rule that no batch size breaks
                continue
            gone = keep & ~np.asarray(holds)
            if gone.any():
                self.refuse(rule.name, sizes, point, gone)
                keep = keep & holds
                if not keep.any():
                    return keep
        if len(keep) and (broken := unsupported_rule(self.space.engine, self.shape, block)):
            self.refuse(f"{broken[0]}: engine {self.space.engine} {broken[2]}", sizes, point, keep)
            keep = np.zeros(len(mbs), bool)
        return keep

    def block(self, sizes: ParallelSizes, points: Sequence[SearchPoint], keeps: Sequence[np.ndarray]) -> Block | None:
        """The runnable topologies of some points, predicted together; None where there is none."""
        which = np.repeat(np.arange(len(points)), [np.count_nonzero(keep) for keep in keeps])
        mbs, gbs = (np.concatenate([column[keep] for keep in keeps]) for column in self.space.batches(sizes[2]))
        columns = block_columns(self.columns, sizes, points, which, mbs, gbs)
        memory = memory_bytes(columns, self.cluster)
        fits = oom_probability(memory, self.cluster) <= IMPOSSIBLE
        for i in np.unique(which[~fits]).tolist():
            gone = np.flatnonzero(keeps[i])[~fits[which == i]]
            self.refuse(MEMORY_RULE, sizes, points[i], gone)
        columns, memory, which = columns.take(fits), memory[fits], which[fits]
        self.runnable += len(memory)
        if not len(memory):
            return None
        seconds = self.microbatches.seconds(columns) / columns.gbs
        goals = {"gpu_hours": seconds * columns.gpus, "headroom": memory}
        objective = goals.get(self.objective, seconds)
        return Block(sizes, tuple(points), which, columns.mbs, columns.gbs, objective, seconds, memory)

    def blocks(self) -> Iterator[Block]:
        """The runnable topologies, some thousands at a time; the others are counted."""
        for sizes in progress(list(self.space.sizes()), "search", "size"):
            cp, gpus = self.space.cp, sizes[0] * sizes[1] * sizes[2] * self.space.cp
            block = SimpleNamespace(tp=sizes[0], pp=sizes[1], dp=sizes[2], cp=cp, gpus=gpus)
            broken = next((rule for rule, subjects in self.size_rules if not rule.holds(block, *subjects)), None)
            points, keeps, rows = list[SearchPoint](), list[np.ndarray](), 0
            for point in self.space.points(self.shape, sizes[0], sizes[1]):
                if broken:
                    self.refuse(broken.name, sizes, point, slice(None))
                    continue
                keep = self.allowed(sizes, point)
                if keep.any():
                    points, keeps, rows = [*points, point], [*keeps, keep], rows + int(keep.sum())
                if rows > ROWS:
                    if found := self.block(sizes, points, keeps):
                        yield found
                    points, keeps, rows = [], [], 0
            if points and (found := self.block(sizes, points, keeps)):
                yield found

    def run(self, top: int) -> SearchResult:
        """All blocks; the best `top` of the safe and of the risky, and the Pareto front, kept on the way."""
        safe, risky, front = BestBlocks(top), BestBlocks(top), list[Block]()
        for found in self.blocks():
            danger = oom_probability(found.memory, self.cluster) > RISKY
            calm = found.take(~danger)
            if len(calm):
                front.append(calm.take(front_of(calm.seconds, calm.memory)))
            safe.add(calm)
            risky.add(found.take(danger))
        return SearchResult(
            space=self.space,
            candidates=tuple(self.candidates(safe.rows())),
            risky=tuple(self.candidates(risky.rows())),
            runnable=self.runnable,
            refused_by_rule=dict(self.refused.most_common()),
            refused=tuple(self.examples),
            front=lambda: self.candidates(merged_front(front)),
        )

    def candidates(self, found: Iterable[Block]) -> list[Candidate]:
        """Each row as a plan, predicted in full."""
        several = len(self.space.gbs) > 1
        result = []
        for block in found:
            for which, mbs, gbs in zip(block.which, block.mbs, block.gbs, strict=True):
                t = topology_of(self.space, block.sizes, block.points[which], mbs, gbs)
                label = label_of(self.shape, self.cluster, t, self.space.engine) + f"-gbs{t.gbs}" * several
                made: dict[str, Any] = {"shape": self.shape, "cluster": self.cluster, "engine": self.space.engine}
                plan = Plan(label=label, topology=t, **made)
                result.append(Candidate(plan=plan, prediction=predict(plan, self.calibration)))
        return result


def search_space(
    shape: ModelShape,
    cluster: Cluster,
    space: Space,
    calibration: Calibration | None = None,
    objective: str = "seconds",
    top: int = 200,
) -> SearchResult:
    """Predict every topology of a space; the best `top` by the objective, and the front of speed against memory."""
    cluster.gpu.flops_per_s(space.precision)
    return _Search(shape, cluster, space, calibration or calibration_for(cluster), objective).run(top)


def search(
    shape: ModelShape,
    cluster: Cluster,
    *,
    gpus: int | Sequence[int],
    gbs: int | Sequence[int],
    engine: str = ENGINES[0],
    calibration: Calibration | None = None,
    objective: str = "seconds",
    top: int = 500,
    **choices: Any,
) -> SearchResult:
    """Every topology of `gpus` GPUs (one or more counts) and `gbs` sequences an iteration that the engine can train.

    `choices` pins what the search would vary, by Topology's names, each to one value or several: `mbs=(1, 2)`,
    `recompute="full"`, `sequence_parallel=False`; or sets what it holds fixed: `precision`, `attention`,
    `fp32_gradients`. SearchResult.space.held_fixed names what was not varied.
    """
    space = space_for(shape, cluster, gpus=gpus, gbs=gbs, engine=engine, **choices)
    return search_space(shape, cluster, space, calibration, objective, top)
