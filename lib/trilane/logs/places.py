"""Places: the rank, task and node that a line is about, and those that other lines of the run prove.

Five numbers look alike. A *rank* counts in the run: `[rank12]`, mpirun's `[1,12]<stderr>`. A *task* counts what
srun has started, `srun: error: gpu3: task 3` and the `3: ` of its --label: ranks, or one torchrun a node. torchrun's
`[default0]` counts on a node, and `[PG 1 Rank 3]` in a process group.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

NAMES = rb"[A-Za-z0-9][\w.-]{0,98}(?:\[[\d,-]{1,200}\])?"  # of nodes, as SLURM lists them
# The node that a line is about, or that printed it; a prefix needs a digit, as any word may stand before a colon.
HOST = re.compile(
    rb"(?:[Nn]ode|Prolog) failure on (?:node )?(NAMES)|(?:failed|exited on| process.{0,60}) (?:on )?node (NAMES)"
    rb"|srun: error: (?:Nodes? )?(NAMES)(?:: tasks? \d| (?:is|are) still not)|ON (NAMES) UNCORRECTABLE"
    rb"|(?:^|[\s>:\]])((?!\d{4}-)(?=[\w.-]{0,98}[A-Za-z])NAMES):\d+:\d+ \[\d+\]|\bslurmstepd-(NAMES): "
    rb"|^(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\dT\S{8,30}) (NAMES) \S{1,40}: |^\[([a-z]NAMES):\d+\] "
    rb"|^((?!rank\d|gpu\d: |nvidia|python|ib\d|eth|cuda|step|line|pip\d)[a-z][a-z-]*\d[a-z\d.-]{0,60}): \S".replace(
        b"NAMES", NAMES
    )
)
SRUN = re.compile(rb"srun: error: (NAMES): tasks? ([\d,-]{1,200})".replace(b"NAMES", NAMES))
RANK = re.compile(
    rb"\[rank(\d{1,7})\]|\[\d{1,6},(\d{1,7})\]<std|process rank (\d{1,7}) with PID|rank\s{0,20}: (\d{1,7}) \(local_rank"
    rb"|default_pg\) Rank (\d{1,7})\]|\[PG (?:ID )?0 (?:PG GUID 0 ?)?Rank (\d{1,7})\]"
)
TASK = re.compile(rb"^\s*(\d{1,6}): ")
LOCAL = re.compile(rb"\[default(\d{1,6})\]:|\(local_rank: (\d{1,6})\)")
GROUP = re.compile(rb"\[PG (?:ID )?\d.{0,200}Rank \d")  # counts in a process group
# of a line without another number; later in a line it may be any rank, and `rank12: ` is a host of that name
WORD = re.compile(rb"\[[Rr]ank ?(\d{1,7})\]|^\W{0,3}[Rr]ank (\d{1,7})\b")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where something happened, None or "" for what is not known; `node` may be SLURM's list of several.

    `proof` is how the node is known: "named" by the line, or "mapped" by others that print two of these together.
    """

    rank: int | None = None
    task: int | None = None
    local: int | None = None
    node: str = ""
    proof: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The node, as a tuple."""
        return (self.node,) * bool(self.node)


def place(line: bytes) -> Place:
    """What the line itself names."""
    line = line[:2000]
    # slurmstepd names the node that prints this, which is not the one that failed
    host = None if b"CANCELLED AT" in line else HOST.search(line)
    node = host[host.lastindex or 0].decode() if host else ""
    rank, local = _number(RANK, line), _number(LOCAL, line)
    task = int(re.split(rb"\D", of[2])[0]) if (of := SRUN.search(line)) else _number(TASK, line)
    if (rank, task, local) == (None, None, None) and not GROUP.search(line):
        rank = _number(WORD, line)
    return Place(rank=rank, task=task, local=local, node=node, proof="named" if node else "")


def _number(pattern: re.Pattern[bytes], line: bytes) -> int | None:
    found = pattern.search(line)
    return int(found[found.lastindex or 0]) if found else None


@dataclass(kw_only=True)
class Places:
    """What the lines of a run print together: nodes of ranks and of tasks, ranks of tasks and of a node's numbers."""

    nodes: dict[int, str] = field(default_factory=dict)  # of ranks
    of_tasks: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)  # of tasks
    locals: dict[tuple[str, int], int] = field(default_factory=dict)
    has_launchers: bool = False  # a process on each node starts its ranks: a task of srun is none of these
    world: int = 0  # 0: unknown
    root: Place | None = None  # of torchrun's tables of failures, the first to fail
    root_time: str = ""

    def learn(self, line: bytes) -> None:
        """Keep what the line names together."""
        if found := SRUN.search(line):
            for first, last in re.findall(rb"(\d+)(?:-(\d+))?", found[2])[:64]:
                for task in range(int(first), min(int(last or first), int(first) + 4096) + 1):
                    self.add(Place(task=task, node=found[1].decode()))
        else:
            self.add(place(line))

    def add(self, of: Place) -> None:
        """Keep the node of its rank and task, and the rank of its task and of its number on the node."""
        node = "" if "[" in of.node else of.node  # a list says not which of them
        if of.rank is not None and of.task is not None:
            self.ranks[of.task] = of.rank
        if node and of.rank is not None:
            self.nodes[of.rank] = node
        if node and of.task is not None:
            self.of_tasks[of.task] = node
        if node and of.rank is not None and of.local is not None:
            self.locals[node, of.local] = of.rank

    @property
    def tasks_are_ranks(self) -> bool | None:
        """Whether srun started each rank as a task of its own; None where nothing shows it."""
        if self.has_launchers or any(task != rank for task, rank in self.ranks.items()):
            return False
        several = len({*self.of_tasks.values()}) < len(self.of_tasks)  # on one node
        many = (
            self.world and max(self.of_tasks, default=-1) >= self.world // 2
        )  # torchrun has nodes of two GPUs and more
        return True if several or many or any(self.ranks) else None

    def known(self, of: Place) -> Place:
        """The place with what is proved of it; without a rank that no run of this size has."""
        rank = of.rank
        if rank is None and of.task is not None:
            rank = of.task if self.tasks_are_ranks else self.ranks.get(of.task)
        if rank is None and of.local is not None:
            rank = self.locals.get((of.node, of.local)) if of.node else of.local if self._is_one_node else None
        if rank is not None and self.world and rank >= self.world:
            rank = None
        if of.node:
            return replace(of, rank=rank)
        task = of.task if of.task is not None else self._task_of(rank)
        node = self.of_tasks.get(-1 if task is None else task, "") or self.nodes.get(-1 if rank is None else rank, "")
        return replace(of, rank=rank, node=node, proof="mapped" if node else "")

    def _task_of(self, rank: int | None) -> int | None:
        same = rank if self.tasks_are_ranks else None
        return next((task for task, other in self.ranks.items() if other == rank), same)

    @property
    def _is_one_node(self) -> bool:
        # a node has up to 8 GPUs
        return 0 < self.world <= 8 and len({*self.nodes.values(), *self.of_tasks.values()}) <= 1


def excludable(nodes: Iterable[str]) -> str:
    """Nodes as --exclude takes them: without names that no node can have, and without addresses."""
    names = dict.fromkeys(name.partition(".")[0] for name in nodes)
    node = re.compile(r"(?!localhost$)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]{0,62}(?:\[[\d,-]{1,200}\])?", re.ASCII)
    return ",".join(filter(node.fullmatch, names))
