"""Blocks: what a search keeps of the topologies it computes together, and the times that blocks share."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.columns import Columns
from trilane.constants import Constants
from trilane.hardware import Cluster
from trilane.layertime import LayerTime, embedding_seconds, head_seconds, layer_time
from trilane.space import Choice
from trilane.timing import assemble

Lane = tuple[int, int, int]


@dataclass(frozen=True)
class Found:
    """Runnable topologies of one block: what they are, their objective, seconds per sequence and memory."""

    lane: Lane
    choice: Choice
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
