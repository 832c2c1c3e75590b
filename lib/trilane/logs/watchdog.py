"""Who did not come to a collective, by what the ranks' NCCL watchdogs print when it times out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trilane.utils.tables import one_line

# torch's ProcessGroupNCCL.cpp, 1.13 to 2.13: a rank is `[Rank 3]`, `[PG 1 Rank 3]`, `[PG 0 (default_pg) Rank 3]` or
# `[PG ID 0 PG GUID 0(default_pg) Rank 3]`, numbered within its process group, and since 2.2 `[rank3]:` in the run. What
# an exception repeats of such a line (`what():`) has no number in the run.
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
MEMBER = re.compile(
    rb"\[(?:PG (?:ID )?(\d{1,9}) ?(?:PG GUID ([^\s()\]]{1,64}))? ?(?:\(([^()]{1,64})\))? ?)?Rank (\d{1,7})\]"
)
GLOBAL = re.compile(rb"\[rank(\d{1,7})\]")
TIMED_OUT = re.compile(
    rb"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,60})(?:, NumelIn=(\d{1,18}))?.{0,400}\) ran for \d|"
    rb"Timeout at NCCL work: (\d{1,18})"
)
DETECTED = re.compile(rb"detected by watchdog at work(?: sequence id)?: (\d{1,18})")
COUNTS = re.compile(
    rb"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,18}),.{0,120}[Ll]ast completed (?:NCCL )?work: (-?\d{1,18})"
)
# TORCH_NCCL_DESYNC_DEBUG=1, https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/TraceUtils.h
NEVER = re.compile(rb"ranks \[([\d, ]{1,60000})\] are the lagging ranks")
BEHIND = re.compile(rb"\[([\d, ]{1,60000})\] finished collective #(\d{1,18}), but didn't join")
CAUGHT, ENDED = b"Watchdog caught", b"terminated with exception"
WORDS = (b"WorkNCCL", b"NCCL work", b"by watchdog", b"nqueued", b"lagging", b"didn't join", CAUGHT, ENDED)
DEFAULT = "default_pg"
ANY_SIZE = "ALLTOALL"  # whose ranks may have different sizes
BETWEEN_TWO = ("SEND", "RECV", "COALESCED")  # of two ranks, not of the group; batch_isend_irecv is coalesced
MAX_REPORTS = 200_000  # of ranks in process groups
SHOWN = 8  # process groups


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank in a process group, in which its number is `member`: the work that timed out there (-1: none), its key
    among the names, and the last work that the rank had enqueued and completed (None: not printed); whether it ended
    with an error of its own."""

    member: int
    stuck: int = -1
    work: tuple[bool, int, int] = (True, -1, -1)
    enqueued: int | None = None
    completed: int | None = None
    failed: bool = False


Reports = dict[str, dict[int, Report]]  # by process group ("" where the log does not name it) and rank


@dataclass
class Watchdogs:
    """What the ranks of a run reported: by their numbers in the run, and those that have one in their group alone."""

    groups: Reports = field(default_factory=dict)
    unnumbered: Reports = field(default_factory=dict)
    never: set[int] = field(default_factory=set)  # ranks of a group that joined no collective, by torch's own analysis
    behind: dict[int, int] = field(default_factory=dict)  # by the last collective that they finished, likewise
    cut: set[int] = field(default_factory=set)  # ranks whose line ends early
    world: int = 0  # ranks of the run, or of its largest communicator; 0: unknown
    is_whole: bool = False  # whether it is that of the run
    _names: dict[tuple[bool, int, int], str] = field(default_factory=dict)  # of a rank and its work ("": of two groups)

    def read(self, line: bytes) -> None:
        """Read a line of a watchdog, the heartbeat monitor, or torch's analysis."""
        if never := NEVER.search(line):
            self.never.update(map(int, re.findall(rb"\d{1,7}", never[1])))
        elif behind := BEHIND.search(line):
            self.behind |= dict.fromkeys(map(int, re.findall(rb"\d{1,7}", behind[1])), int(behind[2]))
        elif (member := MEMBER.search(line)) and b"periodically" not in line and len(self._names) < MAX_REPORTS:
            group, number, rank = _group(member), int(member[4]), GLOBAL.search(line)
            is_numbered = bool(rank) or group == DEFAULT
            reports = (self.groups if is_numbered else self.unnumbered).setdefault(group, {})
            at = int(rank[1]) if rank else number
            reports[at] = self._report(line, reports.get(at, Report(member=number)), (is_numbered, at))

    def _report(self, line: bytes, found: Report, rank: tuple[bool, int]) -> Report:
        """What the rank reports; a watchdog's first line names the collective, not the group."""
        timed, detected, counts = TIMED_OUT.search(line), DETECTED.search(line), COUNTS.search(line)
        at = int(timed[1] or timed[4]) if timed else int(detected[1]) if detected else -1
        if timed and timed[1]:
            size = f" of {int(timed[3]):,} elements" if timed[3] and not timed[2].startswith(ANY_SIZE.encode()) else ""
            name = timed[2].decode() + size
            self._names[*rank, at] = name if self._names.get((*rank, at), name) == name else ""
        if at >= 0 and (timed or (*rank, at) in self._names):  # else an error, not a timeout
            first = at if found.stuck < 0 else min(at, found.stuck)
            found = replace(found, stuck=first, work=(*rank, first))
        elif ENDED in line and b"imeout" not in line:
            found = replace(found, failed=True)
        elif CAUGHT in line and b"timeout: WorkNCCL(" not in line:
            self.cut.add(rank[1])
        if counts:
            found = replace(found, enqueued=int(counts[1]), completed=int(counts[2]))
        return found

    def sentences(self, places: Mapping[int, tuple[str, str]], world: object = None) -> tuple[str, ...]:
        """Who did not come: of torch's analysis, and of each process group in which a work timed out.

        `world` is the number of ranks where the log's arguments have it, and `places` are nodes of ranks.
        """
        given = world if isinstance(world, int) else 0
        self.world, self.is_whole = max(self.world, given), given >= self.world
        named = {rank for group, ranks in self.groups.items() if group for rank, r in ranks.items() if r.stuck >= 0}
        found, of = list[str](), self._of_analysis()
        numbered = places if not of else {}
        for last in sorted(set(self.behind.values()))[:SHOWN]:
            late = [rank for rank, at in self.behind.items() if at == last]
            found.append(f"torch: {_ranks(late, numbered)}{of} did not join collective {last + 1}")
        if self.never:
            found.append(f"torch: {_ranks(self.never, numbered)}{of} never joined a collective")
        # what repeats a line that numbers its rank in the run adds nothing
        is_numbered = any(report.stuck >= 0 for ranks in self.groups.values() for report in ranks.values())
        for group, ranks in (self.groups if is_numbered else self.unnumbered).items():
            left = ranks if group else {rank: r for rank, r in ranks.items() if rank not in named}
            if any(report.stuck >= 0 for report in left.values()):
                is_run = self._is_run(group, left)
                of = "" if is_numbered or is_run else " of it"
                found.append(self._sentence(group, left, {} if of else places, is_run, of))
        return (*found[:SHOWN], *([f"and {len(found) - SHOWN} more process groups"] if len(found) > SHOWN else []))

    def _is_run(self, group: str, ranks: Mapping[int, Report]) -> bool:
        """Whether the group has all ranks of the run: a smaller one, of which a run has several, has no such number."""
        if group == DEFAULT:
            return max(ranks) < self.world <= MAX_REPORTS
        highest = max(report.member for report in ranks.values())
        one = len({r.stuck for r in ranks.values() if r.stuck >= 0}) == 1
        return not group and one and self.world // 2 <= highest < self.world <= MAX_REPORTS and max(ranks) < self.world

    def _of_analysis(self) -> str:
        """The process group whose ranks torch's analysis numbers, "" for the run's."""
        groups = {*self.groups, *self.unnumbered} - {""}
        listed = {*self.never, *self.behind}
        if groups <= {DEFAULT} and (groups or (listed and 0 < self.world // 2 <= max(listed))):
            return ""
        return f" of {min(groups)}" if len(groups) == 1 else " of a process group"

    def _sentence(
        self, group: str, ranks: Mapping[int, Report], places: Mapping[int, tuple[str, str]], is_run: bool, of: str
    ) -> str:
        """Who waits in which work, who had not enqueued it, and of whom the log holds nothing; `of` stands behind the
        numbers of ranks."""
        waits = dict[tuple[int, str], list[int]]()
        for rank, report in ranks.items():
            if report.stuck >= 0:
                waits.setdefault((report.stuck, self._names.get(report.work, "")), []).append(rank)
        for at, _ in [work for work in waits if not work[1]]:  # a rank's line may lack the collective of that number
            if len(same := [work for work in waits if work[0] == at and work[1]]) == 1:
                waits[same[0]] += waits.pop((at, ""))
        first = min(waits)[0]
        shown = sorted(waits)[:SHOWN]
        works = [f"work {at}{f' ({name})' * bool(name)} on {_ranks(waits[at, name], places)}{of}" for at, name in shown]
        parts = [f"{group or 'a process group'}: timed out {', '.join(works)}"]
        if any(name.startswith(BETWEEN_TWO) for _, name in waits):
            parts.append("sends and receives of two ranks each: the log does not name the other one")
            return "; ".join(parts)
        if len(waits) > 1:
            one = len({at for at, _ in waits}) == 1
            parts.append(
                "the same number is another operation or size there" if one else "they wait in different works"
            )
        late = dict[int, list[int]]()
        for rank, report in ranks.items():
            if report.stuck < 0 and report.enqueued is not None and report.enqueued < first:
                late.setdefault(report.enqueued, []).append(rank)
        parts += [f"{_ranks(late[at], places)}{of} did not come: last enqueued {at}" for at in sorted(late)[:SHOWN]]
        counts = {rank: r.enqueued for rank, r in ranks.items() if r.stuck >= 0 and r.enqueued is not None}
        if behind := [rank for rank, n in counts.items() if n < max(counts.values())]:
            low, high = min(counts.values()), max(counts.values())
            parts.append(f"{_ranks(behind, places)}{of} had queued less than others: {low} works for {high}")
        through = [
            rank for rank, r in ranks.items() if r.stuck < 0 and r.completed is not None and r.completed >= first
        ]
        parts += [f"{_ranks(through, places)}{of} completed it"] if through else []
        failed = [rank for rank, report in ranks.items() if report.failed and report.stuck < 0]
        cut = self.cut.difference(*waits.values()) if is_run else set[int]()
        parts += [f"{_ranks(failed, places)}{of} ended with another error"] if failed else []
        parts += [f"the report of {_ranks(cut, places)}{of} is cut, and others may be missing"] if cut else []
        silent = set(range(self.world)) - set(ranks) - cut if is_run else set()
        if silent:
            parts.append(
                f"{_ranks(silent, places)} did not come, or did not report: nothing of the kind is in this log"
            )
        elif is_run and not (late or failed or cut) and len(waits) == 1:
            known = "all ranks" if self.is_whole else "all ranks of the largest communicator in this log"
            name = min(waits)[1]
            other = "" if "elements" in name or name.startswith(ANY_SIZE) else "another size on one of them, "
            parts.append(f"{known} queued it: {other}the network, or a GPU that is still in what was queued before it")
        elif not (late or failed or is_run):
            parts.append("who did not come cannot be known from this log: it does not give the members of the group")
        return "; ".join(parts)


def _group(member: re.Match[bytes]) -> str:
    """The group by the name that all its ranks share: `default_pg`, or its GUID with what it is for."""
    number, guid, purpose, _ = (text.decode("utf-8", "replace") if text else "" for text in member.groups())
    if purpose == DEFAULT or (not purpose and (guid or number) == "0"):
        return DEFAULT
    return one_line(f"{purpose or 'process group'} {guid or number}") if number else ""


def _ranks(ranks: Sequence[int] | set[int], places: Mapping[int, tuple[str, str]]) -> str:
    """`ranks 0-6, 9`, with the nodes of a few."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{a}-{b}" if b > a else str(a) for a, b in runs[: 2 * SHOWN]] + ["..."] * (len(runs) > 2 * SHOWN)
    hosts = dict.fromkeys(places[rank][0] for rank in sorted(ranks) if rank in places) if len(ranks) <= SHOWN else {}
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}" + (f" ({', '.join(hosts)})" if hosts else "")
