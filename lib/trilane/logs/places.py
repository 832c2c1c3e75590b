"""Places: on which rank, task, node and GPU something happened, by what a line prints and a map
that the log holds.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from trilane.workspace.place import Known, Place
from trilane.workspace.rank_grid import MOST

NAMES = rb"[A-Za-z0-9][\w.-]{0,98}(?:\[[\d,-]{1,200}\])?"  # of nodes, as SLURM lists them
# The node that a line is about goes before the one that printed it; a prefix needs a digit, as any
# word may stand before a colon, and `rank3: ` may be a node or a rank: it is neither.
NAMED, PRINTED = (
    re.compile(pattern.replace(b"NAMES", NAMES))
    for pattern in (
        rb"(?:[Nn]ode|Prolog) failure on (?:node )?(NAMES)|(?:failed|exited on| process.{0,60}) (?:on )?node (NAMES)"
        rb"|srun: error: (?:Nodes? )?(NAMES)(?:: tasks? \d| (?:is|are) still not)|ON (NAMES) UNCORRECTABLE",
        rb"(?:^|[\s>:\]])((?!\d{4}-)(?=[\w.-]{0,98}[A-Za-z])NAMES):\d+:\d+ \[\d+\]|\bslurmstepd-(NAMES): "
        rb"|^(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\dT\S{8,30}) (NAMES) \S{1,40}: |^\[([a-z]NAMES):\d+\] "
        rb"|^((?!rank\d|gpu\d: |nvidia|python|ib\d|eth|cuda|step|line|pip\d)[a-z][a-z-]*\d[a-z\d.-]{0,60}): \S",
    )
)
# A rank of the run: torch's prefix since 2.2, a watchdog's in the group of all ranks, or before 2.2
# in one that it does not name; and what Megatron, mpirun and trilane write. In other words it may
# be a rank that this one waits for.
RANK = re.compile(
    rb"\[rank(\d{1,7})\]|\[(?:PG[ \w]{0,99}\(default_pg\) |PG 0 |PG ID 0 PG GUID 0 )?Rank (\d{1,7})\]"
    rb"|(?:^|: |process )[Rr]ank (\d{1,7})(?:: | with PID )"
)
TASK = re.compile(
    rb"^\s*(\d{1,6}): "  # srun --label
    rb"|\[\d{1,6},(\d{1,7})\]<std\w{3}>"  # mpirun --tag-output
    rb"|\bsrun: error: [^\s:]{1,300}: tasks? ([\d,-]{1,400}): "
)
NCCL = re.compile(
    rb"([A-Za-z0-9][\w.-]{0,98}):\d+:\d+ \[\d+\] NCCL INFO .{0,200}"
    rb"\brank (\d{1,7}) nranks (\d{1,7}) (?:cudaDev (\d{1,3}))?"
)


def place_of(line: bytes) -> Place:
    """The place that a line prints, with nothing concluded."""
    rank, task = RANK.search(line), TASK.search(line)
    local = re.search(rb"\[default(\d{1,4})\]:|\blocal_rank: (\d{1,4})\b", line)
    found = NAMED.search(line[:2000]) or PRINTED.search(line[:2000])
    gpu = re.search(rb":\d+:\d+ \[(\d{1,3})\]", line[:2000])
    # slurmstepd names the node that prints this, which is not the one that failed
    node = "" if b"CANCELLED AT" in line or not found else found[found.lastindex or 0].decode()
    return Place(
        rank=_first(rank),
        local=_first(local),
        tasks=_numbers(next(filter(None, task.groups()))) if task else (),
        node=node,
        gpu=_first(gpu),
        rank_known=Known.NO
        if not rank
        else Known.ASSUMED
        if rank[0].startswith(b"[Rank")
        else Known.LINE,
        node_known=Known.LINE if node else Known.NO,
    )


def _first(found: re.Match[bytes] | None) -> int | None:
    return int(found[found.lastindex or 0]) if found else None


def _numbers(text: bytes) -> tuple[int, ...]:
    """The numbers of `0,4-7`."""
    ends = [
        [int(end) for end in part.split(b"-") if end][:2]
        for part in text.split(b",")
        if part.strip(b"-")
    ]
    return tuple(
        n for first, *last in ends for n in range(first, min((last or [first])[0], first + 512) + 1)
    )


Map = dict[int, tuple[str, int | None] | None]  # node and GPU; None where two lines differ


@dataclass(kw_only=True)
class Places:
    """What a run's log shows of its ranks: the node and GPU of each, and what the numbers of tasks
    and processes count.

    `world` is the number of ranks (0: unknown), `size` that of the largest communicator.
    """

    world: int = 0
    size: int = 0
    has_groups: bool = False  # of tensor or pipeline parallelism
    has_launchers: bool = (
        False  # a process on each node starts its ranks: a task of srun is none of these
    )
    nodes: Map = field(default_factory=dict)  # of ranks
    nccl: Map = field(default_factory=dict)  # of the ranks of the largest communicator
    tasks: Map = field(default_factory=dict)  # of tasks
    first: dict[str, int] = field(default_factory=dict)  # a task of a node
    under: dict[int, int] = field(default_factory=dict)  # the task of a rank
    same: bool = False  # a line has a task and the rank of that number, or a node has two tasks
    differ: bool = False  # a line has a task and a rank of another number
    width: int = 0  # most ranks of a node that were seen
    highest: int = -1
    root: tuple[str, int] | None = (
        None  # when the first rank of torchrun's tables failed, and this rank
    )
    hosts: set[str] = field(default_factory=set)  # that printed such a table

    def see(self, place: Place, line: bytes) -> None:
        """Learn from a line about an end."""
        rank = place.rank if place.rank_known > Known.ASSUMED else None
        self.highest = max(self.highest, -1 if rank is None else rank)
        self.width = max(self.width, 0 if place.local is None else place.local + 1)
        if len(place.tasks) == 1 and rank is not None:
            self.under |= {rank: place.tasks[0]} if len(self.under) < MOST else {}
            self.differ |= place.tasks[0] != rank
            self.same |= (
                place.tasks[0] == rank > 0
            )  # under a launcher, that of the first node alone is equal
        if not place.node or "[" in place.node:
            return
        is_own = b"process rank" in line or not NAMED.search(
            line[:2000]
        )  # the node that ran what the line numbers
        if place.tasks and (is_own or b"srun: error: " in line):
            self.same |= len({*place.tasks, self.first.setdefault(place.node, place.tasks[0])}) > 1
            for task in place.tasks:
                _add(self.tasks, task, place.node, None)
        if rank is not None and is_own:
            _add(self.nodes, rank, place.node, place.gpu)

    def listed(self, rank: int, local: int, host: str, time: str) -> None:
        """Learn from an entry of torchrun's table of failures."""
        self.width, self.highest = max(self.width, local + 1), max(self.highest, rank)
        self.root = min(filter(None, (self.root, (time, rank))))
        if host:
            self.hosts.add(host)
            _add(self.nodes, rank, host, None)

    def mapped(self, line: bytes) -> None:
        """Learn from a line of NCCL, or of DeepSpeed's launcher."""
        if named := NCCL.search(line):
            if int(named[3]) > self.size:  # the largest communicator numbers the ranks of the run
                self.size, self.nccl = int(named[3]), {}
            if int(named[3]) == self.size:
                _add(
                    self.nccl,
                    int(named[2]),
                    named[1].decode("utf-8", "replace"),
                    int(named[4]) if named[4] else None,
                )
        of_nodes = re.findall(
            rb"'([\w.-]{1,99})': \[(\d[\d, ]{0,9999})\]", line.partition(b"global_rank_mapping=")[2]
        )
        for host, ranks in of_nodes:
            for rank in re.findall(rb"\d{1,7}", ranks):
                _add(self.nodes, int(rank), host.decode(), None)

    @property
    def ranks(self) -> int:
        """How many ranks the run has; 0 where it is unknown: the largest communicator that was read
        may be of a group (in a node of 8, or of one rank a node), but not where it ends with the
        highest rank that printed anything.
        """
        return self.world or (self.size if self.size == self.highest + 1 > 8 else 0)

    def host(self, rank: int) -> str:
        """The node of a rank, by what the log prints of both together; "" where it does not, or
        contradicts itself.
        """
        known = [self.nodes[rank]] if rank in self.nodes else []
        # a smaller communicator numbers its own ranks
        known += [self.nccl[rank]] if rank in self.nccl and self.size == self.ranks else []
        task = self.under.get(rank, rank if self.tasks_are_ranks() else -1)
        known += [self.tasks[task]] if task in self.tasks and not self._is_mixed else []
        names = {_short(place[0]) if place else "": place[0] if place else "" for place in known}
        return names.popitem()[1] if len(names) == 1 else ""

    @property
    def _is_mixed(self) -> bool:
        """Whether tasks of two steps are in the log: of launchers, and of several tasks a node, as
        a test has.
        """
        return self.same and self.has_launchers

    def tasks_are_ranks(self) -> bool:
        """Whether srun, or mpirun, has started the ranks themselves, as the log shows: each node
        has one task of a launcher, which has at least two ranks, so that a task of half the ranks
        or above is a rank.
        """
        if self.has_launchers or self.differ:
            return False
        nccl = self.nccl if self.size == self.ranks else {}
        known = [(nccl.get(t) or self.nodes.get(t), at) for t, at in self.tasks.items() if t]
        if any(place and at and _short(place[0]) != _short(at[0]) for place, at in known):
            return False
        return (
            self.same
            or any(place for place, _ in known)
            or 0 < self.world <= 2 * max(self.tasks, default=0)
        )

    def resolve(self, place: Place) -> Place:
        """The place with its rank and its node, where the log proves them."""
        rank, known = place.rank, place.rank_known
        if (
            rank is not None
            and known == Known.ASSUMED
            and self.has_groups
            and not 0 < self.world <= 2 * rank
        ):
            rank = None  # it may count in a group, which has at most half of the ranks
        if rank is None and len(place.tasks) == 1 and self.tasks_are_ranks():
            rank, known = place.tasks[0], Known.MAP
        elif (
            rank is None
            and place.local is not None
            and self.world == max(self.width, place.local + 1)
        ):
            rank, known = place.local, Known.MAP  # on the only node
        elif rank is None and self.root and place.local is None and not (place.node or place.tasks):
            # of a line without any number torchrun's first is meant only where the tables of all
            # nodes were read
            all_read = 0 < self.world <= len(self.hosts) * self.width
            rank, known = (self.root[1], Known.MAP) if all_read else (None, Known.NO)
        if rank is not None and self.ranks and rank >= self.ranks:
            rank, known = None, Known.NO
        place, at = (
            replace(place, rank=rank, rank_known=known),
            self.tasks.get(min(place.tasks, default=-1)),
        )
        of_task = at[0] if at and len(place.tasks) == 1 and not self._is_mixed else ""
        node = "" if place.node else of_task if rank is None else self.host(rank)
        how = Known.ASSUMED if known == Known.ASSUMED else Known.MAP
        return replace(place, node=node, node_known=how) if node else place


def _add(nodes: Map, rank: int, host: str, gpu: int | None) -> None:
    """Add the node and GPU of a rank; None where they differ from those that were read before."""
    before = nodes.setdefault(rank, (host, gpu)) if len(nodes) < MOST or rank in nodes else None
    differ = before and (
        _short(before[0]) != _short(host) or (None not in (before[1], gpu) and before[1] != gpu)
    )
    if differ:
        nodes[rank] = None


def _short(host: str) -> str:
    """The name that SLURM has for a node whose programs print its full one."""
    return host.partition(".")[0] if re.match(r"[\w-]*[A-Za-z]", host) else host


def excluded(nodes: Iterable[str]) -> str:
    """Nodes as --exclude takes them: without names that no node can have, and without addresses."""
    node = re.compile(
        r"(?!localhost$)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]{0,62}(?:\[[\d,-]{1,200}\])?", re.ASCII
    )
    return ",".join(filter(node.fullmatch, dict.fromkeys(name.partition(".")[0] for name in nodes)))
