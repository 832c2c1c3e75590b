"""Grid: the coordinates (tp, pp, dp), node and process groups of each rank."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

from trilane.utils.files import json_object, read_text
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, grouped
from trilane.utils.validation import from_mapping, require, require_integer

COORDINATES = ("tp", "pp", "dp")
USUAL_GPUS_PER_NODE = 8
MOST = 1 << 17  # ranks, of which a grid takes 5 s and 0.6 GB; a file with more is damaged


class Known(IntEnum):
    """How a rank or a node is known; a node is blamed only from MAP on."""

    NO = 0
    ASSUMED = 1  # by an order, such as that of names
    MAP = 2  # by a map from ranks to nodes that was read
    LINE = 3  # one line prints it


@frozen
class GridPlace:
    """The place of a rank, the state of its process, and its last heartbeat; "", -1 and "" where
    unknown. Where the node's name is unknown (Known.NO), `node` is "node" and its number.
    """

    rank: int
    tp: int
    pp: int
    dp: int
    node: str = ""
    state: str = ""  # the kernel's letter: "T" stopped, "Z" dead; or "gone"
    step: int = -1
    phase: str = ""
    node_known: Known = Known.MAP

    @property
    def named(self) -> bool:
        """Whether the node's name is known."""
        return self.node_known > Known.NO

    @property
    def progress(self) -> int:
        """The iteration, one more for a rank that has finished its last one; -1 where unknown."""
        return self.step + (self.phase == "end" and self.step >= 0)


@frozen
class Grid:
    """The places of all ranks of a job. `known` is False for an unknown topology: then every group
    is the world.

    Ranks are numbered as in Megatron and DeepSpeed: tp fastest, then dp, then pp
    (megatron/core/parallel_state.py, order "tp-cp-ep-dp-pp"; deepspeed/runtime/pipe/topology.py
    PipeModelDataParallelTopology).
    """

    # A group axis is named by the coordinates that vary in it: "tp" are the ranks of one pp and dp.
    AXES: ClassVar = {
        "tp": ("tp",),
        "pp": ("pp",),
        "dp": ("dp",),
        "model": ("tp", "pp"),
        "stage": ("tp", "dp"),
        "pp-dp": ("pp", "dp"),
        "world": COORDINATES,
    }
    places: tuple[GridPlace, ...]
    known: bool = True

    @functools.cached_property
    def _by_rank(self) -> dict[int, GridPlace]:
        return {place.rank: place for place in self.places}

    @functools.cached_property
    def _groups(self) -> dict[tuple[str, tuple[int, ...]], frozenset[int]]:
        # all at once: to look for each rank's group among all ranks would take minutes for ten
        # thousand
        members: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for axis in self.AXES:
            for place in self.places:
                members.setdefault(self._key(axis, place), []).append(place.rank)
        return {key: frozenset(ranks) for key, ranks in members.items()}

    def __getitem__(self, rank: int) -> GridPlace:
        return self._by_rank[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._by_rank

    @property
    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted(self._by_rank)

    @functools.cached_property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return 1 + max(place.pp for place in self.places)

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node."""
        nodes = grouped(self.places, lambda place: place.node)
        return {node: [place.rank for place in places] for node, places in nodes.items()}

    def node_name(self, node: str) -> str:
        """A node in words: its name, or "node 3 of 8" where names are unknown."""
        nodes = list(self.nodes)
        if any(place.named for place in self.places if place.node == node):
            return node
        return f"node {nodes.index(node) + 1} of {len(nodes)}"

    def group(self, axis: str, rank: int) -> frozenset[int]:
        """The ranks of `rank`'s group along `axis` (a name of AXES, "embedding", "next" or
        "previous" stage).
        """
        place = self._by_rank[rank]
        if axis in self.AXES:
            return self._groups[self._key(axis if self.known else "world", place)]
        stages = {"next": [place.pp + 1], "previous": [place.pp - 1], "embedding": [0, -1]}[axis]
        # interleaved pipelines wrap around: the first stage follows the last
        numbers = [stage % self.stages for stage in stages]
        members = [other for other in self.group("pp", rank) if self._by_rank[other].pp in numbers]
        return frozenset([*members, rank])

    def _key(self, axis: str, place: GridPlace) -> tuple[str, tuple[int, ...]]:
        fixed = [name for name in COORDINATES if name not in self.AXES[axis]]
        return axis, tuple(getattr(place, name) for name in fixed)


def asked(tp: int, pp: int, dp: int, gpus_per_node: int = USUAL_GPUS_PER_NODE) -> Grid | None:
    """The grid of these sizes, of which 0 means 1; None where all are 0."""
    if not (tp or pp or dp):
        return None
    return regular(tp or 1, pp or 1, dp or 1, gpus_per_node)


def regular(tp: int, pp: int, dp: int, gpus_per_node: int) -> Grid:
    """The grid of tp x pp x dp ranks that fill nodes of `gpus_per_node`, one after the other."""
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp), ("gpus_per_node", gpus_per_node)):
        require_integer(name, size, 1)
    require(tp * pp * dp <= MOST, "tp x pp x dp", tp * pp * dp, f"must be at most {MOST}")
    places = []
    for rank in range(tp * pp * dp):
        place = GridPlace(
            rank=rank,
            tp=rank % tp,
            dp=rank // tp % dp,
            pp=rank // (tp * dp),
            node=f"node{rank // gpus_per_node}",
            node_known=Known.NO,
        )
        places.append(place)
    return Grid(places=tuple(places))


def with_hosts(grid: Grid, hosts: Sequence[str], width: int, known: Known) -> Grid:
    """The grid with `hosts`, in their order, as names of its nodes; unchanged where it has names or
    they do not fit.

    `known` is how their order is known. They fit where there are as many as nodes, or `width` ranks
    for each; all have equally many.
    """
    fits = len(hosts) == len(grid.nodes) or len(hosts) * width == len(grid.ranks)
    if not fits or any(place.named for place in grid.places):
        return grid
    # The first host has the first ranks, as SLURM numbers them: nodes by name, tasks by node.
    share = len(grid.ranks) // len(hosts)
    places = []
    for place in grid.places:
        host = hosts[min(place.rank // share, len(hosts) - 1)]
        places.append(replace(place, node=host, node_known=known))
    return replace(grid, places=tuple(places))


def unknown(ranks: Iterable[int], gpus_per_node: int) -> Grid:
    """The grid of a job of unknown topology: ranks 0 to the highest of `ranks`."""
    return replace(regular(1, 1, max(ranks, default=0) + 1, gpus_per_node), known=False)


def from_json(values: Json) -> Grid | None:
    """The grid of a topology.json or a plan.json; None where it holds no sizes.

    {"tp": .., "pp": .., "dp": .., "gpus_per_node": ..} (gpus_per_node 8 by default); a list
    "ranks": [{"rank": .., "tp": .., "pp": .., "dp": .., "node": ..}, ..] beside it takes precedence
    for the ranks that it names.
    """
    sizes = values.get("topology", values)
    if set(COORDINATES).isdisjoint(sizes):
        return None
    cluster = values.get("cluster", {})
    width = values.get("gpus_per_node") or cluster.get("gpus_per_node") or 8
    tp, pp, dp = (sizes.get(name, 1) for name in COORDINATES)
    grid = with_hosts(regular(tp, pp, dp, width), values.get("hosts", ()), width, Known.MAP)
    listed = {int(facts["rank"]): facts for facts in values.get("ranks") or ()}
    places = [_place(place, listed.get(place.rank, {})) for place in grid.places]
    return replace(grid, places=tuple(places))


def read(path: Path) -> Grid | None:
    """The grid of a topology.json or a plan.json; None where it is missing or damaged, or holds
    none.
    """
    try:
        return from_json(json_object(read_text(path)) or {})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _place(base: GridPlace, facts: Json) -> GridPlace:
    """A rank of topology.json; its node is named by its host, else by its label."""
    names = ("tp", "pp", "dp", "state", "step", "phase")
    values = {name: facts[name] for name in names if facts.get(name) is not None}
    node = facts.get("host") or facts.get("node")
    if isinstance(node, int):
        values |= {"node": f"node{node}", "node_known": Known.NO}
    elif node:
        values |= {"node": node, "node_known": Known.MAP}
    return from_mapping(GridPlace, {**vars(base), **values}, "rank")
