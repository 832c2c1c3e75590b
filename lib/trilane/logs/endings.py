"""How a run ended, and the line that proves it: the scheduler's messages first, then those of the
run itself.
"""

import re
from dataclasses import replace
from enum import IntEnum
from functools import cache

from trilane.logs.places import Place, place_of
from trilane.utils.frozen import frozen
from trilane.utils.tables import printable
from trilane.utils.validation import shipped_json
from trilane.workspace.status import Status

# what launchers put before a message, one after the other: numbers, and pdsh the node
NUMBERS = (
    rb"(?:(?:\[\w{1,40} ?\d{0,9}\]:|\d{1,9}: |\[\d{1,9},\d{1,9}\]<std\w{3}>:"
    rb"|[a-z][\w.-]{0,60}\d[\w.-]*: )\s?+){0,3}"
)
# and what stands before it still: the bars of an exception group, the module of the exception
LEAD = rb"^\s*" + NUMBERS + rb"\s*(?:\|\s*)?(?:\w++\.)*+"
RETRIES = re.compile(
    rb"(?<!after )\b[Rr]etrying\b(?! failed| did)|\b[Ww]ill (?:be )?retr(?:y|ied)\b"
)
EXCEPTION = re.compile(LEAD + rb"(?=[A-Z]\w*?[a-z])\w++(?::|\s*$)")
MAX_LINE = 1 << 14  # bytes; a longer line is no message
MAX_HOSTS = 256  # of an ending
MAX_TEXT = 600  # characters
# iterations after which a message was no end: SLURM's jobs print on for 30 s; the rank that prints
# iterations may lag by one
LATE_SCHEDULER = 1000
LATE = 2


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


OF_PROGRAM = (Level.CAUSE, Level.ERROR, Level.CONSEQUENCE)
# by what started a program: it ended, even after the planned end
ENDS = (Level.SCHEDULER, Level.OUTSIDE, Level.WRAPPER)


@frozen
class Ending:
    """A line about the end of a run, and the place that it prints; `rows` read before it
    (iterations), and the nodes at fault of all such lines.
    """

    level: Level
    status: Status
    evidence: str
    rows: int
    place: Place
    hosts: tuple[str, ...]

    @property
    def blames_node(self) -> bool:
        """Whether a node is at fault, so that the next start should avoid it; of a lost link its
        own.
        """
        if self.status is Status.NETWORK:
            return self.level == Level.CAUSE
        return self.status in (Status.GPU_ERROR, Status.NODE_FAILURE)


@cache
def rules() -> list[tuple[list[bytes], re.Pattern[bytes], Level, Status]]:
    """The rules of data/endings.json, of which the first that a line matches counts: a line that
    holds one of the words and matches the pattern is of that level and status.
    """
    every = []
    for row in shipped_json("endings"):
        pattern = "|".join(row["patterns"]).encode().replace(b"<LEAD>", LEAD)
        words = [word.encode() for word in row["words"]]  # cheaper to look for than a pattern
        level = Level[row["level"].upper()]
        every.append((words, re.compile(pattern), level, Status(row["status"])))
    return every


@cache
def any_word() -> re.Pattern[bytes]:
    """A word of any rule: an ordinary line of a log has none."""
    words = {word for row in shipped_json("endings") for word in row["words"]}
    return re.compile("|".join(map(re.escape, words)).encode())


def ending(line: bytes, rows: int) -> Ending | None:
    """The ending that the line reports, None for any other line."""
    line = line[:MAX_LINE]
    if b"NCCL INFO" in line or not any_word().search(line):
        return None
    for words, pattern, level, status in rules():
        if any(word in line for word in words) and pattern.search(line):
            if level in OF_PROGRAM and RETRIES.search(line):
                return None  # the program tries again
            return reported(level, status, line, rows)
    return None


def raised(line: bytes, rows: int) -> Ending | None:
    """The exception on the first line after a traceback; its name need not end in Error."""
    if EXCEPTION.match(line):
        return reported(Level.ERROR, Status.CRASHED, line, rows)
    return None


def reported(level: Level, status: Status, line: bytes, rows: int) -> Ending:
    """The ending that `line` reports, after so many iterations."""
    if status is Status.RENDEZVOUS and level == Level.OUTSIDE and rows:
        status = Status.NETWORK  # after iterations it is the store that a node no longer reaches
    place = place_of(line)
    hosts = (place.node,) if place.node else ()
    return Ending(
        level=level, status=status, evidence=text(line), place=place, hosts=hosts, rows=rows
    )


def joined(first: Ending, later: Ending) -> Ending:
    """The first of two endings of one kind; where nodes are at fault, with those of both."""
    if first.blames_node and len(first.hosts) < MAX_HOSTS:
        return replace(first, hosts=tuple(dict.fromkeys((*first.hosts, *later.hosts))))
    return first


def superseded(end: Ending, rows: int) -> bool:
    """Whether the run continued after that, which then was no end."""
    return rows >= end.rows + (LATE_SCHEDULER if end.level == Level.SCHEDULER else LATE)


def strongest(every: list[Ending], rows: int) -> Ending | None:
    """The ending that counts: the lowest level, then the first line; a crash after Ctrl-C is the
    Ctrl-C. Of a run that ended as planned, an error before the last iteration was none, nor is one
    after the end if no program ended by it.
    """
    planned = [end.rows for end in every if end.level == Level.PLANNED]
    last_row = max(planned, default=0)
    left = []
    ends_at = 0  # how many of these stand up to the last planned end
    for end in every:
        is_outside = end.level in (Level.SCHEDULER, Level.PLANNED)
        if not superseded(end, rows) and (is_outside or end.rows >= last_row):
            left.append(end)
            if end.level == Level.PLANNED:
                ends_at = len(left)
    if ends_at and not any(end.level in ENDS or end.rows > last_row for end in left[ends_at:]):
        left = left[:ends_at]
    strongest = min(left, key=lambda end: end.level, default=None)
    if strongest and strongest.status is Status.CRASHED:
        for end in left[: left.index(strongest)]:
            if end.evidence.startswith("KeyboardInterrupt"):
                return end
    return strongest


def text(line: bytes) -> str:
    """The line as evidence: printable characters, at most MAX_TEXT."""
    return printable(line.strip()[: 8 * MAX_TEXT].decode("utf-8", "replace"))[:MAX_TEXT]
