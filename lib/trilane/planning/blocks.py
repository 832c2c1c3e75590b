"""Blocks of topologies that are predicted together, as arrays; the best of many blocks and their Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.planning.space import ParallelSizes, SearchPoint


@dataclass(frozen=True)
class Block:
    """Runnable topologies of one tp x pp x dp: what they are, their objective, seconds per sequence and memory."""

    sizes: ParallelSizes
    points: tuple[SearchPoint, ...]
    which: np.ndarray  # of the points
    mbs: np.ndarray
    gbs: np.ndarray
    objective: np.ndarray
    seconds: np.ndarray
    memory: np.ndarray

    def __len__(self) -> int:
        return len(self.mbs)

    def take(self, index: np.ndarray) -> "Block":
        rows = (getattr(self, n)[index] for n in ("which", "mbs", "gbs", "objective", "seconds", "memory"))
        return Block(self.sizes, self.points, *rows)


def front_of(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Rows that no other row beats in both seconds and memory, the fastest first."""
    order = np.lexsort((memory, seconds))
    lowest = np.minimum.accumulate(memory[order])
    return order[np.append(True, memory[order][1:] < lowest[:-1])]


def _rows(blocks: Sequence[Block], order: np.ndarray) -> list[Block]:
    owner = np.repeat(np.arange(len(blocks)), [len(b) for b in blocks])
    place = np.concatenate([np.arange(len(b)) for b in blocks]) if blocks else np.array([], int)
    return [blocks[owner[i]].take(np.array([place[i]])) for i in order]


def merged(blocks: Sequence[Block], top: int) -> tuple[list[Block], float]:
    """The best `top` rows of all blocks, a block each, and the objective that a further row must beat."""
    blocks = [b for b in blocks if len(b)]
    if not blocks:
        return [], np.inf
    objective = np.concatenate([b.objective for b in blocks])
    order = np.argsort(objective, kind="stable")[:top]
    return _rows(blocks, order), float(objective[order[-1]]) if len(order) == top else np.inf


def merged_front(blocks: Sequence[Block]) -> list[Block]:
    """The rows of all blocks that no other row beats in both seconds and memory, a block each."""
    if not blocks:
        return []
    order = front_of(np.concatenate([b.seconds for b in blocks]), np.concatenate([b.memory for b in blocks]))
    return _rows(blocks, order)


class BestBlocks:
    """The best `top` rows of the blocks seen so far."""

    def __init__(self, top: int) -> None:
        self._top, self._blocks, self._worst = top, list[Block](), np.inf

    def add(self, found: Block) -> None:
        better = np.flatnonzero(found.objective <= self._worst)
        if len(better):
            order = np.argsort(found.objective[better], kind="stable")[: self._top]
            self._blocks.append(found.take(better[order]))
        if sum(map(len, self._blocks)) > 20 * self._top:
            self._blocks, self._worst = merged(self._blocks, self._top)

    def rows(self) -> list[Block]:
        return merged(self._blocks, self._top)[0]
