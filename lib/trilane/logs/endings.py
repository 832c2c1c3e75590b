"""How a run ended, and the line that proves it: the scheduler's word first, then the text of the run itself."""

import re
from dataclasses import dataclass

from trilane.workspace.status import Status

SPEAKER = rb"(?:\[\w+ ?\d*\]:|\d+: )"  # in front of what a rank says; a group of exceptions has bars in front
LEAD = rb"^\s*(?:" + SPEAKER + rb"\s*)?(?:\|\s*)?(?:\w+\.)*"
EXCEPTION = LEAD + rb"\w*(?:Error|Exception)(?:Group)?(?::|\s*$)"
NO_MEMORY = LEAD + rb"_?(?:Array)?MemoryError(?::|\s*$)"
TRACEBACK = re.compile(rb"Traceback \(most recent call last\):\s*$")
FRAME = re.compile(rb"^(?:" + SPEAKER + rb"(?:\s\s|\s*$)|\s|$)")  # what a traceback consists of is indented
RAISED = re.compile(LEAD + rb"[A-Z]\w*[a-z]\w*(?::|\s*$)")  # right behind a traceback any such name is an exception

# (level, status, pattern): a lower level is stronger; within a level the first line counts.
#   0 the scheduler's reason         1 no memory on a GPU: what the other ranks say then only follows
#   2 what a rank said of itself     3 ended from outside, or only known by an exit code
#   4 the end as planned             5 a launcher that ends its workers, for whatever reason
# Each pattern comes with words of which one must stand in the line: to look for words is cheap, for patterns it is not.
PATTERNS = [
    (0, Status.TIME_LIMIT, b"LIMIT walltime", rb"DUE TO TIME ?LIMIT|TERM_RUNLIMIT|walltime \d+ exceeded limit"),
    (0, Status.NODE_FAILURE, b"FAIL failure", rb"DUE TO NODE FAILURE|[Nn]ode failure on|NODE_FAIL"),
    (0, Status.OOM, b"kill Out OUT_OF", rb"[1-9]\d* oom[-_]kill event|task[s ].*: Out Of Memory|OUT_OF_MEMORY"),
    (0, Status.OOM, b"MEMORY memory", rb"DUE TO OUT OF MEMORY|Exceeded (?:job|step) memory limit|cgroup out of memory"),
    (
        1,
        Status.OOM,
        b"memory OutOf",
        rb"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA (?:driver )?error: out of memory",
    ),
    (1, Status.OOM, b"failure", rb"Cuda failure (?:\d+ )?'out of memory'"),
    (1, Status.OOM, b"allocate ALLOC", rb"can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED"),
    (1, Status.OOM, b"memory", rb"cuda runtime error \(2\)"),
    (1, Status.OOM, b"Error", NO_MEMORY),
    (2, Status.HANG, b"atchdog collective", rb"[Ww]atchdog caught collective|collective operation timeout"),
    (2, Status.HANG, b"atchdog collective", rb"watchdog got stuck for \d|due to a collective timeout"),
    (2, Status.HANG, b"imed timeout", rb"failed or timed out|Wait timeout|wait\(\) timed out|watchdog.{0,80}timeout"),
    (2, Status.HANG, b"imed", rb"Heartbeat monitor timed out"),
    (2, Status.HANG, b"imed Timeout", rb"[Tt]imed out (?:waiting(?! for job)|after|initializing)|Socket Timeout"),
    (2, Status.NCCL_ERROR, b"NCCL nccl", rb"NCCL error|nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)\w*"),
    (
        2,
        Status.NCCL_ERROR,
        b"unhandled aborted Dist",
        rb"unhandled (?:system|cuda) error|NCCL .* aborted|DistBackendError",
    ),
    (
        2,
        Status.NAN_LOSS,
        b"NaN nan",
        rb"found NaN in|Unexpected result nan|[Ll]oss is (?:nan|NaN)|NaN detected in loss",
    ),
    (3, Status.CRASHED, b"Error", rb"ChildFailedError|CalledProcessError"),
    (3, Status.CRASHED, b"FAILURE", rb"DUE TO TASK FAILURE"),
    (3, Status.NODE_FAILURE, b"missing", rb"srun: error: .*missing step on node"),
    (3, Status.CANCELLED, b"CANCELLED PREEMPT", rb"CANCELLED AT|DUE TO PREEMPTION"),
    (3, Status.CANCELLED, b"Interrupt ignal", rb"^KeyboardInterrupt|SignalException|death signal"),
    (2, Status.CRASHED, b"Error Exception", EXCEPTION),
    (
        2,
        Status.CRASHED,
        b"fault Fatal terminate Bus",
        rb"Segmentation fault|Fatal Python|terminate called|Bus error \(",
    ),
    (3, Status.CRASHED, b"srun", rb"srun: error: .*(?:[Ee]xited with exit code|Killed|Aborted|Bus error)"),
    (3, Status.CRASHED, b"exitcode", rb"failed \(exitcode: -?\d"),
    (3, Status.CRASHED, b"exits", rb"exits with return code = -?[1-9]"),
    (3, Status.CRASHED, b"pdsh@", rb"pdsh@.*: ssh exited with exit code [1-9]"),
    (4, Status.STOPPED, b"trilane", rb"trilane: stopped at iteration \d+ by "),
    (
        4,
        Status.COMPLETED,
        b"raining exiting",
        rb"\[after training is done\]|exiting program (?:at|after)|Training completed",
    ),
    (5, Status.CRASHED, b"Killing closing", rb"(?:^|_handler\] )Killing subprocess|Sending process \d+ closing signal"),
    (5, Status.CRASHED, b"srun", rb"srun: error: .*: Terminated"),
]

WORDS = sorted({word for _, _, words, _ in PATTERNS for word in words.split()})
ANY = re.compile(b"|".join(WORDS))
COMPILED = [(l, s, frozenset(words.split()), re.compile(pattern)) for l, s, words, pattern in PATTERNS]

# a word that ANY finds may hide another that it holds, or that goes on after it
HELD = {word: {other for other in WORDS if other in word or word in other} for word in WORDS}
RANK = re.compile(rb"\[(?:default|rank|Rank )(\d+)\]|\b[Rr]ank ?(\d+)\b|^\s*(\d{1,6}): |\btasks? (\d+)\b")
ROOT = re.compile(rb"rank\s+: (\d+) \(local_rank: \d+\)")
ASKED = re.compile(rb"(?:[Tt]ried to|Unable to) allocate (\d+\.?\d*) (?:([KMGTP])i?B|bytes)")
UNITS = {b"": 1, b"K": 2**10, b"M": 2**20, b"G": 2**30, b"T": 2**40, b"P": 2**50}
LONGEST = 600  # characters of evidence


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A line that speaks of the end. `rank` is who said it, None where the line names nobody; `asked_bytes` NaN
    unless memory was asked for; `rows` is how many iterations had been read before."""

    level: int
    status: Status
    evidence: str
    rank: int | None
    asked_bytes: float
    rows: int


def ending(line: bytes, rows: int) -> Ending | None:
    """What the line says about the end of a run; None for the rest."""
    held = {word for found in set(ANY.findall(line)) for word in HELD[found]}
    if not held:
        return None
    for level, status, words, pattern in COMPILED:
        if words & held and pattern.search(line):
            return _said(level, status, line, rows)
    return None


def raised(line: bytes, rows: int) -> Ending | None:
    """What the first line behind a traceback says: an exception, also one whose name does not end in Error."""
    return _said(2, Status.CRASHED, line, rows) if RAISED.match(line) else None


def _said(level: int, status: Status, line: bytes, rows: int) -> Ending:
    rank, asked = RANK.search(line), ASKED.search(line)
    return Ending(
        level=level,
        status=status,
        evidence=text(line),
        rank=int(next(filter(None, rank.groups()))) if rank else None,
        asked_bytes=float(asked[1]) * UNITS[asked[2] or b""] if asked else float("nan"),
        rows=rows,
    )


def overtaken(found: Ending, rows: int) -> bool:
    """Whether the run went on after what a rank said: that was no end. A line before the first iteration is overtaken
    by it, a later one by the second after it, since the rank that prints may be late."""
    return found.level > 0 and (rows > 0 if found.rows == 0 else rows >= found.rows + 2)


def strongest(found: list[Ending], rows: int) -> Ending | None:
    """The ending that counts: the lowest level, then the first line; a crash after a Ctrl-C is the Ctrl-C's."""
    left = [e for e in found if not overtaken(e, rows)]
    end = min(left, key=lambda e: e.level, default=None)
    if end and end.status is Status.CRASHED:
        return next((e for e in left[: left.index(end)] if e.evidence.startswith("KeyboardInterrupt")), end)
    return end


def text(line: bytes) -> str:
    """The line as evidence: one line of readable characters."""
    plain = line.decode("utf-8", "replace").strip()
    return "".join(c for c in plain if c.isprintable() or c == "\t")[:LONGEST]


def planned(line: bytes, rows: int) -> Ending:
    """The end as planned, said by `line`."""
    nan = float("nan")
    return Ending(level=4, status=Status.COMPLETED, evidence=text(line), rank=None, asked_bytes=nan, rows=rows)
