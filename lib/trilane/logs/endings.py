"""How a run ended, and the line that proves it: the scheduler's messages first, then those of the
run itself.
"""

import re
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache

from trilane.logs.places import place_of
from trilane.utils.tables import printable
from trilane.utils.validation import shipped_json
from trilane.workspace.place import Place
from trilane.workspace.status import Status

# what launchers put before a message, one after the other: numbers, and pdsh the node
NUMBERS = rb"(?:(?:\[\w{1,40} ?\d{0,9}\]:|\d{1,9}: |\[\d{1,9},\d{1,9}\]<std\w{3}>:|[a-z][\w.-]{0,60}\d[\w.-]*: )\s?){0,3}"
# and what stands before it still: the bars of an exception group, the module of the exception
LEAD = rb"^\s*" + NUMBERS + rb"\s*(?:\|\s*)?(?:\w++\.)*+"


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
    """A line about the end of a run, and the place that it prints; `rows` read before it
    (iterations), and the nodes at fault of all such lines.
    """

    level: Level
    status: Status
    evidence: str
    rows: int
    place: Place = field(default_factory=Place)
    hosts: tuple[str, ...] = ()
    in_traceback: bool = False

    @property
    def ends_program(self) -> bool:
        """Whether it proves that a program ended, even after the planned end: a traceback, or a
        line of what started the program.
        """
        return self.in_traceback or self.level in (Level.SCHEDULER, Level.OUTSIDE, Level.WRAPPER)

    @property
    def blames_node(self) -> bool:
        """Whether a node is at fault, so that the next start should avoid it; of a lost link its
        own.
        """
        return self.status in (Status.GPU_ERROR, Status.NODE_FAILURE) or (
            self.status is Status.NETWORK and self.level == Level.CAUSE
        )


@cache
def rules() -> list[tuple[list[bytes], Level, Status, re.Pattern[bytes]]]:
    """The rules of data/endings.json, of which the first that a line matches counts; the line must
    hold one of the words, which are cheaper to look for than patterns.
    """
    patterns = [
        ("|".join(row["patterns"]).encode().replace(b"<LEAD>", LEAD), row)
        for row in shipped_json("endings")
    ]
    return [
        (
            row["words"].encode().split(),
            Level[row["level"].upper()],
            Status(row["status"]),
            re.compile(pattern),
        )
        for pattern, row in patterns
    ]


def ending(line: bytes, rows: int) -> Ending | None:
    """The ending that the line reports, None for any other line."""
    line = line[: 1 << 14]  # a longer one is no message
    for words, level, status, pattern in rules() if b"NCCL INFO" not in line else ():
        if any(word in line for word in words) and (found := pattern.search(line)):
            undone = level in (Level.CAUSE, Level.ERROR, Level.CONSEQUENCE) and _continues(
                line, found
            )
            return None if undone else reported(level, status, line, rows)
    return None


def _continues(line: bytes, found: re.Match[bytes]) -> bool:
    """Whether the program continues after that line: it tries again, or quotes a text without
    reporting an error.
    """
    quotes, reports = (
        re.compile(rb'"[^"]*+"'),
        rb"(?i)error|fail|exce|fatal|abort|died|crash|reason|message|cause|warn|critical|\{",
    )
    quoted = any(q.start() < found.start() and found.end() < q.end() for q in quotes.finditer(line))
    retried = re.search(
        rb"(?<!after )\b[Rr]etrying\b(?! failed| did)|\b[Ww]ill (?:be )?retr(?:y|ied)\b", line
    )
    return bool(retried) or (quoted and not re.search(reports, quotes.sub(b"", line)))


def raised(line: bytes, rows: int) -> Ending | None:
    """The exception on the first line after a traceback; its name need not end in Error."""
    is_name = re.match(LEAD + rb"(?=[A-Z]\w*?[a-z])\w++(?::|\s*$)", line)
    return reported(Level.ERROR, Status.CRASHED, line, rows) if is_name else None


def reported(level: Level, status: Status, line: bytes, rows: int) -> Ending:
    """The ending that `line` reports, after so many iterations."""
    if status is Status.RENDEZVOUS and level == Level.OUTSIDE and rows:
        status = Status.NETWORK  # after iterations it is the store that a node no longer reaches
    place = place_of(line)
    return Ending(
        level=level,
        status=status,
        evidence=text(line),
        place=place,
        rows=rows,
        hosts=(place.node,) * bool(place.node),
    )


def caveat(status: Status, evidence: str, rank: int | None, hosts: tuple[str, ...]) -> str:
    """What the evidence, a line of that rank and these nodes, leaves open; "" where nothing."""
    if status is Status.KILLED:
        return "this log does not show what killed it: possibly by its node's OOM killer (sacct, dmesg)"
    if status is Status.GPU_ERROR and not hosts:
        return f"the fault is on {'a rank' if rank is None else f'rank {rank}'}; its node is not known from this log"
    if status is Status.CRASHED and re.search(
        r"CUDA error: (?:an illegal|misaligned|unspecified launch|unknown)|Memory access fault by GPU",
        evidence,
    ):
        return "the program or the card may be the reason: this log does not show which"
    return ""


def joined(first: Ending, later: Ending) -> Ending:
    """The first of two endings of one kind; where nodes are at fault, with those of both."""
    first = replace(first, in_traceback=first.in_traceback or later.in_traceback)
    if not first.hosts and (first.level, first.status) == (Level.SCHEDULER, Status.HOST_MEMORY):
        return replace(
            first, hosts=later.hosts
        )  # of a step that ran out of memory slurmstepd names no node, but srun
    if not first.blames_node or len(first.hosts) >= 256:
        return first
    return replace(first, hosts=tuple(dict.fromkeys((*first.hosts, *later.hosts))))


def superseded(found: Ending, rows: int) -> bool:
    """Whether the run continued after that, which then was no end: after a message before the first
    iteration by that iteration, after a later one by the second after it, because the rank that
    prints may lag; after the scheduler's, whose jobs print on for 30 s, by 1000 iterations.
    """
    late = 1000 if found.level == Level.SCHEDULER else 2 if found.rows else 1
    return rows >= found.rows + late


def strongest(found: list[Ending], rows: int) -> Ending | None:
    """The ending that counts: the lowest level, then the first line; a crash after Ctrl-C is the
    Ctrl-C. Of a run that ended as planned, an error before the last iteration was none, nor is one
    after the end if no program ended by it.
    """
    planned = max((e.rows for e in found if e.level == Level.PLANNED), default=0)
    left = [
        e
        for e in found
        if not superseded(e, rows)
        and (e.level in (Level.SCHEDULER, Level.PLANNED) or e.rows >= planned)
    ]
    last = max(
        (place for place, e in enumerate(left) if e.level == Level.PLANNED), default=len(left)
    )
    if not any(e.ends_program or e.rows > planned for e in left[last + 1 :]):
        left = left[: last + 1]
    end = min(left, key=lambda e: e.level, default=None)
    if end and end.status is Status.CRASHED:
        return next(
            (e for e in left[: left.index(end)] if e.evidence.startswith("KeyboardInterrupt")), end
        )
    return end


def text(line: bytes, most: int = 600) -> str:
    """The line as evidence: printable characters, at most `most`."""
    plain = line.strip()[: 8 * most].decode("utf-8", "replace")
    if not plain.isprintable():
        plain = "".join(c for c in plain if c.isprintable() or c == "\t")
    return printable(plain)[:most]
