"""Exclusion: the nodes that a waiting job avoids, because they have failed; as far as enough others exist."""

import re
import sys
from collections.abc import Iterable, Sequence

from trilane.slurm import client


def exclude(job: str, nodes: Iterable[str], earlier: Sequence[str] = ()) -> None:
    """Keep a waiting job off `nodes`, in addition to those that it already avoids.

    Where too few nodes would be left for it, it may use the `earlier` ones again, the first of them first: they may
    have been repaired, and while they are not, SLURM does not give them out.
    """
    shown = client.call(["scontrol", "show", "job", job])
    before = [host for found in re.findall(r"ExcNodeList=([^\s(]+)", shown) for host in client.hostnames(found)]
    every = list(dict.fromkeys([*before, *nodes]))  # an update replaces the list
    again = [node for node in earlier if node in every and node not in nodes]
    excess = len(every) - _most_excluded(shown) if again else 0
    dropped = again[: max(0, excess)]
    names = ",".join(node for node in every if node not in dropped)
    client.call(["scontrol", "update", f"JobId={job}", f"ExcNodeList={names}"])


def _most_excluded(shown: str) -> int:
    """How many nodes a job may avoid and still start, by `scontrol show job`.

    Of its reservation, or of its partition. Left out: a constraint, which leaves fewer.
    """
    facts = dict(re.findall(r"(\w+)=([^\s(]+)", shown))
    wanted = re.match(r"\d+", facts.get("NumNodes", ""))
    if wanted and "Reservation" in facts:
        held = re.search(r"NodeCnt=(\d+)", client.call(["scontrol", "show", "reservation", facts["Reservation"]]))
        return int(held[1]) - int(wanted[0]) if held else sys.maxsize
    if wanted and "Partition" in facts:
        names = client.call(["sinfo", "-h", "-N", "-p", facts["Partition"], "-o", "%N"]).split()
        return len(set(names)) - int(wanted[0])
    return sys.maxsize
