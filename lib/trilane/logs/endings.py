"""How a run ended, and the line that proves it: the scheduler's messages first, then those of the run itself."""

import re
from dataclasses import dataclass

from trilane.utils.tables import printable
from trilane.workspace.status import Status

RANK_PREFIX = rb"(?:\[\w{1,40} ?\d{0,9}\]:|\d{1,9}: )"  # of a rank's output; exception groups add bars
LEAD = rb"^\s*(?:" + RANK_PREFIX + rb"\s*)?(?:\|\s*)?(?:\w++\.)*+"
EXCEPTION = LEAD + rb"\w*(?:Error|Exception)(?:Group)?(?::|\s*$)"
NO_MEMORY = LEAD + rb"_?(?:Array)?MemoryError(?::|\s*$)"
TRACEBACK = re.compile(rb"Traceback \(most recent call last\):\s*$")
FRAME = re.compile(rb"^(?:" + RANK_PREFIX + rb"(?:\s\s|\s*$)|\s|$)")  # the body of a traceback is indented
RAISED = re.compile(LEAD + rb"(?=[A-Z]\w*?[a-z])\w++(?::|\s*$)")  # after a traceback, any such name is an exception

# (level, status, words, pattern): a lower level is stronger; within a level the first line counts.
#   0 the scheduler's reason         1 out of memory on a GPU: errors of other ranks are consequences
#   2 a rank's own error             3 ended from outside, or known by an exit code only
#   4 the planned end                5 a launcher that ends its workers, for any reason
# One of the words must occur in the line before the pattern is tried: searching for words is much cheaper.
PATTERNS = [
    (0, "time limit", b"LIMIT walltime", rb"DUE TO TIME ?LIMIT|TERM_RUNLIMIT|walltime \d+ exceeded limit"),
    (0, "node failure", b"FAIL failure", rb"DUE TO NODE FAILURE|[Nn]ode failure on|NODE_FAIL"),
    (0, "OOM", b"kill Out OUT_OF", rb"[1-9]\d{0,8} oom[-_]kill event|task[s ].{0,500}: Out Of Memory|OUT_OF_MEMORY"),
    (0, "OOM", b"MEMORY memory", rb"DUE TO OUT OF MEMORY|Exceeded (?:job|step) memory limit|cgroup out of memory"),
    (1, "OOM", b"memory OutOf", rb"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA (?:driver )?error: out of memory"),
    (1, "OOM", b"allocate ALLOC", rb"can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED"),
    (1, "OOM", b"failure memory", rb"Cuda failure (?:\d+ )?'out of memory'|cuda runtime error \(2\)"),
    (1, "OOM", b"Error", NO_MEMORY),
    (2, "rendezvous", b"rendezvous", rb"\brendezvous=\S{1,99}: "),
    (
        3,
        "rendezvous",
        b"socket Rendezvous clients",
        rb"client socket has (?:timed out|failed to connect)|Rendezvous\w*Error",
    ),
    (3, "rendezvous", b"clients", rb"Timed out after \d+ seconds waiting for clients"),
    (2, "hang", b"atchdog collective", rb"[Ww]atchdog caught collective|collective operation timeout"),
    (2, "hang", b"atchdog collective", rb"watchdog got stuck for \d|due to a collective timeout"),
    (2, "hang", b"imed timeout", rb"failed or timed out|Wait timeout|wait\(\) timed out|watchdog.{0,80}timeout"),
    (2, "hang", b"imed", rb"Heartbeat monitor timed out"),
    (2, "hang", b"imed Timeout", rb"[Tt]imed out (?:waiting(?! for job)|after|initializing)|Socket Timeout"),
    (2, "NCCL error", b"NCCL nccl", rb"NCCL error|nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)\w*"),
    (
        2,
        "NCCL error",
        b"unhandled aborted Dist",
        rb"unhandled (?:system|cuda) error|NCCL .{0,500} aborted|DistBackendError",
    ),
    (2, "NaN loss", b"NaN nan", rb"found NaN in|Unexpected result nan|[Ll]oss is (?:nan|NaN)|NaN detected in loss"),
    (3, "crashed", b"Error", rb"ChildFailedError|CalledProcessError"),
    (3, "crashed", b"FAILURE", rb"DUE TO TASK FAILURE"),
    (3, "node failure", b"missing", rb"srun: error: .{0,500}missing step on node"),
    (3, "cancelled", b"CANCELLED PREEMPT", rb"CANCELLED AT|DUE TO PREEMPTION"),
    (3, "cancelled", b"Interrupt ignal", rb"^KeyboardInterrupt|SignalException|death signal"),
    (2, "crashed", b"Error Exception", EXCEPTION),
    (2, "crashed", b"fault Fatal terminate Bus", rb"Segmentation fault|Fatal Python|terminate called|Bus error \("),
    (3, "crashed", b"srun", rb"srun: error: .{0,500}(?:[Ee]xited with exit code|Killed|Aborted|Bus error)"),
    (3, "crashed", b"exitcode exits", rb"failed \(exitcode: -?\d|exits with return code = -?[1-9]"),
    (3, "crashed", b"pdsh@", rb"pdsh@.{0,500}: ssh exited with exit code [1-9]"),
    (4, "stopped", b"trilane", rb"trilane: stopped at iteration \d+ by "),
    (4, "completed", b"raining exiting", rb"\[after training is done\]|exiting program (?:at|after)"),
    (4, "completed", b"raining", rb"Training completed"),
    (5, "crashed", b"Killing closing", rb"(?:^|_handler\] )Killing subprocess|Sending process \d+ closing signal"),
    (5, "crashed", b"srun", rb"srun: error: .{0,500}: Terminated"),
]
WORDS = sorted({word for _, _, words, _ in PATTERNS for word in words.split()})
ANY_WORD = re.compile(b"|".join(WORDS))
COMPILED = [(l, Status(s), frozenset(words.split()), re.compile(pattern)) for l, s, words, pattern in PATTERNS]

# a word that ANY_WORD finds may hide one that it contains, or a longer one
OVERLAPPING = {word: {other for other in WORDS if other in word or word in other} for word in WORDS}
RANK = re.compile(rb"\[(?:default|rank|Rank )(\d{1,9})\]|\b[Rr]ank ?(\d{1,9})\b|^\s*(\d{1,6}): |\btasks? (\d{1,9})\b")
ROOT = re.compile(rb"rank\s+: (\d{1,9}) \(local_rank: \d+\)")
REQUESTED = re.compile(rb"(?:[Tt]ried to|Unable to) allocate (\d+(?:\.\d*)?) (?:([KMGTP])i?B|bytes)")
UNITS = {b"": 1, b"K": 2**10, b"M": 2**20, b"G": 2**30, b"T": 2**40, b"P": 2**50}
MAX_EVIDENCE = 600  # characters of evidence


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A line about the end of a run: `rank` that printed it (None if unnamed), `asked_bytes` of a failed allocation
    (else NaN), `rows` read before it (iterations)."""

    level: int
    status: Status
    evidence: str
    rows: int
    rank: int | None = None
    asked_bytes: float = float("nan")


def ending(line: bytes, rows: int) -> Ending | None:
    """The ending that the line reports, None for any other line."""
    words_found = {word for found in set(ANY_WORD.findall(line)) for word in OVERLAPPING[found]}
    if not words_found:
        return None
    for level, status, words, pattern in COMPILED:
        if words & words_found and pattern.search(line):
            return _ending(level, status, line, rows)
    return None


def raised(line: bytes, rows: int) -> Ending | None:
    """The exception on the first line after a traceback; its name need not end in Error."""
    return _ending(2, Status.CRASHED, line, rows) if RAISED.match(line) else None


def _ending(level: int, status: Status, line: bytes, rows: int) -> Ending:
    rank, requested = RANK.search(line), REQUESTED.search(line)
    return Ending(
        level=level,
        status=status,
        evidence=text(line),
        rank=int(next(filter(None, rank.groups()))) if rank else None,
        asked_bytes=float(requested[1]) * UNITS[requested[2] or b""] if requested else float("nan"),
        rows=rows,
    )


def superseded(found: Ending, rows: int) -> bool:
    """Whether the run continued after a rank's message, which then was no end: a message before the first iteration by
    that iteration, a later one by the second iteration after it, because the rank that prints may lag."""
    return found.level > 0 and (rows > 0 if found.rows == 0 else rows >= found.rows + 2)


def strongest(found: list[Ending], rows: int) -> Ending | None:
    """The ending that counts: the lowest level, then the first line; a crash after Ctrl-C is the Ctrl-C."""
    left = [e for e in found if not superseded(e, rows)]
    end = min(left, key=lambda e: e.level, default=None)
    if end and end.status is Status.CRASHED:
        return next((e for e in left[: left.index(end)] if e.evidence.startswith("KeyboardInterrupt")), end)
    return end


def text(line: bytes) -> str:
    """The line as evidence: printable characters, at most MAX_EVIDENCE."""
    plain = line.strip()[: 8 * MAX_EVIDENCE].decode("utf-8", "replace")
    return printable("".join(c for c in plain if c.isprintable() or c == "\t"))[:MAX_EVIDENCE]


def planned_end(line: bytes, rows: int) -> Ending:
    """The planned end, reported by `line`."""
    return Ending(level=4, status=Status.COMPLETED, evidence=text(line), rows=rows)
