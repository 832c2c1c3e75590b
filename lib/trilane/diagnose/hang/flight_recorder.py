"""Reader of PyTorch's Flight Recorder dumps: which collectives a rank entered and finished, per process group.

A dump is a pickle or JSON. The pickle is read here, opcode by opcode (CPython, Lib/pickletools.py), never by Python's
own reader: that reserves any amount of memory that a file asks for, takes a time exponential in the size of some, and
calls what they name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from struct import Struct
from struct import error as StructError
from typing import Any

from trilane.utils.tables import short
from trilane.utils.validation import require
from trilane.workspace.rank_grid import MOST

GET, LONG_GET, PUT, LONG_PUT, MARK, STOP = b"hjqr(."
MEMOIZE, INDEX = 0x94, Struct("<I")
SKIP = {0x80: 1, 0x95: 8}  # protocol and frame: bytes of their argument
CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
NUMBERS = {ord(code): Struct(form) for code, form in (("K", "<B"), ("M", "<H"), ("J", "<i"), ("G", ">d"))}
TEXTS = {ord("X"): Struct("<I"), 0x8C: Struct("<B"), 0x8D: Struct("<Q")}
LONG = 0x8A
EMPTY = {ord("]"): list, ord("}"): dict, ord(")"): tuple}
TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
MANY = 100_000  # entries: torch keeps 2000 by default
TENSORS, DIMENSIONS = 64, 16  # of a call, that are compared between ranks
RANKS = re.compile(r"\s*(?:\[[\d,\s]*\]\s*)?")
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, StructError)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective as a rank recorded it. `group` is the process group's name, `ranks` its members."""

    group: str
    desc: str
    ranks: tuple[int, ...]
    sequence: int
    p2p: bool
    op: str
    sizes: str
    state: str
    done: bool

    @property
    def number(self) -> tuple[str, bool, int]:
        """Identifies the batch of the call."""
        return self.group, self.p2p, self.sequence


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The calls of one rank, oldest first; `entered` is the last sequence number that it entered in each group,
    `members` are the ranks of each group; those of the groups in `lost` are damaged, as `problems` report."""

    calls: tuple[Call, ...]
    entered: dict[str, int]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

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
        entries = (values["entries"] if "pg_config" not in values else values.get("entries") or [])[-MANY:]
        members, problems = _members(values.get("pg_config") or {})
        calls = tuple(_call(entry, members) for entry in entries)
        # pg_status numbers the groups of this rank (pg_id); the rest has their names, which all ranks share
        names = {_word(entry["pg_id"]): _word(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
        status = {names[k]: v for k, v in (values.get("pg_status") or {}).items() if k in names}
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
    )


def load_plain(data: bytes) -> Any:
    """The value of a pickle of lists, tuples, dicts, text and numbers; one of DAMAGED for any other.

    Nothing in it is called or imported, and memory stays in proportion to its size. A value may hold another many
    times, so that it must not be walked through as a whole.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0
    while True:
        code, at = data[at], at + 1
        if code == GET:
            stack.append(memo[data[at]])
            at += 1
        elif code == MARK:
            marks.append(len(stack))
        elif code == LONG_GET:
            stack.append(memo[INDEX.unpack_from(data, at)[0]])
            at += 4
        elif code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == PUT:
            memo[data[at]] = stack[-1]
            at += 1
        elif code == LONG_PUT:
            memo[INDEX.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif code == STOP:
            return stack.pop()
        elif code in SKIP:
            at += SKIP[code]
        elif not _collected(code, stack, marks):
            value, at = _scalar(code, data, at)
            stack.append(value)


def _collected(code: int, stack: list[Any], marks: list[int]) -> bool:
    """Whether the opcode makes or fills a list, tuple or dict; then that is done."""
    if code in EMPTY:
        stack.append(EMPTY[code]())
        return True
    if code in TUPLES:
        first = len(stack) - TUPLES[code]
    elif code in b"as":
        first = len(stack) - 1 - (code == ord("s"))
    elif code in b"teu":
        first = marks.pop()
    else:
        return False
    items = stack[first:]
    del stack[first:]
    if code in b"ae":
        list.extend(stack[-1], items)  # TypeError for any other object
    elif code in b"su":
        keys = items[::2]
        require(all(type(key) in (str, int) for key in keys), "pickle", "a key", "must be text or a number")
        dict.update(stack[-1], zip(keys, items[1::2], strict=True))
    else:
        stack.append(tuple(items))
    return True


def _scalar(code: int, data: bytes, at: int) -> tuple[Any, int]:
    """The constant, number or text of an opcode, and where it ends."""
    if code in CONSTANTS:
        return CONSTANTS[code], at
    if code in NUMBERS:
        return NUMBERS[code].unpack_from(data, at)[0], at + NUMBERS[code].size
    if code == LONG:
        end = at + 1 + data[at]
        return int.from_bytes(data[at + 1 : end], "little", signed=True), end
    if code in TEXTS:
        first = at + TEXTS[code].size
        end = first + TEXTS[code].unpack_from(data, at)[0]
        require(end <= len(data), "pickle", "a text", "ends after the file")
        return data[first:end].decode("utf-8", "replace"), end
    raise ValueError(f"asks for an object or a call (opcode {bytes([code])!r}), which no Flight Recorder dump needs")


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
        state=state,
        # NCCL reports "completed"; gloo only retires the entry
        done=state == "completed" or (bool(entry.get("retired")) and state != "started"),
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
