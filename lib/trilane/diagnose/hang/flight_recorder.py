"""Reader of PyTorch's Flight Recorder dumps: which collectives a rank entered and finished, per process group.

A dump is a pickle (see plain_pickle) or JSON.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from struct import error as StructError
from typing import Any

from trilane.diagnose.hang.plain_pickle import load_plain
from trilane.diagnose.hang.wait import patterns
from trilane.utils.tables import short
from trilane.utils.validation import require
from trilane.workspace.rank_grid import MOST

MANY = 100_000  # entries: torch keeps 2000 by default
TENSORS, DIMENSIONS = 64, 16  # of a call, that are compared between ranks
RANKS = re.compile(r"\s*(?:\[[\d,\s]*\]\s*)?")
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, StructError)
# Operations in which each rank may have sizes of its own, all_gather and reduce_scatter those on lists of tensors:
# https://github.com/pytorch/pytorch/blob/main/torch/distributed/flight_recorder/components/types.py
ANY_SIZE = re.compile(r"all_to_all\w*|all_gather(?:_v)?|reduce_scatter(?:_v)?|gather|scatter")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective as a rank recorded it. `group` is the process group's name, `ranks` its members; `sizes` and
    `types` are of its inputs, `outputs` the sizes of its outputs."""

    group: str
    desc: str
    ranks: tuple[int, ...]
    sequence: int
    p2p: bool
    op: str
    sizes: str
    types: str
    outputs: str
    state: str
    done: bool

    @property
    def kind(self) -> tuple[str, ...]:
        """What must be equal on all ranks of the group."""
        if ANY_SIZE.fullmatch(self.op):
            return self.op, self.types
        return self.op, self.types, self.sizes, "" if self.is_rooted else self.outputs

    @property
    def is_rooted(self) -> bool:
        """Whether one rank sends to, or receives from, all others."""
        return bool(patterns("functions")["rooted"].fullmatch(self.op.removesuffix("_oop").lstrip("_")))

    @property
    def number(self) -> tuple[str, bool, int]:
        """Identifies the batch of the call."""
        return self.group, self.p2p, self.sequence


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The calls of one rank, oldest first; `entered` is the last sequence number that it entered in each group,
    `members` are the ranks of each group; those of the groups in `lost` are damaged, as `problems` report. Where
    `begins` is above 0, as many calls were pushed out of the ring before the oldest one."""

    calls: tuple[Call, ...]
    entered: dict[str, int]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    begins: int = 0

    def knows(self, group: str) -> bool:
        """Whether the recording shows how far its rank is in the group."""
        return group in self.entered or not self.begins

    @property
    def waiting(self) -> Call | None:
        """The oldest unfinished call, which all later ones wait for; None where all are done."""
        return next((call for call in self.calls if not call.done), None)


def read_recording(data: bytes) -> Recording:
    """The recording in a dump, pickle or JSON (`_dump_nccl_trace`, `_dump_fr_trace_json`); ValueError for other data,
    also truncated.

    Format 2.x of torch 2.3 to 2.13 (torch/csrc/distributed/c10d/FlightRecorder.hpp). Left out: C++ stacks, timings.
    """
    try:
        values = json.loads(data) if data.lstrip()[:1] == b"{" else load_plain(data)
        entries = (values.get("entries", []) if "pg_config" in values else values["entries"])[-MANY:]
        members, problems = _members(values.get("pg_config") or {})
        calls = tuple(_call(entry, members) for entry in entries)
        # pg_status numbers the groups of this rank (pg_id); the rest has their names, which all ranks share
        names = {_word(entry["pg_id"]): _word(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
        given = values.get("pg_status") or {}
        numbers, groups = [k for k in given if k not in names], [name for name in members if name not in names.values()]
        if len(numbers) == len(groups) == 1:  # the only group of which no entry is left
            names[numbers[0]] = groups[0]
        status = {names[k]: v for k, v in given.items() if k in names}
        # its count is that of the last call, in a group with sends and receives maybe of these, which number their own
        mixed = {_word(entry["process_group"][0]) for entry in entries if entry.get("is_p2p")}
        counts = {name: v["last_enqueued_collective"] for name, v in status.items() if name not in mixed}
        entered = {name: _whole(int(n) if isinstance(n, str) else n) for name, n in counts.items()}  # text in JSON
    except DAMAGED as error:
        raise ValueError(f"no Flight Recorder dump, or truncated ({short(str(error))})") from None
    for entry, call in zip(entries, calls, strict=True):
        # a send or a receive has the number of the collective before it, too
        number = call.sequence if not call.p2p else entry.get("collective_seq_id", 0)
        entered[call.group] = max(entered.get(call.group, 0), number if type(number) is int else 0)
    return Recording(
        calls=_in_order(calls),
        entered=entered,
        members=members,
        lost=tuple(problems),
        problems=tuple(problems.values()),
        begins=max(0, first if entries and type(first := entries[0].get("record_id")) is int else 0),
    )


def _in_order(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls; a "scheduled" one counts as done where a later one of its group is, since NCCL keeps order.

    The calls of a batch (batch_isend_irecv, a coalescing manager) stay "scheduled": only the entry `nccl:coalesced`
    that closes the batch is timed, with their group and number (torch/distributed/flight_recorder/components/utils.py,
    find_coalesced_group).
    """
    done: set[str] = set()
    found = []
    for call in reversed(calls):
        found.append(replace(call, done=call.done or (call.state == "scheduled" and call.group in done)))
        done |= {call.group} if call.state == "completed" else set()  # gloo, which keeps no order, never reports that
    return tuple(reversed(found))


def _members(config: Mapping[Any, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The ranks of each group, and what is wrong with those that are damaged."""
    found: dict[str, tuple[int, ...]] = {}
    problems: dict[str, str] = {}
    for name, group in config.items():
        value = group.get("ranks")
        # torch names the default group "" in pg_config and "0" in the entries of gloo
        names = ("", "0") if name == "" and "0" not in config else (_word(name),)
        ranks = _ranks(value)
        if ranks is None:
            problems |= dict.fromkeys(names, f"group {short(str(name), 40)}: its ranks are damaged")
        else:
            found |= dict.fromkeys(names, ranks)
    return found, problems


def _call(entry: dict[str, Any], members: Mapping[str, tuple[int, ...]]) -> Call:
    group, desc = [*map(_word, entry["process_group"][:2]), ""][:2]
    p2p, state, op = bool(entry.get("is_p2p")), _word(entry.get("state", "")), _word(entry["profiling_name"])
    return Call(
        group=group,
        desc=desc,
        ranks=members.get(group, ()),
        sequence=_whole(entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id", 0)) or 0),
        p2p=p2p,
        op=op.partition(":")[2] or op,
        sizes=_sizes(entry.get("input_sizes", ())),
        types=", ".join(sorted({_word(name) for name in entry.get("input_dtypes", ())[:TENSORS]})),
        outputs=_sizes(entry.get("output_sizes", ())),
        state=state,
        # NCCL reports "completed", and retires what timed out; gloo only retires the entry
        done=state == "completed" or (bool(entry.get("retired")) and state != "started" and not op.startswith("nccl:")),
    )


def _word(value: Any) -> str:
    require(type(value) in (str, int), "dump", type(value).__name__, "a name is text")
    return short(value) if isinstance(value, str) and len(value) > 100 else str(value)


def _whole(value: Any) -> int:
    require(type(value) is int and abs(value) < 1 << 63, "dump", type(value).__name__, "a number is whole")
    return int(value)


def _sizes(value: Any) -> str:
    """The sizes of a call's tensors, such as [[4096], [8, 2]], as text."""
    sizes = [[_whole(size) for size in tensor[:DIMENSIONS]] for tensor in value[:TENSORS]]
    return str(sizes)


def _ranks(value: Any) -> tuple[int, ...] | None:
    """The ranks of a group, which torch writes as text "[0, 1]", other tools as a list; None where they are damaged."""
    if isinstance(value, str):
        value = [int(word[:9]) for word in re.findall(r"\d+", value)] if RANKS.fullmatch(value) else None
    elif value is None:
        value = ()
    if not isinstance(value, list | tuple):
        return None
    return tuple(value) if all(type(rank) is int and 0 <= rank < MOST for rank in value[:MOST]) else None
