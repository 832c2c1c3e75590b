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

from trilane.logs.places import Places
from trilane.utils.numbers import ranges
from trilane.utils.tables import one_line

MEMBER = re.compile(
    rb"\[(?:PG (?:ID )?(\d{1,9}) ?(?:PG GUID ([^\s()\]]{1,64}))? ?(?:\(([^()]{1,64})\))? ?)?"
    rb"Rank (\d{1,7})\]"
)
OF_RUN = re.compile(rb"\[rank(\d{1,7})\]")
WORK = re.compile(
    rb"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,60})(?:, NumelIn=(\d{1,18}))?.{0,400}\) ran for \d"
)
TIMED_OUT = re.compile(
    rb"Timeout at NCCL work: (\d{1,18})|detected by watchdog at work(?: sequence id)?: (\d{1,18})"
)
COUNTS = re.compile(
    rb"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,18}),.{0,120}"
    rb"[Ll]ast completed (?:NCCL )?work: (-?\d{1,18})"
)
WORDS = (b"WorkNCCL", b"NCCL work", b"by watchdog", b"nqueued", b"terminated with exception")
DEFAULT = "default_pg"  # the group of all ranks
SHOWN = 8  # lines, and ranks with their nodes
MAX_REPORTS = 200_000


@dataclass(kw_only=True)
class Report:
    """Of a rank in a process group: the work that timed out (-1: none), what it was, and the last
    work that it had enqueued and completed ("": not printed).
    """

    stuck: int = -1
    operation: str = ""
    counts: str = ""

    def __str__(self) -> str:
        parts = []
        if self.stuck >= 0:
            parts.append(f"timed out in work {self.stuck}{self.operation}")
        if self.counts:
            parts.append(self.counts)
        return "; ".join(parts) or "ended with an error"


@dataclass(kw_only=True)
class Watchdogs:
    """What the ranks of a run reported, by process group ("": not named) and rank."""

    reports: dict[tuple[str, int], Report] = field(default_factory=dict)

    def read(self, line: bytes) -> None:
        """Read a line of a watchdog or the heartbeat monitor."""
        member = MEMBER.search(line)
        if not member or b"periodically" in line or len(self.reports) > MAX_REPORTS:
            return
        group = _group(member)
        of_run = OF_RUN.search(line)
        if of_run:
            rank = int(of_run[1])
        elif group == DEFAULT:
            rank = int(member[4])
        else:
            return  # before torch 2.2 a rank is numbered in a group that is not named
        report = self.reports.setdefault((group, rank), Report())
        # a watchdog's first line names the operation and not the group, later ones the group alone
        first = self.reports.get(("", rank), report)
        if work := WORK.search(line):
            report.stuck = int(work[1])
            report.operation = f" ({work[2].decode()})"
            if work[3] and not work[2].startswith(b"ALLTOALL"):
                report.operation = f" ({work[2].decode()} of {int(work[3]):,} elements)"
        elif timed := TIMED_OUT.search(line):
            stuck = int(timed[timed.lastindex or 0])
            if timed[1] or first.stuck == stuck:  # else an error, not a timeout
                report.stuck = stuck
                report.operation = first.operation if first.stuck == stuck else ""
        if counts := COUNTS.search(line):
            report.counts = f"last enqueued {int(counts[1])}, last completed {int(counts[2])}"

    def lines(self, places: Places) -> list[str]:
        """A line for each report in a process group in which a work timed out, with the ranks that
        have it.

        The log does not give the members of a group: who printed nothing is known of the group of
        all ranks alone.
        """
        reports = self.reports
        stuck = [key for key, report in reports.items() if report.stuck >= 0]
        named = {rank for group, rank in stuck if group}
        groups = {group for group, rank in stuck if group or rank not in named}
        same: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for (group, rank), report in reports.items():
            if group in groups and (group or rank not in named):
                same[group, str(report)].append(rank)
        if DEFAULT in groups:
            printed = {rank for group, rank in reports if group == DEFAULT}
            silent = [rank for rank in range(places.ranks) if rank not in printed]
            if silent and max(printed) < places.ranks:
                same[DEFAULT, "nothing of them is in this log"] = silent
        lines = []
        for group, text in sorted(same, key=lambda key: (key[0], "timed out" in key[1])):
            ranks = sorted(same[group, text])
            shown = " " + ranges(ranks, 2 * SHOWN)
            if len(ranks) > 1:
                shown = f"s{shown}"
            hosts = dict.fromkeys(places.host(rank) for rank in ranks[: SHOWN + 1])
            hosts.pop("", None)
            if hosts and len(ranks) <= SHOWN:
                shown += f" ({', '.join(hosts)})"
            lines.append(f"{group or 'a process group'}: rank{shown}: {text}")
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"and {len(lines) - SHOWN} more"]
        return lines


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
