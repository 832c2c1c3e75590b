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
NAMED = re.compile(
    (
        rb"(?:[Nn]ode|Prolog) failure on (?:node )?(NAMES)"
        rb"|(?:failed|exited on| process.{0,60}) (?:on )?node (NAMES)"
        rb"|srun: error: (?:Nodes? )?(NAMES)(?:: tasks? \d| (?:is|are) still not)"
        rb"|ON (NAMES) UNCORRECTABLE"
    ).replace(b"NAMES", NAMES)
)
PRINTED = re.compile(
    (
        rb"(?:^|[\s>:\]])((?!\d{4}-)(?=[\w.-]{0,98}[A-Za-z])NAMES):\d+:\d+ \[\d+\]"
        rb"|\bslurmstepd-(NAMES): "
        rb"|^(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\dT\S{8,30}) (NAMES) \S{1,40}: "
        rb"|^\[([a-z]NAMES):\d+\] "
        rb"|^((?!rank\d|gpu\d: |nvidia|python|ib\d|eth|cuda|step|line|pip\d)"
        rb"[a-z][a-z-]*\d[a-z\d.-]{0,60}): \S"
    ).replace(b"NAMES", NAMES)
)
# A rank of the run: torch's prefix since 2.2, a watchdog's in the group of all ranks, and what
# Megatron, mpirun and trilane write. In other words it may be a rank that this one waits for.
RANK = re.compile(
    rb"\[rank(\d{1,7})\]"
    rb"|\[(?:PG[ \w]{0,99}\(default_pg\)|PG 0|PG ID 0 PG GUID 0) Rank (\d{1,7})\]"
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
LAUNCHED = re.compile(rb"'([\w.-]{1,99})': \[(\d[\d, ]{0,9999})\]")  # by DeepSpeed, on a node
NODE = re.compile(  # that --exclude takes: not `localhost`, and no address
    r"(?!localhost$)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]{0,62}(?:\[[\d,-]{1,200}\])?", re.ASCII
)
MAX_LINE = 2000  # bytes that are searched for a node
MAX_TASKS = 512  # of `0-511`


def place_of(line: bytes) -> Place:
    """The place that a line prints, with nothing concluded."""
    rank = RANK.search(line)
    head = line[:MAX_LINE]
    named = NAMED.search(head) or PRINTED.search(head)
    node = ""
    node_known = Known.NO
    # slurmstepd names the node that prints this, which is not the one that failed
    if named and b"CANCELLED AT" not in line:
        node = named[named.lastindex or 0].decode()
        node_known = Known.LINE
    task = TASK.search(line)
    return Place(
        rank=_number(rank),
        tasks=_numbers(task[task.lastindex or 0]) if task else (),
        node=node,
        rank_known=Known.LINE if rank else Known.NO,
        node_known=node_known,
    )


def _number(match: re.Match[bytes] | None) -> int | None:
    if match:
        return int(match[match.lastindex or 0])
    return None


def _numbers(text: bytes) -> tuple[int, ...]:
    """The numbers of `0,4-7`."""
    numbers: list[int] = []
    for part in text.split(b","):
        if ends := re.findall(rb"\d+", part):
            first = int(ends[0])
            last = min(int(ends[-1]), first + MAX_TASKS)
            numbers += range(first, last + 1)
    return tuple(numbers)


@dataclass(kw_only=True)
class Places:
    """What a run's log shows of its ranks: the node of each, and whether tasks are ranks.

    `world` is the number of ranks (0: unknown), `size` that of the largest communicator. A node is
    "" where two lines differ.
    """

    world: int = 0
    size: int = 0
    # a process on each node starts its ranks, or ranks are numbered otherwise: no task is a rank
    has_launchers: bool = False
    nodes: dict[int, str] = field(default_factory=dict)  # of ranks
    nccl: dict[int, str] = field(default_factory=dict)  # of ranks of the largest communicator
    tasks: dict[int, str] = field(default_factory=dict)  # of tasks

    def see(self, place: Place, line: bytes) -> None:
        """Learn from a line about an end."""
        rank = place.rank
        if rank is not None and len(place.tasks) == 1 and place.tasks[0] != rank:
            self.has_launchers = True
        if not place.node or "[" in place.node:
            return
        # the node that ran what the line numbers
        is_own = b"process rank" in line or not NAMED.search(line[:MAX_LINE])
        if is_own or b"srun: error: " in line:
            for task in place.tasks:
                _add(self.tasks, task, place.node)
        if rank is not None and is_own:
            _add(self.nodes, rank, place.node)

    def mapped(self, line: bytes) -> None:
        """Learn from a line of NCCL, or of DeepSpeed's launcher."""
        if match := NCCL.search(line):
            size = int(match[3])
            if size > self.size:  # the largest communicator numbers the ranks of the run
                self.size = size
                self.nccl = {}
            if size == self.size:
                _add(self.nccl, int(match[2]), match[1].decode("utf-8", "replace"))
        for host, ranks in LAUNCHED.findall(line.partition(b"global_rank_mapping=")[2]):
            for rank in re.findall(rb"\d{1,7}", ranks):
                _add(self.nodes, int(rank), host.decode())

    def host(self, rank: int) -> str:
        """The node of a rank, by what the log prints of both together; "" where it does not, or
        contradicts itself.
        """
        maps = [self.nodes]
        if self.size == self.world:  # a smaller communicator numbers its own ranks
            maps.append(self.nccl)
        if self.tasks_are_ranks:
            maps.append(self.tasks)
        hosts = {_short(of_ranks[rank]): of_ranks[rank] for of_ranks in maps if rank in of_ranks}
        if len(hosts) == 1:
            return hosts.popitem()[1]
        return ""

    @property
    def tasks_are_ranks(self) -> bool:
        """Whether srun, or mpirun, has started the ranks themselves: a launcher, of which each node
        has one task, has at least two ranks, so that a task of half the ranks or above is a rank.
        """
        return not self.has_launchers and 0 < self.world <= 2 * max(self.tasks, default=0)

    def resolve(self, place: Place) -> Place:
        """The place with its rank and its node, where the log proves them."""
        rank = place.rank
        known = place.rank_known
        if rank is None and len(place.tasks) == 1 and self.tasks_are_ranks:
            rank = place.tasks[0]
            known = Known.MAP
        if rank is None or 0 < self.world <= rank:
            rank = None
            known = Known.NO
        place = replace(place, rank=rank, rank_known=known)
        if place.node:
            return place
        node = ""
        if rank is not None:
            node = self.host(rank)
        elif len(place.tasks) == 1 and len({*self.tasks.values()}) == len(self.tasks):
            # many tasks a node may be of another step, such as a test's
            node = self.tasks.get(place.tasks[0], "")
        return replace(place, node=node, node_known=Known.MAP if node else Known.NO)


def _add(nodes: dict[int, str], number: int, host: str) -> None:
    """Add the node of a rank or task; "" where it differs from the one that was read before."""
    if number in nodes and _short(nodes[number]) != _short(host):
        nodes[number] = ""
    elif len(nodes) < MOST:
        nodes.setdefault(number, host)


def _short(host: str) -> str:
    """The name that SLURM has for a node whose programs print its full one."""
    if re.match(r"[\w-]*[A-Za-z]", host):
        return host.partition(".")[0]
    return host


def excluded(nodes: Iterable[str]) -> str:
    """Nodes as --exclude takes them: without names that no node can have, and without addresses."""
    names = dict.fromkeys(name.partition(".")[0] for name in nodes)
    return ",".join(filter(NODE.fullmatch, names))
