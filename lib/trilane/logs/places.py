"""Places of endings: the nodes and GPUs that the lines about the end of a run name."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trilane.logs.endings import Ending

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
GPU = re.compile(
    rb"Xid \(((?:PCI:)?[\da-fA-F:.]{1,20})\)|GPU (?:at )?((?:PCI:)?[\da-fA-F]{4,8}(?::[\da-fA-F]{2}){2})(?:\.\d)?"
    rb"|\bGPU[ =](\d{1,2})\b(?! GPU)|:\d+:\d+ \[(\d{1,2})\]"
)


def place(line: bytes) -> tuple[tuple[str, ...], ...]:
    """The nodes and the GPU that the line names."""
    # slurmstepd names the node that prints this, which is not the one that failed
    host = None if b"CANCELLED AT" in line else HOST.search(line[:2000])
    gpu = GPU.search(line[:2000])
    return tuple((m[m.lastindex or 0].decode(),) if m else () for m in (host, gpu))


def where(
    end: "Ending | None", named: tuple[str, str] | None, exits: "list[Ending]", others: "list[Ending]"
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Nodes and GPUs of an ending, of which the rank ran at `named`, and which `others` of the run may name; and those
    at fault, as --exclude takes them: without names that no node can have, and without addresses."""
    if end is None:
        return (), (), ""
    host, gpu = named or (exited_on(exits, end.rank) if end.blames_node else _batch_host(end, others), "")
    hosts, gpus = end.hosts or (host,) * bool(host), end.gpus or (gpu,) * bool(gpu)
    names = dict.fromkeys(name.partition(".")[0] for name in hosts)
    return hosts, gpus, ",".join(filter(NODE.fullmatch, names)) if end.blames_node else ""


def exited_on(found: "list[Ending]", rank: int | None) -> str:
    """The node of the task that srun reports as failed: of that rank, or if the rank of either is unknown the only node
    that has such a task; "" where several could be meant."""
    nodes = {e.hosts[0] for e in found if None in (rank, e.rank) or e.rank == rank}
    return nodes.pop() if len(nodes) == 1 and "[" not in "".join(nodes) else ""


def _batch_host(end: "Ending", others: "list[Ending]") -> str:
    """The node of a batch step that the line of an ending names only by its job; "" if no line names it."""
    # slurmstepd prints JOB lines from the batch step alone, on the job's first node, where its batch step runs
    # https://github.com/SchedMD/slurm/blob/master/src/slurmd/slurmstepd/req.c
    step = re.search(r"StepId=(\d{1,12})\.batch\b", end.evidence)
    named = (re.search(r"\*\*\* JOB (\d{1,12}) ON (\S{1,99}) ", other.evidence) for other in others)
    return next((found[2] for found in named if found and step and found[1] == step[1]), "")
