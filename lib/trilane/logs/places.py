"""Places: on which rank, task and node something happened, by what a line prints and a map
that the log holds.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    rb"|(?:^|: )[Rr]ank (\d{1,7}): "
    rb"|process rank (\d{1,7}) with PID "
)
TASK = re.compile(
    rb"^\s*(\d{1,6}): "  # srun --label
    rb"|\[\d{1,6},(\d{1,7})\]<std\w{3}>"  # mpirun --tag-output
    rb"|\bsrun: error: [^\s:]{1,300}: tasks? ([\d,-]{1,400}): "
    rb"|process rank (\d{1,7}) with PID "  # mpirun, whose process may start the ranks of a node
)
NCCL = re.compile(
    rb"([A-Za-z0-9][\w.-]{0,98}):\d+:\d+ \[\d+\] NCCL INFO .{0,200}"
    rb"\brank (\d{1,7}) nranks (\d{1,7}) (?:cudaDev (\d{1,3}))?"
)
LAUNCHED = re.compile(rb"'([\w.-]{1,99})': \[(\d[\d, ]{0,9999})\]")  # by DeepSpeed, on a node
NODE = re.compile(  # that --exclude takes: not `localhost`, and no address
    r"(?!localhost$)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]{0,62}(?:\[[\d,-]{1,200}\])?", re.ASCII
)
# torch's monitoredBarrier: not the rank that prints this, rank 0
BARRIER = re.compile(rb"[Rr]anks? (\d[\d, ]{0,2000}) failed to pass monitoredBarrier")
MAX_LINE = 2000  # bytes that are searched for a node
MAX_TASKS = 512  # of `0-511`


class Place(NamedTuple):
    """A rank of the run, tasks of srun (or a process of mpirun), and the node, or SLURM's list of
    several; None, () and "" where unknown.
    """

    rank: int | None = None
    tasks: tuple[int, ...] = ()
    node: str = ""


def place_of(line: bytes) -> Place:
    """The place that a line prints, with nothing concluded."""
    if late := BARRIER.search(line):
        ranks = numbers_of(late[1])
        return Place(rank=ranks[0] if len(ranks) == 1 else None)
    rank = RANK.search(line)
    head = line[:MAX_LINE]
    named = NAMED.search(head) or PRINTED.search(head)
    node = ""
    # slurmstepd names the node that prints this, which is not the one that failed
    if named and b"CANCELLED AT" not in line:
        node = named[named.lastindex or 0].decode()
    task = TASK.search(line)
    return Place(
        rank=int(rank[rank.lastindex or 0]) if rank else None,
        tasks=numbers_of(task[task.lastindex or 0]) if task else (),
        node=node,
    )


def numbers_of(text: bytes) -> tuple[int, ...]:
    """The numbers of `0,4-7`."""
    numbers: list[int] = []
    for first, last in re.findall(rb"(\d+)(?:-(\d+))?", text):
        end = min(int(last or first), int(first) + MAX_TASKS)
        numbers += range(int(first), end + 1)
    return tuple(numbers)


@dataclass(kw_only=True)
class Places:
    """What a run's log shows of its ranks: the node of each, and whether tasks are ranks.

    `world` is the number of ranks (0: unknown). A node is "" where two lines differ.
    """

    world: int = 0
    # a process on each node starts its ranks, or ranks are numbered otherwise: no task is a rank
    has_launchers: bool = False
    # of ranks by the size of the communicator that numbers them, 0 for that of the run
    nodes: dict[tuple[int, int], str] = field(default_factory=dict)
    tasks: dict[int, str] = field(default_factory=dict)  # of tasks

    def see(self, place: Place, line: bytes) -> None:
        """Learn from a line about an end."""
        rank = place.rank
        if rank is not None and len(place.tasks) == 1 and place.tasks[0] != rank:
            self.has_launchers = True
        if not place.node or "[" in place.node:
            return
        # the node that ran what the line numbers
        is_own = not NAMED.search(line[:MAX_LINE])
        if is_own or b"srun: error: " in line or b"process rank" in line:
            for task in place.tasks:
                _add(self.tasks, task, place.node)
        if rank is not None and is_own:
            _add(self.nodes, (0, rank), place.node)

    def mapped(self, line: bytes) -> None:
        """Learn from a line of NCCL, or of DeepSpeed's launcher."""
        if match := NCCL.search(line):
            host = match[1].decode("utf-8", "replace")
            _add(self.nodes, (int(match[3]), int(match[2])), host)
        for host, ranks in LAUNCHED.findall(line.partition(b"global_rank_mapping=")[2]):
            for rank in re.findall(rb"\d{1,7}", ranks):
                _add(self.nodes, (0, int(rank)), host.decode())

    def host(self, rank: int) -> str:
        """The node of a rank, by what the log prints of both together; "" where it does not, or
        contradicts itself.
        """
        nodes = [self.nodes.get((0, rank)), self.nodes.get((self.world, rank))]
        if self.tasks_are_ranks:
            nodes.append(self.tasks.get(rank))
        hosts = {_short(node): node for node in nodes if node is not None}
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
        rank, tasks, node = place
        if rank is None and len(tasks) == 1 and self.tasks_are_ranks:
            rank = tasks[0]
        if rank is not None and 0 < self.world <= rank:
            rank = None
        if not node and rank is not None:
            node = self.host(rank)
        elif not node and len(tasks) == 1 and len({*self.tasks.values()}) == len(self.tasks):
            # many tasks a node may be of another step, such as a test's
            node = self.tasks.get(tasks[0], "")
        return Place(rank, tasks, node)


def _add(nodes: dict[Any, str], number: Any, host: str) -> None:
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
    return ",".join(filter(NODE.fullmatch, dict.fromkeys(map(_short, nodes))))
