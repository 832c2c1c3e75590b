"""How a run ended, and the line that proves it: the scheduler's messages first, then those of the run itself."""

import re
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache

from trilane.utils.tables import printable
from trilane.utils.validation import shipped_json
from trilane.workspace.status import Status

# what stands before a message: the rank, the bars of an exception group, the module of the exception
LEAD = rb"^\s*(?:(?:\[\w{1,40} ?\d{0,9}\]:|\d{1,9}: )\s*)?(?:\|\s*)?(?:\w++\.)*+"
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


class Level(IntEnum):
    """A lower level is stronger, whenever it is printed; within a level the first line counts."""

    SCHEDULER = 0  # its reason, or that of the kernel on its behalf
    CAUSE = 1  # outside the program, of which errors of other ranks are consequences
    ERROR = 2  # of one rank
    CONSEQUENCE = 3  # that a rank also has when another one is gone
    OUTSIDE = 4  # ended from outside
    WRAPPER = 5  # a launcher that reports the failure of what it started
    PLANNED = 6  # the planned end
    LAUNCHER = 7  # a launcher that ends its workers, for any reason


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A line about the end of a run: `rank` that printed it (None if unnamed), a number `among` the ranks of the run,
    srun's tasks or the ranks of a node; `rows` read before it (iterations), the nodes that it names."""

    level: Level
    status: Status
    evidence: str
    rows: int
    rank: int | None = None
    among: str = "run"
    hosts: tuple[str, ...] = ()
    in_traceback: bool = False

    @property
    def ends_program(self) -> bool:
        """Whether it proves that a program ended, even after the planned end: a traceback, or a line of what started
        the program."""
        return self.in_traceback or self.level in (Level.SCHEDULER, Level.OUTSIDE, Level.WRAPPER)

    @property
    def blames_node(self) -> bool:
        """Whether a node is at fault, so that the next start should avoid it; of a lost link its own."""
        return self.status in (Status.GPU_ERROR, Status.NODE_FAILURE) or (
            self.status is Status.NETWORK and self.level == Level.CAUSE
        )


@cache
def rules() -> list[tuple[list[bytes], Level, Status, re.Pattern[bytes]]]:
    """The rules of data/endings.json, of which the first that a line matches counts; the line must hold one of the
    words, which are cheaper to look for than patterns."""
    patterns = [("|".join(row["patterns"]).encode().replace(b"<LEAD>", LEAD), row) for row in shipped_json("endings")]
    return [
        (row["words"].encode().split(), Level[row["level"].upper()], Status(row["status"]), re.compile(pattern))
        for pattern, row in patterns
    ]


def ending(line: bytes, rows: int) -> Ending | None:
    """The ending that the line reports, None for any other line."""
    line = line[: 1 << 14]  # a longer one is no message
    for words, level, status, pattern in rules() if b"NCCL INFO" not in line else ():
        if any(word in line for word in words) and (found := pattern.search(line)):
            undone = level in (Level.CAUSE, Level.ERROR, Level.CONSEQUENCE) and _continues(line, found)
            return None if undone else _ending(level, status, line, rows)
    return None


def _continues(line: bytes, found: re.Match[bytes]) -> bool:
    """Whether the program continues after that line: it tries again, or quotes a text without reporting an error."""
    quotes, reports = (
        re.compile(rb'"[^"]*+"'),
        rb"(?i)error|fail|exce|fatal|abort|died|crash|reason|message|cause|warn|critical|\{",
    )
    quoted = any(q.start() < found.start() and found.end() < q.end() for q in quotes.finditer(line))
    retried = re.search(rb"(?<!after )\b[Rr]etrying\b(?! failed| did)|\b[Ww]ill (?:be )?retr(?:y|ied)\b", line)
    return bool(retried) or (quoted and not re.search(reports, quotes.sub(b"", line)))


def raised(line: bytes, rows: int) -> Ending | None:
    """The exception on the first line after a traceback; its name need not end in Error."""
    return crashed(line, rows) if re.match(LEAD + rb"(?=[A-Z]\w*?[a-z])\w++(?::|\s*$)", line) else None


def crashed(line: bytes, rows: int) -> Ending:
    """An error of the program, reported by `line`."""
    return _ending(Level.ERROR, Status.CRASHED, line, rows)


def _ending(level: Level, status: Status, line: bytes, rows: int) -> Ending:
    rank, among = _rank(line)
    if status is Status.RENDEZVOUS and level == Level.OUTSIDE and rows:
        status = Status.NETWORK  # after iterations it is the store that a node no longer reaches
    return Ending(
        level=level,
        status=status,
        evidence=text(line),
        rank=rank,
        among=among,
        rows=rows,
        hosts=_hosts(line),
    )


def _rank(line: bytes) -> tuple[int | None, str]:
    """The rank that the line names, and among what that number counts."""
    # A rank of the run goes before a task of srun, or its --label, and these before torchrun's number on a node.
    run, task, node = (
        rb"\[rank(\d{1,9})\]|\b[Rr]ank ?(\d{1,9})\b",
        rb"^\s*(\d{1,6}): |\btasks? (\d{1,9})\b",
        rb"\[default(\d{1,9})\]:",
    )
    for among, pattern in (("run", run), ("task", task), ("node", node)):
        if found := re.search(pattern, line):
            return int(next(filter(None, found.groups()))), among
    return None, "run"


def caveat(status: Status, evidence: str) -> str:
    """What the evidence leaves open; "" where nothing."""
    if status is Status.KILLED:
        return "this log does not show what killed it: possibly by its node's OOM killer (sacct, dmesg)"
    if status is Status.CRASHED and re.search(
        r"CUDA error: (?:an illegal|misaligned|unspecified launch|unknown)|Memory access fault by GPU", evidence
    ):
        return "the program or the card may be the reason: this log does not show which"
    return ""


def joined(first: Ending, later: Ending) -> Ending:
    """The first of two endings of one kind; where nodes are at fault, with those of both."""
    first = replace(first, in_traceback=first.in_traceback or later.in_traceback)
    if not first.hosts and (first.level, first.status) == (Level.SCHEDULER, Status.HOST_MEMORY):
        return replace(first, hosts=later.hosts)  # of a step that ran out of memory slurmstepd names no node, but srun
    if not first.blames_node or len(first.hosts) >= 256:
        return first
    return replace(first, hosts=tuple(dict.fromkeys((*first.hosts, *later.hosts))))


def superseded(found: Ending, rows: int) -> bool:
    """Whether the run continued after that, which then was no end: after a message before the first iteration by that
    iteration, after a later one by the second after it, because the rank that prints may lag; after the scheduler's,
    whose jobs print on for 30 s, by 1000 iterations."""
    late = 1000 if found.level == Level.SCHEDULER else 2 if found.rows else 1
    return rows >= found.rows + late


def strongest(found: list[Ending], rows: int) -> Ending | None:
    """The ending that counts: the lowest level, then the first line; a crash after Ctrl-C is the Ctrl-C. Of a run that
    ended as planned, an error before the last iteration was none, nor is one after the end if no program ended by it.
    """
    planned = max((e.rows for e in found if e.level == Level.PLANNED), default=0)
    left = [
        e
        for e in found
        if not superseded(e, rows) and (e.level in (Level.SCHEDULER, Level.PLANNED) or e.rows >= planned)
    ]
    last = max((place for place, e in enumerate(left) if e.level == Level.PLANNED), default=len(left))
    if not any(e.ends_program or e.rows > planned for e in left[last + 1 :]):
        left = left[: last + 1]
    end = min(left, key=lambda e: e.level, default=None)
    if end and end.status is Status.CRASHED:
        return next((e for e in left[: left.index(end)] if e.evidence.startswith("KeyboardInterrupt")), end)
    return end


def text(line: bytes, most: int = 600) -> str:
    """The line as evidence: printable characters, at most `most`."""
    plain = line.strip()[: 8 * most].decode("utf-8", "replace")
    if not plain.isprintable():
        plain = "".join(c for c in plain if c.isprintable() or c == "\t")
    return printable(plain)[:most]


def planned_end(line: bytes, rows: int) -> Ending:
    """The planned end, reported by `line`."""
    return Ending(level=Level.PLANNED, status=Status.COMPLETED, evidence=text(line), rows=rows)


def _hosts(line: bytes) -> tuple[str, ...]:
    """The node, or SLURM's list of nodes, that the line names; () where it names none."""
    # slurmstepd names the node that prints this, which is not the one that failed
    found = None if b"CANCELLED AT" in line else HOST.search(line[:2000])
    return (found[found.lastindex or 0].decode(),) if found else ()


def where(end: Ending | None, named: str, exits: list[Ending]) -> tuple[tuple[str, ...], str]:
    """Nodes of an ending, of which the rank ran on the node `named` (""); and those at fault, as --exclude takes them:
    without names that no node can have, and without addresses."""
    if end is None:
        return (), ""
    host = named or (exited_on(exits, end.rank) if end.blames_node else "")
    hosts = end.hosts or (host,) * bool(host)
    names = dict.fromkeys(name.partition(".")[0] for name in hosts)
    node = re.compile(r"(?!localhost$)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]{0,62}(?:\[[\d,-]{1,200}\])?", re.ASCII)
    return hosts, ",".join(filter(node.fullmatch, names)) if end.blames_node else ""


def exited_on(found: list[Ending], rank: int | None) -> str:
    """The node of the task that srun reports as failed: of that rank, or if the rank of either is unknown the only node
    that has such a task; "" where several could be meant."""
    nodes = {e.hosts[0] for e in found if None in (rank, e.rank) or e.rank == rank}
    return nodes.pop() if len(nodes) == 1 and "[" not in "".join(nodes) else ""
