"""Who did not come to a collective, by what the ranks' NCCL watchdogs print when it times out."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trilane.utils.tables import one_line

# torch's ProcessGroupNCCL.cpp, 1.13 to 2.13: a rank is `[Rank 3]`, `[PG 1 Rank 3]`, `[PG 0 (default_pg) Rank 3]` or
# `[PG ID 0 PG GUID 0(default_pg) Rank 3]`, numbered within its process group, and since 2.2 `[rank3]:` in the run.
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
WORDS = (b"WorkNCCL", b"NCCL work", b"by watchdog", b"nqueued", b"lagging", b"didn't join")
DEFAULT = "default_pg"
BETWEEN_TWO = ("SEND", "RECV", "COALESCED")  # of two ranks, not of the group; batch_isend_irecv is coalesced
UNEVEN = ("ALLTOALL", "GATHER", "SCATTER")  # in which ranks may have different numbers of elements
MAX_REPORTS = 200_000  # of ranks in process groups
# The coordinates that vary among the members of Megatron's groups, by the names that it gives them.
# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/parallel_state.py
VARIES = {
    "TENSOR_MODEL_PARALLEL_GROUP": ("tp",),
    "CONTEXT_PARALLEL_GROUP": ("cp",),
    "PIPELINE_MODEL_PARALLEL_GROUP": ("pp",),
    "DATA_PARALLEL_GROUP": ("dp",),
    "DATA_PARALLEL_GROUP_WITH_CP": ("dp", "cp"),
    "MODEL_PARALLEL_GROUP": ("tp", "pp"),
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": ("tp", "cp"),
    "TENSOR_AND_DATA_PARALLEL_GROUP": ("tp", "dp"),
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": ("tp", "dp", "cp"),
}
SIZES = {  # of its axes: arguments, and what holds where a log has none
    "tp": ("tensor_model_parallel_size", None),
    "pp": ("pipeline_model_parallel_size", None),
    "cp": ("context_parallel_size", 1),
}
ORDERS = {("tp", "cp", "dp", "pp"): False, ("tp", "cp", "pp", "dp"): True}  # of ranks, by use_tp_pp_dp_mapping
SHOWN = 8  # process groups


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank in a process group: the work that timed out there (-1: none), its collective and elements, and the last
    work that the rank had enqueued and completed (None: not printed), its number in the group (-1: unknown)."""

    stuck: int = -1
    name: str = ""
    enqueued: int | None = None
    completed: int | None = None
    member: int = -1


@dataclass
class Watchdogs:
    """What the ranks of a run reported, by process group ("" where the log does not name it)."""

    groups: dict[str, dict[int, Report]] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)  # ranks that joined no collective, by torch's own analysis
    behind: dict[int, int] = field(default_factory=dict)  # ranks by the last collective that they finished, likewise
    world: int = 0  # ranks of the run, or of its largest communicator; 0: unknown
    is_whole: bool = False  # whether it is that of the run
    _names: dict[tuple[int, int], str] = field(default_factory=dict)  # of rank and work that timed out: the collective

    def read(self, line: bytes) -> None:
        """Read a line of a watchdog, the heartbeat monitor, or torch's analysis."""
        if never := NEVER.search(line):
            self.never.update(map(int, re.findall(rb"\d{1,7}", never[1])))
        elif behind := BEHIND.search(line):
            self.behind |= dict.fromkeys(map(int, re.findall(rb"\d{1,7}", behind[1])), int(behind[2]))
        elif (member := MEMBER.search(line)) and b"periodically" not in line and len(self._names) < MAX_REPORTS:
            known = GLOBAL.search(line)
            self._report(line, _group(member), int(known[1] if known else member[4]), int(member[4]) if known else -1)

    def _report(self, line: bytes, group: str, rank: int, member: int) -> None:
        """Read what the rank reports of the group; a watchdog's first line names the collective, not the group."""
        found = self.groups.get(group, {}).get(rank, Report(member=member))
        timed, detected, counts = TIMED_OUT.search(line), DETECTED.search(line), COUNTS.search(line)
        at = int(timed[1] or timed[4]) if timed else int(detected[1]) if detected else -1
        if timed and timed[1]:
            has_size = timed[3] and not timed[2].startswith(tuple(map(str.encode, UNEVEN)))
            self._names[rank, at] = timed[2].decode() + (f" of {int(timed[3]):,} elements" if has_size else "")
        if at >= 0 and (timed or (rank, at) in self._names):  # else an error, not a timeout
            first = at if found.stuck < 0 else min(at, found.stuck)
            found = replace(found, stuck=first, name=self._names.get((rank, first), found.name))
        if counts:
            found = replace(found, enqueued=int(counts[1]), completed=int(counts[2]))
        self.groups.setdefault(group, {})[rank] = found

    def sentences(
        self, places: Mapping[int, tuple[str, str]], arguments: Mapping[str, object] = MappingProxyType({})
    ) -> tuple[str, ...]:
        """Who did not come: of torch's analysis, and of each process group in which a work timed out.

        `arguments` are those of the log, with the number of ranks and the parallel sizes; `places` are nodes of ranks.
        """
        world = arguments.get("world_size")
        given = world if isinstance(world, int) else 0
        self.world, self.is_whole = max(self.world, given), given >= self.world
        named = {rank for group, ranks in self.groups.items() if group for rank, r in ranks.items() if r.stuck >= 0}
        found = list[str]()
        for last in sorted(set(self.behind.values()))[:SHOWN]:
            late = [rank for rank, at in self.behind.items() if at == last]
            found.append(f"torch: {_ranks(late, places)} did not join collective {last + 1}")
        if self.never:
            found.append(f"torch: {_ranks(self.never, places)} never joined a collective")
        for group, ranks in self.groups.items():
            left = ranks if group else {rank: r for rank, r in ranks.items() if rank not in named}
            if any(report.stuck >= 0 for report in left.values()):
                members = set(range(self.world)) if group in ("", DEFAULT) else _members(group, ranks, arguments)
                found.append(self._sentence(group, left, places, members if self.world <= MAX_REPORTS else set()))
        return (*found[:SHOWN], *([f"and {len(found) - SHOWN} more process groups"] if len(found) > SHOWN else []))

    def _sentence(
        self, group: str, ranks: Mapping[int, Report], places: Mapping[int, tuple[str, str]], members: set[int]
    ) -> str:
        """Who waits in which work, who had not enqueued it, and of which of the `members` the log holds nothing."""
        waits = dict[tuple[int, str], list[int]]()
        for rank, report in ranks.items():
            if report.stuck >= 0:
                waits.setdefault((report.stuck, report.name), []).append(rank)
        first = min(waits)[0]
        shown = sorted(waits)[:SHOWN]
        works = [f"work {at}{f' ({name})' * bool(name)} on {_ranks(waits[at, name], places)}" for at, name in shown]
        parts = [f"{group or 'a process group'}: timed out {', '.join(works)}"]
        if any(name.startswith(BETWEEN_TWO) for _, name in waits):
            parts.append("sends and receives of two ranks each: the log does not name the other one")
            return "; ".join(parts)
        if len(waits) > 1:
            same = len({at for at, _ in waits}) == 1
            which = "one made a call that the others did not" if same else "who is wrong cannot be known from this log"
            parts.append(f"they wait in different works: {which}")
        late = dict[int, list[int]]()
        for rank, report in ranks.items():
            if report.stuck < 0 and report.enqueued is not None and report.enqueued < first:
                late.setdefault(report.enqueued, []).append(rank)
        parts += [f"{_ranks(late[at], places)} did not come: last enqueued {at}" for at in sorted(late)[:SHOWN]]
        whole = ranks.keys() <= members
        silent = members - set(ranks) if whole else set()
        if silent:
            parts.append(
                f"{_ranks(silent, places)} did not come, or did not report: nothing of the kind is in this log"
            )
        elif whole and not late and len(waits) == 1:
            every = "all members" if group not in ("", DEFAULT) else "all ranks"
            known = every if self.is_whole else "all ranks of the largest communicator in this log"
            parts.append(f"{known} came: suspect the network")
        elif not late and not whole:
            parts.append("who did not come cannot be known from this log: it does not give the members of the group")
        return "; ".join(parts)


def _members(group: str, ranks: Mapping[int, Report], arguments: Mapping[str, object]) -> set[int]:
    """The members of one of Megatron's groups, by the parallel sizes in the log's arguments; empty where these are not
    there, or leave a choice, or do not give each rank the number in the group that it printed."""
    sizes = {axis: arguments.get(name, default) for axis, (name, default) in SIZES.items()}
    world, varies = arguments.get("world_size"), VARIES.get(group.partition(" ")[0], ())
    known = {axis: size for axis, size in sizes.items() if isinstance(size, int) and size > 0}
    if not varies or len(known) < len(sizes) or not isinstance(world, int) or not 0 < world <= MAX_REPORTS:
        return set()
    counts = known | {"dp": world // math.prod(known.values())}
    if math.prod(counts.values()) != world or max(ranks) >= world:
        return set()
    mapping = arguments.get("use_tp_pp_dp_mapping")
    orders = [order for order, name in ORDERS.items() if mapping in (None, name)]
    found = set[frozenset[int]]()
    for order in orders:
        own = _fixed(min(ranks), order, counts, varies)
        members = [rank for rank in range(world) if _fixed(rank, order, counts, varies) == own]
        if all(rank in members and members.index(rank) == report.member for rank, report in ranks.items()):
            found.add(frozenset(members))
    return set(found.pop()) if len(found) == 1 else set()


def _fixed(rank: int, order: Sequence[str], counts: Mapping[str, int], varies: Sequence[str]) -> list[int]:
    """The coordinates of a rank along the axes that do not vary in a group; the first of `order` varies fastest."""
    place = list[int]()
    for axis in order:
        rank, number = divmod(rank, counts[axis])
        place += [] if axis in varies else [number]
    return place


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
