"""The rank, the node and the GPU that a line of a log names."""

import re

RANK = re.compile(rb"\[(?:default|rank|Rank )(\d{1,9})\]|\b[Rr]ank ?(\d{1,9})\b|^\s*(\d{1,6}): |\btasks? (\d{1,9})\b")
ROOT = re.compile(rb"rank\s+: (\d{1,9}) \(local_rank: (\d{1,9})\)")
# of ranks, as torchrun lists failures, and as NCCL prints each rank of a communicator
FAILED_TIME = re.compile(rb"^\s*time\s{1,20}: (\d{4}-\d\d-\d\d_[\d:]{8})\s*$")
FAILED_HOST = re.compile(rb"^\s*host\s{1,20}: (\S{1,99})\s*$")
NCCL_RANK = re.compile(rb"(\S{1,99}):\d+:\d+ \[(\d+)\] NCCL INFO .{0,200}\brank (\d{1,7}) nranks (\d{1,7}) ")
MAX_PLACE = 2000  # bytes of a line that are searched for a node
NODE = re.compile(r"(?!localhost$)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]{0,62}(?:\[[\d,-]{1,200}\])?", re.ASCII)

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
ELSEWHERE = b"CANCELLED AT"  # slurmstepd names the node that prints this, which is not the one that failed
GPU = re.compile(
    rb"Xid \(((?:PCI:)?[\da-fA-F:.]{1,20})\)|GPU (?:at )?((?:PCI:)?[\da-fA-F]{4,8}(?::[\da-fA-F]{2}){2})(?:\.\d)?"
    rb"|\bGPU[ =](\d{1,2})\b(?! GPU)|:\d+:\d+ \[(\d{1,2})\]"
)


def rank_of(line: bytes) -> int | None:
    """The rank that the line names, None where it names none."""
    rank = RANK.search(line)
    return int(next(filter(None, rank.groups()))) if rank else None


def of_line(line: bytes) -> tuple[tuple[str, ...], ...]:
    """The nodes and the GPU that the line names."""
    host = None if ELSEWHERE in line else HOST.search(line[:MAX_PLACE])
    gpu = GPU.search(line[:MAX_PLACE])
    return tuple((m[m.lastindex or 0].decode(),) if m else () for m in (host, gpu))
