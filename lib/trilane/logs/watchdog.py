"""Ranks missing from a collective, by what their NCCL watchdogs print when it times out: a table of
ranks.

torch's ProcessGroupNCCL.cpp, 2.2 to 2.13: a rank is `[Rank 3]`, `[PG 1 Rank 3]`, `[PG 0
(default_pg) Rank 3]` or `[PG ID 0 PG GUID 0(default_pg) Rank 3]`, numbered within its process
group, and since 2.2 `[rank3]:` in the run.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from trilane.utils.numbers import ranges
from trilane.utils.tables import one_line
from trilane.workspace.rank_grid import MOST

MEMBER = re.compile(
    rb"\[(?:PG (?:ID )?(\d{1,9}) ?(?:PG GUID ([^\s()\]]{1,64}))? ?(?:\(([^()]{1,64})\))? ?)?"
    rb"Rank (\d{1,7})\]"
)
OF_RUN = re.compile(rb"\[rank(\d{1,7})\]")
WORK = re.compile(
    rb"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,60}).{0,500}\) (?:ran for \d|timed out)"
)
TIMED_OUT = re.compile(
    rb"(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?): (\d{1,18})"
)
COUNTS = re.compile(
    rb"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,18}),.{0,120}"
    rb"[Ll]ast completed (?:NCCL )?work: (-?\d{1,18})"
)
WORDS = (b"WorkNCCL", b"NCCL work", b"by watchdog", b"nqueued", b"terminated with exception")
DEFAULT = "default_pg"  # the group of all ranks
SHOWN = 8  # lines
MAX_REPORTS = 200_000


@dataclass(kw_only=True)
class Watchdogs:
    """What the ranks of a run reported, by process group ("": not named) and rank: what timed out,
    and the work that was last enqueued and completed ("": not printed).
    """

    timeouts: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: dict[tuple[str, int], str] = field(default_factory=dict)

    def read(self, line: bytes) -> None:
        """Read a line of a watchdog or the heartbeat monitor."""
        member = MEMBER.search(line)
        if not member or b"periodically" in line or len(self.counts) > MAX_REPORTS:
            return
        group = _group(member)
        of_run = OF_RUN.search(line)
        if of_run:
            rank = int(of_run[1])
        elif group == DEFAULT:
            rank = int(member[4])
        else:
            return  # before torch 2.2 a rank is numbered in a group that is not named
        if work := WORK.search(line):
            self.timeouts[group, rank] = f"work {int(work[1])} ({work[2].decode()})"
        elif timed := TIMED_OUT.search(line):
            # a watchdog's first line names the operation and not the group, later ones the group
            # alone; of another work it is an error, not a timeout
            first = self.timeouts.get(("", rank), "")
            if first.startswith(f"work {int(timed[1])} "):
                self.timeouts[group, rank] = first
        counts = self.counts.get((group, rank), "")
        if work := COUNTS.search(line):
            counts = f"last enqueued {int(work[1])}, last completed {int(work[2])}"
        self.counts[group, rank] = counts

    def lines(self, world: int) -> list[str]:
        """A line for each report in a process group in which a work timed out, with the ranks that
        have it.

        The log does not give the members of a group: who printed nothing is known of the group of
        all ranks alone.
        """
        named = {rank for group, rank in self.timeouts if group}
        groups = {group for group, rank in self.timeouts if group or rank not in named}
        same = defaultdict(list)
        for (group, rank), counts in self.counts.items():
            if group in groups and (group or rank not in named):
                work = self.timeouts.get((group, rank), "")
                text = f"timed out in {work}; {counts}" if work else counts
                same[group, bool(work), text.strip("; ")].append(rank)
        for name in groups & {DEFAULT, ""}:
            printed = {rank for group, rank in self.counts if group == name}
            silent = [rank for rank in range(min(world, MOST)) if rank not in printed]
            # no smaller group has more than half of the ranks
            is_all = name == DEFAULT or 2 * len(printed) > world
            if silent and is_all and max(printed) < world:
                same[name, False, "nothing of them is in this log"] = silent
        lines = []
        for group, is_late, text in sorted(same):
            ranks = ranges(same[group, is_late, text])
            lines.append(f"{group or 'a process group'}: ranks {ranks}: {text}")
        return lines[:SHOWN]


def _group(member: re.Match[bytes]) -> str:
    """The group by the name that all its ranks share: `default_pg`, or its GUID with what it is
    for.
    """
    texts = [(text or b"").decode("utf-8", "replace") for text in member.groups()]
    number, guid, purpose, _ = texts
    if purpose == DEFAULT or (not purpose and (guid or number) == "0"):
        return DEFAULT
    if number:
        return one_line(f"{purpose or 'process group'} {guid or number}")
    return ""
