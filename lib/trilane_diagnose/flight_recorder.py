"""PyTorch's Flight Recorder dumps: which collectives a rank entered and finished, per process
group.
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from struct import error as StructError
from typing import Any, NoReturn

from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, short
from trilane.utils.validation import require
from trilane.workspace.rank_grid import MOST
from trilane_diagnose.stacks import DAMAGED

MOST_CALLS = 100_000  # that are read: torch keeps 2,000 by default
# Operations in which each rank may have sizes of its own, all_gather and reduce_scatter those on
# lists:
# https://github.com/pytorch/pytorch/blob/main/torch/distributed/flight_recorder/components/types.py
OWN_SIZES = re.compile(r"all_to_all\w*|all_gather(?:_v)?|reduce_scatter(?:_v)?|gather|scatter")


def refused(reader: Any) -> NoReturn:
    """Raise ValueError for what runs code when it is read, or reserves as much memory as the file
    asks for.
    """
    raise ValueError("asks for an object or a call, which no Flight Recorder dump needs")


class Plain(pickle._Unpickler):
    """Reads pickles of lists, dicts, texts and numbers, in memory in proportion to their size;
    refuses all others.

    Python's reader and not the one in C, which reserves memory for any index of its memo.
    """

    # CPython, Lib/pickle.py: protocol, frame, mark, stop, None, booleans, numbers, texts, lists,
    # dicts, the memo.
    dispatch = defaultdict(lambda: refused) | {
        code: pickle._Unpickler.dispatch[code]
        for code in b"\x80\x95(.N\x88\x89JKM\x8aGX\x8c\x8d]ae}su\x94qrhj"
    }
    # Tuples become lists: as the key of a dict, one that holds another twice, and so on, is hashed
    # for ever.
    dispatch |= {ord(")"): dispatch[ord("]")], ord("t"): pickle._Unpickler.dispatch[ord("l")]}
    for size in (1, 2, 3):
        dispatch[0x84 + size] = lambda self, n=size: self.append(
            [self.stack.pop() for _ in range(n)][::-1]
        )


@frozen
class Call:
    """One collective as a rank recorded it: its group, its number in it, and the `kind` that all
    ranks share.
    """

    group: str
    desc: str
    ranks: tuple[int, ...]
    sequence: int
    p2p: bool
    op: str
    kind: tuple[str, ...]
    state: str
    done: bool

    def __str__(self) -> str:
        return f"{' '.join(self.kind)} number {self.sequence} of group {self.desc or self.group}"

    @property
    def peer(self) -> int | None:
        """The other end of a send or a receive, which names group members by their index in the
        group.
        """
        match = re.search(r"(?:recv \d+<-|send \d+->)(\d+)", self.op)
        if not match:
            return None
        number = int(match[1])
        if number < len(self.ranks):
            return sorted(self.ranks)[number]
        return number

    @property
    def number(self) -> tuple[str, bool, int]:
        """Identifies the batch of the call."""
        return self.group, self.p2p, self.sequence


@frozen
class Recording:
    """The calls of one rank, oldest first, the last number that it entered in each group, and the
    groups' members.
    """

    calls: tuple[Call, ...]
    entered: dict[str, int]
    members: Mapping[str, tuple[int, ...]]
    has_lost: bool  # calls that were pushed out of the ring, or not dumped

    @cached_property
    def collectives(self) -> dict[tuple[str, int], Call]:
        """The calls that are no sends or receives, by group and number."""
        return {(c.group, c.sequence): c for c in reversed(self.calls) if not c.p2p}

    def knows(self, group: str) -> bool:
        """Whether the recording shows how far its rank is in the group."""
        return group in self.entered or not self.has_lost

    @property
    def waiting(self) -> Call | None:
        """The oldest unfinished call, which all later ones wait for; None where all are done."""
        return next((call for call in self.calls if not call.done), None)


def read_recording(data: bytes) -> Recording:
    """The recording in a dump, pickle or JSON; ValueError for other or truncated data.

    Format 2.x of torch 2.3 to 2.13 (torch/csrc/distributed/c10d/FlightRecorder.hpp). Left out: C++
    stacks, timings.
    """
    try:
        is_json = data.lstrip()[:1] == b"{"
        return _recording(json.loads(data) if is_json else Plain(io.BytesIO(data)).load())
    except (*DAMAGED, pickle.PickleError, StructError) as error:
        raise ValueError(f"no Flight Recorder dump, or truncated ({short(str(error))})") from None


def _recording(values: Any) -> Recording:
    entries = values["entries"][-MOST_CALLS:]
    config = values.get("pg_config") or {}
    members = {_word(name): _ranks(group.get("ranks")) for name, group in config.items()}
    if "" in members:
        # torch names the default group "" in pg_config and "0" in the entries of gloo
        members.setdefault("0", members[""])
    calls = _in_order([_call(entry, members) for entry in entries])
    entered = {call.group: 0 for call in calls}
    for entry, call in zip(entries, calls, strict=True):
        number = call.sequence
        if call.p2p:  # it has the number of the collective before it, too
            number = _whole(entry.get("collective_seq_id", 0))
        entered[call.group] = max(entered[call.group], number)
    # torch may dump the calls alone that have not ended, of which there may be none
    has_lost = not entries or bool(entries[0].get("record_id"))
    return Recording(calls=calls, entered=entered, members=members, has_lost=has_lost)


def _in_order(calls: list[Call]) -> tuple[Call, ...]:
    """The calls; a "scheduled" one counts as done where a later one of its group is, since NCCL
    keeps order.
    """
    # Of a batch (batch_isend_irecv) only the entry `nccl:coalesced` that closes it is timed, the
    # others stay "scheduled" (torch/distributed/flight_recorder/components/utils.py,
    # find_coalesced_group).
    finished = set()
    backwards = []
    for call in reversed(calls):
        is_passed = call.state == "scheduled" and call.group in finished
        backwards.append(replace(call, done=call.done or is_passed))
        if call.state == "completed":  # gloo, which keeps no order, never reports that
            finished.add(call.group)
    return tuple(reversed(backwards))


def _call(entry: Json, members: Mapping[str, tuple[int, ...]]) -> Call:
    names = [_word(name) for name in entry["process_group"][:2]]
    group = names[0]
    p2p = bool(entry.get("is_p2p"))
    state = _word(entry.get("state", ""))
    name = _word(entry["profiling_name"])
    op = name.partition(":")[2] or name
    types = sorted({_word(kind) for kind in entry.get("input_dtypes", ())[:64]})
    kind = [op, ", ".join(types)]
    if not OWN_SIZES.fullmatch(op):
        # of a call's first tensors, such as [[4096], [8, 2]]
        sizes = entry.get("input_sizes", ())[:64]
        kind.append(str([[_whole(size) for size in tensor[:16]] for tensor in sizes]))
    number = entry.get("p2p_seq_id" if p2p else "collective_seq_id", 0)
    # NCCL reports "completed", and retires what timed out; gloo only retires the entry
    is_retired = bool(entry.get("retired")) and state != "started" and not name.startswith("nccl:")
    return Call(
        group=group,
        desc=names[1] if len(names) > 1 else "",
        ranks=members.get(group, ()),
        sequence=_whole(number or 0),
        p2p=p2p,
        op=op,
        kind=tuple(kind),
        state=state,
        done=state == "completed" or is_retired,
    )


def _word(value: Any) -> str:
    require(type(value) in (str, int), "dump", type(value).__name__, "a name is text")
    return short(str(value))


def _whole(value: Any) -> int:
    is_whole = type(value) is int and abs(value) < 1 << 63
    require(is_whole, "dump", type(value).__name__, "a number is whole")
    return int(value)


def _ranks(value: Any) -> tuple[int, ...]:
    """The ranks of a group, which torch writes as text "[0, 1]", other tools as a list."""
    values = json.loads(value) if isinstance(value, str) and value else value or ()
    ranks = tuple(_whole(rank) for rank in values[:MOST])
    require(all(0 <= rank < MOST for rank in ranks), "dump", "ranks", "a group's are damaged")
    return ranks
