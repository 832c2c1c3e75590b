"""Search: every topology of a space predicted, the refused counted by rule, the rest ranked."""

from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, label_of, unsupported_rule
from trilane.config.model import ModelShape
from trilane.config.parallelism import CLUSTER_RULES, SHAPE_RULES, TOPOLOGY_RULES, Rule
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import Microbatches
from trilane.costmodel.memory import memory_bytes, oom_probability
from trilane.costmodel.predict import IMPOSSIBLE, RISKY, predict
from trilane.costmodel.shipped import calibration_for
from trilane.planning.search_result import Candidate, SearchResult, first_per_sizes
from trilane.planning.space import ParallelSizes, Point, Space, block_columns, space_for, topology_of
from trilane.utils.progress import progress
from trilane.utils.validation import require_known

MEMORY_RULE = "memory must fit the card"


class Row(NamedTuple):
    """One topology that can run, with its objective, its seconds per sequence and its memory."""

    objective: float
    seconds: float
    memory: float
    topology: tuple[ParallelSizes, Point, float, float]  # with mbs and gbs


def front_of(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Rows that no other row beats in both seconds and memory, the fastest first."""
    order = np.lexsort((memory, seconds))
    lowest = np.minimum.accumulate(memory[order])
    return order[np.append([True] * (len(order) > 0), memory[order][1:] < lowest[:-1]).astype(bool)]


class _Search:
    """One pass over a space: the best `top` of the safe and of the risky, and the Pareto front, kept on the way."""

    def __init__(self, shape: ModelShape, cluster: Cluster, space: Space, calibration: Calibration, **how: Any):
        self.shape, self.cluster, self.space, self.calibration = shape, cluster, space, calibration
        self.objective, self.top = how["objective"], how["top"]
        # variants of one tp x pp x dp are no different answers, unless there is no other
        self.distinct = how["distinct"] and len({*space.sizes()}) > 1
        # seconds per sequence, which is also the order of the days of a number of tokens; GPU-seconds per sequence;
        # least memory of the fullest stage
        require_known("objective", self.objective, ("seconds", "days", "gpu_hours", "headroom"))
        self.safe, self.risky, self.front = list[Row](), list[Row](), list[Row]()
        batches = [space.batches(dp)[0] for dp in {dp for _, _, dp in space.sizes()}] or [np.ones(1)]
        self.microbatches = Microbatches(cluster, calibration, np.unique(np.concatenate(batches)))
        rules: list[tuple[Rule, tuple[Any, ...]]] = [(rule, (cluster,)) for rule in CLUSTER_RULES]
        rules += [(rule, (shape,)) for rule in SHAPE_RULES] + [(rule, ()) for rule in TOPOLOGY_RULES]
        # one look at tp, pp and dp refuses all batch sizes and choices
        self.size_rules = [pair for pair in rules if pair[0].of_sizes]
        self.rules = [pair for pair in rules if not pair[0].of_sizes]
        self.columns = columns_of(shape, space.fixed, space.engine)
        self.refused: Counter[str] = Counter()
        self.runnable = 0

    def allowed(self, sizes: ParallelSizes, point: Point) -> np.ndarray:
        """Which batch sizes of a block no rule refuses; the refused are counted under the first rule they break."""
        mbs, gbs = self.space.batches(sizes[2])
        names = dict(zip(("tp", "pp", "dp"), sizes, strict=True))
        block: Any = SimpleNamespace(**{**vars(self.space.fixed), **point, **names, "mbs": mbs, "gbs": gbs})
        keep, nothing = np.ones(len(mbs), bool), np.zeros(len(mbs), bool)
        for rule, subjects in self.rules:
            holds = rule.holds(block, *subjects)
            if holds is True:  # most often: a rule that no batch size breaks
                continue
            if holds is False:
                self.refused[rule.name] += int(keep.sum())
                return nothing
            left = keep & holds
            if lost := int(keep.sum() - left.sum()):
                self.refused[rule.name] += lost
                keep = left
                if not keep.any():
                    return keep
        if broken := unsupported_rule(self.space.engine, self.shape, block):
            self.refused[f"{broken[0]}: {broken[2]}"] += int(keep.sum())
            return nothing
        return keep

    def predict(self, sizes: ParallelSizes, points: Sequence[Point], keeps: Sequence[np.ndarray]) -> None:
        """Predict the topologies of some points together, and keep the best of them."""
        which = np.repeat(np.arange(len(points)), [np.count_nonzero(keep) for keep in keeps])
        mbs, gbs = (np.concatenate([column[keep] for keep in keeps]) for column in self.space.batches(sizes[2]))
        columns = block_columns(self.columns, sizes, points, which, mbs, gbs)
        memory = memory_bytes(columns, self.cluster)
        probability = oom_probability(memory, self.cluster)
        fits = probability <= IMPOSSIBLE
        self.refused[MEMORY_RULE] += int(len(fits) - fits.sum())
        self.runnable += int(fits.sum())
        if not fits.any():
            return
        columns, memory, which = columns.take(fits), memory[fits], which[fits]
        seconds = self.microbatches.seconds(columns) / columns.gbs
        goals = {"gpu_hours": seconds * columns.gpus, "headroom": memory}
        objective = np.asarray(goals.get(self.objective, seconds))

        def rows(index: np.ndarray) -> list[Row]:
            found = zip(*(values[index] for values in (objective, seconds, memory)), strict=True)
            facts = zip(which[index], columns.mbs[index], columns.gbs[index], strict=True)
            return [Row(o, s, b, (sizes, points[w], m, g)) for (o, s, b), (w, m, g) in zip(found, facts, strict=True)]

        danger = probability[fits] > RISKY
        for best, able in ((self.safe, ~danger), (self.risky, danger)):
            # a row is a Python object: only what may enter the best becomes one
            worst = best[-1].objective if len(best) == self.top else np.inf
            index = np.flatnonzero(able & (objective <= worst))
            new = rows(index[np.argsort(objective[index], kind="stable")[: 1 if self.distinct else self.top]])
            merged = sorted([*best, *new], key=lambda row: row.objective)
            best[:] = (first_per_sizes(merged, lambda row: row.topology[0]) if self.distinct else merged)[: self.top]
        # what a row of another block beats leaves at the end, in pareto()
        calm = np.flatnonzero(~danger)
        self.front += rows(calm[front_of(seconds[calm], memory[calm])])

    def run(self) -> SearchResult:
        """All topologies, some thousands at a time; what no rule refuses is predicted."""
        able = [sizes for sizes in self.space.sizes() if len(self.space.batches(sizes[2])[0])]
        for sizes in progress(able, "search", "size"):
            cp, gpus = self.space.fixed.cp, sizes[0] * sizes[1] * sizes[2] * self.space.fixed.cp
            block = SimpleNamespace(tp=sizes[0], pp=sizes[1], dp=sizes[2], cp=cp, gpus=gpus)
            broken = next((rule for rule, subjects in self.size_rules if not rule.holds(block, *subjects)), None)
            points, keeps, rows = list[Point](), list[np.ndarray](), 0
            for point in self.space.points(self.shape, sizes[0], sizes[1]):
                if broken:
                    self.refused[broken.name] += len(self.space.batches(sizes[2])[0])
                    continue
                keep = self.allowed(sizes, point)
                if keep.any():
                    points, keeps, rows = [*points, point], [*keeps, keep], rows + int(keep.sum())
                if rows > 1 << 14:  # 128 KiB a column, which stays in the cache
                    self.predict(sizes, points, keeps)
                    points, keeps, rows = [], [], 0
            if points:
                self.predict(sizes, points, keeps)
        return SearchResult(
            space=self.space,
            candidates=tuple(self.candidates(self.safe)),
            risky=tuple(self.candidates(self.risky)),
            runnable=self.runnable,
            refused_by_rule={rule: count for rule, count in self.refused.most_common() if count},
            front=self.pareto,
        )

    def pareto(self) -> list[Candidate]:
        """The plans that no other beats in both seconds and memory, the risky left out."""
        seconds, memory = (np.array([getattr(row, name) for row in self.front]) for name in ("seconds", "memory"))
        return self.candidates(self.front[i] for i in front_of(seconds, memory))

    def candidates(self, rows: Iterable[Row]) -> list[Candidate]:
        """Each row as a plan, predicted in full."""
        several, result = len(self.space.gbs) > 1, []
        for row in rows:
            t = topology_of(self.space, *row.topology)
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
    distinct: bool = False,
) -> SearchResult:
    """Predict every topology of a space; the best `top` by the objective, and the front of speed against memory."""
    cluster.gpu.flops_per_s(space.fixed.precision)
    known = calibration or calibration_for(cluster)
    return _Search(shape, cluster, space, known, objective=objective, top=top, distinct=distinct).run()


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
    distinct: bool = False,
    **choices: Any,
) -> SearchResult:
    """Every topology of `gpus` GPUs (one or more counts) and `gbs` sequences an iteration that the engine can train.

    `choices` pins what the search would vary, by Topology's names, each to one value or several, or sets what it holds
    fixed (precision, attention, fp32_gradients, ...). SearchResult.space.held_fixed names what was not varied. With
    `distinct`, the `top` best are of as many tp x pp x dp; where there is only one, they are its variants.

        search(shape, load_cluster("jz-a100-80g"), gpus=384, gbs=2048, mbs=(1, 2), recompute="full")
    """
    space = space_for(shape, cluster, gpus=gpus, gbs=gbs, engine=engine, **choices)
    return search_space(shape, cluster, space, calibration, objective, top, distinct)
