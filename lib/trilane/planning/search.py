"""Blocks: what a search keeps of the topologies it computes together, and the times that blocks share.

Search: every topology of a space predicted, the refused counted by reason, the rest ranked.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import Columns
from trilane.costmodel.constants import Constants
from trilane.costmodel.iteration import assemble
from trilane.costmodel.layers import LayerTime, embedding_seconds, head_seconds, layer_time
from trilane.costmodel.memory import memory_bytes, oom_probability
from trilane.costmodel.predict import Prediction, predict
from trilane.planning.space import (
    MEMORY_RULE,
    SCHEDULE_RULE,
    SearchPoint,
    Space,
    block_columns,
    choice_rule,
    lane_rule,
    space_around,
    topology_of,
)
from trilane.utils.validation import require_known

ParallelSizes = tuple[int, int, int]


@dataclass(frozen=True)
class Found:
    """Runnable topologies of one block: what they are, their objective, seconds per sequence and memory."""

    lane: ParallelSizes
    choice: SearchPoint
    mbs: np.ndarray
    gbs: np.ndarray
    objective: np.ndarray
    seconds: np.ndarray
    memory: np.ndarray

    def __len__(self) -> int:
        return len(self.mbs)

    def take(self, index: np.ndarray) -> "Found":
        rows = (getattr(self, n)[index] for n in ("mbs", "gbs", "objective", "seconds", "memory"))
        return Found(self.lane, self.choice, *rows)


class Microbatches:
    """Seconds of a layer, the head and the embedding for every microbatch size, computed once for many blocks."""

    def __init__(self, cluster: Cluster, constants: Constants, sizes: np.ndarray) -> None:
        self.cluster, self.constants, self.sizes = cluster, constants, sizes
        self.known: dict[tuple[float, ...], tuple[np.ndarray, ...]] = {}

    def seconds(self, columns: Columns) -> np.ndarray:
        """Seconds per iteration of a block's rows."""
        sharing = columns.gpus if self.cluster.gpu.kind == "cpu" else 0  # processes of a CPU share its cores
        # a group that leaves the node is slower, but a search refuses it before (space.lane_rule): no part of the key
        key = (columns.tp, columns.recompute, columns.sequence_parallel, sharing)
        if key not in self.known:
            self.known[key] = self._compute(columns)
        rows = np.searchsorted(self.sizes, columns.mbs)
        *layer, head, embedding = (part[rows] for part in self.known[key])
        time = assemble(columns, LayerTime(*layer), head, embedding, self.cluster, self.constants)
        return np.asarray(time.total)

    def _compute(self, columns: Columns) -> tuple[np.ndarray, ...]:
        few = dataclasses.replace(columns, mbs=self.sizes, gbs=self.sizes * columns.dp)
        layer = layer_time(few, self.cluster, self.constants)
        parts = [getattr(layer, f.name) for f in dataclasses.fields(layer)]
        parts += [head_seconds(few, self.cluster, self.constants), embedding_seconds(few, self.cluster, self.constants)]
        return tuple(np.broadcast_to(p, self.sizes.shape) for p in parts)


def front_of(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Rows that no other row beats in both seconds and memory, the fastest first."""
    order = np.lexsort((memory, seconds))
    lowest = np.minimum.accumulate(memory[order])
    return order[np.append(True, memory[order][1:] < lowest[:-1])]


def _rows(blocks: Sequence[Found], order: np.ndarray) -> list[Found]:
    owner = np.repeat(np.arange(len(blocks)), [len(b) for b in blocks])
    place = np.concatenate([np.arange(len(b)) for b in blocks]) if blocks else np.array([], int)
    return [blocks[owner[i]].take(np.array([place[i]])) for i in order]


def merged(blocks: Sequence[Found], top: int) -> tuple[list[Found], float]:
    blocks = [b for b in blocks if len(b)]
    if not blocks:
        return [], np.inf
    objective = np.concatenate([b.objective for b in blocks])
    order = np.argsort(objective, kind="stable")[:top]
    return _rows(blocks, order), float(objective[order[-1]]) if len(order) == top else np.inf


def merged_front(blocks: Sequence[Found]) -> list[Found]:
    if not blocks:
        return []
    order = front_of(np.concatenate([b.seconds for b in blocks]), np.concatenate([b.memory for b in blocks]))
    return _rows(blocks, order)


OOM_LIMIT = 0.5


EXAMPLES_PER_RULE = 50


OBJECTIVES = {
    "seconds": "seconds per sequence: seconds per iteration where gbs is the same",
    "days": "the same order, for a fixed number of tokens",
    "gpu_hours": "GPU-seconds per sequence",
    "headroom": "least memory of the fullest stage",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A topology and what is expected of it."""

    topology: Topology
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best candidates, best first; all refused topologies counted by rule, some of them shown with their reason."""

    candidates: tuple[Candidate, ...]
    runnable: int
    refused_by_rule: dict[str, int]
    refused: tuple[tuple[Topology, str], ...]
    pareto: tuple[Candidate, ...]

    @property
    def evaluated(self) -> int:
        """Topologies that were looked at."""
        return self.runnable + sum(self.refused_by_rule.values())

    def best_lanes(self, count: int) -> list[Candidate]:
        """The `count` best candidates that differ in tp, pp or dp."""
        best: dict[ParallelSizes, Candidate] = {}
        for candidate in self.candidates:
            t = candidate.topology
            best.setdefault((t.tp, t.pp, t.dp), candidate)
        return list(best.values())[:count]


class _Search:
    """One pass over a space."""

    def __init__(self, shape: ModelShape, cluster: Cluster, space: Space, calibration: Calibration, objective: str):
        require_known("objective", objective, OBJECTIVES)
        self.shape, self.cluster, self.space, self.calibration = shape, cluster, space, calibration
        self.objective = objective
        sizes = [space.batches(dp)[0] for dp in {dp for _, _, dp in space.lanes()}] or [np.ones(1)]
        self.microbatches = Microbatches(cluster, calibration.constants, np.unique(np.concatenate(sizes)))
        self.refused: Counter[str] = Counter()
        self.examples: list[tuple[Topology, str]] = []
        self.shown: Counter[str] = Counter()
        self.runnable = 0

    def refuse(
        self, rule: str, count: int, lane: ParallelSizes, choice: SearchPoint, mbs: np.ndarray, gbs: np.ndarray
    ) -> None:
        """Count `count` topologies under a rule, and keep a few of them as examples."""
        self.refused[rule] += count
        for i in range(min(len(mbs), EXAMPLES_PER_RULE - self.shown[rule])):
            self.shown[rule] += 1
            try:
                topology = topology_of(self.space, lane, choice, mbs[i], gbs[i])
            except ValueError:
                return  # cannot even be written down
            self.examples.append((topology, f"{topology.label}: {rule}"))

    def block(self, lane: ParallelSizes, choice: SearchPoint) -> Found | None:
        """Predict one block; None where a rule refuses all of it."""
        tp, pp, dp = lane
        mbs, gbs = self.space.batches(dp)
        rule = lane_rule(self.shape, self.cluster, *lane) or choice_rule(self.shape, tp, pp, choice)
        if rule:
            self.refuse(rule, len(mbs), lane, choice, mbs[:EXAMPLES_PER_RULE], gbs[:EXAMPLES_PER_RULE])
            return None
        columns = block_columns(self.shape, self.space, lane, choice)
        keep = np.ones(len(mbs), bool)
        if choice.interleaving > 1:
            keep = self.drop(keep, columns.microbatches % pp == 0, SCHEDULE_RULE, lane, choice)
        memory = np.broadcast_to(memory_bytes(columns, self.cluster), mbs.shape)
        fits = oom_probability(memory, self.cluster) <= OOM_LIMIT
        keep = self.drop(keep, fits, MEMORY_RULE, lane, choice)
        columns, memory = columns.take(keep), memory[keep]
        self.runnable += len(memory)
        if not len(memory):
            return None
        seconds = self.microbatches.seconds(columns) / columns.gbs
        goal = {"seconds": seconds, "days": seconds, "gpu_hours": seconds * tp * pp * dp, "headroom": memory}[
            self.objective
        ]
        return Found(lane, choice, columns.mbs, columns.gbs, goal, seconds, memory)

    def drop(self, keep: np.ndarray, ok: np.ndarray, rule: str, lane: ParallelSizes, choice: SearchPoint) -> np.ndarray:
        """Refuse what is still kept and not ok."""
        gone = keep & ~ok
        if gone.any():
            mbs, gbs = self.space.batches(lane[2])
            self.refuse(rule, int(gone.sum()), lane, choice, mbs[gone], gbs[gone])
        return keep & ok

    def run(self, top: int) -> SearchResult:
        """All blocks, the best `top` and the Pareto front kept as it goes."""
        best: list[Found] = []
        front: list[Found] = []
        worst = np.inf
        for lane in self.space.lanes():
            for choice in self.space.choices(self.shape, lane[0], lane[1]):
                found = self.block(lane, choice)
                if found is None:
                    continue
                front.append(found.take(front_of(found.seconds, found.memory)))
                better = np.flatnonzero(found.objective <= worst)
                best.append(found.take(better[np.argsort(found.objective[better], kind="stable")[:top]]))
                if sum(map(len, best)) > 20 * top:
                    best, worst = merged(best, top)
        best, _ = merged(best, top)
        return SearchResult(
            candidates=tuple(self.candidates(best)),
            runnable=self.runnable,
            refused_by_rule=dict(self.refused.most_common()),
            refused=tuple(self.examples),
            pareto=tuple(self.candidates(merged_front(front))),
        )

    def candidates(self, found: Iterable[Found]) -> list[Candidate]:
        """Each row predicted in full."""
        result = []
        for block in found:
            for mbs, gbs in zip(block.mbs, block.gbs, strict=True):
                topology = topology_of(self.space, block.lane, block.choice, mbs, gbs)
                prediction = predict(self.shape, topology, self.cluster, self.calibration)
                result.append(Candidate(topology=topology, prediction=prediction))
        return result


def search_space(
    shape: ModelShape,
    cluster: Cluster,
    space: Space,
    calibration: Calibration,
    objective: str = "seconds",
    top: int = 200,
) -> SearchResult:
    """Predict every topology of a space; the best `top` by the objective, and the front of speed against memory."""
    cluster.gpu.flops_per_s(space.precision)
    return _Search(shape, cluster, space, calibration, objective).run(top)


def search(
    shape: ModelShape,
    cluster: Cluster,
    *,
    gpus: int | Sequence[int],
    gbs: int | Sequence[int],
    calibration: Calibration,
    mbs: Sequence[int] = (),
    base: Topology | None = None,
    top: int = 500,
) -> SearchResult:
    """Every tp x pp x dp of `gpus` GPUs (one or more counts) and microbatch size; other choices are those of `base`."""
    counts = (gpus,) if isinstance(gpus, int) else gpus
    batches = (gbs,) if isinstance(gbs, int) else gbs
    return search_space(shape, cluster, space_around(base or Topology(), counts, batches, mbs), calibration, top=top)
