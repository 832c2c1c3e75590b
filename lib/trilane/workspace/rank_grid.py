"""Grid: which coordinates (tp, pp, dp) and which node each rank has, and who shares a process group with whom."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trilane.utils.validation import require

# A group is named by the coordinates that vary in it: "tp" are the ranks of one pp and dp.
AXES = {
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "model": ("tp", "pp"),
    "stage": ("tp", "dp"),
    "lane": ("pp", "dp"),
    "world": ("tp", "pp", "dp"),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is. `state` is the kernel's letter for its process ("T" stopped, "Z" dead, "gone"), `step` and
    `phase` its last heartbeat; "", -1 and "" where nobody wrote them down."""

    rank: int
    tp: int
    pp: int
    dp: int
    node: str
    state: str = ""
    step: int = -1
    phase: str = ""
    told: bool = True  # the node's name; else it is "node" and its number

    @property
    def progress(self) -> int:
        """The iteration; one more for a rank that has left its last one behind; -1 where unknown."""
        return self.step + (self.phase == "end" and self.step >= 0)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The places of all ranks of a job. `known` is False where nobody said the topology: then only "world" means much.

    Ranks count as in Megatron and DeepSpeed: tp fastest, then dp, then pp (megatron/core/parallel_state.py, order
    "tp-cp-ep-dp-pp"; deepspeed/runtime/pipe/topology.py PipeModelDataParallelTopology).
    """

    places: tuple[Place, ...]
    known: bool = True
    _groups: dict[tuple[str, tuple[int, ...]], frozenset[int]] = field(init=False, repr=False, compare=False)
    _by_rank: dict[int, Place] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups: defaultdict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        for place in self.places:
            for axis in AXES:
                groups[self._key(axis, place)].add(place.rank)
        object.__setattr__(self, "_groups", {key: frozenset(ranks) for key, ranks in groups.items()})
        object.__setattr__(self, "_by_rank", {place.rank: place for place in self.places})

    def __getitem__(self, rank: int) -> Place:
        return self._by_rank[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._by_rank

    @property
    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted(self._by_rank)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """tp, pp and dp."""
        return tuple(1 + max(getattr(p, axis) for p in self.places) for axis in ("tp", "pp", "dp"))

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for place in self.places:
            found[place.node].append(place.rank)
        return dict(found)

    def where(self, node: str) -> str:
        """A node in words: its name, or which one it is where nobody told the names."""
        nodes = self.nodes
        return node if self._by_rank[nodes[node][0]].told else f"the {_ordinal(1 + list(nodes).index(node))} node"

    def group(self, axis: str, rank: int) -> frozenset[int]:
        """Who is in `rank`'s group along `axis` (a name of AXES, "embedding", "next" or "previous" stage)."""
        place = self._by_rank[rank]
        if axis in ("next", "previous", "embedding"):
            lane, last = self.group("pp", rank), self.sizes[1] - 1
            wanted = {"next": {place.pp + 1}, "previous": {place.pp - 1}, "embedding": {0, last}}[axis]
            # Interleaved pipelines go round: behind the last stage comes the first.
            wanted = {(stage + last + 1) % (last + 1) for stage in wanted}
            return frozenset(r for r in lane if self._by_rank[r].pp in wanted) | {rank}
        return self._groups[self._key(axis if self.known else "world", place)]

    def _key(self, axis: str, place: Place) -> tuple[str, tuple[int, ...]]:
        return axis, tuple(getattr(place, name) for name in ("tp", "pp", "dp") if name not in AXES[axis])


MOST = 1 << 20  # ranks: what asks for more is a broken file


def regular(tp: int, pp: int, dp: int, gpus_per_node: int, hosts: Iterable[str] = ()) -> Grid:
    """The grid of tp x pp x dp ranks that fill nodes of `gpus_per_node` one after the other."""
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp), ("gpus_per_node", gpus_per_node)):
        require(size >= 1, name, size, "must be at least 1")
    require(tp * pp * dp <= MOST, "tp x pp x dp", tp * pp * dp, f"must be at most {MOST}")
    names = list(hosts)
    places = []
    for rank in range(tp * pp * dp):
        number = rank // gpus_per_node
        told = number < len(names)
        node = names[number] if told else f"node{number}"
        places.append(Place(rank=rank, tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp), node=node, told=told))
    return Grid(places=tuple(places))


def named(grid: Grid, hosts: Sequence[str], width: int) -> Grid:
    """The grid on `hosts`, in their order, where nobody told the nodes' names, and there are as many hosts.

    Where hosts of `width` ranks hold just all ranks, that many are on a node. That the first host has the first ranks
    is how SLURM counts: nodes by their names, tasks by nodes.
    """
    if any(p.told for p in grid.places):
        return grid
    if len(hosts) * width == len(grid.ranks):
        on = {rank: hosts[index // width] for index, rank in enumerate(grid.ranks)}
    elif len(hosts) == len(grid.nodes):
        on = {rank: host for host, ranks in zip(hosts, grid.nodes.values(), strict=True) for rank in ranks}
    else:
        return grid
    return replace(grid, places=tuple(replace(p, node=on[p.rank], told=True) for p in grid.places))


def _ordinal(number: int) -> str:
    words = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 // 10 != 1 else 0, "th")
    return words[number - 1] if number <= len(words) else f"{number}{ending}"


def unknown(ranks: Iterable[int], gpus_per_node: int, hosts: Iterable[str] = ()) -> Grid:
    """The grid of a job whose topology nobody said: ranks 0 to the highest seen."""
    grid = regular(1, 1, max(ranks, default=0) + 1, gpus_per_node, hosts)
    return Grid(places=grid.places, known=False)


def from_json(values: Mapping[str, Any]) -> Grid | None:
    """The grid of a topology.json, or of a plan.json; None where it holds no sizes and no ranks.

    Either {"tp": .., "pp": .., "dp": .., "gpus_per_node": ..} (gpus_per_node 8 where it is not said), or
    {"ranks": [{"rank": .., "tp": .., "pp": .., "dp": .., "node": ..}, ..]}, or both: then the list counts.
    """
    if not isinstance(values, Mapping):
        return None
    sizes = values.get("topology", values)
    cluster = values.get("cluster")
    node = values.get("gpus_per_node") or (cluster.get("gpus_per_node") if isinstance(cluster, Mapping) else None) or 8
    base = None
    if isinstance(sizes, Mapping) and any(name in sizes for name in ("tp", "pp", "dp")):
        tp, pp, dp = (_whole(name, sizes.get(name, 1)) for name in ("tp", "pp", "dp"))
        base = regular(tp, pp, dp, _whole("gpus_per_node", node), values.get("hosts", ()))
    listed = values.get("ranks")
    if isinstance(listed, Mapping):
        listed = [{"rank": int(rank), **facts} for rank, facts in listed.items()]
    if not isinstance(listed, list) or not listed:
        return base
    given = {int(facts["rank"]): facts for facts in listed}
    base = base or unknown(given, _whole("gpus_per_node", node))
    hosts: defaultdict[Any, set[str]] = defaultdict(set)
    for facts in given.values():
        hosts[facts.get("node")] |= {str(facts["host"])} if facts.get("host") else set()
    heard = {node: names for node, names in hosts.items() if names and node is not None}
    origin = {r: base[r] if r in base else base.places[0] for r in {*base.ranks, *given}}
    places = [_place(origin[r], r, given.get(r, {}), heard) for r in origin]
    return Grid(places=tuple(sorted(places, key=lambda p: p.rank)), known=base.known or "tp" in listed[0])


def _place(base: Place, rank: int, facts: Mapping[str, Any], hosts: Mapping[Any, set[str]]) -> Place:
    """`hosts` are those heard of each node: where there are any, "node" is only what they are called here."""
    coordinates = {name: int(facts.get(name, getattr(base, name))) for name in ("tp", "pp", "dp")}
    node = facts.get("node", base.node)
    heard = {str(facts["host"])} if facts.get("host") else hosts.get(node, set())
    host = next(iter(heard)) if len(heard) == 1 else ""
    step = facts.get("step", -1)
    return Place(
        rank=rank,
        **coordinates,
        node=host or (f"node{node}" if isinstance(node, int) else str(node)),
        state=str(facts.get("state") or ""),
        step=-1 if step is None else int(step),
        phase=str(facts.get("phase") or ""),
        told=bool(host) or (isinstance(node, str) and not hosts if "node" in facts else base.told),
    )


def _whole(name: str, value: Any) -> int:
    require(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, value, "must be at least 1")
    return value
