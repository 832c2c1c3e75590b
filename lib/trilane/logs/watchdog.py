"""Ranks missing from a collective, by what their NCCL watchdogs print when it times out: a table of
ranks.

torch's ProcessGroupNCCL.cpp, 1.13 to 2.13: a rank is `[Rank 3]`, `[PG 1 Rank 3]`, `[PG 0
(default_pg) Rank 3]` or `[PG ID 0 PG GUID 0(default_pg) Rank 3]`, numbered within its process
group, and since 2.2 `[rank3]:` in the run.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from trilane.logs.places import Places
from trilane.utils.numbers import ranges
from trilane.utils.tables import one_line

MEMBER = re.compile(
    rb"\[(?:PG (?:ID )?(\d{1,9}) ?(?:PG GUID ([^\s()\]]{1,64}))? ?(?:\(([^()]{1,64})\))? ?)?Rank (\d{1,7})\]"
)
TIMED_OUT = re.compile(
    rb"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,60})(?:, NumelIn=(\d{1,18}))?.{0,400}\) ran for \d|"
    rb"Timeout at NCCL work: (\d{1,18})|detected by watchdog at work(?: sequence id)?: (\d{1,18})"
)
COUNTS = re.compile(
    rb"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,18}),.{0,120}[Ll]ast completed (?:NCCL )?work: (-?\d{1,18})"
)
WORDS = (b"WorkNCCL", b"NCCL work", b"by watchdog", b"nqueued", b"terminated with exception")
DEFAULT, SHOWN = (
    "default_pg",
    8,
)  # the group of all ranks; lines that are shown, and ranks with their nodes


@dataclass(kw_only=True)
class Report:
    """Of a rank in a process group: the work that timed out (-1: none), what it was by the names
    that the rank prints, and the last work that it had enqueued and completed ("": not printed).
    """

    stuck: int = -1
    ops: set[str] = field(default_factory=set)
    counts: str = ""
    failed: bool = False

    def __str__(self) -> str:
        op = f" ({min(self.ops)})" if len(self.ops) == 1 else ""  # two groups may be at one number
        stuck = (
            f"timed out in work {self.stuck}{op}"
            if self.stuck >= 0
            else "ended with an error" * self.failed
        )
        return "; ".join(filter(None, (stuck, self.counts))) or "its report is cut"


@dataclass(kw_only=True)
class Watchdogs:
    """What the ranks of a run reported, by process group ("" where the log does not name it) and
    rank: `numbered` in the run, or `others` in their group alone.
    """

    numbered: dict[tuple[str, int], Report] = field(default_factory=dict)
    others: dict[tuple[str, int], Report] = field(default_factory=dict)

    def read(self, line: bytes) -> None:
        """Read a line of a watchdog or the heartbeat monitor."""
        if (
            (member := MEMBER.search(line))
            and b"periodically" not in line
            and len(self.numbered) < 200_000
        ):
            group, found = _group(member), re.search(rb"\[rank(\d{1,7})\]", line)
            reports = self.numbered if found or group == DEFAULT else self.others
            rank = int(found[1] if found else member[4])
            report = reports.setdefault((group, rank), Report())
            timed, counts = TIMED_OUT.search(line), COUNTS.search(line)
            # a watchdog's first line names the operation and not the group, later ones the group
            # alone
            first = reports.get(("", rank), report)
            at = int(next(filter(None, (timed[1], timed[4], timed[5])))) if timed else -1
            if timed and timed[2]:
                size = (
                    f" of {int(timed[3]):,} elements"
                    if timed[3] and not timed[2].startswith(b"ALLTOALL")
                    else ""
                )
                report.ops.add(timed[2].decode() + size)
            if timed and (
                timed[2] or timed[4] or first.stuck == at
            ):  # else an error, not a timeout
                report.stuck = at if report.stuck < 0 else min(at, report.stuck)
                report.ops = first.ops if first.stuck == at else report.ops
            report.failed |= b"terminated with exception" in line and b"imeout" not in line
            if counts:
                report.counts = f"last enqueued {int(counts[1])}, last completed {int(counts[2])}"

    def lines(self, places: Places) -> list[str]:
        """A line for each report in a process group in which a work timed out, with the ranks that
        have it.

        The log does not give the members of a group: who printed nothing is known of the group of
        all ranks alone.
        """
        is_numbered = any(report.stuck >= 0 for report in self.numbered.values())
        reports = self.numbered if is_numbered else self.others
        named = {rank for (group, rank), report in reports.items() if group and report.stuck >= 0}
        stuck = {
            group
            for (group, rank), report in reports.items()
            if report.stuck >= 0 and (group or rank not in named)
        }
        same = defaultdict[tuple[str, str], list[int]](list)
        for (group, rank), report in reports.items():
            if group in stuck and (group or rank not in named):
                same[group, str(report)].append(rank)
        there = {rank for group, rank in reports if group == DEFAULT}
        ranks = places.ranks
        if (
            DEFAULT in stuck
            and max(there) < ranks
            and (silent := [r for r in range(ranks) if r not in there])
        ):
            same[DEFAULT, "nothing of them is in this log"] = silent
        of = "" if is_numbered else " of it"
        order = sorted(same, key=lambda key: (key[0], "timed out" in key[1], len(same[key])))
        found = [
            f"{g or 'a process group'}: {_ranks(same[g, text], places)}{of}: {text}"
            for g, text in order
        ]
        return [*found[:SHOWN], *([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])]


def _group(member: re.Match[bytes]) -> str:
    """The group by the name that all its ranks share: `default_pg`, or its GUID with what it is
    for.
    """
    number, guid, purpose, _ = (
        text.decode("utf-8", "replace") if text else "" for text in member.groups()
    )
    if purpose == DEFAULT or (not purpose and (guid or number) == "0"):
        return DEFAULT
    return one_line(f"{purpose or 'process group'} {guid or number}") if number else ""


def _ranks(ranks: Iterable[int], places: Places) -> str:
    """`ranks 0-6, 9`, with the nodes of a few."""
    known = sorted(ranks)
    hosts = dict.fromkeys(filter(None, map(places.host, known))) if len(known) <= SHOWN else {}
    return f"rank{'s' * (len(known) > 1)} {ranges(known, 2 * SHOWN)}" + (
        f" ({', '.join(hosts)})" if hosts else ""
    )
