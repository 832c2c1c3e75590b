"""Place: the rank, task, node and GPU that something happened on, and how they are known."""

from dataclasses import dataclass
from enum import IntEnum


class Known(IntEnum):
    """How a rank or a node is known; a node is blamed only from MAP on."""

    NO = 0
    ASSUMED = 1  # by an order, such as that of names
    MAP = 2  # by a map from ranks to nodes that was read
    LINE = 3  # one line prints it


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank of the run, or on its node (`local`), tasks of srun (or a process of mpirun), the
    node, or SLURM's list of several, and the GPU on it; None, () and "" where unknown.
    """

    rank: int | None = None
    local: int | None = None
    tasks: tuple[int, ...] = ()
    node: str = ""
    gpu: int | None = None
    rank_known: Known = Known.NO
    node_known: Known = Known.NO
